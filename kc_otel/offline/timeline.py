"""Timeline of a recording under one contract: alerts, decisions, messages; and the differences of two."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """An alert, a route or a directive, Unix times in seconds; without an end it lasts to the end of the recording.

    `what` is the verdict that an alert is about, `route:train-kernel`, or a directive's kind. Only alerts have a
    clause, a training kernel and what follows those; a route's inference kernel is the version that it avoids.
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
    alerts: tuple[Span, ...]
    decisions: tuple[Span, ...]
    messages: tuple[SentWebhook, ...]
    not_recorded: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MovedSpan:
    """The same alert, route or directive under both contracts, but at other times or with other actions.

    It begins and ends so many seconds later; infinitely later where it does not end any more, and the reverse.
    """

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
