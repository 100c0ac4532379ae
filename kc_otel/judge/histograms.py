"""Histograms of either layout under one set of verbs: union and difference.

`ExplicitHistogram` is the twin of `stats.ExponentialHistogram` for what others send; a plain counter is one without
edges: a single bucket that counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kc_otel.stats import Binned, Buckets, ExponentialHistogram

_ROUNDING_ERROR: Final = 1e-9
"""Relative error that a sum of doubles may have picked up."""
_UNSAID_ZERO: Final = 2.0**-30
"""Half width that a zero bucket may have without saying so: OpenTelemetry's SDK for Python cannot say it."""


@dataclass(frozen=True, slots=True, eq=False)
class ExplicitHistogram:
    """A histogram with the buckets (-inf, e0], (e0, e1], ... (ek, inf): `edges` e0..ek, and counts, int64 [k + 2].

    Extremes are nan when unknown; `maximum_observed` says whether the maximum is itself an observation. No edges at all
    are a single bucket.
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

        Extremes are the cumulative ones where those moved, else those of the outermost buckets.
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
    return ExponentialHistogram.union([part for part in parts if isinstance(part, ExponentialHistogram)])


def difference(later: Histogram, earlier: Histogram) -> Histogram | None:
    """Return the observations after `earlier`, both cumulative with one start and layout; None on contradiction."""
    if isinstance(later, ExplicitHistogram):
        return later.since(earlier) if isinstance(earlier, ExplicitHistogram) else None
    return later.since(earlier) if isinstance(earlier, ExponentialHistogram) else None


def sum_fits(histogram: Histogram, slack: float = 0.0) -> bool:
    """Return True if the sum is possible for observations in these buckets, with so much rounding error.

    A bucket's neighbours are allowed for, because senders may put a value at an edge on either side of it.
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
    positive, negative = least_of(histogram.positive, histogram.scale), least_of(histogram.negative, histogram.scale)
    return positive - negative * wider - zero, positive * wider - negative + zero


def least_of(side: Buckets, scale: int) -> float:
    """The sum of |x| if every observation of one sign lay at the lower edge of the bucket below its own."""
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


def _outermost(edges: tuple[float, ...], counts: NDArray[np.int64]) -> tuple[float, float]:
    used = np.flatnonzero(counts)
    if not used.size:
        return math.nan, math.nan
    around = (-math.inf, *edges, math.inf)
    return around[int(used[0])], around[int(used[-1]) + 1]
