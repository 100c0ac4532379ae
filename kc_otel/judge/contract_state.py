"""The evaluator's state of one contract: streams, the series they feed, reports heard, kernels.

A stream is one sender's; a series is (metric, slice, kernel pair), and takes the increments of all its streams. Memory
is bounded: at most `max_series` series, and STREAMS_PER_SERIES times as many streams. A series over the cap is counted
in the slice `other` of its metric and never judged; so is a new pair of kernels on a metric with PAIRS pairs that
reported within a short window, unless it has _MORE times as many observations as the one with the fewest: a sender that
invents kernels has to measure more of each than of a real one. What a clause would have judged is `unjudged`, and has a
verdict that says so. Streams over their cap are refused: a cumulative value means nothing without the one before.

A series keeps its layout of buckets while anything with it is in the short window: a point with other explicit bounds
is refused until then, so that one sender cannot throw away what the others sent.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Final, NamedTuple

import numpy as np

from kc_otel.contract.model import Contract
from kc_otel.contract.slices import ALL, OTHER
from kc_otel.judge.columns.series_slots import POINTS_PER_CHUNK, SeriesSlots
from kc_otel.judge.columns.stream_rows import RowContent, StreamRows
from kc_otel.judge.fail_evidence import FailEvidence
from kc_otel.judge.otlp.wire_columns import ColumnMessage
from kc_otel.judge.plain_json import not_later
from kc_otel.judge.point_streams import Horizon, PointStream, RefusedPoints
from kc_otel.judge.points import INVALID, Point, invalid_on, metric_of
from kc_otel.judge.recorders import KernelInfo, Recorders
from kc_otel.judge.series import LONG, PAIRS, SHORT, Heard, Pair, PaneColumns, Series, SeriesKey, SeriesTable, grids
from kc_otel.judge.statistics import metric_name, opposite_name
from kc_otel.stats import Binned
from kc_otel.stats.histogram import Histogram
from kc_otel.stats.histogram_columns import HistogramColumns
from kc_otel.stats.interval import Numbers

_CLOCK_TOLERANCE: Final = 30.0
"""Seconds by which a sender's clock may be ahead before its points are refused."""
STREAMS_PER_SERIES: Final = 16
"""Processes that may report the same series before streams are refused."""
_MOST_TAKEN: Final = 2**56
"""Observations that are taken point by point in a pane of the long window; those of all panes fit an int64."""
_MORE: Final = 2
"""Times as many observations with which a pair without room takes that of another."""
_MAX_REMEMBERED_PAIRS: Final = 8
"""Kernel pairs per metric that are remembered after their series are gone: the latest ones."""
_UNJUDGED: Final = 64
"""Series without room that have a verdict which says so; the others are counted."""
_NO_PAIR: Final[Pair] = ("", "")
_PAIR: Final = itemgetter(2, 3)
"""The kernel pair of a series' key."""
_MIN_MISSING_SECONDS: Final = 60.0
"""Seconds for which a point that is not judged is missing, at least: some senders export once a minute."""


class UnsavedPane(NamedTuple):
    """Content of some series in a pane of a grid, SHORT or LONG, that the store does not have yet."""

    grid: int
    pane: int
    keys: Sequence[SeriesKey]
    held: HistogramColumns
    """A histogram of each series; none at all where they hold nothing any more."""


class _WithoutRoom(NamedTuple):
    """Pairs that a metric has no room for, since some Unix time."""

    since: float
    fewest: Pair
    """The pair with room that had the fewest observations then."""
    held: int
    counts: Counter[Pair]
    """Observations of pairs without room; of many only the larger ones are sure to be among them."""

    def add(self, pair: Pair, count: int) -> int:
        """Count observations of a pair. Returns how many it has at least (Misra and Gries 1982)."""
        self.counts[pair] += count
        if len(self.counts) > _UNJUDGED:
            least = min(self.counts.values())
            self.counts.subtract(dict.fromkeys(self.counts, least))
            for gone in [other for other, left in self.counts.items() if not left]:
                del self.counts[gone]
        return self.counts.get(pair, 0)


class ContractState:
    """Everything remembered of one contract. Changed parts are noted for the store.

    Unless it is `weighed`, what is counted is not held against limits here.
    """

    def __init__(self, contract: Contract, *, weighed: bool = True) -> None:
        self.contract = contract
        self.heard: dict[Pair, Heard] = {}
        self.kernels: dict[tuple[str, str], KernelInfo] = {}  # by role and version
        self.recorders = Recorders(contract.observability.heartbeat, contract.observability.window)
        self.newest: dict[str, dict[Pair, float]] = {}  # newest observation by metric and pair, in order of arrival
        self.events: Counter[str] = Counter()
        self.observed: Sequence[SeriesKey] = ()
        self.clock = 0.0
        self.sharing: Mapping[str, float] = {}  # shares of the requests, by version of the inference kernel
        self._without: dict[str, _WithoutRoom] = {}  # pairs without room, by metric
        self._evicted_at = 0.0
        self._taken = 0, 0  # the running pane of the long window, and what was observed in it
        self.grids = grids(contract)
        self.panes = PaneColumns(self.grids, weighed=weighed)
        self.version = 0  # changes whenever there may be other cells than before, or a series of other buckets
        self.evidence = FailEvidence(contract, self.grids[SHORT].width)
        self.unjudged: dict[SeriesKey, float] = {}  # what clauses are about and had no room, by their last point
        self.metrics = {clause.id: metric_name(clause) for clause in contract.clauses}
        self._limited_metrics = {*self.metrics.values()}
        self._limited_metrics |= {name for clause in contract.clauses if (name := opposite_name(clause)) is not None}
        self._table = SeriesTable(self.panes)
        self.series = self._table.by_key
        self._most_streams = STREAMS_PER_SERIES * contract.observability.max_series
        self.streams = StreamRows(self._most_streams)
        self._slots = SeriesSlots(self.streams, self.grids)
        self._window = contract.observability.window
        self.timely = self.grids[SHORT].timely  # seconds up to which a point may be old for the short window
        self.refused = RefusedPoints(max(self._window, _MIN_MISSING_SECONDS))
        self._heartbeat = contract.observability.heartbeat
        self._long = max(contract.observability.long_window, self._window)
        self._renewed = self._long - self.grids[LONG].width

    def horizon(self, now: float) -> Horizon:
        """Return the time limits for points that arrive now; where the clock went back, so does what is remembered."""
        ahead = now < self.clock - _CLOCK_TOLERANCE
        if ahead or (now < self.clock and any(grid.index(now) < grid.index(self.clock) for grid in self.grids)):
            self.settle()
        if ahead:
            self._turn_back(now)
        self.clock = max(self.clock, now)
        grid = self.grids[LONG]
        return Horizon(
            future=_ns(now + _CLOCK_TOLERANCE),
            start=_ns(now - self._long),
            oldest=_ns(grid.oldest(now) * grid.width),
            gap=_ns(self._window),
        )

    def fold(self, message: ColumnMessage, rows: Numbers, horizon: Horizon, now: float, number: int) -> int:
        """Take the plain points of streams that are in these rows [points], -1 for none, of a message with a number.

        The message has which ones, and the series of those that add to these. Returns how many were too old when they
        arrived for every evaluation of the short window to have them.
        """
        records, behind = self.streams.rows, 0
        for first in range(0, rows.size, POINTS_PER_CHUNK):
            if not self._slots.has_room:
                self.settle()
            own = rows[first : first + POINTS_PER_CHUNK]
            before = records["count"][own]
            if gaps := self._slots.fold(message, rows, first, horizon, now, number):
                self.events["gap"] += gaps
            taken = np.flatnonzero((message.taken[first : first + own.size] != 0) & (own >= 0))
            keys = self._table.living(records["series"][own[taken]])
            for pair in dict.fromkeys(map(_PAIR, keys)):
                self.hear(pair, now)
            grown = (records["count"][own] > before)[taken].tolist()
            for point, key, more in zip((first + taken).tolist(), keys, grown, strict=True):
                if more:
                    message.grown[point] = key
            ages = now - message.points["time"][first + taken] / 1e9
            late = np.flatnonzero(ages > self.timely).tolist()
            behind += len(late)
            for at in {keys[at].pair: at for at in late}.values():
                sender = message.sender(int(first + taken[at]))
                self.refused.add("behind", keys[at].pair, sender, float(ages[at]), now)
        return behind

    def settle(self) -> None:
        """Bring the series up to date with what was folded."""
        if (found := self._slots.take()) is not None:
            series, columns, newest, now = found
            self.count_all(self._table.living(series), columns, newest.tolist(), now.tolist())

    def take(self, point: Point, slices: Iterable[str], pair: Pair, horizon: Horizon, now: float) -> str:
        """Take a point of a histogram or counter. Returns what became of it; it adds to the series in `observed`."""
        self.observed = ()
        if point.histogram.layout is not None and point.metric != INVALID:
            self.settle()  # other buckets may clear what their series hold
        stream, slices = self._stream_of(point, now), tuple(slices)
        if stream is None:
            for name in slices:
                self.leave_unjudged(SeriesKey(point.series, name, *pair), now)
            return "over_cap"
        if not self._fits(point, slices, pair, now):
            self.hear(pair, now)
            return "other_buckets"
        step = stream.accept(point, horizon)
        if step.event:
            self.events[step.event] += 1
        if step.outcome in {"accepted", "two_writers", "baseline"} and point.metric != INVALID:
            self.hear(pair, now)
        behind = step.outcome in {"accepted", "baseline"} and now - point.time / 1e9 > self.timely
        if step.increment is not None and step.increment.count:
            if not self._believes(step.increment.count, now):
                return "malformed"
            keys = [SeriesKey(point.series, name, *pair) for name in slices]
            counted = [self.count(key, step.increment, point.time / 1e9, now) for key in keys]
            if not all(counted):
                return "unjudged"
            self.observed = keys
        return "behind" if behind else step.outcome

    def hear(self, pair: Pair, now: float) -> None:
        """Note a report of a pair of kernels."""
        self.heard.setdefault(pair, Heard(now)).hear(now, self._heartbeat)

    def begin(self, version: str, now: float) -> None:
        """Note the first report of a recorder of an inference kernel."""
        for pair, heard in self.heard.items():
            if pair[1] == version:
                heard.begin(now)

    def take_dropped(self, point: Point, horizon: Horizon, now: float) -> int:
        """Take a point of what a recorder dropped. Returns how much that is since its last point."""
        stream = self._stream_of(point, now)
        if stream is None:
            return 0
        step = stream.accept(point, horizon)
        return step.increment.count if step.increment is not None else 0

    def _stream_of(self, point: Point, now: float) -> PointStream | None:
        """The stream of a point that arrived now, begun anew if there was none; None where there is no room for it."""
        stream = self.streams.take_out(point.stream)
        if stream is None:
            if len(self.streams) >= self._most_streams:
                return None
            stream = self.streams.alone[point.stream] = PointStream()
        stream.heard = now
        self.streams.changed.add(point.stream)
        return stream

    def count(self, key: SeriesKey, increment: Histogram, time: float, now: float) -> bool:
        """Count what a series has observed; return False where a clause is about it and it will not be judged.

        Where there is no room for the series, what is counted goes to the slice `other` of its metric. `increment` has
        one new observation at least, `time` is that of the newest, and all of them are in the panes of that.
        """
        judged = True
        time = min(time, now)
        if not self._has_room(key, time, now) and not self._takes_room(key, increment.count, now):
            self.events["series_over_cap"] += 1
            judged = not self.leave_unjudged(key, now)
            # Not one for each operator: their names are the senders', and as many as these like.
            key = SeriesKey(metric_of(key.metric), OTHER, "", "")
        series = self.series.get(key)
        if series is None:
            series = self._table.begin(key)
            self.version += 1
            self.unjudged.pop(key, None)
        self._slots.open(series.number, plain=increment.layout is None)
        if increment.layout != series.layout:
            if self.panes.holds(series.number):
                if key.slice != OTHER:
                    self.weigh(now)  # what came in the old buckets is older
                self.panes.drop([series.number])
                self.events["layout_changed"] += 1
            series.layout = increment.layout
            self.version += 1
        self.panes.count(series.number, time, now, increment)
        self._renew(series, time, now)
        if key.slice == OTHER:
            return judged
        newest = self.newest.setdefault(key.metric, {})
        newest[key.pair] = max(newest.get(key.pair, 0.0), time)
        return judged

    def count_all(
        self, keys: Sequence[SeriesKey], columns: HistogramColumns, times: Sequence[float], now: Sequence[float]
    ) -> None:
        """`count` of many [n]: of each its series, a histogram, the time of that and when it arrived."""
        usual: list[int] = []
        numbers: list[int] = []
        at: dict[tuple[str, Pair], float] = {}
        for number, (key, time, when) in enumerate(zip(keys, times, now, strict=True)):
            series, where = self.series.get(key), (key.metric, key[2:])
            known = series is not None and key.slice != OTHER and series.layout is None
            if series is None or not known or (where not in at and not self._has_room(key, min(time, when), when)):
                self.count(key, columns[number], time, when)
                continue
            usual.append(number)
            numbers.append(series.number)
            at[where] = max(at.get(where, 0.0), time)
            self._renew(series, time, when)
        for (metric, pair), time in at.items():
            newest = self.newest.setdefault(metric, {})
            newest[pair] = max(newest.get(pair, 0.0), time)
        if usual:
            which = np.array(usual)
            some = columns if which.size == len(columns) else columns.taken(which)
            self.panes.count_all(np.array(numbers), np.array(times)[which], np.array(now)[which], some)

    def _renew(self, series: Series, time: float, now: float) -> None:
        """Note newer data of a series."""
        if series.newest < now - self._renewed:
            self.version += 1
        series.newest, series.arrived = max(series.newest, time), now

    def weigh(self, now: float) -> None:
        """Update the evidence with the counts since the last evaluation."""
        shared = self.recorders.shared()
        for late in (True, False):
            series, columns = self.panes.take_arrived(late=late)
            if series.size:
                self.evidence.take(now, self._table.keys(series), columns, shared, late=late)

    def has_ended(self, pair: Pair) -> bool:
        """Return True if each recorder of a pair's kernel version is done with it, and none reported it since.

        One that fell silent without a word, less than a long window before the end of the others, may have died beside
        a kernel that serves. One that measures another version may come back to this one, until a long window has
        passed without anything of it.
        """
        since = self.clock - self._long
        measured = any(newest.get(pair, -math.inf) > since for newest in self.newest.values())
        if self.recorders.moved_since(pair[1], -math.inf if measured else since):
            return False
        heard = self.heard.get(pair)
        last = -math.inf if heard is None else heard.last
        if self.recorders.all_ended(pair[1], last, self._long):
            return True
        return last < self.clock - self._window and self.recorders.all_who_broke_ended(pair, self._long)

    def pairs(self, metric: str, slice: str) -> dict[Pair, Series]:
        """Series of a metric on a slice, by kernel pair."""
        return self._table.on(metric, slice)

    def series_of(self, metric: str) -> Mapping[SeriesKey, Series]:
        """Series of a metric, by key."""
        return self._table.of(metric)

    def invalid(self, slice: str) -> dict[SeriesKey, Series]:
        """Series of invalid sequences on a slice, by key, and of those whose slices nobody knows."""
        return {**self._table.of(INVALID), **self._table.of(invalid_on(slice))}

    def binned(self, series: Series, grid: int, now: float) -> Binned:
        """Observations of a series in the window, SHORT or LONG, that ends now."""
        return self.panes.binned(grid, series.number, now)

    def counted(self, series: Series, grid: int, now: float) -> int:
        """Number of observations of a series in such a window."""
        whole = self.panes.window(grid, now).of(series.number)
        return 0 if whole is None else whole.count

    def failed(self, slice: str, now: float, grid: int = SHORT) -> dict[Pair, Counter[str]]:
        """Sequences of a slice that failed an input check in the window, by kernel pair and reason.

        Those whose slices nobody knows are of `all`, where at least as many fail as on any slice, counted there or not.
        """
        found: dict[Pair, Counter[str]] = {}
        of_slice = self.invalid(ALL) if slice == ALL else self.series_of(invalid_on(slice))
        for key, series in sorted(of_slice.items()):
            if count := self.counted(series, grid, now):
                found.setdefault(key.pair, Counter())[key.slice] += count
        for name in self.contract.slices if slice == ALL else ():
            for pair, counts in self.failed(name, now, grid).items():
                found[pair] = found.get(pair, Counter()) | counts
        return found

    def accepts(self, series: Series, histogram: Histogram) -> bool:
        """Return True if a histogram has the same buckets as what the panes hold of a series."""
        return histogram.layout == series.layout or not self.panes.holds(series.number)

    def unsaved(self) -> Iterator[UnsavedPane]:
        """Yield the content that differs from what was saved, by pane."""
        self.panes.settle()
        for (grid, pane), changed in self.panes.changed.items():
            series = np.unique(np.concatenate(changed))
            series = series[[key is not None for key in self._table.keys(series)]]
            whole = self.panes.whole(grid, pane)
            if whole is not None:
                at = np.flatnonzero(np.isin(whole.series, series))
                yield UnsavedPane(grid, pane, self._table.living(whole.series[at]), whole.columns.taken(at))
                series = np.setdiff1d(series, whole.series)
            yield UnsavedPane(grid, pane, self._table.living(series), HistogramColumns.of(()))

    def saved(self) -> Callable[[], None]:
        """Mark everything as saved once the transaction commits; return the function to call if it does not."""
        panes, self.panes.changed = self.panes.changed, {}
        cells, self.evidence.changed = self.evidence.changed, set()
        senders, self.recorders.unsaved = self.recorders.unsaved, set()
        unsaved_streams = self.streams.saved()

        def unsaved() -> None:
            unsaved_streams()
            for pane, changed in panes.items():
                self.panes.changed.setdefault(pane, []).extend(changed)
            self.evidence.changed |= cells
            self.recorders.unsaved |= senders

        return unsaved

    def restored(self, key: SeriesKey, newest: float) -> Series:
        """A series that the store remembers, made anew."""
        series = self.series.get(key) or self._table.begin(key)
        self._slots.open(series.number)
        series.newest = max(series.newest, newest)
        self.version += 1
        self.clock = max(self.clock, newest)
        return series

    def restore_rows(self, content: RowContent, keys: Iterable[SeriesKey | None]) -> None:
        """Remember streams that were in rows [n], and the series of each [n]; None for one that is no more."""
        self.streams.restore(content, [-1 if key is None else self.series[key].number for key in keys])

    def keys(self, numbers: Numbers) -> list[SeriesKey]:
        """The series that have these numbers."""
        return self._table.living(numbers)

    def evict(self, now: float) -> None:
        """Settle, and forget streams that were silent for a long window, and series that no window has anything of."""
        self.settle()
        self.clock = max(self.clock, now)
        if 0 <= now - self._evicted_at < self.grids[SHORT].width:
            return
        self._evicted_at = now
        for number, grid in enumerate(self.grids):
            self.panes.forget(number, grid.oldest(now))
        for key in [key for key, time in self.unjudged.items() if now - time > self._window]:
            del self.unjudged[key]
            self.version += 1
        silent = now - self._long - self._window
        self.events["streams_evicted"] += self.streams.forget_silent(silent)
        gone = [
            key
            for key, series in self.series.items()
            if series.newest < silent and key.pair not in self.sharers(key.metric)
        ]
        self._forget(gone)
        alive = self._table.metrics() | self._limited_metrics
        for metric in [metric for metric in self.newest if metric not in alive and metric != metric_of(metric)]:
            del self.newest[metric]
        for metric in {key.metric for key in gone} & self.newest.keys():
            self._forget_pairs(metric)
        if quiet := {pair for pair, heard in self.heard.items() if heard.last < silent}:
            in_use = {key.pair for key in self.series} | {pair for pairs in self.newest.values() for pair in pairs}
            for pair in quiet - in_use:
                del self.heard[pair]

    def sharers(self, metric: str) -> Collection[Pair]:
        """The latest pair of each version that has a share of the requests: none has replaced it.

        A version that has all of them and shut down cleanly was replaced without a promotion.
        """
        newest, shares = self.newest.get(metric, {}), self.sharing
        sharing = [of for of in newest if of[1] in shares and (shares[of[1]] < 1.0 or not self.has_ended(of))]
        return {pair[1]: pair for pair in sorted(sharing, key=newest.__getitem__)}.values()

    def has_room_for(self, streams: int, count: int, now: float) -> bool:
        """Return True if so many streams more, with so many observations, may be taken together at `now`."""
        return len(self.streams) + streams <= self._most_streams and self._believes(count, now)

    def _believes(self, count: int, now: float) -> bool:
        """Return True if so many more observations are plausible: deltas and restarted streams may claim any number."""
        pane = self.grids[LONG].index(now)
        before = self._taken[1] if self._taken[0] == pane else 0
        if before + count > _MOST_TAKEN:
            return False
        self._taken = pane, before + count
        return True

    def _has_room(self, key: SeriesKey, time: float, now: float) -> bool:
        if key not in self.series and len(self.series) >= self.contract.observability.max_series:
            return False
        newest = self.newest.get(key.metric, {})
        last = newest.get(key.pair, -math.inf)
        if len(newest) < PAIRS or last > now - self._window:
            return True
        silent = max(time, *newest.values()) - self._window  # as `cells` has it
        if last > silent:
            return True
        return sum(time > silent for time in newest.values()) < PAIRS

    def _takes_room(self, key: SeriesKey, count: int, now: float) -> bool:
        """Return whether a pair that a metric has no room for takes that of the pair with the fewest observations."""
        last = self.newest.get(key.metric, {}).get(key.pair, -math.inf)
        if key.slice != ALL or key.metric not in self._limited_metrics or last > now - self._window:
            return False
        without = self._without.get(key.metric)
        if without is None or not 0 <= now - without.since <= self._window:
            self.settle()
            crowded = key not in self.series and len(self.series) >= self.contract.observability.max_series
            held = {
                pair: self.counted(series, SHORT, now)
                for pair, series in self.pairs(key.metric, ALL).items()
                if crowded or series.newest > now - self._window
            }
            fewest = min(held, key=held.__getitem__, default=_NO_PAIR)
            without = self._without[key.metric] = _WithoutRoom(now, fewest, held.get(fewest, 0), Counter())
        if without.add(key.pair, count) <= _MORE * without.held or without.fewest == _NO_PAIR:
            return False
        del self._without[key.metric]
        self._forget([other for other in self.series_of(key.metric) if other.pair == without.fewest])
        self.newest[key.metric].pop(without.fewest, None)
        return self._has_room(key, now, now)

    def _forget_pairs(self, metric: str) -> None:
        """Forget all but the latest of the pairs without a series."""
        newest = self.newest[metric]
        if len(newest) > _MAX_REMEMBERED_PAIRS:
            kept = {key.pair for key in self.series if key.metric == metric}
            without = sorted(newest.keys() - kept, key=lambda pair: newest[pair])
            for pair in without[: len(newest) - _MAX_REMEMBERED_PAIRS]:
                del newest[pair]

    def _fits(self, point: Point, slices: Iterable[str], pair: Pair, now: float) -> bool:
        """Return True if the point's buckets match those of its series, where these are still in use."""
        for name in slices:
            series = self.series.get(SeriesKey(point.series, name, *pair))
            if series is not None and now - series.newest <= self._window and not self.accepts(series, point.histogram):
                return False
        return True

    def _turn_back(self, now: float) -> None:
        """The clock went back: nothing that is remembered is later than now."""
        self.events["clock_went_back"] += 1
        self.clock = now
        self.panes.turn_back(now)
        for series in self.series.values():
            series.newest, series.arrived = min(series.newest, now), min(series.arrived, now)
        self.streams.turn_back(now)
        self.heard, self.newest = not_later((self.heard, self.newest), now)
        self.refused.found = not_later(self.refused.found, now)
        self.recorders.turn_back(now)
        self.version += 1
        self.evidence.turn_back(now)

    def leave_unjudged(self, key: SeriesKey, now: float) -> bool:
        """Remember a series that has no room, where a clause is about it. Returns whether one is."""
        if key.metric not in self._limited_metrics:
            return False
        if key in self.unjudged or len(self.unjudged) < _UNJUDGED:
            self.version += key not in self.unjudged
            self.unjudged[key] = now
        return True

    def _forget(self, gone: Sequence[SeriesKey]) -> None:
        if numbers := [self.series[key].number for key in gone]:
            self.streams.take_out_of(numbers)
            self._slots.forget(numbers)
        self._table.end(gone)
        self.version += len(gone)
        self.events["series_evicted"] += len(gone)
        for key in gone:
            self.evidence.forget(key)


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
