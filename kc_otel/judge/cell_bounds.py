"""Bounds of cells of one clause in one window, at some times: what has not changed is not computed again.

Where only statuses are asked for, of most cells no bound is looked for: one look at the limit says that they keep it.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kc_otel.contract.clause import Clause
from kc_otel.judge.contract_state import ContractState
from kc_otel.judge.statistics import intervals_of_rows, rows_within
from kc_otel.judge.window_rows import WindowStates

__all__ = ["CellBounds", "FoundBounds"]

Floats = NDArray[np.float64]
Numbers = NDArray[np.int64]
_AT_ONCE: Final = 512
"""Rows whose bounds are computed together: their matrices stay in a core's cache."""
_NOTHING: Final = np.array([math.nan, -math.inf, math.inf, 0.0])[:, None]


class FoundBounds(NamedTuple):
    """Bounds of a group's cells at some times.

    Attributes:
        values: Estimate, lower and upper bound, and observations [4, times, cells]. Where nobody has looked for
            them the estimate is nan, and the upper bound the limit.
        odd: Whether a cell is to be judged by itself [times, cells].
        notes: What a reader has to know [times, cells].
    """

    values: Floats
    odd: NDArray[np.bool_]
    notes: NDArray[np.object_]


class CellBounds:
    """The bounds of a group's cells in one window: those of rows that have not changed are not computed again.

    Attributes:
        method: Name of the interval.
    """

    def __init__(self, clause: Clause, state: ContractState, rows: Numbers) -> None:
        self._clause, self._assumptions, self._rows = clause, state.contract.assumptions, rows
        self._version, self._asked = np.full(rows.size, -1), (math.nan, math.nan, True)
        self._last = _nothing(rows.size)
        self.method = ""

    def look(
        self,
        window: WindowStates,
        wanted: NDArray[np.bool_],
        level: float,
        alpha: float,
        limits: Floats | None = None,
    ) -> FoundBounds:
        """Bounds of cells.

        Args:
            window: What the window held at some times.
            wanted: Of which, and when [times, cells].
            level: Error probability of the lower side.
            alpha: Error probability of the upper side.
            limits: Where it is enough to know which bounds are within them [cells].
        """
        if self._asked != (level, alpha, limits is None):
            self._asked, self._version[:] = (level, alpha, limits is None), -1
        found = _nothing(wanted.size)
        cells, times = np.nonzero(wanted.T)
        if cells.size:
            version = window.version[times, self._rows[cells]]
            first = np.diff(cells, prepend=-1) > 0
            before = np.where(first, self._version[cells], np.roll(version, 1))
            new = np.flatnonzero(version != before)
            known = _joined(self._last, self._compute(window, times[new], cells[new], level, alpha, limits))
            # Of each, where it is known from: those that are not new say what the same cell said before.
            source = np.where(first, cells, -1)
            source[new] = self._rows.size + np.arange(new.size)
            source = source[np.maximum.accumulate(np.where(source >= 0, np.arange(cells.size), 0))]
            at = times * self._rows.size + cells
            for one, of in zip(found, known, strict=True):
                one[..., at] = of[..., source]
            last = np.flatnonzero(np.diff(cells, append=-1))
            self._version[cells[last]] = version[last]
            for one, of in zip(self._last, known, strict=True):
                one[..., cells[last]] = of[..., source[last]]
        shape = wanted.shape
        return FoundBounds(found.values.reshape(4, *shape), found.odd.reshape(shape), found.notes.reshape(shape))

    def _compute(
        self, window: WindowStates, times: Numbers, cells: Numbers, level: float, alpha: float, limits: Floats | None
    ) -> FoundBounds:
        found = _nothing(cells.size)
        for begin in range(0, cells.size, _AT_ONCE):
            here = np.arange(begin, min(begin + _AT_ONCE, cells.size))
            if limits is not None:
                here = self._not_within(window, times, cells, here, alpha, limits, found)
            if not here.size:
                continue
            rows = window.rows(times[here], self._rows[cells[here]])
            at = here[rows.places]
            if not at.size:
                continue
            some = intervals_of_rows(self._clause, self._assumptions, rows, alpha_lower=level, alpha_upper=alpha)
            if some is None:
                found.odd[at] = True
            else:
                found.values[:, at] = (some.estimate, some.lower, some.upper, some.samples)
                found.odd[at], found.notes[at], self.method = some.odd, some.note, some.method
        return found

    def _not_within(
        self,
        window: WindowStates,
        times: Numbers,
        cells: Numbers,
        which: Numbers,
        alpha: float,
        limits: Floats,
        found: FoundBounds,
    ) -> Numbers:
        """Those whose bounds have to be looked for; of the others it is noted that they are within their limits."""
        rows = window.rows(times[which], self._rows[cells[which]])
        at = which[rows.places]
        if at.size:
            within = rows_within(self._clause, rows, limits[cells[at]], alpha_upper=alpha)
            kept = at[within]
            found.values[2, kept], found.values[3, kept] = limits[cells[kept]], rows.total[within]
            left = np.ones(which.size, np.bool_)
            left[rows.places[within]] = False
            which = which[left]
        return which


def _nothing(size: int) -> FoundBounds:
    return FoundBounds(np.tile(_NOTHING, (1, size)), np.zeros(size, np.bool_), np.full(size, "", np.object_))


def _joined(one: FoundBounds, other: FoundBounds) -> FoundBounds:
    return FoundBounds(*(np.concatenate(parts, axis=-1) for parts in zip(one, other, strict=True)))
