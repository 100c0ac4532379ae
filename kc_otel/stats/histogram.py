"""Histograms as mergeable values: base-2 exponential ones, and those with explicit bounds that others send.

Buckets are those of the OpenTelemetry data model: at scale s, bucket i of the positive range holds the values in
(2^(i/2^s), 2^((i+1)/2^s)], the negative range mirrors it, and the zero bucket holds what is closer to zero than
anybody cares to resolve. Counts and sums are exact; a value inside a bucket is known only to its edges.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kc_otel.stats.interval import Binned, clipped

MAX_BUCKETS: Final = 4096
"""Widest range of buckets that merging makes; wider ones are made coarser. At scale 4 it spans 2^256."""
EXPLICIT: Final = 127
"""Stands for the scale of a histogram with explicit bounds; exponential ones have none that is as fine."""
_ROUNDING_ERROR: Final = 1e-9
"""Relative error that a sum of doubles may have picked up."""
_UNSAID_ZERO: Final = 2.0**-30
"""Half width that a zero bucket may have without saying so: OpenTelemetry's SDK for Python cannot say it."""


@dataclass(frozen=True, slots=True, eq=False)
class Buckets:
    """Counts of consecutive buckets, the first of them with index `offset`."""

    offset: int
    counts: NDArray[np.int64]

    @classmethod
    def empty(cls) -> Buckets:
        """Return a range without buckets."""
        return cls(0, np.zeros(0, dtype=np.int64))

    @property
    def end(self) -> int:
        """Index after the last bucket."""
        return self.offset + self.counts.size

    def trimmed(self) -> Buckets:
        """The same without empty buckets at the ends."""
        used = np.flatnonzero(self.counts)
        if not used.size:
            return Buckets.empty()
        first, last = int(used[0]), int(used[-1])
        return Buckets(self.offset + first, self.counts[first : last + 1])

    def downscaled(self, by: int) -> Buckets:
        """The same at a scale that is `by` lower: 2^by neighbouring buckets become one."""
        if by == 0 or not self.counts.size:
            return self
        first = self.offset >> by
        size = ((self.end - 1) >> by) - first + 1
        starts = ((np.arange(size, dtype=np.int64) + first) << by) - self.offset
        starts[0] = 0
        return Buckets(first, np.add.reduceat(self.counts, starts))

    def plus(self, other: Buckets, sign: int = 1) -> Buckets:
        """Bucket-wise sum, or difference with sign=-1, at the same scale."""
        return Buckets.union([self, Buckets(other.offset, sign * other.counts)])

    def least(self, scale: int) -> float:
        """The sum of |x| if every observation lay at the lower edge of the bucket below its own."""
        if not self.counts.size:
            return 0.0
        edges = np.exp2((np.arange(self.counts.size, dtype=np.float64) + (self.offset - 1)) * 2.0**-scale)
        return float(edges @ self.counts)

    @classmethod
    def union(cls, parts: Sequence[Buckets]) -> Buckets:
        """Bucket-wise sum of any number of them, at the same scale."""
        parts = [part for part in parts if part.counts.size]
        if len(parts) < 2:
            return parts[0] if parts else cls.empty()
        first = min(part.offset for part in parts)
        counts = np.zeros(max(part.end for part in parts) - first, dtype=np.int64)
        for part in parts:
            counts[part.offset - first : part.end - first] += part.counts
        return cls(first, counts)


@dataclass(frozen=True, slots=True, eq=False)
class Histogram:
    """A base-2 exponential histogram, or one with explicit bounds.

    Attributes:
        scale: Resolution: each bucket's edges differ by the factor 2^(2^-scale); EXPLICIT where there are bounds.
        count: Number of observations.
        sum: Exact sum of the observations; nan when unknown.
        zero_count: Observations in the zero bucket, |x| <= zero_threshold.
        positive: Buckets of the positive observations.
        negative: Buckets of the negative observations, by absolute value.
        minimum: No observation is smaller; nan when unknown or empty.
        maximum: No observation is larger; nan when unknown or empty.
        zero_threshold: Half width of the zero bucket.
        maximum_observed: Whether `maximum` is itself an observation, as in a received histogram, and not only a bound
            on them, as in the difference of two.
        layout: Explicit bounds e0..ek: positive bucket 0 is (-inf, e0], the next (e0, e1], the last (ek, inf). None for
            an exponential histogram. Only those of one layout can be merged; exponential ones are made coarser.
    """

    scale: int
    count: int
    sum: float
    zero_count: int
    positive: Buckets
    negative: Buckets
    minimum: float = math.nan
    maximum: float = math.nan
    zero_threshold: float = 0.0
    maximum_observed: bool = True
    layout: tuple[float, ...] | None = None

    @classmethod
    def empty(cls, scale: int, layout: tuple[float, ...] | None = None) -> Histogram:
        """A histogram of nothing."""
        return cls(scale, 0, 0.0, 0, Buckets.empty(), Buckets.empty(), layout=layout)

    @classmethod
    def explicit(
        cls,
        edges: tuple[float, ...],
        counts: NDArray[np.int64],
        sum: float,
        minimum: float = math.nan,
        maximum: float = math.nan,
    ) -> Histogram:
        """A histogram with the bounds e0..ek, and counts, int64 [k + 2]; no bounds are a single bucket, a counter."""
        total, buckets, none = int(counts.sum()), Buckets(0, counts), Buckets.empty()
        return cls(EXPLICIT, total, sum, 0, buckets, none, minimum, maximum, layout=edges)

    @classmethod
    def union(cls, parts: Iterable[Histogram]) -> Histogram:
        """Histogram of all samples together, at the coarsest of their scales, or coarser to stay in MAX_BUCKETS.

        Faster than merging one by one. Where the layout changed, only those of the last part's.
        """
        every = [*parts]
        parts = [part for part in every if part.count and part.layout == every[-1].layout]
        if len(parts) < 2:
            return (parts or every[-1:] or [cls.empty(0)])[0]
        minimum, maximum, observed = _together(parts)  # aligned buckets are wider
        parts = _aligned(parts)
        return replace(
            parts[0],
            count=sum(part.count for part in parts),
            sum=math.fsum(part.sum for part in parts),
            zero_count=sum(part.zero_count for part in parts),
            positive=Buckets.union([part.positive for part in parts]),
            negative=Buckets.union([part.negative for part in parts]),
            minimum=minimum,
            maximum=maximum,
            maximum_observed=observed,
        )

    def merged(self, other: Histogram) -> Histogram:
        """Histogram of both samples together, as `union`; merging with an empty one changes nothing."""
        if not other.count:
            return self
        return Histogram.union((self, other))

    def downscaled(self, scale: int) -> Histogram:
        """The same at a lower or equal scale; a ValueError if it is higher than this histogram's."""
        by = self.scale - scale
        if by < 0:
            raise ValueError(f"scale: {scale} is finer than this histogram's {self.scale}")
        if by == 0:
            return self
        return replace(self, scale=scale, positive=self.positive.downscaled(by), negative=self.negative.downscaled(by))

    def sized(self, scale: int, zero_threshold: float, most: int) -> Histogram:
        """The same in fewer buckets: at most `most` of each sign, counted from just below the zero threshold upwards.

        It has this scale if the buckets suffice, otherwise a lower one. The zero threshold is a power of two, so that
        it is an edge at every scale.
        """
        sized = self._with_zero_threshold(zero_threshold).downscaled(scale)
        by, below = 0, round(math.log2(zero_threshold) * 2**scale) - 1
        while (max(sized.positive.end, sized.negative.end) >> by) - (below >> by) >= most:
            by += 1
        return sized.downscaled(scale - by)

    def since(self, earlier: Histogram) -> Histogram | None:
        """Return the observations after `earlier`, both cumulative from the same start; None on contradiction.

        A cumulative histogram does not contain the interval's own extremes. They are bounded by the edges of the
        outermost buckets of the difference, and are the cumulative extremes where those moved.
        """
        if self.layout != earlier.layout:
            return None
        if not earlier.count:
            return self
        a, b = _aligned([self, earlier])
        positive, negative = a.positive.plus(b.positive, -1).trimmed(), a.negative.plus(b.negative, -1).trimmed()
        zero_count, count = a.zero_count - b.zero_count, a.count - b.count
        if count < 0 or zero_count < 0 or (positive.counts < 0).any() or (negative.counts < 0).any():
            return None
        if not count:
            return Histogram.empty(a.scale, a.layout)
        delta = replace(
            a,
            count=count,
            sum=a.sum - b.sum,
            zero_count=zero_count,
            positive=positive,
            negative=negative,
            minimum=math.nan,
            maximum=math.nan,
        )
        low, high, _ = delta.extremes()
        minimum, maximum, observed = _moved(a, b, low, high)
        return replace(delta, minimum=minimum, maximum=maximum, maximum_observed=observed)

    def binned(self) -> Binned:
        """The view that bounds are computed from: bins in ascending order, clipped to the extremes."""
        parts = []
        # Values outside the zero bucket lie beyond its threshold, even if their bucket's edge does not.
        if self.negative.counts.size:
            edges = -np.maximum(edges_of(self.negative.offset, self.negative.end, self.scale), self.zero_threshold)[
                ::-1
            ]
            parts.append((edges[:-1], edges[1:], self.negative.counts[::-1]))
        if self.zero_count:
            zero = np.array([-self.zero_threshold, self.zero_threshold])
            parts.append((zero[:1], zero[1:], np.array([self.zero_count])))
        if self.positive.counts.size:
            edges = self._positive_edges()
            parts.append((edges[:-1], edges[1:], self.positive.counts))
        if len(parts) == 1:
            lower, upper, count = parts[0]
        elif parts:
            lower, upper, count = (np.concatenate(columns) for columns in zip(*parts, strict=True))
        else:
            lower, upper, count = np.zeros(0), np.zeros(0), np.zeros(0, dtype=np.int64)
        minimum, maximum = (value if math.isfinite(value) else math.nan for value in (self.minimum, self.maximum))
        return clipped(lower, upper, count, self.sum, minimum, maximum, self.maximum_observed)

    def _positive_edges(self) -> NDArray[np.float64]:
        """Edges of the positive buckets, beyond the zero bucket."""
        first, end = self.positive.offset, self.positive.end
        if self.layout is not None:
            return np.array((-math.inf, *self.layout, math.inf)[first : end + 1])
        return np.maximum(edges_of(first, end, self.scale), self.zero_threshold)

    def sums(self) -> tuple[float, float]:
        """Smallest and largest sum that the buckets allow; exponential ones with one bucket to spare on either side."""
        if self.layout is not None:
            edges, used = self._positive_edges(), np.flatnonzero(self.positive.counts)
            lower, upper = np.fmax(edges[used], self.minimum), np.fmin(edges[used + 1], self.maximum)
            return float(lower @ self.positive.counts[used]), float(upper @ self.positive.counts[used])
        zero = self.zero_count * max(self.zero_threshold, _UNSAID_ZERO)
        wider = 2.0 ** (3.0 * 2.0**-self.scale)
        positive, negative = self.positive.least(self.scale), self.negative.least(self.scale)
        return positive - negative * wider - zero, positive * wider - negative + zero

    def extremes(self) -> tuple[float, float, bool]:
        """Minimum, maximum, whether that was observed; from the outermost buckets where they are unknown."""
        if not (math.isnan(self.minimum) or math.isnan(self.maximum)):
            return self.minimum, self.maximum, self.maximum_observed
        down, up = self.negative.trimmed(), self.positive.trimmed()
        edges = [-self._edge(down.end), -self._edge(down.offset)] if down.counts.size else []
        edges += [-self.zero_threshold, self.zero_threshold] if self.zero_count else []
        edges += [self._edge(up.offset), self._edge(up.end)] if up.counts.size else []
        if not edges:
            return -math.inf, math.inf, False
        low, high = float(np.fmax(edges[0], self.minimum)), float(np.fmin(edges[-1], self.maximum))
        return low, high, not math.isnan(self.maximum) and self.maximum_observed

    def _edge(self, bucket: int) -> float:
        """Lower edge of a positive bucket, beyond the zero bucket."""
        if self.layout is not None:
            return (-math.inf, *self.layout, math.inf)[bucket]
        exponent: float = bucket * 2.0**-self.scale
        return max(math.inf if exponent >= 1024.0 else 2.0**exponent, self.zero_threshold)

    def _with_zero_threshold(self, threshold: float) -> Histogram:
        """The same with a wider zero bucket, that takes the buckets it reaches into; it grows to their outer edges."""
        if threshold <= self.zero_threshold:
            return self
        taken, kept = 0, []
        for side in (self.positive, self.negative):
            inside = int(np.searchsorted(edges_of(side.offset, side.end, self.scale)[:-1], threshold))
            used = np.flatnonzero(side.counts[:inside])
            if used.size:
                outer = float(edges_of(side.offset, side.end, self.scale)[used[-1] + 1])
                if outer > threshold:
                    return self._with_zero_threshold(outer)
            taken += int(side.counts[:inside].sum())
            kept.append(Buckets(side.offset + inside, side.counts[inside:]))
        return replace(
            self, zero_count=self.zero_count + taken, positive=kept[0], negative=kept[1], zero_threshold=threshold
        )


def _aligned(parts: list[Histogram]) -> list[Histogram]:
    """The same with one zero bucket, and at one scale at which their union has no more than MAX_BUCKETS a side."""
    threshold = max(part.zero_threshold for part in parts)
    while any(part.zero_threshold < threshold for part in parts):
        parts = [part._with_zero_threshold(threshold) for part in parts]  # noqa: SLF001 - its own kind
        threshold = max(part.zero_threshold for part in parts)
    scale = min(part.scale for part in parts)
    parts = [part.downscaled(scale) for part in parts]
    by = max(_excess([part.positive for part in parts]), _excess([part.negative for part in parts]))
    return [part.downscaled(scale - by) for part in parts]


def _excess(parts: list[Buckets]) -> int:
    """Return the reduction of scale with which the union has at most MAX_BUCKETS."""
    first = min((part.offset for part in parts if part.counts.size), default=0)
    last = max((part.end - 1 for part in parts if part.counts.size), default=0)
    by = 0
    while (last >> by) - (first >> by) >= MAX_BUCKETS:
        by += 1
    return by


def edges_of(first: int, end: int, scale: int) -> NDArray[np.float64]:
    """Edges of the positive buckets first..end-1, [end - first + 1]; inf where a double ends."""
    with np.errstate(over="ignore"):
        edges: NDArray[np.float64] = np.exp2(np.arange(first, end + 1) * 2.0**-scale)
    return edges


def sum_fits(histogram: Histogram, slack: float = 0.0) -> bool:
    """Return True if the sum is possible for observations in these buckets, with so much rounding error.

    A bucket's neighbours are allowed for, because senders may put a value at an edge on either side of it.
    """
    low, high = histogram.sums()
    rounding = slack + _ROUNDING_ERROR * (abs(low) + abs(high)) if math.isfinite(low) and math.isfinite(high) else slack
    return low - rounding <= histogram.sum <= high + rounding


def magnitude(histogram: Histogram) -> float:
    """The largest |sum| that observations in these buckets can have; inf where a bucket has no end."""
    return max(map(abs, histogram.sums()))


def _moved(later: Histogram, earlier: Histogram, low: float, high: float) -> tuple[float, float, bool]:
    """Minimum, maximum, and whether that was observed, of what came between, whose buckets reach from low to high."""
    moved_down, moved_up = later.minimum < earlier.minimum, later.maximum > earlier.maximum
    return (
        later.minimum if moved_down else float(np.fmax(low, later.minimum)),
        later.maximum if moved_up else float(np.fmin(high, later.maximum)),
        moved_up and later.maximum_observed,
    )


def _together(parts: Sequence[Histogram]) -> tuple[float, float, bool]:
    """`extremes` of all together."""
    extremes = [part.extremes() for part in parts]
    maximum = max(most for _, most, _ in extremes)
    observed = any(observed and most == maximum for _, most, observed in extremes)
    return min(least for least, _, _ in extremes), maximum, observed
