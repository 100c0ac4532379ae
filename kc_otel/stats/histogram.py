"""Histograms as mergeable values: base-2 exponential ones, and those with explicit bounds that others send.

Buckets are those of the OpenTelemetry data model: at scale s, bucket i of the positive range holds the values in
(2^(i/2^s), 2^((i+1)/2^s)], the negative range mirrors it, and the zero bucket holds what is closer to zero than
anybody cares to resolve. Counts and sums are exact; a value inside a bucket is known only to its edges.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Final

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
class ExponentialHistogram:
    """A base-2 exponential histogram.

    Attributes:
        scale: Resolution: each bucket's edges differ by the factor 2^(2^-scale).
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

    @classmethod
    def empty(cls, scale: int) -> ExponentialHistogram:
        """A histogram of nothing."""
        return cls(scale, 0, 0.0, 0, Buckets.empty(), Buckets.empty())

    @classmethod
    def union(cls, parts: Iterable[ExponentialHistogram]) -> ExponentialHistogram:
        """Histogram of all samples together, at the coarsest of their scales, or coarser to stay in MAX_BUCKETS.

        Faster than merging one by one. The union of empty histograms alone is an empty one at scale 0.
        """
        parts = [part for part in parts if part.count]
        if len(parts) < 2:
            return parts[0] if parts else cls.empty(0)
        minimum, maximum, observed = _together(parts)  # aligned buckets are wider
        parts = _aligned(parts)
        return cls(
            scale=parts[0].scale,
            count=sum(part.count for part in parts),
            sum=math.fsum(part.sum for part in parts),
            zero_count=sum(part.zero_count for part in parts),
            positive=Buckets.union([part.positive for part in parts]),
            negative=Buckets.union([part.negative for part in parts]),
            minimum=minimum,
            maximum=maximum,
            zero_threshold=parts[0].zero_threshold,
            maximum_observed=observed,
        )

    def merged(self, other: ExponentialHistogram) -> ExponentialHistogram:
        """Histogram of both samples together, as `union`; merging with an empty one changes nothing."""
        if not other.count:
            return self
        return ExponentialHistogram.union((self, other))

    def downscaled(self, scale: int) -> ExponentialHistogram:
        """The same at a lower or equal scale; a ValueError if it is higher than this histogram's."""
        by = self.scale - scale
        if by < 0:
            raise ValueError(f"scale: {scale} is finer than this histogram's {self.scale}")
        if by == 0:
            return self
        return replace(self, scale=scale, positive=self.positive.downscaled(by), negative=self.negative.downscaled(by))

    def sized(self, scale: int, zero_threshold: float, most: int) -> ExponentialHistogram:
        """The same in fewer buckets: at most `most` of each sign, counted from just below the zero threshold upwards.

        It has this scale if the buckets suffice, otherwise a lower one. The zero threshold is a power of two, so that
        it is an edge at every scale.
        """
        sized = self._with_zero_threshold(zero_threshold).downscaled(scale)
        by, below = 0, round(math.log2(zero_threshold) * 2**scale) - 1
        while (max(sized.positive.end, sized.negative.end) >> by) - (below >> by) >= most:
            by += 1
        return sized.downscaled(scale - by)

    def since(self, earlier: Histogram) -> ExponentialHistogram | None:
        """Return the observations after `earlier`, both cumulative from the same start; None on contradiction.

        A cumulative histogram does not contain the interval's own extremes. They are bounded by the edges of the
        outermost buckets of the difference, and are the cumulative extremes where those moved.
        """
        if isinstance(earlier, ExplicitHistogram):
            return None
        if not earlier.count:
            return self
        a, b = _aligned([self, earlier])
        positive, negative = a.positive.plus(b.positive, -1).trimmed(), a.negative.plus(b.negative, -1).trimmed()
        zero_count, count = a.zero_count - b.zero_count, a.count - b.count
        if count < 0 or zero_count < 0 or (positive.counts < 0).any() or (negative.counts < 0).any():
            return None
        if not count:
            return ExponentialHistogram.empty(a.scale)
        delta = ExponentialHistogram(
            scale=a.scale,
            count=count,
            sum=a.sum - b.sum,
            zero_count=zero_count,
            positive=positive,
            negative=negative,
            zero_threshold=a.zero_threshold,
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
            parts.append((zero[:1], zero[1:], np.array([self.zero_count], dtype=np.int64)))
        if self.positive.counts.size:
            edges = np.maximum(edges_of(self.positive.offset, self.positive.end, self.scale), self.zero_threshold)
            parts.append((edges[:-1], edges[1:], self.positive.counts))
        if len(parts) == 1:
            lower, upper, count = parts[0]
        elif parts:
            lower, upper, count = (np.concatenate(columns) for columns in zip(*parts, strict=True))
        else:
            lower, upper, count = np.zeros(0), np.zeros(0), np.zeros(0, dtype=np.int64)
        return clipped(lower, upper, count, self.sum, self.minimum, self.maximum, self.maximum_observed)

    @property
    def layout(self) -> tuple[float, ...] | None:
        """Key that two histograms must share to be merged: nothing, because every scale can be made coarser."""
        return None

    def sums(self) -> tuple[float, float]:
        """Smallest and largest sum that the buckets allow, with one bucket to spare on either side."""
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
        exponent: float = bucket * 2.0**-self.scale
        return max(math.inf if exponent >= 1024.0 else 2.0**exponent, self.zero_threshold)

    def _with_zero_threshold(self, threshold: float) -> ExponentialHistogram:
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


def _aligned(parts: list[ExponentialHistogram]) -> list[ExponentialHistogram]:
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


@dataclass(frozen=True, slots=True, eq=False)
class ExplicitHistogram:
    """A histogram with the buckets (-inf, e0], (e0, e1], ... (ek, inf): `edges` e0..ek, and counts, int64 [k + 2].

    Extremes are nan when unknown; `maximum_observed` says whether the maximum is itself an observation. No edges at all
    are a single bucket: a counter. Beside exponential ones, in columns, its buckets are positive ones from 0 on.
    """

    scale: ClassVar[int] = EXPLICIT
    zero_threshold: ClassVar[float] = 0.0
    zero_count: ClassVar[int] = 0
    negative: ClassVar[Buckets] = Buckets.empty()
    edges: tuple[float, ...]
    counts: NDArray[np.int64]
    sum: float
    minimum: float = math.nan
    maximum: float = math.nan
    maximum_observed: bool = True

    @property
    def count(self) -> int:
        """Number of observations."""
        return int(self.counts.sum())

    @property
    def positive(self) -> Buckets:
        """The buckets."""
        return Buckets(0, self.counts)

    @property
    def layout(self) -> tuple[float, ...]:
        """Key that two histograms must share to be merged."""
        return self.edges

    @classmethod
    def of_count(cls, count: int) -> ExplicitHistogram:
        """A counter's value."""
        return cls((), np.array([count], dtype=np.int64), 0.0)

    def since(self, earlier: Histogram) -> ExplicitHistogram | None:
        """As `ExponentialHistogram.since`."""
        if isinstance(earlier, ExponentialHistogram) or ((counts := self.counts - earlier.counts) < 0).any():
            return None
        moved = _moved(self, earlier, *_outermost(self.edges, counts))
        return ExplicitHistogram(self.edges, counts, self.sum - earlier.sum, *moved)

    @classmethod
    def union(cls, parts: Sequence[ExplicitHistogram]) -> ExplicitHistogram:
        """Histogram of all samples together; at least one part, all with equal edges."""
        used = [part for part in parts if part.count] or list(parts[:1])
        if len(used) == 1:
            return used[0]
        counts, total = np.sum([part.counts for part in used], axis=0), math.fsum(part.sum for part in used)
        return cls(used[0].edges, counts, total, *_together(used))

    def binned(self) -> Binned:
        """The view that bounds are computed from."""
        minimum = self.minimum if math.isfinite(self.minimum) else math.nan
        maximum = self.maximum if math.isfinite(self.maximum) else math.nan
        bins = Binned.of_explicit(self.edges, self.counts.tolist(), self.sum, minimum, maximum)
        return replace(bins, maximum_observed=self.maximum_observed)

    def sums(self) -> tuple[float, float]:
        """Smallest and largest sum that the buckets allow."""
        used = np.flatnonzero(self.counts)
        if not used.size:
            return 0.0, 0.0
        edges = np.array((-math.inf, *self.edges, math.inf))
        lower, upper = np.fmax(edges[used], self.minimum), np.fmin(edges[used + 1], self.maximum)
        return float(lower @ self.counts[used]), float(upper @ self.counts[used])

    def extremes(self) -> tuple[float, float, bool]:
        """As `ExponentialHistogram.extremes`."""
        low, high = _outermost(self.edges, self.counts)
        known = not math.isnan(self.maximum)
        return (
            low if math.isnan(self.minimum) else self.minimum,
            self.maximum if known else high,
            known and self.maximum_observed,
        )


Histogram = ExponentialHistogram | ExplicitHistogram


def union(parts: Sequence[Histogram]) -> Histogram:
    """Histogram of all samples together; at least one part. Where the layout changed, only those of the last."""
    layout = parts[-1].layout
    if layout is None:
        return ExponentialHistogram.union([part for part in parts if isinstance(part, ExponentialHistogram)])
    return ExplicitHistogram.union(
        [part for part in parts if isinstance(part, ExplicitHistogram) and part.edges == layout]
    )


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


def _outermost(edges: tuple[float, ...], counts: NDArray[np.int64]) -> tuple[float, float]:
    used = np.flatnonzero(counts)
    if not used.size:
        return math.nan, math.nan
    around = (-math.inf, *edges, math.inf)
    return around[int(used[0])], around[int(used[-1]) + 1]
