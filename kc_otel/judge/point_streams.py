"""Conversion of a stream of points to increments: the counts since the previous point.

The rules, for one stream (times are the points' own):

| what arrives | what happens | outcome |
| --- | --- | --- |
| time later than now + tolerance | dropped | `future` |
| time before the oldest pane | nothing is counted; a cumulative value still becomes the last one | `late` |
| cumulative, first of its start time | counts fully if the start is inside the long window, | `accepted` |
| | else it is where counting begins | `baseline` |
| cumulative, later than the last | the difference counts | `accepted` |
| the same, after a silence longer than the long window | as for a first one: counting begins anew | `baseline` |
| cumulative, same start and time | dropped | `duplicate` |
| cumulative, same start, earlier time | dropped: the later value holds it already | `out_of_order` |
| cumulative, same start, a count went down | the whole value counts: a reset nobody announced | `accepted` + `reset` |
| the same, but it goes on from a value before that | the difference to that one counts: two senders | `two_writers` |
| cumulative, same start, no later, but no earlier value | nothing is counted: another sender's | `two_writers` |
| cumulative, new start time | a reset, or a second writer: its own count from here on | as first, + `reset` |
| the same, but the difference has a sum that its buckets cannot have | dropped, and held in doubt | `contradictory` |
| the same, but it agrees with the one in doubt | the difference to that one counts | `accepted` |
| another layout of buckets on the same start | nothing is counted; counting begins anew | `baseline` |
| delta | counts | `accepted` |
| delta with a time seen before | dropped | `duplicate` |
| delta, older than all times remembered | dropped: it cannot be told from a duplicate | `unordered` |
| cumulative, and the last one is later than now + tolerance | clocks went back: the difference counts, | `accepted` |
| | and where a count went down, it is where counting begins | `baseline` |

Values of different start times are kept apart (the newest few), so that two writers that share an identity by mistake,
or the last flush of a process that arrives after its successor's first, neither count twice nor get lost. With more
writers than that, one that was forgotten begins anew when it comes back. Two that have one start time, or none, are
told apart by their counts as long as both speak within a short window: of the values that a new one can go on from, it
goes on from the largest. Of two cumulative values that cannot both be
true the later one waits until a third says which it was. Counts belong to the pane of the point's own time.
A step longer than the short window is counted as a `gap`; its content is judged when it arrives.

A point that is refused leaves no verdict behind, and others of its kernels may pass: that it is missing has to be said
beside them, with who sent it, until a window has passed in which no such point came. Sequences are told in the same
way, where too many of a kernel pair fail the input checks.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from kc_otel.contract.units import format_duration
from kc_otel.contract.words import FAILS_CHECKS
from kc_otel.judge.points import Point
from kc_otel.judge.series import PAIRS, Pair
from kc_otel.judge.stored_numbers import StoredHistogram
from kc_otel.stats.histogram import Histogram, magnitude, sum_fits

MAX_WRITERS: Final = 4
"""Start times that a stream keeps values for."""
REMEMBERED_TIMES: Final = 512
"""Times of delta points that a stream remembers: a long window of exports, in any order."""
_ROUNDING_ERROR: Final = 1e-12
"""Of two large sums that are subtracted, relative to what they may have been at most."""


@dataclass(frozen=True, slots=True)
class Horizon:
    """Time limits for a point, Unix times in ns.

    Points later than `future` are not believed, those before `oldest` have no pane; cumulative values that started
    before `start` may hold what no window covers any more. `gap` is the longest step that is not called one.
    """

    future: int
    start: int
    oldest: int
    gap: int


@dataclass(slots=True)
class LatestValue:
    """The newest cumulative value of one start time; times in ns.

    `doubted` is a later value that contradicts this one, until the next says which of them was wrong.
    """

    start: int
    time: int
    histogram: StoredHistogram
    doubted: StoredHistogram | None = None


@dataclass(frozen=True, slots=True)
class Increment:
    """Outcome of a point, the observations to count, and an event: `reset`, `gap` or none."""

    outcome: str
    increment: Histogram | None = None
    event: str = ""


@dataclass(slots=True)
class PointStream:
    """State of a stream, needed to take its next point."""

    heard: float = 0.0
    """Unix time in seconds at which a point last arrived."""
    writers: list[LatestValue] = field(default_factory=list)
    """Newest value of each, the one heard last at the end; cumulative streams only. Some have one start time."""
    times: list[int] = field(default_factory=list)
    """Of the newest points in ns, ascending; delta streams only."""
    forgotten: int = -1
    """Latest start time of a writer that was forgotten."""

    def accept(self, point: Point, horizon: Horizon) -> Increment:
        """Take the stream's next point."""
        if point.time > horizon.future:
            return Increment("future")
        if point.cumulative:
            return self._cumulative(point, point.histogram, horizon)
        return self._delta(point, point.histogram, horizon)

    def _cumulative(self, point: Point, value: Histogram, horizon: Horizon) -> Increment:
        known = [writer for writer in self.writers if writer.start == point.start]
        if not known:
            return self._first(point, value, horizon)
        last = known[-1]
        if last.time > horizon.future:
            return self._after_clocks_went_back(last, point, value)
        silent = [writer for writer in known[:-1] if writer.time < point.time - horizon.gap]
        if silent:
            self.writers = [writer for writer in self.writers if writer not in silent]
            known = [writer for writer in known if writer not in silent]
        another = self._another(known, point, value) if point.time >= horizon.oldest else None
        return another or self._next(last, point, value, horizon, alone=len(known) == 1)

    def _next(self, last: LatestValue, point: Point, value: Histogram, horizon: Horizon, *, alone: bool) -> Increment:
        if point.time <= last.time:
            return Increment("duplicate" if point.time == last.time else "out_of_order")
        late = point.time < horizon.oldest
        if late or last.time < horizon.start or last.histogram.layout != value.layout:
            self._remember(last, point.time, value)
            return Increment("late" if late else "baseline")
        gap = "gap" if point.time - last.time > horizon.gap else ""
        step = _counted(value, last.histogram, gap)
        if step is None and last.doubted is not None and last.doubted.layout == value.layout:
            step = _counted(value, last.doubted, gap)
        if step is None:
            last.doubted = value
            return Increment("contradictory")
        if step.event == "reset":
            self._begin(LatestValue(point.start, point.time, value))
            return step if alone else Increment("two_writers")
        self._remember(last, point.time, value)
        return step

    def _another(self, known: list[LatestValue], point: Point, value: Histogram) -> Increment | None:
        """Return the increment of an earlier writer of the same start time; None where it may be the last one's."""
        last = known[-1]
        known = [writer for writer in known if writer.histogram.layout == value.layout]
        if last not in known or (len(known) == 1 and point.time > last.time):
            return None
        if any(writer.time >= point.time and writer.histogram.since(value) is not None for writer in known):
            return None  # came twice, or late
        goes_on = last.time < point.time and value.since(last.histogram) is not None
        for other in sorted(known[:-1], key=lambda writer: -writer.histogram.count):
            if other.time < point.time and not (goes_on and other.histogram.count <= last.histogram.count):
                step = _counted(value, other.histogram, "")
                if step is not None and not step.event:
                    self._remember(other, point.time, value)
                    return step if goes_on else Increment("two_writers", step.increment)
        if point.time <= last.time:
            self._begin(LatestValue(point.start, point.time, value))
            return Increment("two_writers")
        return None

    def _after_clocks_went_back(self, last: LatestValue, point: Point, value: Histogram) -> Increment:
        # Both clocks were wrong when `last` came, or it would have been refused; counts need no clock.
        increment = value.since(last.histogram) if last.histogram.layout == value.layout else None
        self._remember(last, point.time, value)
        return Increment("baseline") if increment is None else Increment("accepted", increment)

    def _remember(self, last: LatestValue, time: int, value: Histogram) -> None:
        last.histogram, last.time, last.doubted = value, time, None
        if self.writers[-1] is not last:
            self.writers.remove(last)
            self.writers.append(last)

    def _begin(self, writer: LatestValue) -> None:
        """Begin a writer, and forget all but the last few."""
        self.writers.append(writer)
        gone, self.writers = self.writers[:-MAX_WRITERS], self.writers[-MAX_WRITERS:]
        for lost in gone:
            if all(lost.start != other.start for other in self.writers):
                self.forgotten = max(self.forgotten, lost.start)

    def _first(self, point: Point, value: Histogram, horizon: Horizon) -> Increment:
        event = "reset" if self.writers else ""
        came_back = point.start <= self.forgotten
        self._begin(LatestValue(point.start, point.time, value))
        if point.time < horizon.oldest:
            return Increment("late", event=event)
        if came_back or point.start < horizon.start:
            return Increment("baseline", event=event)
        return Increment("accepted", value, event)

    def _delta(self, point: Point, value: Histogram, horizon: Horizon) -> Increment:
        if point.time < horizon.oldest:
            return Increment("late")
        if self.times and (self.times[-1] > horizon.future or self.times[0] < horizon.oldest):
            # Later ones are those of clocks that went back since; earlier ones come `late` if they come again.
            first, end = bisect_left(self.times, horizon.oldest), bisect_right(self.times, horizon.future)
            self.times = self.times[first:end]
        place = bisect_left(self.times, point.time)
        if place < len(self.times) and self.times[place] == point.time:
            return Increment("duplicate")
        if len(self.times) >= REMEMBERED_TIMES and not place:
            return Increment("unordered")
        gap = "gap" if self.times and point.time - self.times[-1] > horizon.gap else ""
        self.times.insert(place, point.time)
        del self.times[:-REMEMBERED_TIMES]
        return Increment("accepted", value, gap)


def _counted(value: Histogram, before: Histogram, gap: str) -> Increment | None:
    """Return a cumulative value's increment over the one before, of one layout; None if they contradict each other."""
    increment = value.since(before)
    if increment is None:
        return Increment("accepted", value, "reset")
    if not sum_fits(increment, _ROUNDING_ERROR * (magnitude(before) + magnitude(value))):
        return None
    return Increment("accepted", increment, gap)


OUTCOME_SENTENCES: Final = {
    "malformed": "points count more observations than there can be",
    "future": "points are from the future; check the sender's clock",
    "late": "points are older than the long window; check the sender's clock",
    "behind": "points are older than the short window when they arrive; check the sender's clock and what delays it, "
    "or make observability.window longer, unless it is resending points that could not be delivered earlier",
    "other_buckets": "points have other bucket bounds than those in use for their series; give all senders of a "
    "metric the same bounds, or wait for one short window after the last point with the old bounds",
    "contradictory": "cumulative points contradict those before them; later ones decide which of them count",
    "unordered": f"delta points are older than the {REMEMBERED_TIMES} newest of their stream, so they cannot be told "
    "from repeated ones; send them in the order of their times",
    "two_writers": "cumulative points go back and forth between the counts of two senders that share one stream; give "
    "each its own service.instance.id",
    "unjudged": "points of new series are counted as slice `other` and not judged: their contract already has its "
    f"maximum of series, or of {PAIRS} kernel pairs; give kernels fewer versions, or raise observability.max_series",
    "over_cap": "too many streams; raise observability.max_series, or give the senders fewer identities",
}
"""Sentences for a sender about its points, by outcome."""
OF_CLOCKS: Final = frozenset({"future", "late", "behind"})
"""Outcomes of points whose time cannot be right."""
_MAX_KEPT: Final = 64
"""Senders, kernel pairs and outcomes of a contract that are told apart; further senders have no name."""
_MAX_NAMED: Final = 3
"""Senders that a sentence names."""


@dataclass(frozen=True, slots=True)
class RefusedSender:
    """Points of one sender that are not judged for one reason: arrivals from `since` to `last`, Unix seconds.

    `pair` and `sender` are empty where they are not known. The last point was `age` seconds older than its arrival, or
    ahead if that is negative; `said` is what the sender was told beyond the outcome.
    """

    outcome: str
    pair: Pair
    sender: str
    since: float
    last: float
    age: float
    said: str = ""


@dataclass(frozen=True, slots=True)
class Missing:
    """Points of a kernel pair that arrive and are not judged, for one reason; fingerprints are empty where unknown."""

    contract: str
    kernel_train: str
    kernel_inference: str
    outcome: str
    """As in `kc.evaluator.points`; `invalid` where more than 1 % of the sequences failed the input checks."""
    senders: int
    since: float
    text: str
    """Reason, remedy and senders, as the end of a sentence."""

    @property
    def what(self) -> str:
        """Subject of a sentence about them: sequences or points."""
        return "sequences" if self.outcome == FAILS_CHECKS else "points"


@dataclass(slots=True)
class RefusedPoints:
    """Points of one contract that are not judged, by outcome, kernel pair and sender.

    They are missing until `lasting` seconds after the last of them: the window that they belong to.
    """

    lasting: float
    found: dict[tuple[str, Pair, str], RefusedSender] = field(default_factory=dict)

    def add(self, outcome: str, pair: Pair, sender: str, age: float, now: float, said: str = "") -> None:
        """Note a point that arrived at `now`, Unix seconds."""
        key = outcome, pair, sender
        if key not in self.found and len(self.found) >= _MAX_KEPT:
            self.found = {key: known for key, known in self.found.items() if self._lasts(known, now)}
            if len(self.found) >= _MAX_KEPT:
                key = outcome, ("", ""), ""
        known = self.found.get(key)
        since = known.since if known is not None and self._lasts(known, now) else now
        self.found[key] = RefusedSender(*key, since, now, age, said)

    def keep_only(self, outcome: str, said: Mapping[Pair, str], now: float) -> None:
        """Note what is known of kernel pairs at `now`, Unix seconds, and forget the others of this outcome."""
        for key in [key for key in self.found if key[0] == outcome and key[1] not in said]:
            del self.found[key]
        for pair, sentence in said.items():
            self.add(outcome, pair, "", 0.0, now, sentence)

    def merge(self, refused: RefusedSender) -> None:
        """Note what another process has noted."""
        self.add(refused.outcome, refused.pair, refused.sender, refused.age, refused.last, refused.said)

    def present(self, now: float) -> list[RefusedSender]:
        """Return those that are missing at a Unix time, seconds; the oldest first."""
        lasting = (known for known in self.found.values() if self._lasts(known, now))
        return sorted(lasting, key=lambda known: known.since)

    def _lasts(self, known: RefusedSender, now: float) -> bool:
        return now - known.last <= self.lasting


def missing(contract: str, refused: Iterable[RefusedSender]) -> list[Missing]:
    """Return the points that a contract misses, one row for all senders of a kernel pair with one reason."""
    rows: dict[tuple[str, Pair], list[RefusedSender]] = {}
    for found in refused:
        rows.setdefault((found.outcome, found.pair), []).append(found)
    return [
        Missing(contract, *pair, outcome, len(found), min(sender.since for sender in found), _text(outcome, found))
        for (outcome, pair), found in rows.items()
    ]


def _text(outcome: str, found: Sequence[RefusedSender]) -> str:
    worst = max(found, key=lambda refused: abs(refused.age))
    said = worst.said or OUTCOME_SENTENCES[outcome]
    if outcome in OF_CLOCKS:
        said = f"{said} ({format_duration(round(abs(worst.age)))} {'ahead' if worst.age < 0.0 else 'old'})"
    senders = [refused.sender for refused in found if refused.sender]
    names = [*senders[:_MAX_NAMED], *([f"{len(senders) - _MAX_NAMED} more"] if len(senders) > _MAX_NAMED else [])]
    return f"{said}; from {'; '.join(names)}" if names else said
