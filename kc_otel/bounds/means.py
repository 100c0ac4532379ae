"""Confidence intervals for a mean, from samples or from histograms.

The sum of a histogram is exact, so the mean is; what the buckets hide is only the variance, and that is bounded by the
worst placement inside the buckets that still has the exact sum.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from kc_otel.bounds._check import level, usable
from kc_otel.bounds.binned import Binned
from kc_otel.bounds.interval import Interval, nothing

__all__ = ["capped_mean_interval", "hoeffding_interval", "mean_interval"]

_BERNSTEIN = "empirical Bernstein"
_HOEFFDING = "Hoeffding"


def mean_interval(sample: Binned, *, low: float, high: float, alpha_lower: float, alpha_upper: float) -> Interval:
    """Empirical Bernstein interval for the mean of a quantity that lies in [low, high].

    With V the sample variance, each side is
    `mean +- (sqrt(2 V ln(2/alpha) / n) + 7 (high - low) ln(2/alpha) / (3 (n - 1)))`, cut at low and high. Where an
    observation lies outside [low, high] all the same, that side claims nothing and the note says so.

    Source: Maurer and Pontil 2009, Empirical Bernstein Bounds and Sample Variance Penalization, Theorem 4.

    Args:
        sample: The observations; independent.
        low: Smallest value that the quantity can take.
        high: Largest value that the quantity can take.
        alpha_lower: Error probability of the lower side.
        alpha_upper: Error probability of the upper side.

    Raises:
        ValueError: If an alpha is not in (0, 1), [low, high] is not a finite range, or an edge is NaN.
    """
    _range(low, high)
    return capped_mean_interval(
        sample, low=low, high=high, cap=max(abs(low), abs(high)), alpha_lower=alpha_lower, alpha_upper=alpha_upper
    )


def capped_mean_interval(
    sample: Binned, *, low: float, high: float, cap: float, alpha_lower: float, alpha_upper: float
) -> Interval:
    """Empirical Bernstein interval for the mean of a quantity that may be unbounded: low, high, cap as in the registry.

    No finite sample bounds the mean of an unbounded quantity from above. The interval is therefore for the mean of
    the value cut to [max(low, -cap), min(high, cap)], which is the mean itself for a quantity that stays inside, and:

    - for a quantity with low >= -cap (such as one that is never negative) the lower side is valid for the mean itself,
      because cutting from above only makes a mean smaller;
    - once an observation is (or, from its bin, may be) beyond the cap, the side it lies on claims nothing: inf above,
      -inf below;
    - the note says which of this applies. The estimate is always the plain mean of the sample.

    Args:
        sample: The observations; independent.
        low: Smallest value that the quantity can take; may be -inf.
        high: Largest value that the quantity can take; may be inf.
        cap: Largest |value| that an upper bound is asked for; at least max(|low|, |high|) where both are finite.
        alpha_lower: Error probability of the lower side.
        alpha_upper: Error probability of the upper side.

    Raises:
        ValueError: If an alpha is not in (0, 1), the range is empty or has no finite cap, or an edge is NaN.
    """
    level("alpha_lower", alpha_lower)
    level("alpha_upper", alpha_upper)
    if math.isnan(cap) or cap <= 0:
        msg = f"cap: {cap!r} is not a positive number"
        raise ValueError(msg)
    floor, ceiling = max(low, -cap), min(high, cap)
    _range(floor, ceiling)
    if not sample.total:
        return nothing(_BERNSTEIN)
    usable(sample)
    known = _Moments.of(sample, floor, ceiling)
    lower = known.least - known.bernstein(alpha_lower, ceiling - floor)
    upper = known.most + known.bernstein(alpha_upper, ceiling - floor)
    beyond = sample.lower[0] < floor or sample.upper[-1] > ceiling
    below = above = 0
    if beyond:
        # A promised end is broken only by a bin that lies wholly outside; a cap already by one that may.
        below = int(sample.count[(sample.upper if floor == low else sample.lower) < floor].sum())
        above = int(sample.count[(sample.lower if ceiling == high else sample.upper) > ceiling].sum())
    return Interval(
        estimate=known.estimate,
        lower=-math.inf if below else max(floor, lower),
        upper=math.inf if above else min(ceiling, upper),
        samples=sample.total,
        method=_BERNSTEIN,
        note=_note(low, high, floor, ceiling, below, above),
    )


def hoeffding_interval(sample: Binned, *, low: float, high: float, alpha_lower: float, alpha_upper: float) -> Interval:
    """Hoeffding interval for the mean of a quantity in [low, high]: `mean +- (high - low) sqrt(ln(1/alpha) / (2 n))`.

    It does not look at the variance, so it is far wider than `mean_interval` where the mean is small; it is here to be
    compared with. Observations outside [low, high] are treated as there.

    Source: Hoeffding 1963, Theorem 2.

    Args:
        sample: The observations; independent.
        low: Smallest value that the quantity can take.
        high: Largest value that the quantity can take.
        alpha_lower: Error probability of the lower side.
        alpha_upper: Error probability of the upper side.

    Raises:
        ValueError: If an alpha is not in (0, 1), [low, high] is not a finite range, or an edge is NaN.
    """
    level("alpha_lower", alpha_lower)
    level("alpha_upper", alpha_upper)
    _range(low, high)
    if not sample.total:
        return nothing(_HOEFFDING)
    usable(sample)
    known = _Moments.of(sample, low, high)
    below = int(sample.count[sample.upper < low].sum())
    above = int(sample.count[sample.lower > high].sum())
    unit = (high - low) / math.sqrt(2.0 * sample.total)
    return Interval(
        estimate=known.estimate,
        lower=-math.inf if below else max(low, known.least - unit * math.sqrt(-math.log(alpha_lower))),
        upper=math.inf if above else min(high, known.most + unit * math.sqrt(-math.log(alpha_upper))),
        samples=sample.total,
        method=_HOEFFDING,
        note=_note(low, high, low, high, below, above),
    )


@dataclass(frozen=True, slots=True)
class _Moments:
    """Mean and variance of a sample cut to a range, as far as its bins tell.

    Attributes:
        n: Observations.
        estimate: Mean of the sample, not cut.
        least: Smallest possible mean of the cut sample.
        most: Largest possible mean of the cut sample; equal to `least` where the sum is exact and nothing is cut.
        variance: Upper bound of the sample variance (denominator n - 1) of the cut sample; inf for one observation.
    """

    n: int
    estimate: float
    least: float
    most: float
    variance: float

    def bernstein(self, alpha: float, width: float) -> float:
        """Half width of one side of the empirical Bernstein interval."""
        if self.n < 2:
            return math.inf
        log = math.log(2.0 / alpha)
        return math.sqrt(2.0 * self.variance * log / self.n) + 7.0 * width * log / (3.0 * (self.n - 1))

    @classmethod
    def of(cls, sample: Binned, low: float, high: float) -> _Moments:
        """Moments of min(max(x, low), high).

        The sum of the cut values lies between the sums of the cut edges, and also between the exact sum less the most
        and less the least that the cutting can have taken away.

        The variance is largest where all values lie on edges of their bins (it is convex in each of them), the upper
        edges going to the highest bins first: moving sum from a lower bin to a higher one never makes the sum of
        squares smaller. Filling the bins from the top until the exact sum is reached gives the maximum.
        """
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

        center = (least + most) / (2.0 * n)
        a, b = lower - center, upper - center
        slope = a + b
        room = count * (b - a)
        above = np.cumsum(room[::-1])[::-1] - room
        best = float(room[slope > 0.0].sum())
        fill = min(max(best, least - floor), most - floor)
        filled = np.minimum(np.maximum(fill - above, 0.0), room)
        squares = float(count @ (a * a) + filled @ slope)
        return cls(
            n=n,
            estimate=(total if math.isfinite(total) else (least + most) / 2.0) / n,
            least=least / n,
            most=most / n,
            variance=max(squares, 0.0) / (n - 1) if n > 1 else math.inf,
        )


def _range(low: float, high: float) -> None:
    if not (math.isfinite(low) and math.isfinite(high)):
        msg = f"low, high: [{low!r}, {high!r}] is not a finite range; give a finite cap"
        raise ValueError(msg)
    if not low < high:
        msg = f"low, high: [{low!r}, {high!r}] is empty; low has to be smaller than high"
        raise ValueError(msg)


def _note(low: float, high: float, floor: float, ceiling: float, below: int, above: int) -> str:
    said = []
    if floor > low and ceiling < high:
        said.append(f"bounds are for the mean of values cut to [{floor:g}, {ceiling:g}]")
    elif ceiling < high:
        said.append(f"the upper bound is for the mean of min(value, {ceiling:g})")
    elif floor > low:
        said.append(f"the lower bound is for the mean of max(value, {floor:g})")
    if above:
        said.append(f"{above} observations above {ceiling:g}: no upper bound is claimed")
    if below:
        said.append(f"{below} observations below {floor:g}: no lower bound is claimed")
    return "; ".join(said)
