"""Recordings of `kc-otel serve --record` and of the Collector's file exporter, under one contract or under two.

A damaged message is skipped and named; where a length is wrong, the rest of that file is lost. A replay cannot move
traffic: a route does not end the drift of its slice. Recorders slice by their own copy of the contract, so that what
was added later has no data.
"""

from __future__ import annotations

import heapq
import math
import struct
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain, count, islice
from pathlib import Path
from typing import Any, Final

from kc_otel.contract.model import Contract
from kc_otel.judge.decisions import DecisionTable
from kc_otel.judge.escalation.alerts import Alert
from kc_otel.judge.escalation.escalate import EscalationState, GroupTiming, escalate
from kc_otel.judge.escalation.tick import TrafficSeen
from kc_otel.judge.evaluator import Evaluator, without_collector
from kc_otel.judge.otlp.traffic_entries import EVALUATED, MOST_BYTES, TrafficEntry, unmarked
from kc_otel.judge.plain_json import finite_or_none
from kc_otel.judge.statistics import metric_name
from kc_otel.judge.verdict import Status
from kc_otel.judge.verdicts import cells_of, selected

_LENGTH: Final = struct.Struct(">I")
_BUFFER_BYTES: Final = 256 * 1024
"""Bytes that are read at once: a message has some ten thousand."""
_MAX_QUOTED_CHARACTERS: Final = 300
_HEAD_ENTRIES: Final = 100
"""Entries of a file that are looked at to see whether it says when the evaluator judged."""
DEFAULT_TICK_SECONDS: Final = 10.0
_MAX_ITEMS: Final = 60_000
"""Points of a message that is read so; larger ones are read by protobuf."""


class TrafficFileError(Exception):
    """A recording that cannot be used; the message says what to do."""


def read_recordings(paths: Sequence[Path], damage: list[str]) -> Iterator[TrafficEntry]:
    """The entries of all files and folders by time; `damage` takes a sentence for everything that was left out."""
    each = (chain.from_iterable(_entries(file, damage) for file in recorded_files(path)) for path in paths)
    return heapq.merge(*each, key=lambda entry: entry.at)


def evaluations_recorded(paths: Iterable[Path]) -> bool:
    """Return True if every recording states when the evaluator judged."""
    return all(
        any(entry.is_evaluation for entry in islice(read_recordings([path], []), _HEAD_ENTRIES)) for path in paths
    )


def recorded_files(path: Path) -> list[Path]:
    """The file, or the files of a recording's folder, oldest first."""
    if not path.is_dir():
        return [path]
    try:
        files = sorted(file for file in path.iterdir() if file.suffix == ".otlp")
    except OSError as error:
        raise TrafficFileError(f"{path}: cannot be read ({error.strerror or error})") from None
    if not files:
        raise TrafficFileError(f"{path}: has no recording (*.otlp); give the folder STATE-recording of an evaluator")
    return files


def _entries(path: Path, damage: list[str]) -> Iterator[TrafficEntry]:
    try:
        with path.open("rb", buffering=_BUFFER_BYTES) as file:
            for number in count(1):

                def damaged(said: str, where: str = f"{path}: message {number}") -> None:
                    damage.append(f"{where}: {said[:_MAX_QUOTED_CHARACTERS]}")

                head = file.read(_LENGTH.size)
                if not head:
                    return
                if number == 1 and head[0] > MOST_BYTES >> 24:
                    raise TrafficFileError(
                        f"{path}: is no recording; give what `kc-otel serve --record` wrote, or the Collector's file "
                        "exporter with `format: proto` and no compression"
                    )
                length = _LENGTH.unpack(head)[0] if len(head) == _LENGTH.size else 0
                if length > MOST_BYTES:
                    damaged(f"a length of {length:,} bytes is none; what follows is lost")
                    return
                message = file.read(length)
                if len(head) < _LENGTH.size or len(message) < length:
                    damaged("the file ends in the middle of it")
                    return
                if (entry := _entry(message, damaged)) is not None:
                    yield entry
    except OSError as error:
        raise TrafficFileError(f"{path}: cannot be read ({error.strerror or error})") from None


def _entry(message: bytes, damaged: Callable[[str], object]) -> TrafficEntry | None:
    if (marked := unmarked(message)) is None:
        return TrafficEntry(math.nan, message, damaged).arrived()
    what, at, body = marked
    return TrafficEntry(at, body, damaged) if body or what == EVALUATED else None


@dataclass(frozen=True, slots=True)
class Span:
    """An alert, a route or a directive, Unix times in seconds; without an end it lasts to the end of the recording.

    `what` is an alert's verdict, `route:train-kernel`, or a directive's kind; a route's inference kernel is avoided.
    """

    what: str
    slice: str
    kernel_inference: str
    start: float
    end: float | None = None
    clause: str = ""
    kernel_train: str = ""
    step: str = ""
    severity: str = ""
    actions: tuple[str, ...] = ()
    reason: str = ""

    @property
    def about(self) -> tuple[str, ...]:
        """Identity that spans of one alert or decision share."""
        return self.what, self.clause, self.slice, self.kernel_train, self.kernel_inference

    @property
    def until(self) -> float:
        """Its end; infinite where it has none."""
        return math.inf if self.end is None else self.end


@dataclass(frozen=True, slots=True)
class SentWebhook:
    """One webhook to an endpoint: firing, resolved or a reminder of so many alerts."""

    at: float
    endpoint: str
    reason: str
    alerts: int


@dataclass(frozen=True, slots=True)
class ReplayTimeline:
    """Timeline of a recording under one contract, in the order of beginnings, Unix times in seconds."""

    name: str
    version: int
    hash: str
    start: float
    end: float
    evaluations: int
    requests: int
    points: Mapping[str, int]
    cells: int
    alerts: tuple[Span, ...]
    decisions: tuple[Span, ...]
    messages: tuple[SentWebhook, ...]
    not_recorded: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MovedSpan:
    """The same alert or decision under both contracts, begun and ended so many seconds later, or with other actions."""

    old: Span
    new: Span
    later: float
    ends_later: float


@dataclass(frozen=True, slots=True)
class TimelineDifferences:
    """Differences between two timelines; `messages` are numbers of webhooks by (endpoint, reason) that differ."""

    dropped: tuple[Span, ...]
    added: tuple[Span, ...]
    moved: tuple[MovedSpan, ...]
    messages: dict[tuple[str, str], tuple[int, int]]

    def __bool__(self) -> bool:
        return bool(self.dropped or self.added or self.moved or self.messages)


def differences(old: ReplayTimeline, new: ReplayTimeline, apart: float) -> TimelineDifferences:
    """Compare a new contract's timeline with the old one's on the same recording.

    Spans are paired when they are about the same and at most `apart` seconds lie between them: first those of equal
    steps, then of the same severity, then any, nearest first.
    """
    before, after = (*old.alerts, *old.decisions), (*new.alerts, *new.decisions)
    there: dict[tuple[str, ...], list[Span]] = {}
    for other in sorted(after, key=lambda span: span.start, reverse=True):
        there.setdefault(other.about, []).append(other)
    near = [
        (span, other)
        for span in before
        for other in there.get(span.about, ())
        if other.start <= span.until + apart and other.until >= span.start - apart
    ]
    taken: set[int] = set()
    moved = []
    for span, other in sorted(near, key=_unlike):
        if taken.isdisjoint({id(span), id(other)}):
            taken |= {id(span), id(other)}
            pair = MovedSpan(span, other, other.start - span.start, _between(span.until, other.until))
            acts = [(side.severity, set(side.actions)) for side in (span, other)]
            if pair.later or pair.ends_later or acts[0] != acts[1]:
                moved.append(pair)
    sent, sends = (Counter((message.endpoint, message.reason) for message in of.messages) for of in (old, new))
    return TimelineDifferences(
        dropped=tuple(span for span in before if id(span) not in taken),
        added=tuple(span for span in after if id(span) not in taken),
        moved=tuple(sorted(moved, key=lambda pair: (not pair.new.severity, pair.new.start))),
        messages={key: (sent[key], sends[key]) for key in sorted(sent | sends) if sent[key] != sends[key]},
    )


def _unlike(pair: tuple[Span, Span]) -> tuple[bool, bool, float, float]:
    """Sort key of a pair: of another step, of another severity, and how far apart the ends are."""
    span, other = pair
    ends = abs(_between(span.until, other.until))
    return span.step != other.step, span.severity != other.severity, abs(span.start - other.start), ends


def _between(before: float, after: float) -> float:
    return 0.0 if before == after else after - before


@dataclass(frozen=True, slots=True)
class Replayed:
    """Result of a replay under a contract, and if given an `old` one; `damage` names what had to be left out."""

    new: ReplayTimeline
    old: ReplayTimeline | None
    changed: TimelineDifferences | None
    not_recorded: tuple[str, ...]
    damage: tuple[str, ...]


def replay_recordings(paths: Sequence[Path], new: Contract, old: Contract | None = None) -> Replayed:
    """Replay recordings, in any order, through a contract and, if given, through the one in force."""
    if old is not None and old.name != new.name:
        raise ValueError(
            f"metadata.name: {old.name!r} and {new.name!r} are two contracts; streams carry the name of theirs, "
            "so that only versions of one contract can be compared"
        )
    every = None if evaluations_recorded(paths) else DEFAULT_TICK_SECONDS
    timeline, damage = _timeline(paths, new, every)
    if old is None:
        return Replayed(timeline, None, None, timeline.not_recorded, damage)
    before, _ = _timeline(paths, old, every)
    changed = differences(before, timeline, apart=max(old.observability.window, new.observability.window))
    return Replayed(timeline, before, changed, (*timeline.not_recorded, *unmeasured(old, new)), damage)


def as_data(found: Replayed) -> dict[str, Any]:
    """A replay as JSON data: the dataclasses' fields; what does not end any more, or does now, is later by null."""
    plain = asdict(found)
    if found.changed is not None:
        for moved in plain["changed"]["moved"]:
            moved["ends_later"] = finite_or_none(moved["ends_later"])
        plain["changed"]["messages"] = [
            {"endpoint": endpoint, "reason": reason, "old": before, "new": after}
            for (endpoint, reason), (before, after) in found.changed.messages.items()
        ]
    return plain


def _timeline(paths: Sequence[Path], contract: Contract, every: float | None) -> tuple[ReplayTimeline, tuple[str, ...]]:
    """A timeline, and what had to be left out for it."""
    damage: list[str] = []
    timeline = replay(contract, read_recordings(paths, damage), every)
    if not timeline.requests:
        more = f" ({damage[0]})" if damage else ""
        raise TrafficFileError(f"{paths[0]}: holds no metrics{more}; give the recording of a pipeline of metrics")
    if timeline.points.get("unknown_contract") and not timeline.points.get("accepted"):
        raise TrafficFileError(
            f"{paths[0]}: has nothing of {contract.name}; streams carry the name of their contract, so metadata.name "
            "has to be the same"
        )
    return timeline, tuple(damage)


def replay(contract: Contract, entries: Iterable[TrafficEntry], every: float | None) -> ReplayTimeline:
    """Replay a recording, evaluated at multiples of `every` seconds; None for the recording's own times."""
    run, due = _Run(contract), math.nan
    with without_collector():
        for entry in entries:
            if entry.is_evaluation:
                if every is None:
                    run.judge(entry.at)
                continue
            if every is not None:
                due = _next(entry.at, every) if math.isnan(due) else due
                while due <= entry.at:
                    run.judge(due)
                    due = _next(due, every)
            run.take(entry)
        if not math.isnan(due):
            run.judge(due)
        return run.timeline()


def _next(at: float, every: float) -> float:
    """The first multiple of `every` after `at`."""
    index = math.floor(at / every) + 1
    return index * every if index * every > at else (index + 1) * every


@dataclass(frozen=True, slots=True)
class _OrdersObeyed(TrafficSeen):
    """A recording has no routers: an order explains silence as long as anybody reports."""

    def excuses(self, slice: str, version: str, ordered: Callable[[str, str], float | None]) -> bool:
        """Return whether the slice is silent because traffic was ordered away from the version."""
        return not self.silent and ordered(slice, version) is not None


class _Run:
    """The evaluator's process without its sockets and files."""

    def __init__(self, contract: Contract) -> None:
        self._contract = contract
        self._evaluator = Evaluator([contract])
        self._state = EscalationState()
        self._firing: dict[str, Span] = {}
        self._in_force: dict[tuple[str, str, str], Span] = {}
        self._ended: list[Span] = []
        self._messages: list[SentWebhook] = []
        self._silent = {(clause.id, slice) for clause in contract.clauses for slice in contract.slices_for(clause)}
        self._start = self._end = math.nan
        self._evaluations = self._requests = self._cells = 0

    def take(self, entry: TrafficEntry) -> None:
        """A request arrives."""
        self._start = entry.at if math.isnan(self._start) else self._start
        columns = self._evaluator.columns_of(entry.body, _MAX_ITEMS)
        self._evaluator.ingest_metrics(entry.read() if columns is None else columns, entry.at)
        self._requests += 1

    def judge(self, now: float) -> None:
        """Evaluate every cell, and escalate as the evaluator does."""
        contract, before = self._contract, self._state.decisions
        self._start = now if math.isnan(self._start) else self._start
        evaluation = self._evaluator.evaluate(now)[contract.name]
        silent, failing = self._evaluator.silent(contract.name, now), self._evaluator.failing(contract.name, now)
        traffic = _OrdersObeyed(silent=silent, failing=failing)
        step = escalate(contract, self._state, evaluation, timing=GroupTiming(), traffic=traffic)
        self._state = step.state
        self._note_alerts(step.edges)
        if step.state.decisions.version != before.version:
            self._note_decisions(step.state.decisions, now)
        self._messages += [
            SentWebhook(now, message.endpoint, message.reason.value, len(message.alerts)) for message in step.messages
        ]
        self._evaluations, self._end, self._cells = self._evaluations + 1, now, len(evaluation.verdicts)
        if self._silent:
            no_data = {verdict.cell for verdict in selected(evaluation.verdicts, {Status.NO_DATA})}
            self._silent -= {(cell.clause, cell.slice) for cell in cells_of(evaluation.verdicts) if cell not in no_data}

    def _note_alerts(self, edges: Iterable[Alert]) -> None:
        for found in edges:
            if found.fires:
                cell, actions = found.cell, tuple(map(str, found.actions))
                self._firing[found.fingerprint] = Span(
                    found.on, cell.slice, cell.kernel_inference, found.at, clause=cell.clause,
                    kernel_train=cell.kernel_train, step=found.step, severity=found.severity, actions=actions,
                    reason=found.verdict.reason,
                )  # fmt: skip
            else:
                self._ended.append(replace(self._firing.pop(found.fingerprint), end=found.at))

    def _note_decisions(self, table: DecisionTable, now: float) -> None:
        keys = [(f"route:{route.kernel}", route.slice, route.avoid) for route in table.routes]
        keys += [(directive.kind.value, directive.slice, "") for directive in table.directives]
        for key in self._in_force.keys() - keys:
            self._ended.append(replace(self._in_force.pop(key), end=now))
        for key in keys:
            self._in_force.setdefault(key, Span(*key, now))

    def timeline(self) -> ReplayTimeline:
        """Return the timeline of the replay so far."""
        contract = self._contract
        spans = [*self._ended, *self._firing.values(), *self._in_force.values()]
        spans.sort(key=lambda span: (span.start, span.step, span.clause, span.what, span.slice, span.kernel_inference))
        return ReplayTimeline(
            name=contract.name, version=contract.metadata.version, hash=contract.hash, start=self._start,
            end=self._end, evaluations=self._evaluations, requests=self._requests, cells=self._cells,
            points=dict(sorted(self._evaluator.counters.items())),
            alerts=tuple(span for span in spans if span.step), decisions=tuple(span for span in spans if not span.step),
            messages=tuple(self._messages), not_recorded=tuple(not_recorded(contract, self._silent)),
        )  # fmt: skip


def not_recorded(contract: Contract, silent: Collection[tuple[str, str]]) -> Iterator[str]:
    """Yield a sentence for each clause and slice that never had an observation: `silent` throughout."""
    never = {
        clause.id
        for clause in contract.clauses
        if all((clause.id, slice) in silent for slice in contract.slices_for(clause))
    }
    for clause in contract.clauses:
        if clause.id in never:
            yield f"{clause.id}: nothing of {metric_name(clause)} was recorded, so the clause is NO_DATA throughout"
    if len(never) == len(contract.clauses):
        return
    for slice in contract.slices:
        empty = [c.id for c in contract.clauses if c.id not in never and (c.id, slice) in silent]
        if empty and len(empty) + len(never) == len(contract.clauses):
            yield f"slice {slice}: nothing was recorded of it; recorders slice by their own copy of the contract"
        elif empty:
            yield f"slice {slice}: nothing was recorded of it for {', '.join(empty)}"


def unmeasured(old: Contract, new: Contract) -> Iterator[str]:
    """Changes between two contracts that act where traffic is measured, not where it is judged."""
    measured = any(not clause.metric.startswith("gen_ai.") for clause in new.clauses)
    for name in [name for name in new.slices if name in old.slices] if measured else ():
        if old.slices[name].conditions != new.slices[name].conditions:
            yield f"slice {name}: is defined anew, and the recording has what the contract of the time put into it"
    before, after = old.observability.sampling, new.observability.sampling
    if before != after:
        yield f"sampling: {after:g} instead of {before:g} acts on recorders; the recording has the samples of the time"
