"""How the timeline of one contract differs from another's on the same recording.

Alerts are paired when they are about the same clause, slice and kernels and at most `apart` seconds lie between them:
first those of steps that wait for and do the same, then of the same severity, then any that wait for the same verdict.
Among several the nearest beginnings are paired. Routes and directives are paired by what they are and where.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, Generic, TypeVar

from kc_otel.offline.replay.timeline import AlertSpan, DecisionSpan, ReplayTimeline

__all__ = ["MovedSpan", "TimelineDifferences", "differences"]

Span = TypeVar("Span", AlertSpan, DecisionSpan)

_ALERT_KEYS: Final[tuple[Callable[[AlertSpan], object], ...]] = (
    lambda one: (_cell(one), one.step),
    lambda one: (_cell(one), one.on, one.severity),
    lambda one: (_cell(one), one.on),
)
_DECISION_KEYS: Final[tuple[Callable[[DecisionSpan], object], ...]] = (lambda one: (one.what, one.slice, one.avoid),)


@dataclass(frozen=True, slots=True)
class MovedSpan(Generic[Span]):
    """The same alert, route or directive under both contracts, but not at the same time or not with the same actions.

    Attributes:
        old: Under the old contract.
        new: Under the new one.
    """

    old: Span
    new: Span

    @property
    def later(self) -> float:
        """Seconds by which it begins later; negative for earlier."""
        return self.new.start - self.old.start

    @property
    def ends_later(self) -> float:
        """Seconds by which it ends later; infinite where it does not end any more, minus infinite where it ends now."""
        if self.old.end is None or self.new.end is None:
            return 0.0 if self.old.end is self.new.end else math.inf if self.new.end is None else -math.inf
        return self.new.end - self.old.end


@dataclass(frozen=True, slots=True)
class TimelineDifferences:
    """What differs between two timelines; empty when nothing does.

    Attributes:
        alerts_dropped: Only under the old contract.
        alerts_added: Only under the new contract.
        alerts_moved: Under both, differently.
        decisions_dropped: Routes and directives only under the old contract.
        decisions_added: Routes and directives only under the new contract.
        decisions_moved: Routes and directives under both, at other times.
        messages: (endpoint, reason) to the number of webhooks under the old and the new contract, where it differs.
    """

    alerts_dropped: tuple[AlertSpan, ...]
    alerts_added: tuple[AlertSpan, ...]
    alerts_moved: tuple[MovedSpan[AlertSpan], ...]
    decisions_dropped: tuple[DecisionSpan, ...]
    decisions_added: tuple[DecisionSpan, ...]
    decisions_moved: tuple[MovedSpan[DecisionSpan], ...]
    messages: dict[tuple[str, str], tuple[int, int]]

    def __bool__(self) -> bool:
        return any(getattr(self, name) for name in self.__slots__)


def differences(old: ReplayTimeline, new: ReplayTimeline, apart: float) -> TimelineDifferences:
    """What the new contract does differently.

    Args:
        old: Under the contract in force.
        new: Under the contract that is considered, on the same recording.
        apart: Seconds that may lie between two alerts of the same breach.
    """
    pairs, dropped, added = _paired(old.alerts, new.alerts, _ALERT_KEYS, apart)
    decisions, ended, begun = _paired(old.decisions, new.decisions, _DECISION_KEYS, apart)
    before = Counter((one.endpoint, one.reason) for one in old.messages)
    after = Counter((one.endpoint, one.reason) for one in new.messages)
    return TimelineDifferences(
        alerts_dropped=dropped,
        alerts_added=added,
        alerts_moved=tuple(pair for pair in pairs if _moved(pair) or _acts(pair.old) != _acts(pair.new)),
        decisions_dropped=ended,
        decisions_added=begun,
        decisions_moved=tuple(pair for pair in decisions if _moved(pair)),
        messages={key: (before[key], after[key]) for key in sorted(before | after) if before[key] != after[key]},
    )


def _paired(
    old: Sequence[Span], new: Sequence[Span], keys: Sequence[Callable[[Span], object]], apart: float
) -> tuple[list[MovedSpan[Span]], tuple[Span, ...], tuple[Span, ...]]:
    left, right = list(old), list(new)
    pairs: list[MovedSpan[Span]] = []
    for key in keys:
        there: dict[object, list[Span]] = {}
        for other in sorted(right, key=lambda span: span.start):
            there.setdefault(key(other), []).append(other)
        index = {of: _Near(spans) for of, spans in there.items()}
        near = sorted(
            (
                (abs(one.start - other.start), _apart(_end(one), _end(other)), number, one, other)
                for number, one in enumerate(left)
                if key(one) in index
                for other in index[key(one)].to(one, apart)
            ),
            key=lambda found: found[:3],
        )
        taken: set[int] = set()
        for _, _, _, one, other in near:
            if not {id(one), id(other)} & taken:
                taken |= {id(one), id(other)}
                pairs.append(MovedSpan(one, other))
        left = [one for one in left if id(one) not in taken]
        right = [one for one in right if id(one) not in taken]
    return sorted(pairs, key=lambda pair: pair.new.start), tuple(left), tuple(right)


class _Near(Generic[Span]):
    """Spans by their beginnings, ascending."""

    def __init__(self, spans: list[Span]) -> None:
        self._spans: list[Span] = spans
        self._starts = [span.start for span in spans]
        self._ends = list(accumulate((_end(span) for span in spans), max))

    def to(self, one: Span, apart: float) -> Iterator[Span]:
        """Those that overlap with `one`, or between which and `one` lie at most `apart` seconds."""
        for index in range(bisect_right(self._starts, _end(one) + apart) - 1, -1, -1):
            if self._ends[index] < one.start - apart:  # nor does any that begins earlier reach so far
                return
            if _end(self._spans[index]) >= one.start - apart:
                yield self._spans[index]


def _apart(one: float, other: float) -> float:
    return 0.0 if one == other else abs(one - other)


def _end(one: AlertSpan | DecisionSpan) -> float:
    return math.inf if one.end is None else one.end


def _moved(pair: MovedSpan[Span]) -> bool:
    return pair.later != 0 or pair.ends_later != 0


def _acts(one: AlertSpan) -> tuple[str, frozenset[str]]:
    return one.severity, frozenset(one.actions)


def _cell(one: AlertSpan) -> tuple[str, str, str, str]:
    return one.clause, one.slice, one.kernel_train, one.kernel_inference
