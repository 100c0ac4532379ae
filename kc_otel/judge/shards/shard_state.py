"""What a shard remembers of a contract, and what of it the judge has not been sent yet.

A shard takes points by the same rules as one process: streams, resets, duplicates, layouts, caps. What it counts it
keeps once more, merged by series and pane, until the judge asks. The judge counts that into panes of its own, so that a
series may have senders on several shards, and what is held against a limit is held once, by one judge.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from kc_otel.contract.model import Contract
from kc_otel.judge.contract_state import ContractState
from kc_otel.judge.evaluator import Evaluator
from kc_otel.judge.facts import KernelInfo
from kc_otel.judge.histograms import Histogram, layout, union
from kc_otel.judge.series import LONG, SHORT, Heard, Pair, SeriesKey
from kc_otel.judge.shards.shard_batch import Counted, ShardBatch
from kc_otel.stats.histogram_columns import HistogramColumns

__all__ = ["ShardState", "mark_sent", "unsent_batch"]

_PARTS: Final = 8
_OF_STREAMS: Final = ("reset", "gap", "streams_evicted")
"""Events that only who has the streams can count; the judge counts the others itself."""


@dataclass(slots=True)
class _Slot:
    """What a series counted in one short and one long pane since the judge asked last."""

    parts: list[Histogram] = field(default_factory=list)
    time: float = 0.0
    now: float = 0.0

    def add(self, increment: Histogram, time: float, now: float) -> None:
        self.parts.append(increment)
        self.time, self.now = max(self.time, time), max(self.now, now)
        if len(self.parts) >= _PARTS:
            self.parts = [union(self.parts)]


class ShardState(ContractState):
    """What a shard remembers of a contract.

    Attributes:
        slots: What was counted and the judge has not been sent, by series, short pane, long pane and layout.
        sent_heard: When the judge was last sent each kernel pair, Unix seconds.
        sent_events: Events that the judge was sent.
        sent_unjudged: Series without room that the judge was sent, by when.
    """

    def __init__(self, contract: Contract) -> None:
        super().__init__(contract, weighed=False)
        self.slots: dict[tuple[SeriesKey, int, int, tuple[float, ...] | None], _Slot] = {}
        self.sent_heard: dict[Pair, float] = {}
        self.sent_events: dict[str, int] = {}
        self.sent_unjudged: dict[SeriesKey, float] = {}

    def count(self, key: SeriesKey, increment: Histogram, time: float, now: float) -> bool:
        """Count it here, and keep it for the judge, which has the whole contract's caps."""
        at = min(time, now)
        short, long = self.grids[SHORT].index(at), self.grids[LONG].index(at)
        self.slots.setdefault((key, short, long, layout(increment)), _Slot()).add(increment, at, now)
        judged = super().count(key, increment, time, now)
        self.arrived.clear()  # held against the limits by the judge alone
        return judged

    def count_all(
        self, keys: Sequence[SeriesKey], columns: HistogramColumns, times: Sequence[float], now: Sequence[float]
    ) -> None:
        """`count` of many."""
        for key, counted, time, when in zip(keys, columns.objects(), times, now, strict=True):
            self.count(key, counted, time, when)

    def heard_since(self) -> dict[Pair, list[float]]:
        """When each kernel pair reported since the judge was sent one: at least the newest times, oldest first."""
        found = {}
        for pair, heard in self.heard.items():
            told = self.sent_heard.get(pair, -1.0)
            if heard.last > told:
                found[pair] = [time for time in _times(heard) if time > told]
        return found


def unsent_batch(evaluator: Evaluator, number: int, counters: dict[str, int], kernels_since: float) -> ShardBatch:
    """What the judge has not been sent. It stays so until `mark_sent`.

    Args:
        evaluator: Of ShardStates; settled.
        number: Number of the batch.
        counters: Points by outcome that the judge was sent.
        kernels_since: Unix time in seconds after which kernel versions were seen that it was not told of.
    """
    counted, notes = [], {}
    for name, state in evaluator.states.items():
        assert isinstance(state, ShardState)
        for (key, _, _, _), slot in state.slots.items():
            counted.append(Counted(name, key, slot.time, slot.now, union(slot.parts)))
        said: dict[str, Any] = {
            "heard": [[*pair, times] for pair, times in state.heard_since().items()],
            "events": {kind: state.events[kind] - state.sent_events.get(kind, 0) for kind in _OF_STREAMS},
            "unjudged": [[*key, at] for key, at in state.unjudged.items() if at > state.sent_unjudged.get(key, -1.0)],
            "kernels": [asdict(one) for one in _seen(evaluator, name, kernels_since)],
        }
        said["events"] = {kind: count for kind, count in said["events"].items() if count}
        if said := {what: value for what, value in said.items() if value}:
            notes[name] = said
    points = {kind: count - counters.get(kind, 0) for kind, count in evaluator.counters.items()}
    return ShardBatch(number, counted, notes, {kind: count for kind, count in points.items() if count})


def mark_sent(evaluator: Evaluator, counters: dict[str, int]) -> None:
    """The judge will be sent all that `unsent_batch` said."""
    counters.clear()
    counters.update(evaluator.counters)
    for state in evaluator.states.values():
        assert isinstance(state, ShardState)
        state.slots.clear()
        state.sent_heard = {pair: heard.last for pair, heard in state.heard.items()}
        state.sent_events = dict(state.events)
        state.sent_unjudged = dict(state.unjudged)


def _seen(evaluator: Evaluator, contract: str, since: float) -> list[KernelInfo]:
    return [one for one in evaluator.facts[contract][0].known.values() if one.last_seen > since]


def _times(heard: Heard) -> list[float]:
    times = [heard.last]
    for gap in reversed(heard.gaps):
        times.append(times[-1] - gap)
    return times[::-1]
