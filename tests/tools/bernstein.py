"""Empirical Bernstein interval for a mean: wider than the betting one, in closed form, so that a query can compute it.

The rules that `kc-otel generate prometheus` writes are this formula in PromQL; here it is what they are checked
against.
"""

from __future__ import annotations

import math
from dataclasses import replace

from kc_otel.stats.interval import Binned, Interval
from kc_otel.stats.means import Placement, mean_interval


def bernstein_interval(sample: Binned, *, low: float, high: float, alpha_lower: float, alpha_upper: float) -> Interval:
    """Empirical Bernstein interval for the mean of a quantity that lies in [low, high].

    With V the sample variance, each side is
    `mean +- (sqrt(2 V ln(2/alpha) / n) + 7 (high - low) ln(2/alpha) / (3 (n - 1)))`, cut at low and high. Where an
    observation lies outside [low, high] all the same, that side claims nothing and the note says so.

    Source: Maurer and Pontil 2009, Empirical Bernstein Bounds and Sample Variance Penalization, Theorem 4.
    """
    plain = replace(
        mean_interval(sample, low=low, high=high, alpha_lower=alpha_lower, alpha_upper=alpha_upper),
        method="empirical Bernstein",
    )
    if not plain.samples:
        return plain
    known = Placement.of(sample, low, high)
    lower = max(low, known.least - _deviation(known, high - low, alpha_lower))
    upper = min(high, known.most + _deviation(known, high - low, alpha_upper))
    return replace(
        plain,
        lower=lower if math.isfinite(plain.lower) else plain.lower,
        upper=upper if math.isfinite(plain.upper) else plain.upper,
    )


def _deviation(known: Placement, width: float, alpha: float) -> float:
    if known.n < 2:
        return math.inf
    log = math.log(2.0 / alpha)
    return math.sqrt(2.0 * _variance(known) * log / known.n) + 7.0 * width * log / (3.0 * (known.n - 1))


def _variance(known: Placement) -> float:
    """Largest possible sample variance (denominator n - 1) of the cut sample.

    Of all worst placements it is the one that raises exactly the bins whose middle lies above the centre, or, where
    the sum does not allow that, the nearest one that it allows.
    """
    center = (known.least + known.most) / 2.0
    room = known.count * (known.upper - known.lower)
    best = float(known.count @ known.lower + room[known.lower + known.upper > 2.0 * center].sum()) / known.n
    values, weights = known.worst(min(max(best, known.least), known.most))
    return float(weights @ (values - center) ** 2) / (known.n - 1)
