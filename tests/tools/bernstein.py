"""Empirical Bernstein interval for a mean: wider than the betting one, in closed form, so that a query can compute it.

The rules that `kc-otel generate prometheus` writes are this formula in PromQL; here it is what they are checked
against.
"""

from __future__ import annotations

import math
from typing import Final

from kc_otel.stats.binned import Binned
from kc_otel.stats.interval import Interval
from kc_otel.stats.placement import Placement
from kc_otel.stats.ranged import Sides, bounded_interval

__all__ = ["bernstein_interval"]


def bernstein_interval(sample: Binned, *, low: float, high: float, alpha_lower: float, alpha_upper: float) -> Interval:
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
    return bounded_interval(sample, low, high, alpha_lower, alpha_upper, _BERNSTEIN, "empirical Bernstein")


def _bernstein(known: Placement, width: float, alpha: float) -> float:
    if known.n < 2:
        return math.inf
    log = math.log(2.0 / alpha)
    return math.sqrt(2.0 * known.variance() * log / known.n) + 7.0 * width * log / (3.0 * (known.n - 1))


_BERNSTEIN: Final = Sides(
    lower=lambda known, low, high, alpha: known.least - _bernstein(known, high - low, alpha),
    upper=lambda known, low, high, alpha: known.most + _bernstein(known, high - low, alpha),
)
