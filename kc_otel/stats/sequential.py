"""Bounds for a mean that hold at every number of observations at once, from samples or histograms whose order is lost.

An interval for a fixed sample misses more and more often if one looks again and again as data comes in. These do not:
the chance that one ever misses, over all looks together, is at most alpha. What they need is a stream of observations
of which each has, given all earlier ones, the mean in question (independent observations of one distribution do),
looked at as a growing whole: not a window that forgets. If these conditional means change, the bounds are for their
average so far.

The mixture over fixed bets makes them independent of the order, so that exponential histograms can be merged and asked.
For a stream in order, `streams` adapts the bets to what came before.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from kc_otel.stats.binned import Binned
from kc_otel.stats.interval import Interval
from kc_otel.stats.mixture import bets_ever, betting_sides, growth, log_wealth
from kc_otel.stats.placement import Placement, finite_range
from kc_otel.stats.ranged import Sides, bounded_interval

__all__ = ["anytime_bernstein_interval", "anytime_mean_interval", "e_value"]

_LARGEST_LOG: Final = 700.0
"""e to this power is still a number."""


def anytime_mean_interval(
    sample: Binned, *, low: float, high: float, alpha_lower: float, alpha_upper: float
) -> Interval:
    """Betting confidence sequence for the mean of a quantity in [low, high]: valid at all sample sizes together.

    Like `betting_interval`, with one grid of bets for all sizes, which makes it a little wider and holds at any size
    that is chosen in view of the data. From histograms it counts with the worst placement in the buckets, so it is
    valid for whatever was in them: the wealth that is counted never exceeds the wealth that there is.

    Source: Waudby-Smith and Ramdas 2024, JRSS-B 86(1), Theorem 3 and section 4.3; Ville 1939.

    Args:
        sample: All observations so far.
        low: Smallest value that the quantity can take.
        high: Largest value that the quantity can take.
        alpha_lower: Probability that the lower side is ever above the mean.
        alpha_upper: Probability that the upper side is ever below it.

    Raises:
        ValueError: If an alpha is not in (0, 1), [low, high] is not a finite range, or an edge is NaN.
    """
    return bounded_interval(sample, low, high, alpha_lower, alpha_upper, _BETTING, "anytime mixture betting")


def anytime_bernstein_interval(
    sample: Binned, *, low: float, high: float, alpha_lower: float, alpha_upper: float, center: float | None = None
) -> Interval:
    """Empirical Bernstein confidence sequence with a fixed centre c: from count, sum and V = sum (x - c)^2 alone.

    On a scale where the range is 1, `exp(lam (S - n m) - psi(lam) V)`, psi(lam) = -ln(1 - lam) - lam, has a mean of at
    most 1 for each lam in [0, 1); the bound is where a mixture of them over fixed lam reaches 1/alpha. Each factor is
    at most that of a bet of size lam / (1 - lam c), so `anytime_mean_interval` is narrower; this one is for whoever
    keeps no more of a sample than three numbers. From bins, V is the largest that they and the sum allow.

    Source: Howard, Ramdas, McAuliffe and Sekhon 2021, Time-uniform, nonparametric, nonasymptotic confidence sequences,
    Annals of Statistics 49(2), Theorem 4 with a constant prediction c and a discrete mixture; the inequality behind it
    is Fan, Grama and Liu 2015, Exponential inequalities for martingales with applications, equation 4.11.

    Args:
        sample: All observations so far.
        low: Smallest value that the quantity can take.
        high: Largest value that the quantity can take.
        alpha_lower: Probability that the lower side is ever above the mean.
        alpha_upper: Probability that the upper side is ever below it.
        center: c, in [low, high], chosen before the data; `low` by default, which suits drifts.

    Raises:
        ValueError: If an alpha is not in (0, 1), [low, high] is not a finite range, the centre is not in it, or an edge
            is NaN.
    """
    finite_range(low, high)
    at = low if center is None else center
    if not low <= at <= high:
        msg = f"center: {at!r} is not in [low, high] = [{low:g}, {high:g}]"
        raise ValueError(msg)

    def half(known: Placement, width: float, alpha: float) -> float:
        return width * _bernstein_mixture(known.n, known.squares(at) / width**2, alpha)

    sides = Sides(
        lower=lambda known, floor, ceiling, alpha: known.least - half(known, ceiling - floor, alpha),
        upper=lambda known, floor, ceiling, alpha: known.most + half(known, ceiling - floor, alpha),
    )
    return bounded_interval(sample, low, high, alpha_lower, alpha_upper, sides, "anytime empirical Bernstein")


def e_value(sample: Binned, limit: float, *, low: float, high: float) -> float:
    """Evidence against "the mean is at most the limit": the wealth of a mixture of bets that it is larger.

    If the mean of each observation, given the earlier ones, is at most the limit, this has a mean of at most 1 at any
    size of the sample, also one chosen in view of it: it exceeds 1/alpha at any time with probability at most alpha,
    and 1/e_value is an anytime-valid p-value. For many slices at once see `e_bh`.

    Observations above `high` count as `high`, which only takes evidence away, so `high` may be a cap. One that is, or
    from its bin may be, below `low` breaks the promise that the bets rest on: then there is no evidence, and the value
    is 0.

    Source: Waudby-Smith and Ramdas 2024, JRSS-B 86(1), Theorem 3; Shafer 2021, Testing by betting, JRSS-A 184(2).

    Args:
        sample: All observations so far.
        limit: Largest mean of the hypothesis.
        low: Smallest value that the quantity can take.
        high: Largest value that the quantity can take, or a cap.

    Returns:
        The e-value, at least 0; 1 without observations, inf when too large for a number.

    Raises:
        ValueError: If the limit is not in [low, high], [low, high] is not a finite range, or an edge is NaN.
    """
    finite_range(low, high)
    if not low <= limit <= high:
        msg = f"limit: {limit!r} is not in [low, high] = [{low:g}, {high:g}]"
        raise ValueError(msg)
    if not sample.total:
        return 1.0
    known = Placement.of(sample, low, high)
    if sample.lower[0] < low:
        return 0.0
    bets = bets_ever()
    values, weights = known.worst(known.least)
    grown = growth(bets[0], (values - low) / (high - low), weights)
    won = log_wealth(bets, grown, known.n, (limit - low) / (high - low))
    return math.exp(won) if won < _LARGEST_LOG else math.inf


def _bernstein_mixture(n: int, squares: float, alpha: float) -> float:
    """The t at which sum_j weight_j exp(lam_j n t - psi(lam_j) V) is 1/alpha, from above.

    A convex, rising function of t: Newton's method from above never passes the root.
    """
    bets, log_weights = bets_ever()
    lam = bets / (1.0 + bets)
    psi = np.log1p(bets) - lam  # -ln(1 - lam) = ln(1 + c)
    scores = log_weights + math.log(alpha) - psi * squares
    half = float((-scores / (lam * n)).min())
    while True:
        each = scores + lam * n * half
        top = float(each.max())
        share = np.exp(each - top)
        excess = top + math.log(float(share.sum()))
        if excess <= _TOLERANCE:
            return half
        half -= excess * float(share.sum()) / float((lam * n) @ share)


_TOLERANCE: Final = 1e-7
"""Nats by which the wealth may exceed 1/alpha."""
_BETTING: Final = betting_sides(bets_ever)
