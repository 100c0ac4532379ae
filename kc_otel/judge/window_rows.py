"""Windows of a contract's series, as rows of a matrix that follows the panes.

Merging the panes of thousands of series at every evaluation costs more than judging them. So what arrives is added to
its series' row, and what a pane holds that leaves the window is subtracted: counts are whole numbers, and come out
exactly. Sums and extremes are kept by pane. The panes remain what is saved and what all else is read from. A row that
cannot follow them (a clock that went back, a state that was read) is put together of them anew, and a series that does
not fit beside the others (explicit bounds, another scale, extremes that nobody said) has none.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kc_otel.judge.panes import PaneColumns, PaneContent, PaneGrid, PaneHistory
from kc_otel.stats.histogram_columns import HistogramColumns
from kc_otel.stats.histogram_rows import Bins, HistogramRows

Floats = NDArray[np.float64]
Numbers = NDArray[np.int64]

_MAX_BINS: Final = 640
"""Bins that rows may have together."""
_SPARE_BUCKETS: Final = 16
"""Buckets by which matrices are made wider than they have to be."""
_EMPTY_PANE: Final = np.array([0.0, np.inf, -np.inf, -np.inf])[:, None, None]
_MAX_EXACT_COUNT: Final = 2.0**53
"""Observations up to which a double counts them exactly."""


class WindowState(NamedTuple):
    """Rows of a window at one time.

    Attributes:
        edges: Lower and upper edges of the bins [2, B].
        version: A number that changes with the row [rows].
        counts: Observations [rows, B].
        sum: Exact sums [rows].
        minimum: No observation is smaller [rows].
        maximum: No observation is larger [rows].
        observed: Whether `maximum` is an observation [rows].
    """

    edges: Floats
    version: Numbers
    counts: Floats
    sum: Floats
    minimum: Floats
    maximum: Floats
    observed: NDArray[np.bool_]

    def rows(self, rows: Numbers) -> HistogramRows:
        """Rows that are `following`, for bounds of all that hold anything; `places` are among these."""
        count = self.counts[rows]
        total = count.sum(axis=1)
        places = np.flatnonzero(total)
        if places.size < rows.size:
            rows, count, total = rows[places], count[places], total[places]
        used = np.flatnonzero(count.any(axis=0))
        part = slice(int(used[0]), int(used[-1]) + 1) if used.size else slice(0, 1)
        return HistogramRows(
            places,
            self.edges[:, part],
            np.ascontiguousarray(count[:, part]),
            total,
            self.sum[rows],
            self.minimum[rows],
            self.maximum[rows],
            self.observed[rows],
        )


class WindowRows:
    """Rows of series, by their numbers, for windows of one length.

    Args:
        grid: How long windows are.
        panes: Panes of all series.
        number: Of the grid among those of the panes.

    Attributes:
        version: Of each row, a number that is another one once it has changed.
    """

    def __init__(self, grid: PaneGrid, panes: PaneColumns, number: int) -> None:
        self._grid, self._size, self._panes, self._number = grid, grid.size, panes, number
        self._histories: dict[int, PaneHistory] = {}
        self._row_of = np.full(64, -1)  # by the row in the panes
        self._kind: tuple[int, float] | None = None
        self._bins = Bins(0, 0, 0, 0)
        self._edges = np.zeros((2, 1))
        self._head: int | None = None
        self._ahead = self._oldest = 0
        self._unread = False
        self._versions = 0
        self.version = np.zeros(0, np.int64)
        self._follows = np.zeros(0, np.bool_)
        self._counts, self._total = np.zeros((0, 1)), np.zeros(0)
        self._by_pane = np.zeros((4, 2 * grid.size, 0))
        """Sum, minimum, maximum, and the largest observation that is known, by pane [4, panes, rows]."""

    def begin(self, row: int, history: PaneHistory, *, empty: bool) -> None:
        """Give a series a row; its panes are empty, or will be read."""
        if row >= len(self._follows):
            self._grow(max(2 * len(self._follows), row + 1, 16), self._bins)
        if (more := history.row + 1 - self._row_of.size) > 0:
            self._row_of = np.concatenate([self._row_of, np.full(max(self._row_of.size, more), -1)])
        self._histories[row], self._row_of[history.row] = history, row
        self._clear(np.array([row]))
        self._follows[row] = empty
        self._unread |= not empty

    def end(self, row: int) -> None:
        """Free the row of a series."""
        self._follows[row] = False
        self._row_of[self._histories.pop(row).row] = -1

    def read_anew(self, row: int | None = None) -> None:
        """Mark the panes of a series, or of all, as changed."""
        self._follows[slice(None) if row is None else row] = False
        self._unread = True

    def move(self, now: float) -> None:
        """Bring all rows to a time, Unix seconds."""
        head, before = self._grid.index(now), self._head
        caught_up = before is not None and before < head and before < self._ahead
        if before is None or head < before or caught_up or head - before >= self._size:
            if before is not None and head < before:  # panes that are ahead now come in again
                self._ahead = max(self._ahead, before)
            self.read_anew()
        fresh = self._panes.take_fresh(self._number)
        if fresh is None:
            self.read_anew()
        elif (newest := max((content.pane for content in fresh), default=0)) > head:
            self._ahead = newest
            self.read_anew()
        else:
            self._add(fresh)
        self._head, self._oldest = head, head - self._size + 1
        if before is None or head != before:
            if before is not None and head > before:
                # After a jump of the clock no row follows, and all there is of sums are two windows.
                self._leave(range(max(before - self._size + 1, self._oldest - 2 * self._size), self._oldest))
            self._panes.forget(self._number, self._oldest - 1)
            self._unread = True  # a series that did not fit may be gone
        if self._unread:
            self._unread = False
            self._read(range(self._oldest, head + 1), now)

    def following(self, rows: Numbers) -> NDArray[np.bool_]:
        """Return a mask of the rows that match their window's content."""
        return self._follows[rows]

    def state(self) -> WindowState:
        """The rows as they are; valid until they change."""
        sums, minimum, maximum, observed = self._by_pane
        most = maximum.max(axis=0)
        return WindowState(
            self._edges, self.version, self._counts, sums.sum(axis=0), minimum.min(axis=0), most,
            observed.max(axis=0) == most,
        )  # fmt: skip

    def _add(self, fresh: list[PaneContent]) -> None:
        first, end = self._oldest, self._oldest + 2 * self._size
        if self._head is None or any(content.pane >= end for content in fresh):
            self.read_anew()
        else:
            self._count((content for content in fresh if content.pane >= first), 1)

    def _leave(self, panes: range) -> None:
        """Panes leave the window."""
        self._count(self._panes.held(self._number, panes), -1)
        self._by_pane[:, [pane % (2 * self._size) for pane in panes]] = _EMPTY_PANE

    def _read(self, panes: range, now: float) -> None:
        """Put together what does not follow its panes, if it fits beside the others."""
        left = np.flatnonzero(~self._follows).tolist()
        unread = [row for row in left if row in self._histories and not self._histories[row].is_explicit(now)]
        if not unread:
            return
        rows = np.array(unread)
        self._clear(rows)
        follows = self._follows
        self._follows = np.zeros_like(follows)
        self._follows[rows] = True
        self._ahead = max([self._ahead, *self._panes.numbers(self._number)[-1:]])
        self._count(self._panes.held(self._number, panes), 1)
        self._follows |= follows

    def _clear(self, rows: Numbers) -> None:
        self._counts[rows] = self._total[rows] = 0.0
        self._by_pane[:, :, rows] = _EMPTY_PANE
        self._changed(rows)

    def _count(self, held: Iterable[PaneContent], times: int) -> None:
        """Add what was observed to rows that follow, or take it away; those of what does not fit do so no more."""
        some = [self._following(content) for content in held]
        some = [content for content in some if content.rows.size]
        if not some:
            return
        parts = HistogramColumns.joined([content.columns for content in some])
        rows = some[0].rows if len(some) == 1 else np.concatenate([content.rows for content in some])
        panes = [content.pane % (2 * self._size) * self._by_pane.shape[2] for content in some]
        at = rows + (panes[0] if len(some) == 1 else np.repeat(panes, [content.rows.size for content in some]))
        if self._kind is None:
            self._kind = (int(parts.scale[0]), float(parts.zero_threshold[0]))
        fits = (parts.scale == self._kind[0]) & (parts.zero_threshold == self._kind[1])
        fits &= parts.minimum <= parts.maximum
        if not fits.all():
            self._follows[rows[~fits]] = False
            which = np.flatnonzero(fits)
            rows, at, parts = rows[which], at[which], parts.taken(which)
            if not which.size:
                return
        bins = self._bins.with_room_for(parts.negative.span, parts.positive.span, _SPARE_BUCKETS)
        if bins != self._bins:
            if bins.size > _MAX_BINS or not np.isfinite(bins.edges(*self._kind)).all():
                self._follows[rows] = False
                return
            self._grow(len(self._follows), bins)
        flat, begins = self._counts.reshape(-1), rows * bins.size
        parts.positive.add_to(flat, begins + bins.of_positive(parts.positive.offset), times=times)
        parts.negative.add_to(flat, begins + bins.of_negative(parts.negative.offset), step=-1, times=times)
        if parts.zero_count.any():
            np.add.at(flat, begins + bins.zero, times * parts.zero_count)
        np.add.at(self._total, rows, times * parts.count)
        if times > 0:
            sums, minimum, maximum, observed = self._by_pane.reshape(4, -1)
            np.add.at(sums, at, parts.sum)
            np.minimum.at(minimum, at, parts.minimum)
            np.maximum.at(maximum, at, parts.maximum)
            np.maximum.at(observed, at, np.where(parts.observed, parts.maximum, -np.inf))
            self._follows[rows[self._total[rows] >= _MAX_EXACT_COUNT]] = False
        self._changed(rows)

    def _following(self, content: PaneContent) -> PaneContent:
        """The same of rows that follow, by their numbers here."""
        if content.rows.size and content.rows[-1] < self._row_of.size:
            rows = self._row_of[content.rows]
        else:
            known = np.minimum(content.rows, self._row_of.size - 1)
            rows = np.where(known == content.rows, self._row_of[known], -1)
        follows = rows >= 0
        if follows.all():
            follows = self._follows[rows]
        else:
            follows[follows] = self._follows[rows[follows]]
        if follows.all():
            return PaneContent(content.pane, rows, content.columns)
        which = np.flatnonzero(follows)
        return PaneContent(content.pane, rows[which], content.columns.taken(which))

    def _changed(self, rows: Numbers) -> None:
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
        self._by_pane = np.concatenate([self._by_pane, np.tile(_EMPTY_PANE, (1, 2 * self._size, more))], axis=2)
        self._follows = np.concatenate([self._follows, np.zeros(more, np.bool_)])
        self._total = np.concatenate([self._total, np.zeros(more)])
        self.version = np.concatenate([self.version, np.zeros(more, np.int64)])
