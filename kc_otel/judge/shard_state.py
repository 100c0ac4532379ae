"""A shard's state of a contract, and the part of it that the judge has not been sent yet.

A shard takes points by the same rules as one process: streams, resets, duplicates, layouts, caps. It keeps a second
copy of its counts, merged by series and pane, until the judge asks. The judge counts that into panes of its own, so
that a series may have senders on several shards, and what is held against a limit is held once, by one judge.

Nothing here decides anything: the code that counts in one process counts arrivals here, too. Two rules are the whole
contract's and not a shard's, and are kept here once more: the cap on series, which `ContractState.count` has, and that
nobody's bucket bounds throw away what others sent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from kc_otel.contract.model import Contract
from kc_otel.judge.contract_state import ContractState
from kc_otel.judge.evaluator import Evaluator
from kc_otel.judge.point_streams import RefusedSender
from kc_otel.judge.recorders import KernelInfo, LastReport, know_kernel
from kc_otel.judge.series import LONG, SHORT, Heard, Pair, SeriesKey
from kc_otel.judge.stored_numbers import StoredHistogram
from kc_otel.stats.histogram import Histogram
from kc_otel.stats.histogram_columns import HistogramColumns

_PARTS_BEFORE_MERGE: Final = 8
_OF_STREAMS: Final = ("reset", "gap", "streams_evicted")
"""Events that only who has the streams can count; the judge counts the others itself."""


@dataclass(slots=True)
class _Slot:
    """Counts of a series in one short and one long pane since the judge last asked."""

    parts: list[Histogram] = field(default_factory=list)
    time: float = 0.0
    now: float = 0.0

    def add(self, increment: Histogram, time: float, now: float) -> None:
        self.parts.append(increment)
        self.time, self.now = max(self.time, time), max(self.now, now)
        if len(self.parts) >= _PARTS_BEFORE_MERGE:
            self.parts = [Histogram.union(self.parts)]


class _Sent(NamedTuple):
    """Facts that the judge has been sent: pairs and series without room by when, refused points until when."""

    heard: Mapping[Pair, float] = {}
    events: Mapping[str, int] = {}
    unjudged: Mapping[SeriesKey, float] = {}
    until: float = -math.inf
    recorders: Mapping[tuple[str, str], tuple[LastReport, bool]] = {}


class ShardState(ContractState):
    """A shard's state of a contract.

    `slots` has the counts that the judge has not been sent, by series, short pane, long pane and layout.
    """

    def __init__(self, contract: Contract) -> None:
        super().__init__(contract, weighed=False)
        self.slots: dict[tuple[SeriesKey, int, int, tuple[float, ...] | None], _Slot] = {}
        self.sent = _Sent()

    def count(self, key: SeriesKey, increment: Histogram, time: float, now: float) -> bool:
        """Count it here, and keep it for the judge, which has the whole contract's caps."""
        at = min(time, now)
        short, long = self.grids[SHORT].index(at), self.grids[LONG].index(at)
        self.slots.setdefault((key, short, long, increment.layout), _Slot()).add(increment, at, now)
        return super().count(key, increment, time, now)

    def count_all(
        self, keys: Sequence[SeriesKey], columns: HistogramColumns, times: Sequence[float], now: Sequence[float]
    ) -> None:
        """`count` of many."""
        for key, counted, time, when in zip(keys, columns.objects(), times, now, strict=True):
            self.count(key, counted, time, when)

    def heard_since(self) -> dict[Pair, list[float]]:
        """Return the reports of each pair since the judge was sent one: at least the newest times, oldest first."""
        found = {}
        for pair, heard in self.heard.items():
            told = self.sent.heard.get(pair, -1.0)
            if heard.last > told:
                found[pair] = [time for time in _times(heard) if time > told]
        return found


def unsent_batch(evaluator: Evaluator, number: int, counters: dict[str, int], kernels_since: float) -> ShardBatch:
    """Return the batch that the judge has not been sent; it stays unsent until `mark_sent`.

    `counters` are the points by outcome that the judge was sent; it was told of kernel versions seen until
    `kernels_since`, Unix seconds. The evaluator is one of ShardStates, settled.
    """
    counted, notes = [], {}
    for name, state in evaluator.states.items():
        assert isinstance(state, ShardState)
        for (key, _, _, _), slot in state.slots.items():
            counted.append(Counted(name, key, slot.time, slot.now, Histogram.union(slot.parts)))
        sent, reports = state.sent, state.recorders.reports()
        notes[name] = ShardNotes(
            heard=[(*pair, times) for pair, times in state.heard_since().items()],
            events={kind: state.events[kind] - sent.events.get(kind, 0) for kind in _OF_STREAMS},
            unjudged=[(key, at) for key, at in state.unjudged.items() if at > sent.unjudged.get(key, -1.0)],
            refused=[refused for refused in state.refused.found.values() if refused.last > sent.until],
            recorders=[(*key, *told) for key, told in reports.items() if sent.recorders.get(key) != told],
            kernels=[kernel for kernel in state.kernels.values() if kernel.last_seen > kernels_since],
        )
    points = {kind: count - counters.get(kind, 0) for kind, count in evaluator.counters.items()}
    return ShardBatch(number, counted, notes, {kind: count for kind, count in points.items() if count})


def mark_sent(evaluator: Evaluator, counters: dict[str, int]) -> Callable[[], None]:
    """The judge will be sent all that `unsent_batch` said. Returns what to call where it cannot be."""
    before = dict(counters)
    counters.clear()
    counters.update(evaluator.counters)
    undone = [_marked_sent(state) for state in evaluator.states.values()]

    def unsent() -> None:
        counters.clear()
        counters.update(before)
        for undo in undone:
            undo()

    return unsent


def _marked_sent(state: ContractState) -> Callable[[], None]:
    assert isinstance(state, ShardState)
    slots, sent = state.slots, state.sent
    state.slots = {}
    state.sent = _Sent(
        {pair: heard.last for pair, heard in state.heard.items()},
        dict(state.events),
        dict(state.unjudged),
        max((refused.last for refused in state.refused.found.values()), default=sent.until),
        state.recorders.reports(),
    )

    def unsent() -> None:
        for key, later in state.slots.items():
            for part in later.parts:
                slots.setdefault(key, _Slot()).add(part, later.time, later.now)
        state.slots, state.sent = slots, sent

    return unsent


def _times(heard: Heard) -> list[float]:
    times = [heard.last]
    for gap in reversed(heard.gaps):
        times.append(times[-1] - abs(gap))
    return times[::-1]


@dataclass(frozen=True, slots=True)
class Counted:
    """Counts of a series in one pane of each grid: Unix times of its newest observation, and of the last arrival."""

    contract: str
    key: SeriesKey
    time: float
    now: float
    histogram: StoredHistogram


@dataclass(frozen=True, slots=True)
class ShardNotes:
    """A shard's news of a contract beside its counts: reports of pairs, events by kind, series without room, and so on.

    Of recorders it has version, sender, last report, and whether it is done with the version.
    """

    heard: list[tuple[str, str, list[float]]]
    events: dict[str, int]
    unjudged: list[tuple[SeriesKey, float]]
    refused: list[RefusedSender]
    recorders: list[tuple[str, str, LastReport, bool]]
    kernels: list[KernelInfo]


@dataclass(frozen=True, slots=True)
class ShardBatch:
    """Everything a shard took since the previous batch; the judge takes each number of a shard once.

    `points` are by outcome, `notes` by contract.
    """

    number: int
    counted: list[Counted] = field(default_factory=list)
    notes: Mapping[str, ShardNotes] = field(default_factory=dict)
    points: Mapping[str, int] = field(default_factory=dict)


def merge(evaluator: Evaluator, batches: Iterable[ShardBatch], now: float) -> None:
    """Count what shards took, of batches that the judge has not taken yet, at a Unix time."""
    batches = list(batches)
    evaluator.clock(now)
    heard: dict[tuple[str, Pair], list[float]] = {}
    for batch in batches:
        evaluator.counters.update(batch.points)
        for counted in batch.counted:
            if (state := evaluator.states.get(counted.contract)) is not None:
                _count(evaluator, state, counted)
        for name, notes in batch.notes.items():
            if (state := evaluator.states.get(name)) is not None:
                for train, inference, times in notes.heard:
                    heard.setdefault((name, (train, inference)), []).extend(times)
                _note(state, notes)
    for (name, pair), times in heard.items():
        for time in sorted(times):
            evaluator.states[name].hear(pair, time)


def _count(evaluator: Evaluator, state: ContractState, counted: Counted) -> None:
    series = state.series.get(counted.key)
    window = state.contract.observability.window
    if series is not None and counted.now - series.newest <= window and not state.accepts(series, counted.histogram):
        evaluator.counters["other_buckets"] += 1  # shards hear of the layout in use from their own senders alone
    elif not state.count(counted.key, counted.histogram, counted.time, counted.now):
        evaluator.counters["unjudged"] += 1


def _note(state: ContractState, notes: ShardNotes) -> None:
    state.events.update(notes.events)
    for key, at in notes.unjudged:
        state.leave_unjudged(key, at)
    for refused in notes.refused:
        state.refused.merge(refused)
    for version, sender, report, done in notes.recorders:
        if state.recorders.merge(version, sender, report, done=done):
            state.begin(version, report.at)
    for info in notes.kernels:
        known = state.kernels.get((info.role, info.version))
        if known is None or known.last_seen < info.last_seen:  # a shard that begins tells all that it remembers
            know_kernel(state.kernels, info)
