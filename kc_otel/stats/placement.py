"""Possible values of a sample's observations, given only its bins, its exact sum and a range.

Every bound for a mean is the worst case over that. For any concave function the worst placement is the same one: all
values on edges of their bins, the upper edges going to the highest bins first, until the exact sum is reached. It
majorises every other placement with that sum (moving sum from a lower bin to a higher one never makes a sum of squares
smaller, nor a sum of concave functions larger), so it has the largest variance and the least wealth at once.

Source: Marshall, Olkin and Arnold 2011, Inequalities: Theory of Majorization, 3.C.1 (Schur) and 5.A.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kc_otel.stats._check import usable
from kc_otel.stats.binned import Binned


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
