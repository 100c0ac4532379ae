"""Many exponential histograms as the rows of one matrix, so that bounds of all of them come from array operations.

Rows share the edges of their bins; where a histogram's extremes draw in the outermost bins, the row has edges of its
own there, as `ExponentialHistogram.binned` would give it. What does not fit beside the others (another scale or zero
bucket that has to be aligned first, extremes that only some parts know, edges that are not finite) is left to whoever
takes them one by one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kc_otel.stats.histogram import Buckets, ExponentialHistogram, edges_of

__all__ = ["Bins", "HistogramRows", "SideCounts", "rows_of"]

Floats = NDArray[np.float64]

_ROWS: Final = 512
"""Rows at a time: their matrices stay in a core's cache."""
_WIDEST: Final = 2048
"""Bins that rows may have together."""
_MOST: Final = 2**53
"""Observations up to which a double counts them exactly."""


@dataclass(frozen=True, slots=True, eq=False)
class HistogramRows:
    """Samples [R] of at least one observation each, in the same bins [B], in ascending order.

    Attributes:
        places: Number of each among what was given, int64 [R].
        shared: Edges that no extreme draws in: lower and upper, float64 [2, B].
        lower: Lower edges [R, B].
        upper: Upper edges [R, B].
        count: Observations, as doubles [R, B].
        total: Observations, as doubles [R].
        sum: Exact sums [R].
        minimum: No observation is smaller; -inf where that is unknown [R].
        maximum: No observation is larger; inf where that is unknown [R].
        observed: Whether `maximum` is an observation [R].
        ends: The first and the last bin with an observation, int64 [2, R].
    """

    places: NDArray[np.int64]
    shared: Floats
    lower: Floats
    upper: Floats
    count: Floats
    total: Floats
    sum: Floats
    minimum: Floats
    maximum: Floats
    observed: NDArray[np.bool_]
    ends: NDArray[np.int64]

    @classmethod
    def of(
        cls,
        places: NDArray[np.int64],
        shared: Floats,
        count: Floats,
        total: Floats,
        sum: Floats,
        minimum: Floats,
        maximum: Floats,
        observed: NDArray[np.bool_],
    ) -> HistogramRows:
        """Rows whose outermost bins are drawn in to their extremes."""
        lower, upper, ends = _drawn_in(shared, count, minimum, maximum)
        return cls(places, shared, lower, upper, count, total, sum, minimum, maximum, observed, ends)

    def added_up(self, of: Callable[[Floats], Floats], weight: Floats, *, upper: bool = False) -> Floats:
        """What a function of the bins' lower edges, or their upper ones, adds up to in each row [R, J].

        Args:
            of: Takes edges [k] to values [k, J].
            weight: How often each edge counts [R, B].
            upper: Whether the upper edges are meant.
        """
        own, row, left = self.upper if upper else self.lower, np.arange(len(weight)), weight.copy()
        outermost = []
        for end in self.ends:  # these may have edges of their own
            outermost.append(of(own[row, end]) * left[row, end][:, None])
            left[row, end] = 0.0
        total: Floats = left @ of(self.shared[int(upper)]) + outermost[0] + outermost[1]
        return total

    def surely_above(self, threshold: float) -> Floats:
        """`fractions.surely_above` of each row [R]."""
        surely: Floats = (self.count * (self.lower > threshold)).sum(axis=1)
        if threshold > 0.0:  # a positive bucket that begins at the threshold is open there
            begins = (self.lower == threshold) & (self.upper > threshold) & (self.minimum < threshold)[:, None]
            surely += (self.count * begins).sum(axis=1)
        return surely


def rows_of(samples: Sequence[Sequence[ExponentialHistogram]]) -> Iterator[HistogramRows]:
    """The samples that fit beside each other, a few hundred at a time.

    Args:
        samples: Of each, the histograms that it is the union of.
    """
    groups: dict[tuple[int, float, bool], list[int]] = {}
    for number, parts in enumerate(samples):
        if parts and (kind := _kind(parts)) is not None:
            groups.setdefault(kind, []).append(number)
    for kind, places in groups.items():
        for begin in range(0, len(places), _ROWS):
            some = places[begin : begin + _ROWS]
            rows = _rows(some, [samples[place] for place in some], *kind)
            if rows is not None:
                yield rows


def _kind(parts: Sequence[ExponentialHistogram]) -> tuple[int, float, bool] | None:
    """Scale and zero threshold that all parts have, and whether they know their extremes; None where they differ."""
    kind, count = (parts[0].scale, parts[0].zero_threshold, parts[0].minimum <= parts[0].maximum), 0
    for part in parts:
        if (part.scale, part.zero_threshold, part.minimum <= part.maximum) != kind or not part.count:
            return None
        if not (kind[2] or (math.isnan(part.minimum) and math.isnan(part.maximum))):
            return None
        count += part.count
    return kind if count < _MOST else None


def _rows(
    places: list[int], samples: list[Sequence[ExponentialHistogram]], scale: int, threshold: float, known: bool
) -> HistogramRows | None:
    parts = [part for sample in samples for part in sample]
    sizes = np.array([len(sample) for sample in samples])
    row, begins = np.repeat(np.arange(sizes.size), sizes), np.cumsum(sizes) - sizes
    up, down = SideCounts.of([part.positive for part in parts]), SideCounts.of([part.negative for part in parts])
    bins = Bins(down.first, down.end, up.first, up.end)
    if bins.size > _WIDEST:
        return None
    zeros = np.array([part.zero_count for part in parts], np.float64)
    flat: Floats = np.bincount(row * bins.size + bins.zero, zeros, len(places) * bins.size).astype(np.float64)
    for side, at in ((up, bins.of_positive(up.bucket)), (down, bins.of_negative(down.bucket))):
        flat += np.bincount(row[side.part] * bins.size + at, side.counts, flat.size)
    count = flat.reshape(len(places), bins.size)
    shared, total = bins.edges(scale, threshold), count.sum(axis=1)
    if not np.isfinite(shared).all() or not total.all():
        return None
    most = np.array([part.maximum for part in parts])
    minimum = np.minimum.reduceat(np.array([part.minimum for part in parts]), begins)
    maximum = np.maximum.reduceat(most, begins)
    observed = np.array([part.maximum_observed for part in parts]) & (most == maximum[row])
    if not known:  # what is merged begins and ends where its outermost buckets do
        minimum = np.where(sizes > 1, shared[0][(count > 0).argmax(axis=1)], -math.inf)
        maximum, observed = np.full(sizes.size, math.inf), np.zeros_like(observed)
    sums = np.add.reduceat(np.array([part.sum for part in parts]), begins)
    observed = np.logical_or.reduceat(observed, begins)
    return HistogramRows.of(np.array(places), shared, count, total, sums, minimum, maximum, observed)


class Bins(NamedTuple):
    """Bins that rows share: buckets of negative observations, the zero bucket, buckets of positive ones.

    Attributes:
        down_first: Number of the first bucket of negative observations, by absolute value.
        down_end: Number of the bucket after the last one.
        up_first: Number of the first bucket of positive observations.
        up_end: Number of the bucket after the last one.
    """

    down_first: int
    down_end: int
    up_first: int
    up_end: int

    @property
    def zero(self) -> int:
        """Number of the zero bucket's bin."""
        return self.down_end - self.down_first

    @property
    def size(self) -> int:
        """How many bins there are."""
        return self.zero + 1 + self.up_end - self.up_first

    def with_room_for(self, down: SideCounts, up: SideCounts, spare: int) -> Bins:
        """Bins that have these buckets, too, and some more than that where they have to be other ones."""
        sides = []
        for first, end, side in ((self.down_first, self.down_end, down), (self.up_first, self.up_end, up)):
            if side.first == side.end or (first <= side.first and side.end <= end):
                sides += [first, end]
            elif first == end:
                sides += [side.first - spare, side.end + spare]
            else:
                low = first if first <= side.first else side.first - spare
                sides += [low, end if side.end <= end else side.end + spare]
        return Bins(*sides)

    def of_positive(self, bucket: NDArray[np.int64]) -> NDArray[np.int64]:
        """Bins of buckets of positive observations."""
        return bucket + (self.zero + 1 - self.up_first)

    def of_negative(self, bucket: NDArray[np.int64]) -> NDArray[np.int64]:
        """Bins of buckets of negative observations."""
        return self.down_end - 1 - bucket

    def edges(self, scale: int, threshold: float) -> Floats:
        """Lower and upper edges [2, B]."""
        above = np.maximum(edges_of(self.up_first, self.up_end, scale), threshold)
        below = -np.maximum(edges_of(self.down_first, self.down_end, scale), threshold)[::-1]
        return np.array([[*below[:-1], -threshold, *above[:-1]], [*below[1:], threshold, *above[1:]]])


class SideCounts(NamedTuple):
    """The buckets of one sign of many histograms, one after the other [n].

    Attributes:
        first: The lowest bucket of any.
        end: The bucket after the highest of any.
        part: Number of the histogram.
        bucket: Number of the bucket.
        counts: Observations in it, as doubles.
    """

    first: int
    end: int
    part: NDArray[np.int64]
    bucket: NDArray[np.int64]
    counts: Floats

    @classmethod
    def of(cls, sides: list[Buckets]) -> SideCounts:
        """These buckets."""
        sizes = np.array([side.counts.size for side in sides])
        offsets = np.array([side.offset for side in sides])
        used = sizes > 0
        if not used.any():
            return cls(0, 0, np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0))
        counts = np.concatenate([side.counts for side in sides])
        bucket = np.repeat(offsets - (np.cumsum(sizes) - sizes), sizes) + np.arange(counts.size)
        first, end = int(offsets[used].min()), int((offsets + sizes)[used].max())
        return cls(first, end, np.repeat(np.arange(sizes.size), sizes), bucket, counts.astype(np.float64))


def _drawn_in(
    shared: Floats, count: Floats, minimum: Floats, maximum: Floats
) -> tuple[Floats, Floats, NDArray[np.int64]]:
    """Edges drawn in to the extremes, as `binned.clipped` draws them in: that moves the outermost bins only."""
    used, row = count > 0, np.arange(len(count))
    first, last = used.argmax(axis=1), used.shape[1] - 1 - used[:, ::-1].argmax(axis=1)
    lower, upper = np.tile(shared[0], (len(count), 1)), np.tile(shared[1], (len(count), 1))
    lower[row, first] = np.maximum(lower[row, first], np.minimum(minimum, upper[row, first]))
    upper[row, last] = np.minimum(upper[row, last], np.maximum(maximum, lower[row, last]))
    upper[row, first] = np.maximum(upper[row, first], lower[row, first])
    upper[row, last] = np.maximum(upper[row, last], lower[row, last])
    return lower, upper, np.array([first, last])
