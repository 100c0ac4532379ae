"""Timeline of a recording under one contract: alerts, decisions, messages; and the differences of two."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar


@dataclass(frozen=True, slots=True)
class AlertSpan:
    """One alert, Unix times in seconds; without an end it fires on. `step` is the key of the policy's step."""

    step: str
    on: str
    severity: str
    actions: tuple[str, ...]
    clause: str
    slice: str
    kernel_train: str
    kernel_inference: str
    reason: str
    start: float
    end: float | None = None


@dataclass(frozen=True, slots=True)
class DecisionSpan:
    """`route:train-kernel` away from a version to `avoid`, or a directive's kind; without an end it is in force."""

    what: str
    slice: str
    avoid: str
    start: float
    end: float | None = None


@dataclass(frozen=True, slots=True)
class SentWebhook:
    """One webhook to an endpoint: firing, resolved or a reminder of so many alerts."""

    at: float
    endpoint: str
    reason: str
    alerts: int


@dataclass(frozen=True, slots=True)
class ReplayTimeline:
    """Timeline of a recording under one contract, in the order of beginnings, Unix times in seconds.

    `points` are by outcome, `cells` of the last evaluation; `not_recorded` says what the recording has no data for.
    """

    name: str
    version: int
    hash: str
    start: float
    end: float
    evaluations: int
    requests: int
    points: Mapping[str, int]
    cells: int
    alerts: tuple[AlertSpan, ...]
    decisions: tuple[DecisionSpan, ...]
    messages: tuple[SentWebhook, ...]
    not_recorded: tuple[str, ...]


Span = TypeVar("Span", AlertSpan, DecisionSpan)


@dataclass(frozen=True, slots=True)
class MovedSpan(Generic[Span]):
    """The same alert, route or directive under both contracts, but at other times or with other actions."""

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
    """Differences between two timelines; `messages` are numbers of webhooks by (endpoint, reason) that differ."""

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
    """Compare a new contract's timeline with the old one's on the same recording.

    Alerts are paired when they are about the same clause, slice and kernels and at most `apart` seconds lie between
    them: first those of equal steps, then of the same severity, then any that wait for the same verdict, nearest first.
    """
    pairs, dropped, added = _paired(old.alerts, new.alerts, apart)
    decisions, ended, begun = _paired(old.decisions, new.decisions, apart)
    before = Counter((message.endpoint, message.reason) for message in old.messages)
    after = Counter((message.endpoint, message.reason) for message in new.messages)
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
    old: Sequence[Span], new: Sequence[Span], apart: float
) -> tuple[list[MovedSpan[Span]], tuple[Span, ...], tuple[Span, ...]]:
    """Pairs of the same alert or decision, the nearest first, and what is left on either side."""
    there: dict[object, list[Span]] = {}
    for other in sorted(new, key=lambda span: span.start, reverse=True):
        there.setdefault(_about(other), []).append(other)
    near = sorted(
        (
            (_unlike(span, other), number, span, other)
            for number, span in enumerate(old)
            for other in there.get(_about(span), ())
            if other.start <= _end(span) + apart and _end(other) >= span.start - apart
        ),
        key=lambda found: found[:2],
    )
    taken: set[int] = set()
    pairs: list[MovedSpan[Span]] = []
    for _, _, span, other in near:
        if not {id(span), id(other)} & taken:
            taken |= {id(span), id(other)}
            pairs.append(MovedSpan(span, other))
    left, right = (tuple(span for span in side if id(span) not in taken) for side in (old, new))
    return sorted(pairs, key=lambda pair: pair.new.start), left, right


def _about(span: AlertSpan | DecisionSpan) -> tuple[str, ...]:
    if isinstance(span, DecisionSpan):
        return span.what, span.slice, span.avoid
    return span.clause, span.slice, span.kernel_train, span.kernel_inference, span.on


def _unlike(span: Span, other: Span) -> tuple[bool, bool, float, float]:
    """Sort key of a pair: of another step, of another severity, and how far apart the ends are."""
    step, severity = (getattr(span, name, "") != getattr(other, name, "") for name in ("step", "severity"))
    ends = 0.0 if span.end == other.end else abs(_end(span) - _end(other))
    return step, severity, abs(span.start - other.start), ends


def _end(span: AlertSpan | DecisionSpan) -> float:
    return math.inf if span.end is None else span.end


def _moved(pair: MovedSpan[Span]) -> bool:
    return pair.later != 0 or pair.ends_later != 0


def _acts(span: AlertSpan) -> tuple[str, frozenset[str]]:
    return span.severity, frozenset(span.actions)
