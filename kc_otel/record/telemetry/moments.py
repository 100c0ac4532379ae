"""Accumulators of quantities in every slice: counts per bucket, sums and extremes."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kc_otel.record.measure.sampled import TOKEN
from kc_otel.record.telemetry.buckets import LogRatioCells, Slots
from kc_otel.record.telemetry.reduce import Reduced
from kc_otel.stats.histogram import ExponentialHistogram

_ROWS_PER_GROWTH: Final = 64


class Moments:
    """Sums, minima and maxima per slice of `width` quantities."""

    def __init__(self, slices: int, width: int) -> None:
        self.totals = np.zeros((slices, width))
        self.low = np.full((slices, width), np.inf)
        self.high = np.full((slices, width), -np.inf)

    def add(self, membership: NDArray[np.bool_], stats: NDArray[np.float64]) -> None:
        """Add sums, minima and maxima of rows [3, n, width] that belong to slices as `membership` [n, slices] says."""
        totals, low, high = stats
        # Not a matrix product: its threads would compete with the caller's, and rows are few.
        for slice in np.flatnonzero(membership.any(0)):
            rows = membership[:, slice]
            self.totals[slice] += totals[rows].sum(0)
            np.minimum(self.low[slice], low[rows].min(0), out=self.low[slice])
            np.maximum(self.high[slice], high[rows].max(0), out=self.high[slice])

    def add_by_slice(self, values: NDArray[np.float64]) -> None:
        """Add values [n, slices] of the only quantity; NaN where a slice has none."""
        there = ~np.isnan(values)
        self.totals[:, 0] += np.where(there, values, 0.0).sum(0)
        np.minimum(self.low[:, 0], np.where(there, values, np.inf).min(0), out=self.low[:, 0])
        np.maximum(self.high[:, 0], np.where(there, values, -np.inf).max(0), out=self.high[:, 0])

    def of(self, slice: int, column: int) -> tuple[float, float, float]:
        """Sum, minimum and maximum."""
        at = slice, column
        return float(self.totals[at]), float(self.low[at]), float(self.high[at])


class TokenStreams:
    """All quantities that are functions of a token's log ratio, counted together."""

    def __init__(self, slices: int, cells: LogRatioCells) -> None:
        self._cells = cells
        self._counts = np.zeros((slices, cells.size), dtype=np.int64)
        self._moments = Moments(slices, len(TOKEN))

    def add(self, reduced: Reduced, membership: NDArray[np.bool_]) -> None:
        """Add a batch whose measured rows belong to slices as `membership` [rows, slices] says."""
        self._counts += reduced.cells
        self._moments.add(membership, reduced.stats[:, :, : len(TOKEN)])

    def histograms(self, slice: int, quantities: Collection[str]) -> dict[str, ExponentialHistogram]:
        """Histogram of each of the quantities that is one of tokens; empty when nothing was counted."""
        counts = self._counts[slice]
        if not counts.any():
            return {}
        return {
            key: self._cells.slots.histogram(*self._cells.per_slot(key, counts), *self._moments.of(slice, column))
            for column, key in enumerate(TOKEN)
            if key in quantities
        }


class QuantityStream:
    """One quantity. Only the range of buckets that was ever used takes memory."""

    def __init__(self, slices: int, slots: Slots) -> None:
        self._slots = slots
        self._first = slots.center
        self._counts = np.zeros((slices, 1), dtype=np.int64)
        self._moments = Moments(slices, 1)

    def add(self, values: NDArray[np.float64], membership: NDArray[np.bool_]) -> None:
        """Add finite values [n] that belong to slices as `membership` [n, slices] says."""
        self.add_by_slice(np.where(membership, values[:, None], np.nan))

    def add_by_slice(self, values: NDArray[np.float64]) -> None:
        """Add values [n, slices] that differ by slice; NaN where a slice has none."""
        rows, slices = np.nonzero(~np.isnan(values))
        if not rows.size:
            return
        there = values[rows, slices]
        slot = self._slots.of_exact(there)
        self._reserve(int(slot.min()), int(slot.max()))
        np.add.at(self._counts, (slices, slot - self._first), 1)
        self._moments.add_by_slice(values)

    def add_counted(self, counts: NDArray[np.int64], membership: NDArray[np.bool_], stats: NDArray[np.float64]) -> None:
        """Add counts per slice and slot [slices, slots], with sums, minima and maxima per row [3, n]."""
        used = np.flatnonzero(counts.any(0))
        if not used.size:
            return
        first, last = int(used[0]), int(used[-1])
        self._reserve(first, last)
        at = first - self._first
        self._counts[:, at : at + last - first + 1] += counts[:, first : last + 1]
        self._moments.add(membership, stats[:, :, None])

    def histogram(self, slice: int) -> ExponentialHistogram | None:
        """The slice's histogram; None when nothing was counted."""
        counts = self._counts[slice]
        if not counts.any():
            return None
        return self._slots.histogram(self._first, counts, *self._moments.of(slice, 0))

    def _reserve(self, first: int, last: int) -> None:
        low, high = self._first, self._first + self._counts.shape[1]
        if low <= first and last < high:
            return
        new_low = low if low <= first else max(0, first - _ROWS_PER_GROWTH)
        new_high = high if last < high else min(self._slots.size, last + 1 + _ROWS_PER_GROWTH)
        counts = np.zeros((self._counts.shape[0], new_high - new_low), dtype=np.int64)
        counts[:, low - new_low : high - new_low] = self._counts
        self._first, self._counts = new_low, counts
