"""What a shard tells the judge, and how the judge takes it: counts add up, so senders may be on any shard.

Nothing here decides anything: what arrives is counted by the code that counts in one process. Two rules are the whole
contract's and not a shard's, and are kept here once more: the cap on series, which `ContractState.count` has, and that
nobody's bucket bounds throw away what others sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kc_otel.judge.contract_state import ContractState
from kc_otel.judge.evaluator import Evaluator
from kc_otel.judge.facts import KernelInfo
from kc_otel.judge.histograms import Histogram
from kc_otel.judge.series import Heard, Pair, SeriesKey

__all__ = ["Counted", "ShardBatch", "merge"]


@dataclass(frozen=True, slots=True)
class Counted:
    """What a series counted within one pane of each grid.

    Attributes:
        contract: metadata.name.
        key: The series.
        time: Unix time in seconds of its newest observation.
        now: When the last of it arrived, Unix seconds.
        histogram: What was counted.
    """

    contract: str
    key: SeriesKey
    time: float
    now: float
    histogram: Histogram


@dataclass(frozen=True, slots=True)
class ShardBatch:
    """What a shard took since the batch before.

    Attributes:
        number: Of the batch; the judge takes each number of a shard once.
        counted: What was counted.
        notes: By contract, as JSON has it: `heard` [train, inference, [times]], `events` by kind, `unjudged`
            [metric, slice, train, inference, time], and the fields of `kernels`.
        points: Points by outcome.
    """

    number: int
    counted: list[Counted] = field(default_factory=list)
    notes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    points: Mapping[str, int] = field(default_factory=dict)

    def __bool__(self) -> bool:
        """Whether it says anything."""
        return bool(self.counted or self.notes or self.points)


def merge(evaluator: Evaluator, batches: Iterable[ShardBatch], now: float) -> None:
    """Count what shards took.

    Args:
        evaluator: The judge's.
        batches: Each that it has not taken yet.
        now: Unix time in seconds.
    """
    batches = list(batches)
    evaluator.clock(now)
    heard: dict[tuple[str, Pair], list[float]] = {}
    for batch in batches:
        evaluator.counters.update(batch.points)
        for one in batch.counted:
            if (state := evaluator.states.get(one.contract)) is not None:
                _count(evaluator, state, one)
        for name, notes in batch.notes.items():
            if (state := evaluator.states.get(name)) is not None:
                for train, inference, times in notes.get("heard", ()):
                    heard.setdefault((name, (train, inference)), []).extend(times)
                _note(evaluator, state, notes)
    for (name, pair), times in heard.items():
        state = evaluator.states[name]
        for time in sorted(times):
            state.heard.setdefault(pair, Heard(time)).hear(time, state.contract.observability.heartbeat)


def _count(evaluator: Evaluator, state: ContractState, one: Counted) -> None:
    series = state.series.get(one.key)
    window = state.contract.observability.window
    if series is not None and one.now - series.newest <= window and not series.accepts(one.histogram):
        evaluator.counters["other_buckets"] += 1  # shards hear of the layout in use from their own senders alone
    elif not state.count(one.key, one.histogram, one.time, one.now):
        evaluator.counters["unjudged"] += 1


def _note(evaluator: Evaluator, state: ContractState, notes: Mapping[str, Any]) -> None:
    state.events.update(notes.get("events", {}))
    for *key, at in notes.get("unjudged", ()):
        state.leave_unjudged(SeriesKey(*key), at)
    versions = evaluator.facts[state.contract.name][0]
    for fields in notes.get("kernels", ()):
        info = KernelInfo(**fields)
        known = versions.known.get((info.role, info.version))
        if known is None or known.last_seen < info.last_seen:  # a shard that begins tells all that it remembers
            versions.know(info)
