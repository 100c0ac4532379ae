"""Slots of what the streams of a contract counted, and the fold in C (`fold.c`) that adds a message's plain points up.

A plain point is taken against its stream's row, and what it counts is added into a slot of its series. Whatever a point
says that is not the usual case of `point_streams` leaves it, and what follows of its stream in the message, to the code
that takes points one by one. So does a sum so close to the border of what its buckets allow that rounding might decide
otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Structure, addressof
from typing import Any, Final

import numpy as np

from kc_otel.judge.columns.stream_rows import SIDE, StreamRows
from kc_otel.judge.otlp.wire_columns import ColumnMessage
from kc_otel.judge.point_streams import Horizon
from kc_otel.judge.series import PaneGrid
from kc_otel.machine_code import ADDRESS, DOUBLE, NUMBER, function
from kc_otel.stats.histogram_columns import HistogramColumns, SideColumns
from kc_otel.stats.interval import Floats, Numbers

SPAN: Final = 256
"""Buckets of each sign that a slot has room for; more than SIDE."""
SLOT: Final = np.dtype(
    [(name, np.int64) for name in ("series", "short", "long", "scale", "count", "zero_count", "observed")]
    + [(name, np.int64) for name in ("positive_base", "negative_base", "has_positive", "has_negative")]
    + [(name, np.float64) for name in ("zero_threshold", "sum", "carry", "min", "max", "newest", "now")]
)
LIMITS: Final = np.dtype(
    [(name, np.int64) for name in ("future", "start", "oldest", "gap")] + [("short", np.float64), ("long", np.float64)]
)
_NONE, _CLOSED = -1, -2
"""Of a series that has no slot, and of one that takes nothing from columns; of a slot whose series is gone."""
_LEAST_SCALE: Final = -2
_MOST_SCALE: Final = 20
_SLOT_COUNT: Final = 4096
POINTS_PER_CHUNK: Final = 1024
"""Points that are folded at once; they may need a slot each."""


def _powers() -> Any:
    ratios = np.array([2.0 ** (2.0**-scale) for scale in range(_LEAST_SCALE, _MOST_SCALE + 1)])
    with np.errstate(over="ignore"):  # so far apart are no two buckets that can be observed
        return np.concatenate([np.ones((ratios.size, 1)), np.cumprod(np.tile(ratios[:, None], SIDE), axis=1)], axis=1)


_POWERS: Final = _powers()
"""Powers of the ratio of a bucket's edges, by scale from -2 on [23, SIDE + 1]."""

_fold: Final = function(
    "kc_fold",
    *(ADDRESS, ADDRESS, ADDRESS, ADDRESS, NUMBER, NUMBER, NUMBER, DOUBLE, NUMBER, ADDRESS, ADDRESS, ADDRESS),
    result=NUMBER,
)
_used_parts: Final = function(
    "kc_used_parts", *(ADDRESS, ADDRESS, ADDRESS, NUMBER, NUMBER, ADDRESS, ADDRESS, ADDRESS, ADDRESS), result=NUMBER
)


class _Known(Structure):
    """State of the fold, in the layout of `fold.c`."""

    _fields_ = (
        *(("rows", ADDRESS), ("counts", ADDRESS)),
        *(("slots", ADDRESS), ("slot_buckets", ADDRESS), ("most_slots", NUMBER)),
        *(("slot_of", ADDRESS), ("limits", ADDRESS), ("powers", ADDRESS)),
    )


class SeriesSlots:
    """The slots that are in use, their buckets, positive and then negative ones, and whose they are.

    `_of` are the slots that each series counts into [series, 2], one for even and one for odd short panes: where a pane
    ends, some senders are still in the one before.
    """

    def __init__(self, streams: StreamRows, grids: Sequence[PaneGrid]) -> None:
        self._streams, self.used = streams, 0
        self._slots = np.zeros(_SLOT_COUNT, SLOT)
        self._buckets = np.zeros((2, _SLOT_COUNT, SPAN), np.int64)
        self._limits = np.zeros(1, LIMITS)
        self._limits["short"], self._limits["long"] = (grid.width for grid in grids)
        self._of = np.full((64, 2), _NONE)
        self._look()

    def _look(self) -> None:
        """Have the fold look at the arrays as they are now."""
        row, words, slot, buckets, of, limit = (
            array.ctypes.data
            for array in (self._streams.rows, self._streams.counts, self._slots, self._buckets, self._of, self._limits)
        )
        self._known = _Known(row, words, slot, buckets, _SLOT_COUNT, of, limit, _POWERS.ctypes.data)
        self._address = addressof(self._known)

    def open(self, series: int, *, plain: bool = True) -> None:
        """Take points of a series from columns from now on, or only those that come one by one."""
        if series >= len(self._of):
            self._of = np.concatenate([self._of, np.full((series, 2), _NONE)])
            self._look()
        if not plain:
            self._of[series] = _CLOSED
        elif self._of[series, 0] == _CLOSED:
            self._of[series] = _NONE

    def forget(self, series: Sequence[int]) -> None:
        """Forget what was counted of series that are gone; their numbers may be others' from now on."""
        self._of[series] = _NONE
        slots = self._slots["series"][: self.used]
        slots[np.isin(slots, series)] = _NONE

    @property
    def has_room(self) -> bool:
        """True if there is a slot for each point of a chunk."""
        return self.used + POINTS_PER_CHUNK <= _SLOT_COUNT

    def fold(self, message: ColumnMessage, rows: Numbers, first: int, horizon: Horizon, now: float, number: int) -> int:
        """Take the plain ones of a chunk's points, from `first` on, and note which ones in the message.

        They arrived at `now`; `rows` are those of the message's points, -1 for none [points]. A stream's points after
        one that is left are left as well, because their outcome may depend on it, and so are those of rows that are
        `blocked` by the number of this message. Returns how many points came after a gap.
        """
        limits = self._limits
        for name in ("future", "start", "oldest", "gap"):
            limits[name] = getattr(horizon, name)
        heard, gaps = np.zeros(len(self._of), np.bool_), np.zeros(1, np.int64)
        points, of, *into = (array.ctypes.data for array in (message.points, rows, message.taken, heard, gaps))
        last = min(first + POINTS_PER_CHUNK, rows.size)
        self.used = _fold(self._address, message.body, points, of, first, last, self.used, now, number, *into)
        return int(gaps[0])

    def take(self) -> tuple[Numbers, HistogramColumns, Floats, Floats] | None:
        """Take what was counted since the last call; None for nothing.

        That is series by number [n], a histogram of each [n], when it was observed last and when it arrived, Unix
        seconds.
        """
        used, self.used = self.used, 0
        every = self._slots[:used]
        which = np.flatnonzero(every["series"] != _NONE)
        if not which.size:
            return None
        of = every if which.size == used else every[which]
        self._of[of["series"]] = _NONE
        columns = HistogramColumns(
            of["scale"].copy(),
            of["zero_threshold"].copy(),
            of["count"].copy(),
            of["zero_count"].copy(),
            of["sum"] + of["carry"],
            of["min"].copy(),
            of["max"].copy(),
            of["observed"] != 0,
            np.full(which.size, None),
            *(self._used_parts(which, side) for side in (0, 1)),
        )
        return of["series"].copy(), columns, of["newest"].copy(), of["now"].copy()

    def _used_parts(self, which: Numbers, side: int) -> SideColumns:
        """Return the used buckets of some slots, of one sign: 0 positive, 1 negative."""
        size = which.size
        counts, found = np.empty(size * SPAN, np.int64), np.empty(2 * size + 1, np.int64)
        begin, of = found.ctypes.data, found.itemsize
        into = begin, begin + size * of, counts.ctypes.data, begin + 2 * size * of
        slots, buckets = self._slots.ctypes.data, self._buckets[side].ctypes.data
        total = _used_parts(slots, buckets, which.ctypes.data, size, side, *into)
        return SideColumns.packed(found[:size], found[size:-1], counts[:total], int(found[-1]))
