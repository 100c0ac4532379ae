"""A series is (metric, slice, kernel pair) within a contract: its key, its panes, and when its pair was heard."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from kc_otel.contract.model import Contract
from kc_otel.judge.panes import PaneColumns, PaneGrid, PaneHistory
from kc_otel.stats.histogram import Histogram

SHORT: Final = 0
LONG: Final = 1
_SHORT_PANES: Final = 10
_LONG_PANES: Final = 12
_MAX_GAPS: Final = 8
PAIRS: Final = 64
"""Kernel pairs of a metric that are judged at a time."""

Pair = tuple[str, str]
"""Short fingerprints of the training and the inference kernel."""


class SeriesKey(NamedTuple):
    """A series within a contract.

    For what is observed of operators, `metric` names the operator too: see `points.series_name`. For invalid sequences
    `slice` is the reason, and `metric` names their slice where it is known: see `points.invalid_on`; the pair is empty
    where the sender names none.
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
    """The panes of a series.

    `newest` is the Unix time in seconds of its newest observation, `arrived` when any arrived last: clocks may be
    wrong.
    """

    histories: tuple[PaneHistory, PaneHistory]
    newest: float = 0.0
    arrived: float = 0.0
    layout: tuple[float, ...] | None = None
    """Explicit bounds of what it holds; None for exponential histograms."""

    @property
    def number(self) -> int:
        """Its row in the panes, which is given to another series once this one is gone."""
        return self.histories[SHORT].row

    def accepts(self, histogram: Histogram) -> bool:
        """Return True if the histogram has the same buckets as the panes' content."""
        short = self.histories[SHORT]
        return histogram.layout == self.layout or not short.columns.holds(short.row)


@dataclass(slots=True)
class Heard:
    """When a kernel pair reported last, the gaps between its latest reports, and since when it has not fallen silent.

    All are in seconds, times of Unix.
    """

    last: float
    gaps: list[float] = field(default_factory=list)
    since: float = math.nan

    def __post_init__(self) -> None:
        if math.isnan(self.since):
            self.since = self.last

    def hear(self, now: float, heartbeat: float) -> None:
        """Count a report."""
        if now - self.last > self.patience(heartbeat):
            self.since = now
        if now > self.last:
            self.gaps = [*self.gaps[1 - _MAX_GAPS :], now - self.last]
            self.last = now

    def patience(self, heartbeat: float) -> float:
        """Seconds of silence that mean something: the heartbeat, from when the next report was due.

        A sender that reports once per minute is not silent between two reports. The second largest of the latest gaps
        tells when the next is due; the largest may have been an outage.
        """
        gaps = sorted(self.gaps)
        return heartbeat + (gaps[-2] if len(gaps) > 1 else heartbeat)


class Listening(NamedTuple):
    """Times from which on this process listens, and until which the one before it did, Unix seconds."""

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


_Group = TypeVar("_Group")
_Key = TypeVar("_Key")


class SeriesTable:
    """The series that there are, by key, and by what is looked for."""

    def __init__(self, grids: tuple[PaneGrid, PaneGrid], panes: PaneColumns) -> None:
        self.by_key: dict[SeriesKey, Series] = {}
        self._by_slice: dict[tuple[str, str], dict[Pair, Series]] = {}
        self._by_metric: dict[str, dict[SeriesKey, Series]] = {}
        self._grids, self._panes = grids, panes
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

    def keys(self, numbers: NDArray[np.int64]) -> list[SeriesKey | None]:
        """The series with these numbers; None for one that is gone."""
        return [self._keys[number] for number in numbers.tolist()]

    def living(self, numbers: NDArray[np.int64]) -> list[SeriesKey]:
        """The series with these numbers, without those that are gone."""
        return [key for key in self.keys(numbers) if key is not None]

    def begin(self, key: SeriesKey) -> Series:
        """A series that is new; there is none of that key yet."""
        if not self._free:
            self._free.append(len(self._keys))
            self._keys.append(None)
        number = self._free.pop()
        self._keys[number] = key
        series = self.by_key[key] = self.empty(number)
        self._by_slice.setdefault((key.metric, key.slice), {})[key.pair] = series
        self._by_metric.setdefault(key.metric, {})[key] = series
        return series

    def empty(self, number: int = -1) -> Series:
        """A series that holds nothing; by itself it has no number."""
        short, long = self._grids
        return Series((PaneHistory(short, self._panes, SHORT, number), PaneHistory(long, self._panes, LONG, number)))

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


def _leave(groups: dict[_Group, dict[_Key, Series]], group: _Group, key: _Key) -> None:
    """Remove one from a group, and the group with the last."""
    del groups[group][key]
    if not groups[group]:
        del groups[group]
