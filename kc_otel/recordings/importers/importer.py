"""Import files in chunks of bounded size; a file is finished once its drift is exported.

    file -> sequences -> chunks of one weight version -> Recorder.compare -> export -> done

Nothing is sampled: a trainer's files are measured in full. A file that cannot be read is named with its remedy, and the
others go on. With `follow`, files that appear later are imported too.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

import numpy as np

from kc_otel.contract.slices import Scalar
from kc_otel.record.recorder import Recorder
from kc_otel.recordings.importers.imported import Imported, Refusals
from kc_otel.recordings.importers.trainer_formats import FormatName, files_of, prime_rl_is_complete, read_file
from kc_otel.recordings.recording import DENSITY, RecordingError, reward_of

_CHUNK_TOKENS: Final = 262_144
"""Most tokens of one call of the recorder."""
_MAX_UNFLUSHED_TOKENS: Final = 2_000_000
"""Tokens recorded before the recorder is waited for: 64 MB of its queue."""


@dataclass(slots=True)
class ImportTotals:
    """Files whose drift was exported, sequences that were handed to the recorder, and their tokens.

    `identical` are sequences whose two sides are the same numbers, bit by bit; `age_unknown` those of a trainer's step
    of which nothing says which weights sampled them; `failed` files that could not be imported, with the reason.
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

    `columns` are names by role, for generic files. `attributes` of every sequence win over its own. `patience` are
    seconds to wait for an endpoint that does not take the export, unless `stopped`. To `steps` go sequences whose step
    is known, too: from an attribute `step`, or the training kernel's weights.
    """

    def __init__(
        self,
        recorder: Recorder,
        *,
        format: FormatName | None = None,
        columns: Mapping[str, str] | None = None,
        attributes: Mapping[str, Scalar] | None = None,
        patience: float = 60.0,
        stopped: Callable[[], bool] = lambda: False,
        steps: StepRecorders | None = None,
    ) -> None:
        self.totals: Final = ImportTotals()
        self._recorder = recorder
        self._format = format
        self._columns = columns
        self._attributes = dict(attributes or {})
        self._patience = patience
        self._stopped = stopped
        self._steps = steps

    def file(self, path: Path) -> bool:
        """Import one file; whether all of it was measured and exported. Failures are in `totals.failed`."""
        before = sum(self._recorder.stats().dropped.values())
        sequences = tokens = unflushed = 0
        try:
            rows = read_file(path, self.totals.refusals, self._format, columns=self._columns)
            for chunk in self._chunks(rows):
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

    def _chunks(self, sequences: Iterator[Imported]) -> Iterator[list[Imported]]:
        """Sequences that can be one batch, until they have `_CHUNK_TOKENS` tokens."""
        waiting: dict[Hashable, list[Imported]] = {}
        tokens, last = 0, None
        for sequence in sequences:
            prompt = sequence.prompt
            # Rollouts of a prompt stand next to each other, and stay in one batch.
            if tokens >= _CHUNK_TOKENS and (prompt is None or prompt != last):
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


_FileState = tuple[str, int, int]


class Ledger:
    """Files that are done, by path, size and time of change, so that one that was written again is done again.

    They are remembered in a file, one JSON list a line; None is for this run alone.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._known: set[_FileState] = set()
        lines = path.read_text(encoding="utf-8").splitlines() if path is not None and path.exists() else ()
        for number, line in enumerate(lines, 1):
            try:
                name, size, changed = json.loads(line)
            except (ValueError, TypeError):
                said = "is no record of a finished file; give --done a file of its own"
                raise ValueError(f"{path}:{number}: {said}") from None
            self._known.add((name, size, changed))

    def __contains__(self, path: Path) -> bool:
        return _state(path) in self._known

    def add(self, path: Path) -> None:
        """Add a finished file."""
        state = _state(path)
        self._known.add(state)
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(state) + "\n")


def unseen(
    paths: Sequence[Path], ledger: Ledger, stop: threading.Event, *, follow: bool, poll: float
) -> Iterator[Path]:
    """Files that are not done, each once; with `follow`, those that appear, when they have stopped growing."""
    tried: set[_FileState] = set()
    grown: dict[Path, _FileState] = {}
    while not stop.is_set():
        for path in files_of(paths):
            if stop.is_set():
                return
            state = _state(path)
            settled = not follow or (grown.get(path) == state and prime_rl_is_complete(path))
            grown[path] = state
            if settled and state not in tried and path not in ledger:
                tried.add(state)
                yield path
        if not follow or stop.wait(poll):
            return


def _state(path: Path) -> _FileState:
    about = path.stat()
    return str(path.resolve()), about.st_size, about.st_mtime_ns
