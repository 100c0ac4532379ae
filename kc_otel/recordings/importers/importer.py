"""Import files in chunks of bounded size; a file is finished once its drift is exported.

    file -> sequences -> chunks of one weight version -> Recorder.compare -> export -> done

Nothing is sampled: a trainer's files are measured in full. A file that cannot be read is named with its remedy, and the
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
from kc_otel.recordings.importers import nemo_rl_files as nemo_rl
from kc_otel.recordings.importers import prime_rl_files as prime_rl
from kc_otel.recordings.importers import roll_files as roll
from kc_otel.recordings.importers import skyrl_files as skyrl
from kc_otel.recordings.importers import slime_files as slime
from kc_otel.recordings.importers import verl_files as verl
from kc_otel.recordings.importers.detect import Format, format_of
from kc_otel.recordings.importers.imported import Imported, Refusals
from kc_otel.recordings.recording import DENSITY, RecordingError, reward_of
from kc_otel.recordings.recording_files import load_own

_MAX_UNFLUSHED_TOKENS: Final = 2_000_000
"""Tokens recorded before the recorder is waited for: 64 MB of its queue."""
_READERS: Final[Mapping[str, Callable[[Path, Refusals], Iterator[Imported]]]] = {
    "verl": verl.read,
    "skyrl": skyrl.read,
    "roll": roll.read,
    "slime": slime.read,
    "prime-rl": prime_rl.read,
    "nemo-rl": nemo_rl.read,
}


def read_file(
    path: Path,
    refusals: Refusals,
    format: Format | None = None,
    *,
    columns: Mapping[str, str] | None = None,
) -> Iterator[Imported]:
    """Read the sequences of a file.

    Args:
        path: The file.
        refusals: Where records that cannot become sequences are counted.
        format: Whose it is; None to find out.
        columns: Role to column name, for generic files.

    Raises:
        RecordingError: If it cannot be used.
        OSError: If it cannot be read.
    """
    format = format or format_of(path)
    if format == "generic":
        return read_generic(path, columns)
    return _READERS[format](path, refusals)


@dataclass(slots=True)
class ImportTotals:
    """Counts of the import so far.

    Attributes:
        files: Files whose drift was exported.
        sequences: Sequences handed to the recorder; those that fail an input check are counted there.
        tokens: Tokens among them.
        identical: Sequences whose two sides are the same numbers, bit by bit.
        age_unknown: Sequences of a trainer's step of which nothing says which weights sampled them.
        refusals: Records that could not become sequences.
        failed: Files that could not be imported, with the reason.
    """

    files: int = 0
    sequences: int = 0
    tokens: int = 0
    identical: int = 0
    age_unknown: int = 0
    refusals: Refusals = field(default_factory=Refusals)
    failed: dict[Path, str] = field(default_factory=dict)


class StepRecorders(Protocol):
    """A recorder for each step of the trainer, beside the one of them all."""

    def recorder(self, step: int) -> Recorder | None:
        """Return the recorder for sequences of a step; None to drop them."""

    def flush(self) -> None:
        """Measure what was handed over."""

    def end_of_file(self) -> None:
        """Note the end of a file."""


class Importer:
    """Imports files one after the other.

    Args:
        recorder: Where drift goes.
        format: Of every file; None to find out.
        columns: Role to column name, for generic files.
        attributes: Attributes that every sequence gets besides its own; these win.
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
        self._chunk_tokens = chunk_tokens
        self._patience = patience
        self._stopped = stopped
        self._steps = steps

    def file(self, path: Path) -> bool:
        """Import one file; whether all of it was measured and exported. Failures are in `totals.failed`."""
        before = sum(self._recorder.stats().dropped.values())
        sequences = tokens = unflushed = 0
        try:
            for chunk in self._chunks(self._rows(path)):
                size = sum(sequence.train.size for sequence in chunk)
                self._compare(chunk)
                sequences, tokens, unflushed = sequences + len(chunk), tokens + size, unflushed + size
                if unflushed >= _MAX_UNFLUSHED_TOKENS:
                    self._recorder.force_flush(self._patience)
                    if self._steps is not None:
                        self._steps.flush()
                    unflushed = 0
        except (RecordingError, OSError, UnicodeDecodeError) as error:
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

    def _rows(self, path: Path) -> Iterator[Imported]:
        return read_file(path, self.totals.refusals, self._format, columns=self._columns)

    def _chunks(self, sequences: Iterator[Imported]) -> Iterator[list[Imported]]:
        """Sequences that can be one batch, until they have `chunk_tokens` tokens."""
        waiting: dict[Hashable, list[Imported]] = {}
        tokens, last = 0, None
        for sequence in sequences:
            prompt = sequence.prompt
            # Rollouts of a prompt stand next to each other, and stay in one batch.
            if tokens >= self._chunk_tokens and (prompt is None or prompt != last):
                yield from waiting.values()
                waiting, tokens = {}, 0
            waiting.setdefault((_alike(sequence), self._step(sequence)), []).append(sequence)
            tokens, last = tokens + sequence.train.size, prompt
        yield from waiting.values()

    def _compare(self, chunk: Sequence[Imported]) -> None:
        first = chunk[0]
        self.totals.identical += sum(bool(np.array_equal(sequence.train, sequence.inference)) for sequence in chunk)
        if first.weights[0] is not None and first.weights[1] is None and first.versions is None:
            self.totals.age_unknown += len(chunk)
        step = self._step(first)
        masses = [sequence.train_kept for sequence in chunk if sequence.train_kept is not None]
        # A recorder takes what is from before truncation, and renormalises it again.
        train = [
            sequence.train if sequence.train_kept is None else sequence.train + sequence.train_kept
            for sequence in chunk
        ]
        known = np.array([reward_of(sequence.attributes) for sequence in chunk])
        rewards = None if np.isnan(known).all() else known
        versions = [sequence.versions for sequence in chunk]
        prompts = [sequence.prompt for sequence in chunk]
        of_step = None if self._steps is None or step is None else self._steps.recorder(step)
        for recorder in (self._recorder, of_step):
            if recorder is not None:
                recorder.compare(
                    train,
                    [sequence.inference for sequence in chunk],
                    token_ids=None if first.token_ids is None else [sequence.token_ids for sequence in chunk],
                    rewards=rewards,
                    advantages=None if first.advantages is None else [sequence.advantages for sequence in chunk],
                    kept=(masses, None) if masses else None,
                    attributes=[{**sequence.attributes, **self._attributes} for sequence in chunk],
                    processing=None if first.processing is None else (first.processing, first.processing),
                    weights=first.weights if first.versions is None else (first.weights[0], versions),
                    groups=None if None in prompts else prompts,
                    presampled=True,
                    density=first.attributes.get(DENSITY) is True or None,
                )

    def _step(self, sequence: Imported) -> int | None:
        """The trainer's step, where it matters and somebody says it."""
        if self._steps is None:
            return None
        said = self._attributes.get("step", sequence.attributes.get("step", sequence.weights[0]))
        if isinstance(said, float) and said.is_integer():
            return int(said)
        return said if isinstance(said, int) and not isinstance(said, bool) else None

    def _exported(self) -> bool:
        """Return True if everything recorded was measured and accepted by every endpoint, in time."""
        end = time.monotonic() + self._patience
        while True:
            failures = self._recorder.stats().export_failures
            flushed = self._recorder.force_flush(max(end - time.monotonic(), 1.0))
            if flushed and self._recorder.stats().export_failures == failures:
                return True
            if self._stopped() or time.monotonic() >= end:
                return False
            time.sleep(0.2)


def _alike(sequence: Imported) -> Hashable:
    """Return the key shared by sequences of one batch."""
    processing = None if sequence.processing is None else tuple(sorted(sequence.processing.items()))
    return (
        sequence.weights,
        processing,
        sequence.token_ids is None,
        sequence.advantages is None,
        sequence.train_kept is None,
        sequence.versions is None,
        sequence.attributes.get(DENSITY) is True,
    )


def read_generic(path: Path, columns: Mapping[str, str] | None = None) -> Iterator[Imported]:
    """The sequences of a recording; a file with one bad sequence is refused as a whole.

    Columns `train_weights` and `inference_weights` with one value per sequence are weight versions; `weight_versions`
    has the inference kernel's for each token.

    Raises:
        RecordingError: If the recording cannot be used; every problem, one line each.
    """
    log = load_own(path, columns)
    ends = np.cumsum(log.lengths)
    for begin, end, attributes in zip(ends - log.lengths, ends, log.attributes, strict=True):
        here = slice(int(begin), int(end))
        train, inference = (_version(attributes.get(f"{side}_weights")) for side in ("train", "inference"))
        yield Imported(
            log.train[here],
            log.inference[here],
            None if log.token_ids is None else log.token_ids[here],
            None if log.advantages is None else log.advantages[here],
            attributes,
            (train, inference),
            versions=None if log.versions is None else log.versions[here],
            train_kept=None if log.train_kept is None else log.train_kept[here],
        )


def _version(value: object) -> int | str | None:
    return value if isinstance(value, int | str) and not isinstance(value, bool) else None
