"""View of a sample from which bounds are computed: all that is known after it went through a histogram."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class Binned:
    """A sample known through bins: each of `count[i]` observations lies in [lower[i], upper[i]], ascending.

    Attributes:
        lower: Lower edges, float64 [k], ascending.
        upper: Upper edges, float64 [k], ascending, clipped to the extremes.
        count: Observations per bin, int64 [k], all positive.
        total: Number of observations.
        sum: Exact sum of the observations; nan when unknown.
        minimum: No observation is smaller; nan when unknown or empty.
        maximum: No observation is larger; nan when unknown or empty.
        maximum_observed: Whether `maximum` is itself an observation, and not only a bound on them.
        opposite: The sample of the quantity that bounds the same thing from the other side, where both are needed.
    """

    lower: NDArray[np.float64]
    upper: NDArray[np.float64]
    count: NDArray[np.int64]
    total: int
    sum: float
    minimum: float
    maximum: float
    maximum_observed: bool = True
    opposite: Binned | None = None

    def times(self, many: int) -> Binned:
        """The same sample with each observation repeated that many times."""
        opposite = None if self.opposite is None else self.opposite.times(many)
        return replace(self, count=self.count * many, total=self.total * many, sum=self.sum * many, opposite=opposite)

    @classmethod
    def of_samples(cls, values: NDArray[np.floating]) -> Binned:
        """The exact view of a sample of any shape: one bin of no width per distinct value.

        Raises:
            ValueError: If a value is NaN.
        """
        flat = np.asarray(values, dtype=np.float64).ravel()
        distinct, count = np.unique(flat, return_counts=True)
        if distinct.size and math.isnan(distinct[-1]):
            raise ValueError(f"values: {int(np.isnan(flat).sum())} of {flat.size} are nan; drop them or find out why")
        return cls(
            lower=distinct,
            upper=distinct,
            count=count.astype(np.int64),
            total=flat.size,
            sum=float(flat.sum()),
            minimum=float(distinct[0]) if distinct.size else math.nan,
            maximum=float(distinct[-1]) if distinct.size else math.nan,
        )

    @classmethod
    def of_explicit(
        cls,
        edges: Sequence[float],
        counts: Sequence[int],
        sum: float,
        minimum: float,
        maximum: float,
        *,
        maximum_observed: bool = True,
    ) -> Binned:
        """Read an explicit-bucket histogram: `len(edges) + 1` counts, bucket i in (edges[i-1], edges[i]]."""
        if len(counts) != len(edges) + 1:
            raise ValueError(f"counts: {len(counts)} counts for {len(edges)} edges; there is one count more than edges")
        bounds = np.array([-math.inf, *edges, math.inf], dtype=np.float64)
        if not (bounds[1:-1] < bounds[2:]).all():
            raise ValueError(f"edges: {list(edges)!r} do not ascend")
        return clipped(
            bounds[:-1], bounds[1:], np.asarray(counts, dtype=np.int64), sum, minimum, maximum, maximum_observed
        )

    def merged(self, bins: int) -> Binned:
        """The same observations in at most that many bins, neighbours together: the sum stays exact, edges widen."""
        if self.count.size <= bins:
            return self
        first = np.linspace(0, self.count.size, bins + 1).astype(np.intp)[:-1]
        last = np.append(first[1:], self.count.size) - 1
        count = np.add.reduceat(self.count, first)
        return replace(self, lower=self.lower[first], upper=self.upper[last], count=count)


def clipped(
    lower: NDArray[np.float64],
    upper: NDArray[np.float64],
    count: NDArray[np.int64],
    sum: float,
    minimum: float,
    maximum: float,
    maximum_observed: bool,
) -> Binned:
    """The non-empty bins, their edges drawn in to the extremes where those are known."""
    used = count > 0
    if not used.all():
        lower, upper, count = lower[used], upper[used], count[used]
    if count.size:
        # Extremes that contradict the buckets, as rounding or a careless sender may make them, move no edge past them.
        if minimum > lower[0]:
            lower = np.maximum(lower, min(minimum, float(upper[0])))
        if maximum < upper[-1]:
            upper = np.minimum(upper, max(maximum, float(lower[-1])))
        upper = np.maximum(upper, lower)
    return Binned(lower, upper, count, int(count.sum()), float(sum), minimum, maximum, maximum_observed)
