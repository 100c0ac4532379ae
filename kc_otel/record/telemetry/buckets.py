"""Bucket of a number in a base-2 exponential histogram, exact and for millions of numbers at once.

Bucket i of scale s holds (2^(i/2^s), 2^((i+1)/2^s)], negative numbers mirrored: the mapping of the OpenTelemetry data
model. A logarithm of each value is slow and wrong next to the boundaries: buckets are found by their bounds.

One partition of the log ratio l serves every quantity of a sampled token: l, |l|, w, (1-w)+, w - 1 - l and (w-1)^2 are
all functions of l that rise or fall throughout on either side of zero. Cut the line of l wherever any of them enters
another bucket, and finding a token's cell, once, is as good as finding its bucket in six histograms: counts per cell
become counts per bucket only when somebody asks. The bits of l say its cell: sign, exponent and the upper eleven bits
of the mantissa index a table that knows the cell of everything with that prefix, and the few prefixes that a boundary
runs through are settled by a binary search.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from functools import cache, cached_property, partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kc_otel.contract.limits import ZERO_THRESHOLD
from kc_otel.record.measure.sampled import HIGHEST, LOWEST, TOKEN
from kc_otel.stats.histogram import Buckets, Histogram

_SCALE: Final = 4  # resolves 4.4 %; exports have coarser buckets where the contract's layouts ask for them
_SLOTS_PER_GROWTH: Final = 64

_MAX_FLOAT32: Final = float(np.finfo(np.float32).max)
_MAX_EXPONENT: Final = 128  # float32 ends below 2^128
_MIN_EXPONENT: Final = -30

_PREFIX_SHIFT_BITS: Final = 12
_PREFIX_COUNT: Final = 1 << (31 - _PREFIX_SHIFT_BITS)
_AMBIGUOUS_BUCKET: Final = 0xFFFF
_MIN_VALUES_FOR_TABLE: Final = 1 << 17
_NO_MOMENTS: Final = np.array([0.0, np.inf, -np.inf])  # sum, minimum and maximum of no values

Crosses = Callable[[NDArray[np.float64]], NDArray[np.bool_]]


class Slots:
    """The buckets as consecutive slots in ascending order of value, the zero bucket at `center`.

    Values closer to zero than `ZERO_THRESHOLD` are in the zero bucket, those that are farther than float32 reaches in
    the outermost.
    """

    def __init__(self) -> None:
        self.lowest_index: Final = _MIN_EXPONENT << _SCALE
        index = np.arange(self.lowest_index, _MAX_EXPONENT << _SCALE)
        whole, part = np.divmod(index, 1 << _SCALE)
        self.bounds: Final[NDArray[np.float64]] = np.ldexp(np.exp2(part / (1 << _SCALE)), whole)
        """Lower bounds of the positive buckets, ascending: ZERO_THRESHOLD is the first."""
        self.center: Final = self.bounds.size
        self.size: Final = 2 * self.bounds.size + 1

    def locate(self, values: NDArray[np.float64]) -> NDArray[np.intp]:
        """Slot of each value; values [n] are not NaN."""
        outward = np.searchsorted(self.bounds, np.abs(values), side="left")
        return np.where(values < 0, self.center - outward, self.center + outward)

    def histogram(self, first: int, counts: NDArray[np.int64], sum: float, minimum: float, maximum: float) -> Histogram:
        """The histogram of `counts[k]` observations in slot `first + k`."""
        center = self.center - first
        below, above = max(0, min(center, counts.size)), max(0, min(center + 1, counts.size))
        # Slots run towards -inf from the center down, which is the order that negative buckets count in.
        negative = Buckets(self.lowest_index + max(0, center - counts.size), counts[:below][::-1].copy())
        positive = Buckets(self.lowest_index + max(0, -center - 1), counts[above:].copy())
        return Histogram(
            scale=_SCALE,
            count=int(counts.sum()),
            sum=sum,
            zero_count=int(counts[below:above].sum()),
            positive=positive.trimmed(),
            negative=negative.trimmed(),
            minimum=minimum,
            maximum=maximum,
            zero_threshold=ZERO_THRESHOLD,
        )


@cache
def slots() -> Slots:
    """The slots, made once."""
    return Slots()


class LogRatioCells:
    """The line of l cut into cells, numbered in ascending order, and the bucket that each means for each quantity.

    Cell `center` lies around zero. A threshold of magnitudes belongs to the outer one of the two cells that it parts.
    """

    def __init__(self) -> None:
        self.slots: Final[Slots] = slots()
        # Thresholds as float32 bits, ascending and distinct.
        self._positive, self._negative = self._cuts(1.0, HIGHEST), self._cuts(-1.0, -LOWEST)
        self._located = 0
        self.center: Final = self._negative.size
        self.size: Final = self._negative.size + self._positive.size + 1
        positive, negative = self._positive.view(np.float32), -self._negative.view(np.float32)[::-1]
        # x > -t is x >= the float32 after -t, so that one ascending array of edges serves both signs.
        after = -(self._negative - np.uint32(1)).view(np.float32)[::-1]
        self.edges: Final[NDArray[np.float32]] = np.concatenate([after, positive])
        # Of each cell the value closest to zero.
        within = np.concatenate([negative, [0.0], positive], dtype=np.float64)
        self._slot: Final = {key: self.slots.locate(quantity(within)) for key, quantity in TOKEN.items()}

    def locate(self, values: NDArray[np.float32]) -> NDArray[np.uint16]:
        """Cell of each value, uint16 [n]; values [n] are contiguous and not NaN, infinite ones are in the outermost."""
        if self._located < _MIN_VALUES_FOR_TABLE:
            self._located += values.size
            return np.searchsorted(self.edges, values, side="right").astype(np.uint16)
        # One less, so that powers of two, which close a bucket, end a prefix and are never ambiguous.
        prefix = values.view(np.uint32) - np.uint32(1)
        prefix >>= np.uint32(_PREFIX_SHIFT_BITS)
        cells = np.take(self._table, prefix.astype(np.intp), mode="wrap")
        unclear = np.flatnonzero(cells == _AMBIGUOUS_BUCKET)
        if unclear.size:
            cells[unclear] = np.searchsorted(self.edges, values[unclear], side="right")
        return cells

    @cached_property
    def _table(self) -> NDArray[np.uint16]:
        first = (np.arange(_PREFIX_COUNT, dtype=np.uint32) << _PREFIX_SHIFT_BITS) + np.uint32(1)
        last = first + np.uint32((1 << _PREFIX_SHIFT_BITS) - 1)
        halves = []
        for thresholds, sign in ((self._positive, 1), (self._negative, -1)):
            inner = np.searchsorted(thresholds, first, side="right")
            outer = np.searchsorted(thresholds, last, side="right")
            cells = np.where(inner == outer, self.center + sign * inner, _AMBIGUOUS_BUCKET).astype(np.uint16)
            # +0 less one wraps to the negative half's last prefix, -0 to the positive half's; only NaN lies there.
            cells[-1] = self.center
            halves.append(cells)
        return np.concatenate(halves)

    def per_slot(self, quantity: str, counts: NDArray[np.int64]) -> tuple[int, NDArray[np.int64]]:
        """Counts per bucket of a quantity, from counts per cell [size]: the first slot, and counts from there on."""
        slot = self._slot[quantity]
        first = int(slot.min())
        per_slot = np.zeros(int(slot.max()) - first + 1, dtype=np.int64)
        np.add.at(per_slot, slot - first, counts)
        return first, per_slot

    def _cuts(self, sign: float, largest: float) -> NDArray[np.uint32]:
        def above(magnitude: NDArray[np.float64], quantity: Callable[[Any], Any]) -> NDArray[np.bool_]:
            # Along growing magnitudes of l a quantity's own magnitude leaves bounds behind, upwards or downwards; its
            # sign never changes on the way.
            found: NDArray[np.bool_] = abs(quantity(sign * magnitude)) > self.slots.bounds
            return found

        cuts = [magnitudes(partial(above, quantity=quantity), largest) for quantity in TOKEN.values()]
        return np.unique(np.concatenate(cuts))


@cache
def cells() -> LogRatioCells:
    """The joint partition, made once."""
    return LogRatioCells()


def magnitudes(holds: Crosses, largest: float = _MAX_FLOAT32) -> NDArray[np.uint32]:
    """Smallest float32 magnitudes from which on conditions are no longer what they are at 0, by bisection of the bits.

    `holds` says whether each condition holds, given one magnitude for each or one for all; once it has changed it must
    not change again, up to `largest`. Ascending and distinct, as bits; conditions that never change are left out.
    """
    end = int(np.float32(largest).view(np.uint32)) + 1
    at_zero = holds(np.zeros(1))
    low, high = np.zeros(at_zero.size, dtype=np.int64), np.full(at_zero.size, end, dtype=np.int64)
    for _ in range(math.ceil(math.log2(end)) + 1):
        middle = (low + high) // 2
        changed = at_zero != holds(np.minimum(middle, end - 1).astype(np.uint32).view(np.float32).astype(np.float64))
        high = np.where(changed, middle, high)
        low = np.where(changed, low, np.minimum(middle + 1, high))
    found: NDArray[np.uint32] = np.unique(high[high < end]).astype(np.uint32)
    return found


class TokenStreams:
    """All quantities that are functions of a token's log ratio, counted together."""

    def __init__(self, slices: int, cells: LogRatioCells) -> None:
        self._cells = cells
        self._counts = np.zeros((slices, cells.size), dtype=np.int64)
        self._moments = np.tile(_NO_MOMENTS[:, None, None], (1, slices, len(TOKEN)))

    def add(self, counts: NDArray[np.int64], membership: NDArray[np.bool_], stats: NDArray[np.float64]) -> None:
        """Add counts per slice and cell [slices, cells], with sums, minima and maxima per row [3, n, 6]."""
        self._counts += counts
        # Not a matrix product: its threads would compete with the caller's, and rows are few.
        for slice in np.flatnonzero(membership.any(0)):
            rows, (total, low, high) = membership[:, slice], self._moments[:, slice]
            more = stats[0, rows].sum(0), stats[1, rows].min(0), stats[2, rows].max(0)
            self._moments[:, slice] = total + more[0], np.minimum(low, more[1]), np.maximum(high, more[2])

    def histograms(self, slice: int, quantities: Collection[str]) -> dict[str, Histogram]:
        """Histogram of each of the quantities that is one of tokens; empty when nothing was counted."""
        counts = self._counts[slice]
        if not counts.any():
            return {}
        return {
            key: self._cells.slots.histogram(
                *self._cells.per_slot(key, counts), *self._moments[:, slice, column].tolist()
            )
            for column, key in enumerate(TOKEN)
            if key in quantities
        }


class QuantityStream:
    """One quantity. Only the range of buckets that was ever used takes memory."""

    def __init__(self, slices: int, slots: Slots) -> None:
        self._slots = slots
        self._first = slots.center
        self._counts = np.zeros((slices, 1), dtype=np.int64)
        self._moments = np.tile(_NO_MOMENTS[:, None], (1, slices))

    def add(self, values: NDArray[np.float64], membership: NDArray[np.bool_]) -> None:
        """Add values [n] that belong to slices as `membership` [n, slices] says; NaN for none."""
        known = ~np.isnan(values)
        if not known.all():
            values, membership = values[known], membership[known]
        if not values.size:
            return
        slot = self._slots.locate(values)
        for slice in np.flatnonzero(membership.any(0)):
            inside = np.flatnonzero(membership[:, slice])
            self._add_to(slice, values[inside], slot[inside])

    def add_by_slice(self, values: NDArray[np.float64]) -> None:
        """Add values [n, slices] that differ by slice; NaN where a slice has none."""
        known = ~np.isnan(values)
        for slice in np.flatnonzero(known.any(0)):
            there = values[known[:, slice], slice]
            self._add_to(slice, there, self._slots.locate(there))

    def _add_to(self, slice: np.intp, values: NDArray[np.float64], slot: NDArray[np.intp]) -> None:
        self._reserve(int(slot.min()), int(slot.max()))
        self._counts[slice] += np.bincount(slot - self._first, minlength=self._counts.shape[1])
        total, low, high = self._moments[:, slice]
        self._moments[:, slice] = total + values.sum(), min(low, values.min()), max(high, values.max())

    def histogram(self, slice: int) -> Histogram | None:
        """The slice's histogram; None when nothing was counted."""
        counts = self._counts[slice]
        if not counts.any():
            return None
        return self._slots.histogram(self._first, counts, *self._moments[:, slice].tolist())

    def _reserve(self, first: int, last: int) -> None:
        low, high = self._first, self._first + self._counts.shape[1]
        if low <= first and last < high:
            return
        new_low = low if low <= first else max(0, first - _SLOTS_PER_GROWTH)
        new_high = high if last < high else min(self._slots.size, last + 1 + _SLOTS_PER_GROWTH)
        counts = np.zeros((self._counts.shape[0], new_high - new_low), dtype=np.int64)
        counts[:, low - new_low : high - new_low] = self._counts
        self._first, self._counts = new_low, counts
