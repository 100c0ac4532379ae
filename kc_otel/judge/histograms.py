"""Histograms of either layout under one set of verbs: union and difference.

`ExplicitHistogram` is the twin of `bounds.ExponentialHistogram` for what others send; a plain counter is one without
edges: a single bucket that counts. Differences are taken for every point that arrives and unions for every series in
every round, so their usual case (one scale, one zero bucket) has a path of its own, three times as fast; whatever needs
aligning goes to `ExponentialHistogram.since` and `.union`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kc_otel.stats import Binned, Buckets, ExponentialHistogram
from kc_otel.stats.histogram import MAX_BUCKETS

_ROUNDING_ERROR: Final = 1e-9
"""Relative error that a sum of doubles may have picked up."""
_UNSAID_ZERO: Final = 2.0**-30
"""Half width that a zero bucket may have without saying so: OpenTelemetry's SDK for Python cannot say it."""


@dataclass(frozen=True, slots=True, eq=False)
class ExplicitHistogram:
    """A histogram with the buckets (-inf, e0], (e0, e1], ... (ek, inf).

    Attributes:
        edges: e0..ek, ascending; empty for a single bucket.
        counts: Observations per bucket, int64 [k + 2].
        sum: Sum of the observations.
        minimum: No observation is smaller; nan when unknown.
        maximum: No observation is larger; nan when unknown.
        maximum_observed: Whether `maximum` is itself an observation, and not only a bound on them.
    """

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

    @classmethod
    def of_count(cls, count: int) -> ExplicitHistogram:
        """A counter's value."""
        return cls((), np.array([count], dtype=np.int64), 0.0)

    def since(self, earlier: ExplicitHistogram) -> ExplicitHistogram | None:
        """Return the observations after `earlier`, both cumulative from one start; None on contradiction.

        The edges have to be equal. Extremes are the cumulative ones where those moved, else those of the outermost
        buckets.
        """
        counts = self.counts - earlier.counts
        if (counts < 0).any():
            return None
        moved_down, moved_up = self.minimum < earlier.minimum, self.maximum > earlier.maximum
        low, high = _outermost(self.edges, counts)
        return ExplicitHistogram(
            edges=self.edges,
            counts=counts,
            sum=self.sum - earlier.sum,
            minimum=self.minimum if moved_down else float(np.fmax(low, self.minimum)),
            maximum=self.maximum if moved_up else float(np.fmin(high, self.maximum)),
            maximum_observed=moved_up and self.maximum_observed,
        )

    @classmethod
    def union(cls, parts: Sequence[ExplicitHistogram]) -> ExplicitHistogram:
        """Histogram of all samples together; at least one part, all with equal edges."""
        used = [part for part in parts if part.count] or list(parts[:1])
        if len(used) == 1:
            return used[0]
        known = [part._extremes() for part in used]  # noqa: SLF001 - its own kind
        maximum = max(most for _, most, _ in known)
        return cls(
            edges=used[0].edges,
            counts=np.sum([part.counts for part in used], axis=0),
            sum=math.fsum(part.sum for part in used),
            minimum=min(least for least, _, _ in known),
            maximum=maximum,
            maximum_observed=any(observed and most == maximum for _, most, observed in known),
        )

    def binned(self) -> Binned:
        """The view that bounds are computed from."""
        minimum = self.minimum if math.isfinite(self.minimum) else math.nan
        maximum = self.maximum if math.isfinite(self.maximum) else math.nan
        bins = Binned.of_explicit(self.edges, self.counts.tolist(), self.sum, minimum, maximum)
        return replace(bins, maximum_observed=self.maximum_observed)

    def _extremes(self) -> tuple[float, float, bool]:
        low, high = _outermost(self.edges, self.counts)
        known = not math.isnan(self.maximum)
        return (
            low if math.isnan(self.minimum) else self.minimum,
            self.maximum if known else high,
            known and self.maximum_observed,
        )


Histogram = ExponentialHistogram | ExplicitHistogram


def layout(histogram: Histogram) -> tuple[float, ...] | None:
    """Return the layout that two histograms must share to be merged: explicit edges; None for exponential ones."""
    return histogram.edges if isinstance(histogram, ExplicitHistogram) else None


def union(parts: Sequence[Histogram]) -> Histogram:
    """Histogram of all samples together; at least one part, all of one layout."""
    if len(parts) == 1:
        return parts[0]
    if isinstance(parts[0], ExplicitHistogram):
        return ExplicitHistogram.union([part for part in parts if isinstance(part, ExplicitHistogram)])
    exponential = [part for part in parts if isinstance(part, ExponentialHistogram) and part.count]
    return _union_of_aligned(exponential) or ExponentialHistogram.union(exponential)


def difference(later: Histogram, earlier: Histogram) -> Histogram | None:
    """Return the observations after `earlier`, both cumulative with one start and layout; None on contradiction."""
    if isinstance(later, ExplicitHistogram):
        return later.since(earlier) if isinstance(earlier, ExplicitHistogram) else None
    if not isinstance(earlier, ExponentialHistogram):
        return None
    if not _aligned(later, earlier) or not earlier.count:
        return later.since(earlier)
    count, zero_count = later.count - earlier.count, later.zero_count - earlier.zero_count
    positive, negative = _minus(later.positive, earlier.positive), _minus(later.negative, earlier.negative)
    if count < 0 or zero_count < 0 or positive is None or negative is None:
        return None
    if not count:
        return ExponentialHistogram.empty(later.scale)
    low, high = _ends(later.scale, positive, negative, zero_count, later.zero_threshold)
    moved_down, moved_up = later.minimum < earlier.minimum, later.maximum > earlier.maximum
    return ExponentialHistogram(
        scale=later.scale,
        count=count,
        sum=later.sum - earlier.sum,
        zero_count=zero_count,
        positive=positive,
        negative=negative,
        minimum=later.minimum if moved_down or low < later.minimum else low,
        maximum=later.maximum if moved_up or high > later.maximum else high,
        zero_threshold=later.zero_threshold,
        maximum_observed=moved_up and later.maximum_observed,
    )


def sum_fits(histogram: Histogram, slack: float = 0.0) -> bool:
    """Return True if the sum is possible for observations in these buckets.

    A bucket's neighbours are allowed for, because senders may put a value at an edge on either side of it.

    Args:
        histogram: The histogram to check.
        slack: Rounding error that the sum may contain.
    """
    low, high = _sums(histogram)
    rounding = slack + _ROUNDING_ERROR * (abs(low) + abs(high)) if math.isfinite(low) and math.isfinite(high) else slack
    return low - rounding <= histogram.sum <= high + rounding


def magnitude(histogram: Histogram) -> float:
    """The largest |sum| that observations in these buckets can have; inf where a bucket has no end."""
    return max(map(abs, _sums(histogram)))


def _sums(histogram: Histogram) -> tuple[float, float]:
    """Smallest and largest sum that the buckets allow, with one bucket to spare on either side of exponential ones."""
    if isinstance(histogram, ExplicitHistogram):
        return _explicit_sums(histogram)
    zero = histogram.zero_count * max(histogram.zero_threshold, _UNSAID_ZERO)
    wider = 2.0 ** (3.0 * 2.0**-histogram.scale)
    positive, negative = _least(histogram.positive, histogram.scale), _least(histogram.negative, histogram.scale)
    return positive - negative * wider - zero, positive * wider - negative + zero


def _least(side: Buckets, scale: int) -> float:
    """The sum of |x| if every observation lay at the lower edge of the bucket below its own."""
    if not side.counts.size:
        return 0.0
    edges = np.exp2((np.arange(side.counts.size, dtype=np.float64) + (side.offset - 1)) * 2.0**-scale)
    return float(edges @ side.counts)


def _explicit_sums(histogram: ExplicitHistogram) -> tuple[float, float]:
    counts = histogram.counts
    used = np.flatnonzero(counts)
    if not used.size:
        return 0.0, 0.0
    edges = np.array((-math.inf, *histogram.edges, math.inf))
    lower, upper = edges[used], edges[used + 1]
    if not math.isnan(histogram.minimum):
        lower = np.maximum(lower, histogram.minimum)
    if not math.isnan(histogram.maximum):
        upper = np.minimum(upper, histogram.maximum)
    return float(lower @ counts[used]), float(upper @ counts[used])


def _union_of_aligned(parts: Sequence[ExponentialHistogram]) -> ExponentialHistogram | None:
    """The union where all parts have one scale, one zero bucket and known extremes, and little distance; else None."""
    if len(parts) < 2:
        return parts[0] if parts else None
    scale, zero_threshold = parts[0].scale, parts[0].zero_threshold
    minimum, maximum, observed = math.inf, -math.inf, False
    for part in parts:
        if part.scale != scale or part.zero_threshold != zero_threshold or math.isnan(part.minimum):
            return None
        minimum = min(minimum, part.minimum)
        if part.maximum > maximum:
            maximum, observed = part.maximum, part.maximum_observed
        elif part.maximum == maximum:
            observed = observed or part.maximum_observed
        elif math.isnan(part.maximum):
            return None
    positive, negative = _sum([part.positive for part in parts]), _sum([part.negative for part in parts])
    if positive is None or negative is None:
        return None
    return ExponentialHistogram(
        scale=scale,
        count=sum([part.count for part in parts]),
        sum=math.fsum([part.sum for part in parts]),
        zero_count=sum([part.zero_count for part in parts]),
        positive=positive,
        negative=negative,
        minimum=minimum,
        maximum=maximum,
        zero_threshold=zero_threshold,
        maximum_observed=observed,
    )


def _sum(sides: Sequence[Buckets]) -> Buckets | None:
    used = [side for side in sides if side.counts.size]
    if not used:
        return Buckets.empty()
    first = min([side.offset for side in used])
    size = max([side.offset + side.counts.size for side in used]) - first
    if size > MAX_BUCKETS:
        return None
    counts = np.zeros(size, dtype=np.int64)
    for side in used:
        at = side.offset - first
        counts[at : at + side.counts.size] += side.counts
    return Buckets(first, counts)


def _aligned(a: ExponentialHistogram, b: ExponentialHistogram) -> bool:
    return a.scale == b.scale and a.zero_threshold == b.zero_threshold


def _minus(later: Buckets, earlier: Buckets) -> Buckets | None:
    """Bucket-wise difference without empty ends; None where it would be negative."""
    start = earlier.offset - later.offset
    if not earlier.counts.size:
        difference = later
    elif start >= 0 and earlier.end <= later.end:
        counts = later.counts.copy()
        counts[start : start + earlier.counts.size] -= earlier.counts
        difference = Buckets(later.offset, counts)
    else:
        difference = later.plus(earlier, -1)
    trimmed = difference.trimmed()
    return trimmed if not trimmed.counts.size or trimmed.counts.min() >= 0 else None


def _ends(
    scale: int, positive: Buckets, negative: Buckets, zero_count: int, zero_threshold: float
) -> tuple[float, float]:
    """Lower edge of the lowest and upper edge of the highest bucket; trimmed buckets, at least one observation."""
    ends: list[float] = []
    if negative.counts.size:
        ends += [-_edge(negative.end, scale), -_edge(negative.offset, scale)]
    if zero_count:
        ends += [-zero_threshold, zero_threshold]
    if positive.counts.size:
        ends += [_edge(positive.offset, scale), _edge(positive.end, scale)]
    return ends[0], ends[-1]


def _edge(index: int, scale: int) -> float:
    exponent: float = index * 2.0**-scale
    return math.inf if exponent >= 1024.0 else 2.0**exponent


def _outermost(edges: tuple[float, ...], counts: NDArray[np.int64]) -> tuple[float, float]:
    used = np.flatnonzero(counts)
    if not used.size:
        return math.nan, math.nan
    around = (-math.inf, *edges, math.inf)
    return around[int(used[0])], around[int(used[-1]) + 1]
