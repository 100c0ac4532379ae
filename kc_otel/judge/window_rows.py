"""What the windows of a contract's series hold, as rows of a matrix that follows the panes.

Merging the panes of thousands of series at every evaluation costs more than judging them. So what arrives is added to
its series' row, and what a pane holds that leaves the window is subtracted: counts are whole numbers, and come out
exactly. Sums and extremes are kept by pane. The panes remain what is saved and what all else is read from. A row that
cannot follow them (a clock that went back, a state that was read) is put together of them anew, and a series that does
not fit beside the others (explicit bounds, another scale, extremes that nobody said) has none.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final, TypeGuard

import numpy as np
from numpy.typing import NDArray

from kc_otel.judge.histograms import Histogram
from kc_otel.stats import ExponentialHistogram
from kc_otel.stats.histogram_rows import Bins, HistogramRows, SideCounts

if TYPE_CHECKING:
    from kc_otel.judge.panes import Ring

__all__ = ["WindowRows"]

Floats = NDArray[np.float64]
Numbers = NDArray[np.int64]
Counted = tuple[int, int, Histogram]
"""A row, the number of a pane, and what it has observed there."""

_WAITING: Final = 16_384
"""Increments that wait at most until they are added."""
_WIDEST: Final = 640
"""Bins that rows may have together."""
_SPARE: Final = 16
"""Buckets by which matrices are made wider than they have to be."""
_NOTHING: Final = np.array([0.0, np.inf, -np.inf, -np.inf])[:, None, None]
_MOST: Final = 2.0**53
"""Observations up to which a double counts them exactly."""


class WindowRows:
    """Rows of series, by their numbers, for windows of one length.

    Args:
        ring: An empty ring: how long windows are.

    Attributes:
        version: Of each row, a number that is another one once it has changed.
    """

    def __init__(self, ring: Ring) -> None:
        self._size, self._index = ring.size, ring.index
        self._rings: dict[int, Ring] = {}
        self._waiting: list[Counted] = []
        self._kind: tuple[int, float] | None = None
        self._bins = Bins(0, 0, 0, 0)
        self._edges = np.zeros((2, 1))
        self._head: int | None = None
        self._ahead = self._oldest = 0
        self._unread = False
        self._versions = 0
        self.version = np.zeros(0, np.int64)
        self._follows = np.zeros(0, np.bool_)
        self._counts = np.zeros((0, 1))
        self._by_pane = np.zeros((4, 2 * ring.size, 0))
        """Sum, minimum, maximum, and the largest observation that is known, by pane [4, panes, rows]."""

    def begin(self, row: int, ring: Ring, *, empty: bool) -> None:
        """A series has a row from now on; its panes are empty, or to be read."""
        if row >= len(self._follows):
            self._grow(max(2 * len(self._follows), row + 1, 16), self._bins)
        self._rings[row] = ring
        self._clear([row])
        self._follows[row] = empty
        self._unread |= not empty

    def end(self, row: int) -> None:
        """The series of a row is gone."""
        self._add_waiting()
        self._follows[row] = False
        del self._rings[row]

    def add(self, row: int, time: float, now: float, increment: Histogram) -> None:
        """A series has counted what is of a time, at another, Unix seconds; what was too old for panes is in none."""
        pane = self._index(time)
        if pane < self._index(now) - self._size:
            return
        self._waiting.append((row, pane, increment))
        if len(self._waiting) > _WAITING:
            self._add_waiting()

    def read_anew(self, row: int | None = None) -> None:
        """Panes have changed otherwise, those of one series or of all."""
        self._follows[slice(None) if row is None else row] = False
        self._unread = True

    def move(self, now: float) -> None:
        """Bring all rows to a time, Unix seconds."""
        head, before = self._index(now), self._head
        caught_up = before is not None and before < head and before < self._ahead
        if before is None or head < before or caught_up or head - before >= self._size:
            if before is not None and head < before:  # what is ahead now comes in again
                self._ahead = max(self._ahead, before)
            self.read_anew()
        if any(pane > head for _, pane, _ in self._waiting):
            self._ahead = max(pane for _, pane, _ in self._waiting)
            self.read_anew()
        self._add_waiting()
        self._head, self._oldest = head, head - self._size + 1
        if before is None or head != before:
            if before is not None and head > before:
                # After a jump of the clock no row follows, and all there is of sums are two windows.
                self._leave(range(max(before - self._size + 1, self._oldest - 2 * self._size), self._oldest))
            for ring in self._rings.values():
                ring.forget(head)
            self._unread = True  # what did not fit may be gone
        if self._unread:
            self._unread = False
            self._read(range(self._oldest, head + 1))

    def following(self, rows: Numbers) -> NDArray[np.bool_]:
        """Whether each of some rows says what its window holds."""
        return self._follows[rows]

    def rows(self, rows: Numbers) -> HistogramRows:
        """Rows that are `following`, for bounds of all of them that hold anything; `places` are numbers of `rows`."""
        count = self._counts[rows]
        total = count.sum(axis=1)
        places = np.flatnonzero(total)
        if places.size < rows.size:
            rows, count, total = rows[places], count[places], total[places]
        used = np.flatnonzero(count.any(axis=0))
        part = slice(int(used[0]), int(used[-1]) + 1) if used.size else slice(0, 1)
        sums, minimum, maximum, observed = self._by_pane[:, :, rows]
        most = maximum.max(axis=0)
        return HistogramRows.of(
            places,
            self._edges[:, part],
            np.ascontiguousarray(count[:, part]),
            total,
            sums.sum(axis=0),
            minimum.min(axis=0),
            most,
            observed.max(axis=0) == most,
        )

    def _add_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        first, end = self._oldest, self._oldest + 2 * self._size
        if self._head is None or any(pane >= end for _, pane, _ in waiting):
            self.read_anew()
        else:
            self._count([one for one in waiting if one[1] >= first and self._follows[one[0]]], 1.0)

    def _leave(self, panes: range) -> None:
        """Panes leave the window."""
        self._count(self._held(np.flatnonzero(self._follows).tolist(), panes), -1.0)
        self._by_pane[:, [pane % (2 * self._size) for pane in panes]] = _NOTHING

    def _read(self, panes: range) -> None:
        """Put together what does not follow its panes, if it fits beside the others."""
        rows = [row for row in self._rings if not self._follows[row]]
        if not rows:
            return
        self._clear(rows)
        self._follows[rows] = True
        self._ahead = max([self._ahead, *(self._rings[row].newest for row in rows)])
        self._count(self._held(rows, panes), 1.0)

    def _held(self, rows: Iterable[int], panes: range) -> Iterable[Counted]:
        for row in rows:
            if (ring := self._rings.get(row)) is not None:
                for pane, part in ring.held(panes):
                    yield row, pane, part

    def _clear(self, rows: list[int]) -> None:
        self._counts[rows] = 0.0
        self._by_pane[:, :, rows] = _NOTHING
        self._changed(rows)

    def _count(self, counted: Iterable[Counted], sign: float) -> None:
        """Add what was observed to rows, or take it away; rows of what does not fit do not follow any more."""
        fitting: list[tuple[int, int]] = []
        parts: list[ExponentialHistogram] = []
        for row, pane, part in counted:
            if self._fits(part):
                fitting.append((row, pane))
                parts.append(part)
            else:
                self._follows[row] = False
        if not parts:
            return
        rows, panes = np.array(fitting).T
        up, down = SideCounts.of([part.positive for part in parts]), SideCounts.of([part.negative for part in parts])
        bins = self._bins.with_room_for(down, up, _SPARE)
        if bins != self._bins:
            if bins.size > _WIDEST or not np.isfinite(bins.edges(*(self._kind or (0, 0.0)))).all():
                self._follows[rows] = False
                return
            self._grow(len(self._follows), bins)
        flat, begins = self._counts.reshape(-1), rows * bins.size
        np.add.at(flat, begins[up.part] + bins.of_positive(up.bucket), sign * up.counts)
        np.add.at(flat, begins[down.part] + bins.of_negative(down.bucket), sign * down.counts)
        np.add.at(flat, begins + bins.zero, sign * np.array([part.zero_count for part in parts], np.float64))
        if sign > 0.0:
            at = (panes % (2 * self._size), rows)
            most = np.array([part.maximum for part in parts])
            known = np.where(np.array([part.maximum_observed for part in parts]), most, -np.inf)
            np.add.at(self._by_pane[0], at, np.array([part.sum for part in parts]))
            np.minimum.at(self._by_pane[1], at, np.array([part.minimum for part in parts]))
            np.maximum.at(self._by_pane[2], at, most)
            np.maximum.at(self._by_pane[3], at, known)
            self._follows[rows[self._counts[rows].sum(axis=1) >= _MOST]] = False
        self._changed(rows)

    def _fits(self, part: Histogram) -> TypeGuard[ExponentialHistogram]:
        if not isinstance(part, ExponentialHistogram):
            return False
        if self._kind is None:
            self._kind = (part.scale, part.zero_threshold)
        return (part.scale, part.zero_threshold) == self._kind and part.minimum <= part.maximum

    def _changed(self, rows: Numbers | list[int]) -> None:
        self._versions += 1
        self.version[rows] = self._versions

    def _grow(self, rows: int, bins: Bins) -> None:
        """Make matrices longer and wider."""
        old, more = self._bins, rows - len(self._follows)
        up, down = np.arange(old.up_first, old.up_end), np.arange(old.down_first, old.down_end)[::-1]
        counts = np.zeros((rows, bins.size))
        at = np.concatenate([bins.of_negative(down), [bins.zero], bins.of_positive(up)])
        counts[: len(self._counts), at] = self._counts
        self._counts, self._bins = counts, bins
        self._edges = bins.edges(*(self._kind or (0, 0.0)))
        self._by_pane = np.concatenate([self._by_pane, np.tile(_NOTHING, (1, 2 * self._size, more))], axis=2)
        self._follows = np.concatenate([self._follows, np.zeros(more, np.bool_)])
        self.version = np.concatenate([self.version, np.zeros(more, np.int64)])
