"""Takes a message's plain points, in C (`fold.c`): each against its row, and what it adds into a slot.

Whatever a point says that is not the usual case of `point_streams` leaves it, and what follows of its stream in the
message, to the code that takes points one by one. So does a sum so close to the border of what its buckets allow that
rounding might decide otherwise.
"""

from __future__ import annotations

from ctypes import Structure, addressof
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kc_otel.judge.otlp.wire_columns import ColumnMessage
from kc_otel.machine_code import ADDRESS, DOUBLE, NUMBER, function
from kc_otel.stats.histogram_columns import SideColumns

Array = NDArray[Any]

SIDE: Final = 160
"""Buckets of each sign that a value in a row may have: as many as OpenTelemetry's SDKs send."""
SPAN: Final = 256
"""Buckets of each sign that a slot has room for; more than SIDE."""

ROW: Final = np.dtype(
    [(name, np.int64) for name in ("start", "time", "scale", "count", "zero_count", "series", "pair", "contract")]
    + [(name, np.int64) for name in ("positive_size", "positive_offset", "negative_size", "negative_offset")]
    + [(name, np.int64) for name in ("loaded", "dirty", "blocked", "at", "room", "wide")]
    + [(name, np.float64) for name in ("sum", "min", "max", "zero_threshold", "least", "least_negative", "magnitude")]
    + [("heard", np.float64)]
)
SLOT: Final = np.dtype(
    [(name, np.int64) for name in ("series", "short", "long", "scale", "count", "zero_count", "observed")]
    + [(name, np.int64) for name in ("positive_base", "negative_base", "has_positive", "has_negative")]
    + [(name, np.float64) for name in ("zero_threshold", "sum", "carry", "min", "max", "newest", "now")]
)
LIMITS: Final = np.dtype(
    [(name, np.int64) for name in ("future", "start", "oldest", "gap")] + [("short", np.float64), ("long", np.float64)]
)
NOT_LOADED, LOADED, NEW = 0, 1, 2
"""Of a row whose stream takes points by itself, of one that takes them, and of one that waits for its first point."""
NONE, CLOSED = -1, -2
"""Of a series that has no slot, and of one that takes nothing from columns."""
_LEAST_SCALE: Final = -2
_MOST_SCALE: Final = 20


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
_counts_of: Final = function("kc_counts_of", ADDRESS, ADDRESS, NUMBER, ADDRESS)


class _Known(Structure):
    """State of the fold, in the layout of `fold.c`."""

    _fields_ = (
        *(("rows", ADDRESS), ("counts", ADDRESS)),
        *(("slots", ADDRESS), ("slot_buckets", ADDRESS), ("most_slots", NUMBER)),
        *(("slot_of", ADDRESS), ("limits", ADDRESS), ("powers", ADDRESS)),
    )


class Known:
    """Arrays that points are folded into; they are handed over once, not with every message.

    ROW [r]; the words of their buckets, uint32 [w]; SLOT [s]; their buckets, int64 [2, s, SPAN]; the slots of each
    series, int64 [series, 2]; LIMITS [contracts].
    """

    def __init__(
        self, rows: Array, counts: Array, slots: Array, slot_buckets: Array, slot_of: Array, limits: Array
    ) -> None:
        self.arrays = (rows, counts, slots, slot_buckets, slot_of, limits)
        row, words, slot, buckets, of, limit = (array.ctypes.data for array in self.arrays)
        self._known = _Known(row, words, slot, buckets, slots.size, of, limit, _POWERS.ctypes.data)
        self._address = addressof(self._known)

    def fold(
        self,
        message: ColumnMessage,
        part: tuple[int, int],
        used: int,
        now: float,
        number: int,
        heard: NDArray[np.bool_],
        gaps: NDArray[np.int64],
    ) -> int:
        """Take the plain ones of the points in `part`, from its first to before its last, which arrived at `now`.

        Each needs room for a slot. A stream's points after one that is left are left as well, because their outcome may
        depend on it, and so are those of rows that are `blocked` by the number of this message. `heard` gets 1 for
        pairs of kernels that were heard of, and `gaps` one more for the contract of each point that came late. Returns
        how many slots are in use.
        """
        points, rows, *into = (
            array.ctypes.data for array in (message.points, message.rows, message.taken, heard, gaps)
        )
        slots: int = _fold(self._address, message.body, points, rows, *part, used, now, number, *into)
        return slots


def used_parts(slots: Array, buckets: Array, which: NDArray[np.int64], side: int) -> SideColumns:
    """Return the used buckets of some slots, of one sign (0 positive, 1 negative), from all slots' buckets of it."""
    size = which.size
    counts, found = np.empty(size * SPAN, np.int64), np.empty(2 * size + 1, np.int64)
    begin, of = found.ctypes.data, found.itemsize
    into = begin, begin + size * of, counts.ctypes.data, begin + 2 * size * of
    total = _used_parts(slots.ctypes.data, buckets.ctypes.data, which.ctypes.data, size, side, *into)
    return SideColumns.packed(found[:size], found[size:-1], counts[:total], int(found[-1]))


def counts_of(rows: Array, counts: Array, which: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the counts of some rows' buckets: positive and then negative ones, one row after the other."""
    known = _Known(rows.ctypes.data, counts.ctypes.data)
    found = np.empty(int(rows["positive_size"][which].sum() + rows["negative_size"][which].sum()), np.int64)
    _counts_of(addressof(known), which.ctypes.data, which.size, found.ctypes.data)
    return found
