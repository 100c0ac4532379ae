"""From files to a recorder: in chunks of bounded size, and a file is done only when its drift was exported.

    file -> sequences -> chunks of one weight version -> Recorder.compare -> export -> done

Nothing is sampled: what a trainer wrote is measured whole. A file that cannot be read is named with its remedy, and the
others go on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

import numpy as np

from kc_otel.contract.slices import Scalar
from kc_otel.record.recorder import Recorder
from kc_otel.recordings.importers import generic
from kc_otel.recordings.importers import nemo_rl_files as nemo_rl
from kc_otel.recordings.importers import prime_rl_files as prime_rl
from kc_otel.recordings.importers import roll_files as roll
from kc_otel.recordings.importers import skyrl_files as skyrl
from kc_otel.recordings.importers import slime_files as slime
from kc_otel.recordings.importers import verl_files as verl
from kc_otel.recordings.importers.detect import Format, format_of
from kc_otel.recordings.importers.imported import Imported, ImportFileError, Refusals
from kc_otel.recordings.recording import reward_of

__all__ = ["ImportTotals", "Importer", "StepRecorders"]

_UNFLUSHED: Final = 2_000_000
"""Tokens recorded before the recorder is waited for: 64 MB of its queue."""
_PICKLED: Final[Mapping[str, Callable[..., Iterator[Imported]]]] = {
    "verl": verl.read,
    "skyrl": skyrl.read,
    "roll": roll.read,
}
_PLAIN: Final[Mapping[str, Callable[..., Iterator[Imported]]]] = {
    "slime": slime.read,
    "prime-rl": prime_rl.read,
    "nemo-rl": nemo_rl.read,
}


@dataclass(slots=True)
class ImportTotals:
    """What was done so far.

    Attributes:
        files: Files whose drift was exported.
        sequences: Sequences handed to the recorder; those that fail an input check are counted there.
        tokens: Tokens among them.
        identical: Sequences whose two sides are the same numbers, bit by bit.
        refusals: Records that could not become sequences.
        failed: Files that could not be imported, with the reason.
    """

    files: int = 0
    sequences: int = 0
    tokens: int = 0
    identical: int = 0
    refusals: Refusals = field(default_factory=Refusals)
    failed: dict[Path, str] = field(default_factory=dict)


class StepRecorders(Protocol):
    """A recorder for each step of the trainer, beside the one of them all."""

    def recorder(self, step: int) -> Recorder | None:
        """Where sequences of a step go; None for nowhere."""

    def flush(self) -> None:
        """Measure what was handed over."""

    def end_of_file(self) -> None:
        """A file has been read."""


class Importer:
    """Imports files one after the other.

    Args:
        recorder: Where drift goes.
        format: Of every file; None to find out.
        columns: Role to column name, for generic files.
        attributes: Attributes that every sequence gets besides its own; these win.
        trust: Whether to unpickle whatever a file holds.
        chunk_tokens: Most tokens of one call of the recorder.
        patience: Seconds to wait for an endpoint that does not take the export.
        stopped: Whether to give up early.
        steps: Where sequences go too whose step is known: from an attribute `step`, or the training kernel's weights.

    Raises:
        ValueError: If `chunk_tokens` is not positive.
    """

    def __init__(
        self,
        recorder: Recorder,
        *,
        format: Format | None = None,
        columns: Mapping[str, str] | None = None,
        attributes: Mapping[str, Scalar] | None = None,
        trust: bool = False,
        chunk_tokens: int = 262_144,
        patience: float = 60.0,
        stopped: Callable[[], bool] = lambda: False,
        steps: StepRecorders | None = None,
    ) -> None:
        if chunk_tokens < 1:
            msg = f"chunk_tokens: {chunk_tokens!r} leaves no room for a sequence; leave it out for the default"
            raise ValueError(msg)
        self.totals: Final = ImportTotals()
        self._recorder = recorder
        self._format = format
        self._columns = columns
        self._attributes = dict(attributes or {})
        self._trust = trust
        self._chunk_tokens = chunk_tokens
        self._patience = patience
        self._stopped = stopped
        self._steps = steps

    def file(self, path: Path) -> bool:
        """Import one file; whether all of it was measured and exported. What went wrong is in `totals.failed`."""
        before = sum(self._recorder.stats().dropped.values())
        sequences = tokens = unflushed = 0
        try:
            for chunk in self._chunks(self._read(path)):
                size = sum(each.train.size for each in chunk)
                self._compare(chunk)
                sequences, tokens, unflushed = sequences + len(chunk), tokens + size, unflushed + size
                if unflushed >= _UNFLUSHED:
                    self._recorder.force_flush(self._patience)
                    if self._steps is not None:
                        self._steps.flush()
                    unflushed = 0
        except (ImportFileError, OSError, UnicodeDecodeError) as error:
            self.totals.failed[path] = str(error)
        if self._steps is not None:
            self._steps.end_of_file()
        if not self._exported():
            self.totals.failed[path] = f"{path}: no endpoint took the export; import the file again when one does"
        elif (lost := sum(self._recorder.stats().dropped.values()) - before) > 0:
            self.totals.failed[path] = f"{path}: {lost} batches were dropped; see the log and import the file again"
        self.totals.sequences += sequences
        self.totals.tokens += tokens
        if path in self.totals.failed:
            return False
        self.totals.files += 1
        return True

    def _read(self, path: Path) -> Iterator[Imported]:
        format = self._format or format_of(path)
        if format == "generic":
            return generic.read(path, self._columns)
        if pickled := _PICKLED.get(format):
            return pickled(path, self.totals.refusals, trust=self._trust)
        return _PLAIN[format](path, self.totals.refusals)

    def _chunks(self, sequences: Iterator[Imported]) -> Iterator[list[Imported]]:
        """Sequences that can be one batch, until they have `chunk_tokens` tokens."""
        waiting: dict[Hashable, list[Imported]] = {}
        tokens = 0
        for each in sequences:
            waiting.setdefault((_alike(each), self._step(each)), []).append(each)
            tokens += each.train.size
            if tokens >= self._chunk_tokens:
                yield from waiting.values()
                waiting, tokens = {}, 0
        yield from waiting.values()

    def _compare(self, chunk: Sequence[Imported]) -> None:
        first = chunk[0]
        self.totals.identical += sum(bool(np.array_equal(each.train, each.inference)) for each in chunk)
        step = self._step(first)
        masses = [each.train_kept for each in chunk if each.train_kept is not None]
        # A recorder takes what is from before truncation, and renormalises it again.
        train = [each.train if each.train_kept is None else each.train + each.train_kept for each in chunk]
        known = np.array([reward_of(each.attributes) for each in chunk])
        rewards = None if np.isnan(known).all() else known
        versions = [each.versions for each in chunk]
        of_step = None if self._steps is None or step is None else self._steps.recorder(step)
        for recorder in (self._recorder, of_step):
            if recorder is not None:
                recorder.compare(
                    train,
                    [each.inference for each in chunk],
                    token_ids=None if first.token_ids is None else [each.token_ids for each in chunk],
                    rewards=rewards,
                    advantages=None if first.advantages is None else [each.advantages for each in chunk],
                    kept=(masses, None) if masses else None,
                    attributes=[{**each.attributes, **self._attributes} for each in chunk],
                    processing=None if first.processing is None else (first.processing, first.processing),
                    weights=first.weights if first.versions is None else (first.weights[0], versions),
                    presampled=True,
                )

    def _step(self, each: Imported) -> int | None:
        """The trainer's step, where it matters and somebody says it."""
        if self._steps is None:
            return None
        said = self._attributes.get("step", each.attributes.get("step", each.weights[0]))
        if isinstance(said, float) and said.is_integer():
            return int(said)
        return said if isinstance(said, int) and not isinstance(said, bool) else None

    def _exported(self) -> bool:
        """Whether everything recorded was measured and every endpoint accepted it, in time."""
        end = time.monotonic() + self._patience
        while True:
            failures = self._recorder.stats().export_failures
            flushed = self._recorder.force_flush(max(end - time.monotonic(), 1.0))
            if flushed and self._recorder.stats().export_failures == failures:
                return True
            if self._stopped() or time.monotonic() >= end:
                return False
            time.sleep(0.2)


def _alike(each: Imported) -> Hashable:
    """What sequences of one batch have in common."""
    processing = None if each.processing is None else tuple(sorted(each.processing.items()))
    return (
        each.weights,
        processing,
        each.token_ids is None,
        each.advantages is None,
        each.train_kept is None,
        each.versions is None,
    )
