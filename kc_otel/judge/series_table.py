"""Which series a contract has: by key, by slice, by metric, and where each one's observations are.

A series has a number, that of its row in the panes; one that a clause is about has a row in each window besides. Both
are given to the next series once one is gone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from kc_otel.contract.slices import OTHER
from kc_otel.judge.pane_history import PaneHistory
from kc_otel.judge.panes import PaneColumns, PaneGrid
from kc_otel.judge.series import LONG, SHORT, Pair, Series, SeriesKey
from kc_otel.judge.window_rows import WindowRows

__all__ = ["SeriesTable"]

_Group = TypeVar("_Group")
_Key = TypeVar("_Key")


class SeriesTable:
    """The series that there are.

    Args:
        grids: The panes of the short and of the long window.
        panes: What exponential histograms hold.
        windows: What each window holds of the series that clauses are about.
        judged: Names of the metrics that clauses are computed from.

    Attributes:
        by_key: All of them.
    """

    __slots__ = ("_by_metric", "_by_slice", "_free", "_free_rows", "_grids", "_judged", "_keys", "_panes", "_rows",
                 "_windows", "by_key")  # fmt: skip

    def __init__(
        self,
        grids: tuple[PaneGrid, PaneGrid],
        panes: PaneColumns,
        windows: Sequence[WindowRows],
        judged: Iterable[str],
    ) -> None:
        self.by_key: dict[SeriesKey, Series] = {}
        self._by_slice: dict[tuple[str, str], dict[Pair, Series]] = {}
        self._by_metric: dict[str, dict[SeriesKey, Series]] = {}
        self._grids, self._panes, self._windows, self._judged = grids, panes, windows, frozenset(judged)
        self._keys: list[SeriesKey | None] = []  # by number
        self._free: list[int] = []
        self._rows = 0
        self._free_rows: list[int] = []

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

    def begin(self, key: SeriesKey, *, empty: bool) -> Series:
        """A series that is new.

        Args:
            key: Its key; there is none of that yet.
            empty: Whether the panes hold nothing of it.
        """
        if not self._free:
            self._free.append(len(self._keys))
            self._keys.append(None)
        number = self._free.pop()
        self._keys[number] = key
        series = self.by_key[key] = self.empty(number)
        if key.metric in self._judged and key.slice != OTHER:
            series.row = self._free_rows.pop() if self._free_rows else self._rows
            self._rows = max(self._rows, series.row + 1)
            for window, history in zip(self._windows, series.histories, strict=True):
                window.begin(series.row, history, empty=empty)
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
            if series.row >= 0:
                self._free_rows.append(series.row)
                for window in self._windows:
                    window.end(series.row)
            _leave(self._by_slice, (key.metric, key.slice), key.pair)
            _leave(self._by_metric, key.metric, key)


def _leave(groups: dict[_Group, dict[_Key, Series]], group: _Group, key: _Key) -> None:
    """One less in a group; no group without any."""
    del groups[group][key]
    if not groups[group]:
        del groups[group]
