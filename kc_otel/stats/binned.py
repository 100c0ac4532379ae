"""View of a sample from which bounds are computed: all that is known after it went through a histogram.

Every bound for a mean is the worst case over the values that its bins, its exact sum and a range leave possible. For
any concave function the worst placement is the same one: all values on edges of their bins, the upper edges going to
the highest bins first, until the exact sum is reached. It majorises every other placement with that sum (moving sum
from a lower bin to a higher one never makes a sum of squares smaller, nor a sum of concave functions larger), so it has
the largest variance and the least wealth at once.

Source: Marshall, Olkin and Arnold 2011, Inequalities: Theory of Majorization, 3.C.1 (Schur) and 5.A.
"""

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
        cls, edges: Sequence[float], counts: Sequence[int], sum: float, minimum: float, maximum: float
    ) -> Binned:
        """Read an explicit-bucket histogram: `len(edges) + 1` counts, bucket i in (edges[i-1], edges[i]]."""
        if len(counts) != len(edges) + 1:
            raise ValueError(f"counts: {len(counts)} counts for {len(edges)} edges; there is one count more than edges")
        bounds = np.array([-math.inf, *edges, math.inf], dtype=np.float64)
        if not (bounds[1:-1] < bounds[2:]).all():
            raise ValueError(f"edges: {list(edges)!r} do not ascend")
        return clipped(bounds[:-1], bounds[1:], np.asarray(counts, dtype=np.int64), sum, minimum, maximum, True)

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


def usable(sample: Binned) -> Binned:
    """Return a sample if its bins have numbers for edges, lower ones first."""
    fine = sample.lower <= sample.upper
    if not fine.all():
        at = int(np.flatnonzero(~fine)[0])
        msg = f"sample: bin {at} is [{sample.lower[at]!r}, {sample.upper[at]!r}]; edges are numbers, lower before upper"
        raise ValueError(msg)
    return sample


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """A sample cut to [low, high], as far as its bins tell: edges, cut, and counts as doubles [k].

    `estimate` is the mean of the sample, not cut; the mean of the cut sample lies in [least, most], which are equal
    where the sum is exact and nothing is cut.
    """

    n: int
    lower: NDArray[np.float64]
    upper: NDArray[np.float64]
    count: NDArray[np.float64]
    estimate: float
    least: float
    most: float

    @classmethod
    def of(cls, sample: Binned, low: float, high: float) -> Placement:
        """Return the possible placements of min(max(x, low), high), for a sample that is not empty.

        The sum of the cut values lies between the sums of the cut edges, and also between the exact sum less the most
        and less the least that the cutting can have taken away.
        """
        usable(sample)
        n = sample.total
        count = sample.count.astype(np.float64)
        lower, upper = sample.lower, sample.upper
        total = sample.sum if math.isfinite(sample.sum) else math.nan
        taken_least = taken_most = 0.0
        if lower[0] < low or upper[-1] > high:
            lower, upper = np.minimum(np.maximum(lower, low), high), np.minimum(np.maximum(upper, low), high)
            taken_least = float(count @ (sample.lower - lower))
            taken_most = float(count @ (sample.upper - upper))
        floor, ceiling = float(count @ lower), float(count @ upper)
        # fmax and fmin skip the nan of an unknown sum. Bins and sum can disagree by rounding: then cover both.
        first = float(np.fmax(floor, total - taken_most))
        second = float(np.fmin(ceiling, total - taken_least))
        least, most = min(first, second), max(first, second)
        return cls(
            n=n,
            lower=lower,
            upper=upper,
            count=count,
            estimate=(total if math.isfinite(total) else (least + most) / 2.0) / n,
            least=least / n,
            most=most / n,
        )

    def worst(self, mean: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The worst placement with a given mean of the cut sample: values [j] and the observations [j] each stands for.

        Where the sum ends inside a bin, the bin is shared between its two edges. The number of observations on an edge
        is then not whole, which is worse than any placement that can be.
        """
        if self.lower is self.upper:
            return self.lower, self.count
        width = self.upper - self.lower
        room = self.count * width
        above = np.cumsum(room[::-1])[::-1] - room
        fill = mean * self.n - float(self.count @ self.lower)
        raised = np.minimum(np.maximum(fill - above, 0.0), room)
        share = raised / np.where(room > 0.0, room, 1.0)
        inside = np.flatnonzero((share > 0.0) & (share < 1.0))
        values = np.where(share >= 1.0, self.upper, self.lower)
        if not inside.size:
            return values, self.count
        # A shared bin: what stays on its lower edge, and at the end what is raised to its upper one.
        kept = self.count.copy()
        kept[inside] *= 1.0 - share[inside]
        return np.append(values, self.upper[inside]), np.append(kept, (self.count * share)[inside])


def finite_range(low: float, high: float) -> None:
    """Refuse a range that is not finite or holds nothing."""
    if not (math.isfinite(low) and math.isfinite(high)):
        raise ValueError(f"low, high: [{low!r}, {high!r}] is not a finite range; give a finite cap")
    if not low < high:
        raise ValueError(f"low, high: [{low!r}, {high!r}] is empty; low has to be smaller than high")
