"""A series is (metric, slice, kernel pair) within a contract: its key, its windows, and when its pair was heard.

A window of W seconds is made of N panes of W/N seconds, aligned to the Unix epoch; it holds the pane of `now` and the
N - 1 before it, so it reaches back between W - W/N and W seconds, and never holds anything older than W. One pane more
is kept for clocks that disagree. A contract has two such grids, of the short and of the long window. Histograms are
columns of all series together, a few for each pane.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kc_otel.contract.model import Contract
from kc_otel.stats import Binned
from kc_otel.stats.histogram import Histogram
from kc_otel.stats.histogram_columns import HistogramColumns, merged
from kc_otel.stats.interval import Floats, Numbers

SHORT: Final = 0
LONG: Final = 1
_SHORT_PANES: Final = 10
_LONG_PANES: Final = 12
_MAX_GAPS: Final = 8
PAIRS: Final = 64
"""Kernel pairs of a metric that are judged at a time."""

Pair = tuple[str, str]
"""Short fingerprints of the training and the inference kernel."""
_MAX_WAITING_HISTOGRAMS: Final = 16_384
"""Histograms that wait at most until they become columns."""
_MAX_WINDOW_PARTS: Final = 256
"""Columns that wait at most to be added to a window; of more, the window is put together anew."""
_COLUMNS_BEFORE_MERGE: Final = 8
"""Columns that a pane collects before they are merged."""


@dataclass(frozen=True, slots=True)
class PaneGrid:
    """Panes of one window length: seconds that one covers, and how many a window has."""

    width: float
    size: int

    @property
    def timely(self) -> float:
        """Seconds up to which what arrives may be old, so that every evaluation within a pane has it in its window."""
        return self.width * (self.size - 2)

    def index(self, time: float) -> int:
        """Number of the pane that covers this Unix time in seconds."""
        return math.floor(time / self.width)

    def oldest(self, now: float) -> int:
        """Number of the oldest pane that is kept."""
        return self.index(now) - self.size

    def window(self, now: float) -> range:
        """Numbers of the panes of the window that ends now."""
        return range(self.oldest(now) + 1, self.index(now) + 1)


class SeriesContent(NamedTuple):
    """Content of a pane, or of a window: the numbers of some series, ascending [n], and a histogram of each [n]."""

    series: Numbers
    columns: HistogramColumns

    def places(self, series: Numbers) -> tuple[NDArray[np.bool_], Numbers]:
        """Return which of some series are among these [k], and the places of those that are."""
        at = self.series.searchsorted(series)
        found = at < self.series.size
        found[found] = self.series[at[found]] == series[found]
        return found, at[found]

    def of(self, series: int) -> Histogram | None:
        """The histogram of one series; None where there is nothing of it."""
        at = int(self.series.searchsorted(series))
        return self.columns[at] if at < self.series.size and self.series[at] == series else None

    @classmethod
    def whole(cls, parts: list[SeriesContent]) -> SeriesContent:
        """Put several parts together; the list has only the whole afterwards."""
        if not parts:
            parts.append(cls(np.zeros(0, np.int64), HistogramColumns.of(())))
        elif len(parts) > 1:
            series = np.concatenate([part.series for part in parts])
            parts[:] = [cls(*merged(series, HistogramColumns.joined([part.columns for part in parts])))]
        return parts[0]


class PaneColumns:
    """Histograms of a contract's series, by their numbers and by pane; `changed` are those that are not saved.

    With `weighed`, what arrived waits until somebody takes it by `take_arrived`.
    """

    def __init__(self, grids: Sequence[PaneGrid], *, weighed: bool = True) -> None:
        self._grids, self._weighed = grids, weighed
        self._panes: list[dict[int, list[SeriesContent]]] = [{} for _ in grids]
        self._windows: list[tuple[range, list[SeriesContent]] | None] = [None for _ in grids]
        self._waiting: tuple[list[int], list[float], list[float], list[Histogram]] = ([], [], [], [])
        self._versions = 0
        self._version = np.zeros(64, np.int64)
        self._arrived: dict[bool, list[SeriesContent]] = {False: [], True: []}  # by whether late
        self.changed: dict[tuple[int, int], list[Numbers]] = {}

    def count(self, series: int, time: float, now: float, histogram: Histogram) -> None:
        """Count observations of a series, at least one, of a time that has a pane at `now`, when they arrived."""
        waiting, times, arrivals, parts = self._waiting
        waiting.append(series)
        times.append(time)
        arrivals.append(now)
        parts.append(histogram)
        if len(waiting) >= _MAX_WAITING_HISTOGRAMS:
            self.settle()

    def count_all(self, series: Numbers, times: Floats, now: Floats, columns: HistogramColumns) -> None:
        """`count` of many series [n]."""
        self.settle()
        self._count(series, times, now, columns)

    def settle(self) -> None:
        """Make columns of what was counted one by one."""
        if not self._waiting[0]:
            return
        (series, times, now, parts), self._waiting = self._waiting, ([], [], [], [])
        self._count(np.array(series), np.array(times), np.array(now), HistogramColumns.of(parts))

    def put(self, grid: int, pane: int, series: Sequence[int], parts: Sequence[Histogram]) -> None:
        """Restore a saved pane of some series, and add it to the existing content."""
        held = SeriesContent(*merged(np.array(series), HistogramColumns.of(parts)))
        self._panes[grid].setdefault(pane, []).append(held)
        self._touch(held.series)
        self._windows[grid] = None

    def take_arrived(self, *, late: bool) -> SeriesContent:
        """Take what was counted since the last call: too old for the first window when it arrived, or the rest."""
        self.settle()
        arrived, self._arrived[late] = self._arrived[late], []
        if not arrived:
            return SeriesContent.whole([])
        series = np.concatenate([part.series for part in arrived])
        return SeriesContent(*merged(series, HistogramColumns.joined([part.columns for part in arrived])))

    def versions(self, series: Numbers) -> Numbers:
        """Return a number for each series that is another one once the series has changed."""
        self.settle()
        self._make_room(series)
        return self._version[series]

    def window(self, grid: int, now: float) -> SeriesContent:
        """The window that ends now: that of before with what arrived since, or put together anew for other panes."""
        self.settle()
        panes, held = self._grids[grid].window(now), self._windows[grid]
        if held is None or held[0] != panes:
            parts = [part for pane in panes for part in self._panes[grid].get(pane, ())]
            held = self._windows[grid] = panes, parts
        return SeriesContent.whole(held[1])

    def whole(self, grid: int, pane: int) -> SeriesContent | None:
        """Return the content of a pane; None if empty."""
        self.settle()
        parts = self._panes[grid].get(pane)
        return SeriesContent.whole(parts) if parts else None

    def binned(self, grid: int, series: int, now: float) -> Binned:
        """Observations of a series in the window that ends now, as the view that bounds are computed from."""
        return (self.window(grid, now).of(series) or Histogram.empty(0)).binned()

    def turn_back(self, now: float) -> None:
        """Move what lies ahead of a clock that went back to where it is now."""
        self.settle()
        for number, (grid, panes) in enumerate(zip(self._grids, self._panes, strict=True)):
            head = grid.index(now)
            for pane in [pane for pane in panes if pane > head]:
                moved = panes.pop(pane)
                panes.setdefault(head, []).extend(moved)
                for changed in (pane, head):
                    self.changed.setdefault((number, changed), []).extend(part.series for part in moved)
            self._windows[number] = None
        self._versions += 1
        self._version[:] = self._versions

    def forget(self, grid: int, oldest: int) -> None:
        """Forget a grid's panes that are older than this one."""
        self.settle()
        panes = self._panes[grid]
        for pane in [pane for pane in panes if pane < oldest]:
            del panes[pane]

    def holds(self, series: int) -> bool:
        """Return whether there is anything of a series."""
        self.settle()
        return any(series in part.series for panes in self._panes for parts in panes.values() for part in parts)

    def drop(self, gone: Iterable[int]) -> None:
        """Forget some series."""
        self.settle()
        series = np.array(sorted(gone))
        self._arrived = {late: _left(parts, series) for late, parts in self._arrived.items()}
        for number, panes in enumerate(self._panes):
            for pane, parts in [*panes.items()]:
                if any(np.isin(part.series, series).any() for part in parts):
                    if left := _left(parts, series):
                        panes[pane] = left
                    else:
                        del panes[pane]
                    self.changed.setdefault((number, pane), []).append(series)
                    self._windows[number] = None
        self._touch(series)

    def _count(self, series: Numbers, times: Floats, now: Floats, columns: HistogramColumns) -> None:
        if not (series[1:] >= series[:-1]).all():
            order = np.argsort(series, kind="stable")
            series, times, now, columns = series[order], times[order], now[order], columns.taken(order)
        self._touch(series)
        if self._weighed:
            old = now - times > self._grids[0].timely
            for late in {*old.tolist()}:
                which = np.flatnonzero(old == late)
                whole = which.size == series.size
                taken = (series, columns) if whole else (series[which], columns.taken(which))
                self._arrived[late].append(SeriesContent(*taken))
        first, last, latest = float(times.min()), float(times.max()), float(now.max())
        together: tuple[Numbers, HistogramColumns] | None = None
        for number, grid in enumerate(self._grids):
            if (pane := grid.index(first)) == grid.index(last) and pane >= grid.oldest(latest):
                together = together or merged(series, columns)
                self._add(number, pane, *together)
                continue
            panes = np.floor(times / grid.width).astype(np.int64)
            kept = panes >= np.floor(now / grid.width).astype(np.int64) - grid.size
            for pane in sorted({*panes[kept].tolist()}):
                which = np.flatnonzero(kept & (panes == pane))
                some = columns if which.size == series.size else columns.taken(which)
                self._add(number, pane, *merged(series[which], some))

    def _add(self, grid: int, pane: int, series: Numbers, columns: HistogramColumns) -> None:
        content = SeriesContent(series, columns)
        parts = self._panes[grid].setdefault(pane, [])
        parts.append(content)
        self.changed.setdefault((grid, pane), []).append(series)
        window = self._windows[grid]
        if window is not None and pane in window[0]:
            window[1].append(content)
            if len(window[1]) > _MAX_WINDOW_PARTS:
                self._windows[grid] = None
        if len(parts) > _COLUMNS_BEFORE_MERGE:
            self.whole(grid, pane)

    def _touch(self, series: Numbers) -> None:
        self._make_room(series)
        self._versions += 1
        self._version[series] = self._versions

    def _make_room(self, series: Numbers) -> None:
        most = int(series.max(initial=0))
        if most >= self._version.size:
            self._version = np.concatenate([self._version, np.zeros(max(self._version.size, most), np.int64)])


def _left(parts: Iterable[SeriesContent], series: Numbers) -> list[SeriesContent]:
    """The parts without some series."""
    kept = [(part, np.flatnonzero(~np.isin(part.series, series))) for part in parts]
    return [
        part if which.size == part.series.size else SeriesContent(part.series[which], part.columns.taken(which))
        for part, which in kept
        if which.size
    ]


class SeriesKey(NamedTuple):
    """A series within a contract.

    `metric` names the operator too, see `points.series_name`. For invalid sequences `slice` is the reason, and `metric`
    names their slice where it is known, see `points.invalid_on`; the pair is empty where the sender names none.
    """

    metric: str
    slice: str
    kernel_train: str
    kernel_inference: str

    @property
    def pair(self) -> Pair:
        """The kernel pair."""
        return self.kernel_train, self.kernel_inference


@dataclass(slots=True)
class Series:
    """A series; Unix times in seconds of its newest observation, and of the last arrival of any."""

    number: int
    """By which panes, rows and slots name it; given to another series once this one is gone."""
    newest: float = 0.0
    arrived: float = 0.0
    layout: tuple[float, ...] | None = None
    """Explicit bounds of what it holds; None for exponential histograms."""


@dataclass(slots=True)
class Heard:
    """Last report of a pair, gaps between its latest reports, and since when it is not silent; Unix seconds.

    A gap that the first report of a recorder ends is negative: a pause between runs, and no interval of reports. The
    latest of each kind are kept, so that a job with many reports does not displace the pauses between jobs.
    """

    last: float
    gaps: list[float] = field(default_factory=list)
    since: float = math.nan
    begun: float = -math.inf

    def __post_init__(self) -> None:
        if math.isnan(self.since):
            self.since = self.last

    def hear(self, now: float, heartbeat: float) -> None:
        """Count a report."""
        if now - self.last > self.patience(heartbeat):
            self.since = now
        if now > self.last:
            gap = now - self.last
            self.gaps = [*_latest(self.gaps, self.patience(heartbeat)), -gap if self.begun > self.last else gap]
            self.last = now

    def begin(self, now: float) -> None:
        """Note the first report of a recorder, also after its measurements in the same message."""
        self.begun = now
        if self.gaps and now == self.last:
            self.gaps = [*self.gaps[:-1], -abs(self.gaps[-1])]

    def patience(self, heartbeat: float, *, ended: bool = False) -> float:
        """Seconds of silence that mean something: the heartbeat, from when the next report was due.

        That is the second largest of the latest gaps after the last; the largest may have been an outage. What has
        `ended` may pause as before for longer than it ran; what ran for longer has no schedule.
        """
        ran = self.last - self.since
        gaps = sorted(abs(gap) for gap in self.gaps if gap > 0.0 or (ended and -gap > ran))
        return heartbeat + (gaps[-2] if len(gaps) > 1 else heartbeat)


def _latest(gaps: Sequence[float], patience: float) -> list[float]:
    """The latest gaps of either kind, in order, with room for one more.

    A pause within the patience is dropped: several recorders of a job began at about the same time.
    """
    left, kept = {False: _MAX_GAPS - 1, True: _MAX_GAPS - 1}, []
    for gap in reversed(gaps):
        if left[gap > 0.0] and not -patience <= gap < 0.0:
            left[gap > 0.0] -= 1
            kept.append(gap)
    return kept[::-1]


class Listening(NamedTuple):
    """Since when this process listens, and until when the one before it did, Unix seconds."""

    since: float
    before: float = -math.inf

    def silence(self, last: float, now: float) -> float:
        """Seconds of silence of who was heard last at a Unix time."""
        if last >= self.since:
            return now - last
        return now - self.since + max(min(self.before, self.since) - last, 0.0)


def grids(contract: Contract) -> tuple[PaneGrid, PaneGrid]:
    """The panes of the short and of the long window."""
    short = contract.observability.window
    long = max(contract.observability.long_window, short)
    return PaneGrid(short / _SHORT_PANES, _SHORT_PANES), PaneGrid(long / _LONG_PANES, _LONG_PANES)


class SeriesTable:
    """The series that there are, by key, and by what is looked for."""

    def __init__(self, panes: PaneColumns) -> None:
        self.by_key: dict[SeriesKey, Series] = {}
        self._by_slice: dict[tuple[str, str], dict[Pair, Series]] = {}
        self._by_metric: dict[str, dict[SeriesKey, Series]] = {}
        self._panes = panes
        self._keys: list[SeriesKey | None] = []  # by number
        self._free: list[int] = []

    def on(self, metric: str, slice: str) -> dict[Pair, Series]:
        """Series of a metric on a slice, by kernel pair."""
        return self._by_slice.get((metric, slice), {})

    def of(self, metric: str) -> Mapping[SeriesKey, Series]:
        """Series of a metric."""
        return self._by_metric.get(metric, {})

    def metrics(self) -> set[str]:
        """Metrics that have series."""
        return set(self._by_metric)

    def keys(self, numbers: Numbers) -> list[SeriesKey | None]:
        """The series with these numbers; None for one that is gone."""
        return [self._keys[number] for number in numbers.tolist()]

    def living(self, numbers: Numbers) -> list[SeriesKey]:
        """The series with these numbers, without those that are gone."""
        return [key for number in numbers.tolist() if (key := self._keys[number]) is not None]

    def begin(self, key: SeriesKey) -> Series:
        """A series that is new; there is none of that key yet."""
        if not self._free:
            self._free.append(len(self._keys))
            self._keys.append(None)
        number = self._free.pop()
        self._keys[number] = key
        series = self.by_key[key] = Series(number)
        self._by_slice.setdefault((key.metric, key.slice), {})[key.pair] = series
        self._by_metric.setdefault(key.metric, {})[key] = series
        return series

    def end(self, gone: Sequence[SeriesKey]) -> None:
        """Series that are no more, and what the panes hold of them."""
        if gone:
            self._panes.drop([self.by_key[key].number for key in gone])
        for key in gone:
            series = self.by_key.pop(key)
            self._keys[series.number] = None
            self._free.append(series.number)
            _leave(self._by_slice, (key.metric, key.slice), key.pair)
            _leave(self._by_metric, key.metric, key)


def _leave(groups: dict[Any, dict[Any, Series]], group: object, key: object) -> None:
    """Remove one from a group, and the group with the last."""
    del groups[group][key]
    if not groups[group]:
        del groups[group]
