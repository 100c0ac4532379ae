"""Base-2 exponential histograms as mergeable values, and the view of a distribution that bounds are computed from.

Buckets are those of the OpenTelemetry data model: at scale s, bucket i of the positive range holds the values in
(2^(i/2^s), 2^((i+1)/2^s)], the negative range mirrors it, and the zero bucket holds what is closer to zero than
anybody cares to resolve. Counts, sums and extremes are exact; a value inside a bucket is known only to its edges.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

__all__ = ["Binned", "Buckets", "ExponentialHistogram"]


@dataclass(frozen=True, slots=True, eq=False)
class Binned:
    """A sample known through bins: each of `count[i]` observations lies in [lower[i], upper[i]], ascending.

    Attributes:
        lower: Lower edges, float64 [k], ascending.
        upper: Upper edges, float64 [k], ascending, clipped to the observed extremes.
        count: Observations per bin, int64 [k], all positive.
        total: Number of observations.
        sum: Exact sum of the observations.
        minimum: Smallest observation; nan when unknown or empty.
        maximum: Largest observation; nan when unknown or empty.
    """

    lower: NDArray[np.float64]
    upper: NDArray[np.float64]
    count: NDArray[np.int64]
    total: int
    sum: float
    minimum: float
    maximum: float

    @classmethod
    def of_samples(cls, values: NDArray[np.floating]) -> Binned:
        """The exact view of a sample [n]: one bin of no width per distinct value."""
        distinct, count = np.unique(np.asarray(values, dtype=np.float64), return_counts=True)
        return cls(
            lower=distinct,
            upper=distinct,
            count=count.astype(np.int64),
            total=int(count.sum()),
            sum=float(np.sum(values, dtype=np.float64)),
            minimum=float(distinct[0]) if distinct.size else math.nan,
            maximum=float(distinct[-1]) if distinct.size else math.nan,
        )

    @classmethod
    def of_explicit(
        cls, edges: Sequence[float], counts: Sequence[int], sum: float, minimum: float, maximum: float
    ) -> Binned:
        """From an explicit-bucket histogram: `len(edges) + 1` counts, bucket i in (edges[i-1], edges[i]]."""
        lower = np.array([-math.inf, *edges], dtype=np.float64)
        upper = np.array([*edges, math.inf], dtype=np.float64)
        count = np.asarray(counts, dtype=np.int64)
        return _clipped(lower, upper, count, sum, minimum, maximum)


@dataclass(frozen=True, slots=True, eq=False)
class Buckets:
    """Counts of consecutive buckets, the first of them with index `offset`."""

    offset: int
    counts: NDArray[np.int64]

    @classmethod
    def empty(cls) -> Buckets:
        """No buckets."""
        return cls(0, np.zeros(0, dtype=np.int64))

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
        index = (np.arange(self.counts.size, dtype=np.int64) + self.offset) >> by
        counts = np.zeros(int(index[-1] - index[0]) + 1, dtype=np.int64)
        np.add.at(counts, index - index[0], self.counts)
        return Buckets(int(index[0]), counts)

    def plus(self, other: Buckets, sign: int = 1) -> Buckets:
        """Bucket-wise sum, or difference with sign=-1, at the same scale."""
        if not other.counts.size:
            return self
        if not self.counts.size:
            return Buckets(other.offset, sign * other.counts)
        first = min(self.offset, other.offset)
        last = max(self.offset + self.counts.size, other.offset + other.counts.size)
        counts = np.zeros(last - first, dtype=np.int64)
        counts[self.offset - first : self.offset - first + self.counts.size] += self.counts
        counts[other.offset - first : other.offset - first + other.counts.size] += sign * other.counts
        return Buckets(first, counts)


@dataclass(frozen=True, slots=True, eq=False)
class ExponentialHistogram:
    """A base-2 exponential histogram.

    Attributes:
        scale: Resolution: each bucket's edges differ by the factor 2^(2^-scale).
        count: Number of observations.
        sum: Exact sum of the observations.
        zero_count: Observations in the zero bucket, |x| <= zero_threshold.
        zero_threshold: Half width of the zero bucket.
        positive: Buckets of the positive observations.
        negative: Buckets of the negative observations, by absolute value.
        minimum: Smallest observation; nan when unknown or empty.
        maximum: Largest observation; nan when unknown or empty.
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

    @classmethod
    def empty(cls, scale: int) -> ExponentialHistogram:
        """A histogram of nothing."""
        return cls(scale, 0, 0.0, 0, Buckets.empty(), Buckets.empty())

    def downscaled(self, scale: int) -> ExponentialHistogram:
        """The same at a lower or equal scale.

        Raises:
            ValueError: If `scale` is higher than this histogram's.
        """
        by = self.scale - scale
        if by < 0:
            msg = f"scale: {scale} is finer than this histogram's {self.scale}"
            raise ValueError(msg)
        return replace(self, scale=scale, positive=self.positive.downscaled(by), negative=self.negative.downscaled(by))

    def merged(self, other: ExponentialHistogram) -> ExponentialHistogram:
        """Histogram of both samples together, at the coarser scale."""
        if other.count == 0:
            return self
        if self.count == 0:
            return other
        a, b = self._aligned(other)
        return ExponentialHistogram(
            scale=a.scale,
            count=a.count + b.count,
            sum=a.sum + b.sum,
            zero_count=a.zero_count + b.zero_count,
            positive=a.positive.plus(b.positive),
            negative=a.negative.plus(b.negative),
            minimum=float(np.fmin(a.minimum, b.minimum)),
            maximum=float(np.fmax(a.maximum, b.maximum)),
            zero_threshold=max(a.zero_threshold, b.zero_threshold),
        )

    def since(self, earlier: ExponentialHistogram) -> ExponentialHistogram | None:
        """What was observed after `earlier`, both being cumulative from the same start; None if that cannot be.

        A cumulative histogram says nothing of the interval's own extremes, so they are taken from the edges of
        the outermost buckets of the difference, or from the cumulative extremes where those moved.
        """
        a, b = self._aligned(earlier)
        positive, negative = a.positive.plus(b.positive, -1).trimmed(), a.negative.plus(b.negative, -1).trimmed()
        zero_count, count = a.zero_count - b.zero_count, a.count - b.count
        if count < 0 or zero_count < 0 or (positive.counts < 0).any() or (negative.counts < 0).any():
            return None
        delta = ExponentialHistogram(
            a.scale, count, a.sum - b.sum, zero_count, positive, negative, zero_threshold=a.zero_threshold
        )
        if not count:
            return replace(delta, sum=0.0)
        low, high = delta._edges()
        return replace(
            delta,
            minimum=a.minimum if not a.minimum >= b.minimum else float(np.fmax(low, a.minimum)),
            maximum=a.maximum if not a.maximum <= b.maximum else float(np.fmin(high, a.maximum)),
        )

    def binned(self) -> Binned:
        """The view that bounds are computed from: bins in ascending order, clipped to the extremes."""
        base = 2.0**-self.scale
        negative = np.arange(self.negative.counts.size)[::-1] + self.negative.offset
        positive = np.arange(self.positive.counts.size) + self.positive.offset
        lower = np.concatenate([-np.exp2((negative + 1) * base), [-self.zero_threshold], np.exp2(positive * base)])
        upper = np.concatenate([-np.exp2(negative * base), [self.zero_threshold], np.exp2((positive + 1) * base)])
        count = np.concatenate([self.negative.counts[::-1], [self.zero_count], self.positive.counts])
        return _clipped(lower, upper, count, self.sum, self.minimum, self.maximum)

    def _aligned(self, other: ExponentialHistogram) -> tuple[ExponentialHistogram, ExponentialHistogram]:
        scale = min(self.scale, other.scale)
        return self.downscaled(scale), other.downscaled(scale)

    def _edges(self) -> tuple[float, float]:
        bins = self.binned()
        return (float(bins.lower[0]), float(bins.upper[-1])) if bins.count.size else (math.nan, math.nan)


def _clipped(
    lower: NDArray[np.float64],
    upper: NDArray[np.float64],
    count: NDArray[np.int64],
    sum: float,
    minimum: float,
    maximum: float,
) -> Binned:
    used = count > 0
    lower, upper, count = lower[used], upper[used], count[used]
    if not math.isnan(minimum):
        lower = np.maximum(lower, min(minimum, upper[0]) if upper.size else minimum)
    if not math.isnan(maximum):
        upper = np.minimum(upper, max(maximum, lower[-1]) if lower.size else maximum)
    return Binned(lower, np.maximum(upper, lower), count, int(count.sum()), float(sum), minimum, maximum)
