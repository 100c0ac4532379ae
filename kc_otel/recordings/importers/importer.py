"""Import files; a file is finished once its drift is exported.

file -> sequences, counted by prompt -> chunks of one weight version -> Recorder.compare -> export -> done

Nothing is sampled, and nothing measured twice: of a file of lines that has grown, only the new lines are. A file that
was written anew is measured as what it is now, unless it begins with the sequence that it began with: then it is
refused. A file that cannot be read is named, and the others go on.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import re
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import astuple, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kc_otel.contract.input_reasons import remedy
from kc_otel.contract.slices import LAG, Scalar
from kc_otel.record.measure.checks import ratio_sums
from kc_otel.record.recorder import Recorder
from kc_otel.record.telemetry.environment import try_export
from kc_otel.recordings.confirmation import NO_ENDPOINT, why_unexported
from kc_otel.recordings.importers.trainer_files import LINE_ENDINGS, files_of, prime_rl_is_complete
from kc_otel.recordings.read_table import LinesRead, Problems, RewrittenError, lines
from kc_otel.recordings.recording import DENSITY, Recording, RecordingError, group_of, prompt_of
from kc_otel.recordings.recording_files import digest_of, read_file

_log: Final = logging.getLogger("kc_otel")
_INVALID: Final = re.compile(r"INVALID INPUT, (\w+)")
_CHUNK_TOKENS: Final = 262_144
_LOCK_POLL_SECONDS: Final = 0.1
_PAUSES: Final = 0.2, 5.0
"""Seconds from a failed export to the next: the first, doubled up to the last."""
_NOT_ALLOWED: Final = re.compile(r"\b40[13]\b|UNAUTHENTICATED|PERMISSION_DENIED")
_LAST_SECONDS: Final = 1.0  # of an export beside which nothing is left to do
_IN_PART: Final = "a part of it counts already: only --again measures it again, and counts that part twice"
_MAX_UNFLUSHED_TOKENS: Final = 2_000_000
"""Tokens recorded before the recorder is waited for: 64 MB of its queue."""


@dataclass(slots=True)
class ImportTotals:
    """Files `done`, and sequences and tokens that were handed to the recorder; the trainer's `steps`.

    `refused` sequences were not, but for those that a mask leaves no token of. The two sides of `identical` sequences
    are bit by bit the same; of `age_unknown` nothing says which weights sampled. `copies` of files do not count.
    `ratios` are what `swapped_by_sums` takes.
    """

    done: set[Path] = field(default_factory=set)
    sequences: int = 0
    tokens: int = 0
    refused: int = 0
    identical: int = 0
    age_unknown: int = 0
    ratios: NDArray[np.float64] = field(default_factory=lambda: np.zeros(5))
    steps: set[int] = field(default_factory=set)
    refusals: Problems = field(default_factory=Problems)
    failed: dict[Path, str] = field(default_factory=dict)
    copies: dict[Path, str] = field(default_factory=dict)

    @property
    def files(self) -> int:
        """Number of files that are done, and have not failed since, without copies."""
        return len(self.done - self.failed.keys() - self.copies.keys())


class Importer:
    """Imports files one by one, waiting up to `patience` seconds for an endpoint, and adds those done to `ledger`."""

    def __init__(
        self,
        recorder: Recorder,
        *,
        columns: Mapping[str, str] | None = None,
        attributes: Mapping[str, Scalar] | None = None,
        patience: float = 60.0,
        stopped: Callable[[], bool] = lambda: False,
        ledger: Ledger | None = None,
        follow: bool = False,
    ) -> None:
        self.totals: Final = ImportTotals()
        self._recorder = recorder
        self._columns = columns
        self._attributes = dict(attributes or {})
        self._patience = patience
        self._stopped = stopped
        self._ledger = Ledger() if ledger is None else ledger
        self._follow = follow
        self._awaiting: set[Path] = set()
        self._taken_before: dict[Path, int] = {}
        """Exports that were taken before what is not saved of a file was measured."""
        self._unreadable: Counter[Path] = Counter()

    @property
    def unexported(self) -> bool:
        """True if an endpoint has not taken all that was measured."""
        return bool(self._awaiting)

    def file(self, path: Path) -> bool:
        """Import what is new in a file; whether all was measured and exported. A later export holds what is open."""
        self.totals.failed.pop(path, None)
        self._awaiting.discard(path)
        before, known = self._recorder.stats(), self._ledger.measured(path)
        if path not in self._ledger.unsaved:
            self._taken_before[path] = before.exports_taken
        refused = self.totals.refusals.counts.copy()
        try:
            self._measure(path)
            del self._unreadable[path]
        except (RecordingError, OSError, UnicodeDecodeError) as error:
            self.totals.failed[path] = str(error)
            if isinstance(error, RecordingError):
                found = _INVALID.search(str(error))
                more = error.sequences - self._unreadable[path]  # a file that grows is tried again
                self._unreadable[path] += max(more, 0)
                self._refuse(found[1] if found else "unreadable", error, max(more, 0))
        for reason, count in (self.totals.refusals.counts - refused).items():
            if reason != "no_tokens":  # a mask is no fault
                self._refuse(reason, self.totals.refusals.first[reason], count)
        why = self._why_unexported(self._patience)
        after = self._recorder.stats()
        taken = after.exports_taken > self._taken_before[path]
        if (lost := sum(after.dropped.values()) - sum(before.dropped.values())) > 0:
            part = after.sequences > before.sequences
            self._ledger.lose(path, known, part=part)
            then = _IN_PART if part and taken else "import the file again"
            self.totals.failed[path] = f"{path}: {lost} batches were dropped, see the log; {then}"
        elif why and path not in self.totals.failed:
            self._awaiting.add(path)
            self.totals.failed[path] = f"{path}: {why}" + f"; {_IN_PART}" * taken
        if not why:
            self._confirm()
        return path not in self.totals.failed

    def _refuse(self, reason: str, why: object, sequences: int) -> None:
        """Tell the evaluator of sequences of a file that are not measured."""
        if sequences:
            self.totals.refused += sequences
            self._recorder.refuse(reason, why, sequences)

    def finish(self) -> None:
        """End the recorder with an export for files that no endpoint has taken yet; what one took in part is noted."""
        before = self._recorder.stats()
        if self._ledger.unsaved:
            self._recorder.shutdown(_LAST_SECONDS)
        after = self._recorder.stats()
        if after.exports > before.exports and after.dropped == before.dropped:
            self._confirm()
        self._ledger.unsaved = {
            path: replace(found, part=True)
            for path, found in self._ledger.unsaved.items()
            if after.exports_taken > self._taken_before[path]
        }
        self._ledger.save()

    def _measure(self, path: Path) -> None:
        before = known = self._ledger.measured(path)
        about, by_lines = path.stat(), path.name.lower().endswith(LINE_ENDINGS)
        whole = "" if by_lines else digest_of(path)
        new, read = True, LinesRead()
        if known is not None:
            read = LinesRead(known.lines, known.digest) if by_lines else read
            try:
                new = _appended(path, known, whole, read)
            except RewrittenError:
                known, read = None, LinesRead()
        if known is None and by_lines and self._follow and next(lines(path, LinesRead()), None) is None:
            return
        if known is None and (copied := self._copied(path, whole, about)):
            self.totals.copies[path] = copied
            return
        found = self._read(path, read, new=new)
        first = known.first if known is not None and known.first else _first(found)
        if known is None and before is not None and found is not None and first == before.first:
            why = f"INVALID INPUT, rewritten_file: {remedy('rewritten_file')}"
            raise RecordingError(f"{path}: {why}", sequences=found.lengths.size)
        prompts: list[str] = []
        if found is not None:
            found = found.with_attributes(self._attributes)
            if by_lines:
                found, prompts = self._without_late_rollouts(path, found, self._ledger.prompts(path, first))
        unflushed = 0
        for chunk, sizes in () if found is None else _chunks(found):
            self._compare(chunk, sizes)
            self.totals.sequences += chunk.lengths.size
            self.totals.tokens += chunk.train.size
            unflushed += chunk.train.size
            if unflushed >= _MAX_UNFLUSHED_TOKENS:
                self._recorder.force_flush(self._patience)
                unflushed = 0
        self._note(path, about, read, whole or read.digest, first, prompts)

    def _read(self, path: Path, read: LinesRead, *, new: bool) -> Recording | None:
        """Return what is new in a file; a last line that is cut off counts, unless its end may follow."""
        try:
            return read_file(path, self.totals.refusals, self._columns, read) if new else None
        finally:
            if read.torn and not self._follow:
                self.totals.refusals.add(f"{path}:{read.torn}: the last line is cut off", kind="unreadable")

    def _note(
        self, path: Path, about: os.stat_result, read: LinesRead, digest: str, first: str, prompts: list[str]
    ) -> None:
        measured = _Measured(about.st_size, about.st_mtime_ns, read.count, digest, first, prompts, time.time())
        self._ledger.note(path, measured)

    def _without_late_rollouts(
        self, path: Path, found: Recording, counted: Container[str]
    ) -> tuple[Recording, list[str]]:
        """Refuse appended rollouts of prompts that have counted; return the others, and the names of their prompts."""
        names = list(map(_prompt_name, found.attributes))
        late = np.array([name in counted for name in names])
        if late.any():
            prompt = group_of(found.attributes[int(late.argmax())])
            said = f"{path}: prompt {prompt}: {remedy('split_prompt')}"
            self.totals.refusals.add(said, kind="split_prompt", times=int(late.sum()))
        return found.only(~late), sorted({name for name in names if name and name not in counted})

    def _copied(self, path: Path, digest: str, about: os.stat_result) -> str:
        """Return the file that has a new file's content and is measured, and note this one as measured; else ""."""
        read = LinesRead()
        if not digest:
            for _ in lines(path, read):
                pass
        digest = digest or read.digest
        if name := self._ledger.name(digest):
            original = self._ledger.measured(Path(name))
            if original is not None and original.part:
                raise RecordingError(f"{path}: is a copy of {name}: {_IN_PART}")
            first = original.first if original is not None else ""
            self._note(path, about, read, digest, first, sorted(self._ledger.prompts(Path(name), first)))
        return name

    def _confirm(self) -> None:
        """Note that everything measured is exported."""
        self.totals.done |= self._ledger.save()
        for path in self._awaiting:
            del self.totals.failed[path]
        self._awaiting.clear()

    def _compare(self, chunk: Recording, sizes: Sequence[int]) -> None:
        """Measure sequences of one weight version, whose prompts have so many rollouts in the file."""
        sides = [chunk.rows(side) for side in ("train", "inference")]
        self.totals.identical += sum(map(np.array_equal, *sides))
        if not chunk.density:
            self.totals.ratios += ratio_sums(chunk.train - chunk.inference)
        first = chunk.attributes[0]
        weights = _weights(first)
        self.totals.age_unknown += int(chunk.age_unknown.sum())
        step = first.get("step", weights[0])
        if not isinstance(step, bool | str | None) and float(step).is_integer():
            self.totals.steps.add(int(step))
        masses = chunk.rows("train_kept")
        prompts = chunk.prompts
        self._recorder.compare(
            # A recorder takes what is from before truncation, and renormalises it again.
            list(map(np.add, sides[0], masses)) if masses else sides[0],
            sides[1],
            token_ids=chunk.rows("token_ids") or None,
            rewards=chunk.rewards,
            advantages=chunk.rows("advantages") or None,
            kept=(masses, None) if masses else None,
            attributes=chunk.attributes,
            weights=(weights[0], chunk.rows("versions") or weights[1]),
            groups=None if prompts is None else list(map(_prompt, chunk.attributes)),
            group_size=sizes,
            presampled=True,
            density=first.get(DENSITY) is True or None,
        )
        # A lag without the steps that it lies between; all traffic has one, also of sequences that are stale.
        aged = [row for row in chunk.attributes if isinstance(row.get(LAG), int)] if None in weights else []
        if aged and chunk.versions is None:
            known = [{name: value for name, value in row.items() if name != LAG} for row in aged]
            self._recorder.observe("weights_lag", [row[LAG] for row in aged], attributes=known)

    def _why_unexported(self, patience: float) -> str:
        """Return "" if everything recorded was measured and accepted by every endpoint, in time; or why not."""
        end, (pause, longest), said = time.monotonic() + patience, _PAUSES, ""
        while True:
            # Streams are cumulative, and of one pair of kernels: an export that is accepted contains all before it.
            why = why_unexported(self._recorder, self._recorder.stats(), max(end - time.monotonic(), 1.0))
            if why != NO_ENDPOINT or self._stopped() or not patience:
                return why
            said = said or try_export()
            if time.monotonic() >= end or (_NOT_ALLOWED.search(said) and not self._follow):
                return f"{why}: {said}" if said else why
            time.sleep(min(pause, max(end - time.monotonic(), 0.0)))
            pause = min(2.0 * pause, longest)


def _chunks(of: Recording) -> Iterator[tuple[Recording, list[int]]]:
    """Sequences that can be one batch, of about `_CHUNK_TOKENS` tokens, and how many rollouts each one's prompt has."""
    rollouts = Counter(map(_prompt, of.attributes))
    alike: dict[Hashable, list[int]] = {}
    for index, row in enumerate(of.attributes):
        alike.setdefault((_weights(row), row.get("step"), row.get(DENSITY) is True), []).append(index)
    for group in alike.values():
        sizes = of.lengths[group]
        starts = np.flatnonzero(np.diff((np.cumsum(sizes) - sizes) // _CHUNK_TOKENS, prepend=-1))
        for begin, end in pairwise([*starts.tolist(), len(group)]):
            inside = np.zeros(of.lengths.size, dtype=np.bool_)
            inside[group[begin:end]] = True
            part = of.only(inside)
            yield part, [rollouts[_prompt(row)] for row in part.attributes]


def _prompt(row: Mapping[str, Scalar]) -> Hashable:
    """Return a sequence's `prompt_of`; without one the sequence is the only rollout of a prompt of its own."""
    return id(row) if (prompt := prompt_of(row)) is None else prompt


def _prompt_name(row: Mapping[str, Scalar]) -> str:
    """Return a short name of a sequence's prompt and step, which is the same in every process; "" without a prompt."""
    if (prompt := prompt_of(row)) is None:
        return ""
    return hashlib.blake2b(repr(prompt).encode(), digest_size=6).hexdigest()


def _weights(row: Mapping[str, Scalar]) -> tuple[int | str | None, int | str | None]:
    """Return the versions of both kernels' weights, the training kernel's first."""
    train, inference = (row.get(name) for name in ("train_weights", "inference_weights"))
    return None if isinstance(train, float) else train, None if isinstance(inference, float) else inference


@dataclass(frozen=True, slots=True)
class _Measured:
    """Progress in a file: size, time of change, lines, digests of all and of the first sequence, new prompts, time.

    Of a `part` that is exported it is not known which sequences it has.
    """

    size: int
    changed: int
    lines: int
    digest: str
    first: str
    prompts: list[str]
    at: float
    part: bool = False


class Ledger:
    """Progress in files, remembered in a list once it is exported; `again` ignores what the list has so far."""

    def __init__(self, path: Path | None = None, *, again: bool = False) -> None:
        self._path = path
        self._end = path.stat().st_size if path is not None and again else 0
        self._known: dict[str, _Measured] = {}
        self._names: dict[str, str] = {}
        self._prompts: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
        self.unsaved: dict[Path, _Measured] = {}
        self.refresh()

    def refresh(self) -> None:
        """Read what has been added to the list since the last time: by this process, or by another."""
        if self._path is None or not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._end)
            added = file.read()
        added = added[: added.rfind(b"\n") + 1]  # another process may be writing the last line
        self._end += len(added)
        unsaved = {str(path.resolve()) for path in self.unsaved}
        for line in added.splitlines():
            try:
                name, *progress = json.loads(line)
                measured = _Measured(*progress)
            except (ValueError, TypeError):
                _log.warning("%s: a record was cut off, and its file is measured again", self._path)
                continue
            if name not in unsaved and (name not in self._known or self._known[name].at <= measured.at):
                self._know(name, measured)

    def _know(self, name: str, measured: _Measured) -> None:
        self._known[name] = measured
        self._names[measured.digest] = name
        self._prompts[name, measured.first].update(measured.prompts)

    def __contains__(self, path: Path) -> bool:
        known = None if path in self.unsaved else self.measured(path)
        return known is not None and not known.part and _state(path)[1:] == (known.size, known.changed)

    def name(self, digest: str) -> str:
        """Return the name of a file that is measured and has this content, empty for none."""
        return self._names.get(digest, "")

    def measured(self, path: Path) -> _Measured | None:
        """Return how far a file is measured."""
        return self._known.get(str(path.resolve()))

    def prompts(self, path: Path, first: str) -> set[str]:
        """Return the prompts that have counted, of a file as long as it begins with a sequence of this digest."""
        return self._prompts[str(path.resolve()), first]

    def note(self, path: Path, measured: _Measured) -> None:
        """Note how far a file is measured; it is saved when that is exported."""
        self.unsaved[path] = measured
        self._know(str(path.resolve()), measured)

    def lose(self, path: Path, known: _Measured | None, *, part: bool) -> None:
        """Note that what is new of a file was lost, all or a `part`: it is as far as `known`, and its copies count."""
        if part and path in self.unsaved:
            self.note(path, replace(self.unsaved[path], part=True))
        elif measured := self.unsaved.pop(path, None):
            name = str(path.resolve())
            self._names.pop(measured.digest, None)
            self._known.pop(name)
            self._prompts[name, measured.first].difference_update(measured.prompts)
            if known is not None:
                self._know(name, known)

    def save(self) -> set[Path]:
        """Save what was noted, and return the files that are done."""
        records = [json.dumps([str(path.resolve()), *astuple(measured)]) for path, measured in self.unsaved.items()]
        if self._path is not None and records:
            with self._path.open("a+b") as file:
                file.seek(max(file.seek(0, os.SEEK_END) - 1, 0))
                cut_off = file.read(1) not in {b"", b"\n"}  # the process that wrote it was killed
                file.write("\n".join([*[""] * cut_off, *records, ""]).encode())
        done = set(self.unsaved)
        self.unsaved.clear()
        return done


def default_ledger(contract: str) -> Path | None:
    """Return the list of the files that were imported to a contract; None, and a warning, where it cannot be kept."""
    try:
        state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
        path = state / "kc-otel" / f"imported-{contract}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    except (OSError, RuntimeError) as error:
        _log.warning(
            "a second import will count the files again, because they cannot be listed: %s; set XDG_STATE_HOME", error
        )
        return None
    return path


def unseen(
    paths: Sequence[Path], ledger: Ledger, stop: threading.Event, *, follow: bool, poll: float
) -> Iterator[Path]:
    """Files that are not done, each once; with `follow`, those that appear, when they have stopped growing."""
    tried: set[tuple[str, int, int]] = set()
    grown: dict[Path, tuple[str, int, int]] = {}
    while not stop.is_set():
        with suppress(*[FileNotFoundError] * follow):
            for path in files_of(filter(Path.exists, paths) if follow else paths):
                if stop.is_set():
                    return
                state = _state(path)
                settled = not follow or (grown.get(path) == state and prime_rl_is_complete(path))
                grown[path] = state
                if settled and state not in tried:
                    tried.add(state)
                    with _locked(path, stop):
                        ledger.refresh()
                        if path not in ledger and not stop.is_set():
                            yield path
        if not follow or stop.wait(poll):
            return


@contextmanager
def _locked(path: Path, stop: threading.Event) -> Iterator[None]:
    """Wait for another import of a file; one that cannot be locked may count twice."""
    with ExitStack() as opened:
        with suppress(OSError):
            file = opened.enter_context(path.open("rb"))
            while not stop.is_set():
                with suppress(BlockingIOError):
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                stop.wait(_LOCK_POLL_SECONDS)
        yield


def _appended(path: Path, known: _Measured, digest: str, read: LinesRead) -> bool:
    """Return True if lines were appended to a file; a RewrittenError if it changed in another way."""
    new = False
    if not digest:
        ahead = replace(read)
        new = next(lines(path, ahead), None) is not None
        read.torn = ahead.torn
    elif digest != known.digest:
        raise RewrittenError(f"{path}: changed after it was measured")
    if known.part:
        raise RecordingError(f"{path}: {_IN_PART}")
    return new


def _first(found: Recording | None) -> str:
    """Return the digest of a file's first sequence, "" where there is none."""
    if found is None:
        return ""
    return next(found.digests()).hex()


def _state(path: Path) -> tuple[str, int, int]:
    about = path.stat()
    return str(path.resolve()), about.st_size, about.st_mtime_ns
