"""Confidence intervals for a share: of observations above a threshold, or of a quantity that has two values only."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from kc_otel._extras import extra
from kc_otel.stats._check import level
from kc_otel.stats.binned import Binned, finite_range, usable
from kc_otel.stats.interval import Interval, affine, nothing
from kc_otel.stats.mixture import bets_for, growth, lower_bound

Counts = TypeVar("Counts", int, NDArray[np.float64])


def fraction_interval(
    sample: Binned, above: float, *, alpha_lower: float, alpha_upper: float, anytime: bool = False
) -> Interval:
    """Clopper-Pearson interval for P(X > above).

    The lower side is the p with P(Bin(n, p) >= k) = alpha_lower, the upper side the p with P(Bin(n, p) <= k) =
    alpha_upper, k the number of observations above the threshold. Bins that the threshold may cut count as below it in
    the lower side and as above it in the upper side; the estimate takes half of them. With `anytime` the sides are
    `share_ever`'s.

    Source: Clopper and Pearson 1934.

    >>> flips = Binned.of_samples(np.repeat([0.0, 1.0], [1990, 10]))
    >>> interval = fraction_interval(flips, 0.5, alpha_lower=0.005, alpha_upper=0.005)
    >>> round(interval.lower, 4), interval.estimate, round(interval.upper, 4)
    (0.0019, 0.005, 0.0107)
    """
    level("alpha_lower", alpha_lower)
    level("alpha_upper", alpha_upper)
    if math.isnan(above):
        raise ValueError(f"above: {above!r} is not a threshold")
    n, method = sample.total, "anytime mixture betting" if anytime else "Clopper-Pearson"
    if not n:
        return nothing(method)
    usable(sample)
    surely = surely_above(sample, above)
    maybe = int(sample.count[np.searchsorted(sample.upper, above, side="right") :].sum())
    if anytime:
        lower, upper = share_ever(surely, n, alpha_lower), 1.0 - share_ever(n - maybe, n, alpha_upper)
    else:
        lower, upper = map(float, clopper_pearson(surely, maybe, n, alpha_lower, alpha_upper))
    return Interval(
        estimate=(surely + maybe) / (2.0 * n),
        lower=lower,
        upper=upper,
        samples=n,
        method=method,
        note="" if surely == maybe else f"{maybe - surely} of them in the bin of the threshold {above:g}",
    )


def clopper_pearson(
    surely: Counts, maybe: Counts, n: Counts, alpha_lower: float, alpha_upper: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Both sides of one or many samples, from the observations surely above the threshold, and those maybe above it."""
    with extra("stats", "an exact interval"):
        from scipy.special import betainccinv, betaincinv  # noqa: PLC0415 - a third of a second that not everybody needs

    with np.errstate(invalid="ignore"):
        lower = np.where(surely > 0, betaincinv(surely, n - surely + 1, alpha_lower), 0.0)
        return lower, np.where(maybe < n, betainccinv(maybe + 1, n - maybe, alpha_upper), 1.0)


def share_ever(count: int, n: int, alpha: float) -> float:
    """Lower bound on a probability, from how often of n times something happened, that holds at every n at once.

    The betting confidence sequence of an indicator. Where the probability changes from one observation to the next,
    given the earlier ones, it is for the average of these.

    >>> share_ever(0, 100, 0.005), round(share_ever(100, 100, 0.005), 3)
    (0.0, 0.936)
    """
    if not count:
        return 0.0
    bets = bets_for(n, anytime=True)
    grown = growth(bets[0], np.array([1.0]), np.array([float(count)]))
    return min(lower_bound(bets, grown, float(n), alpha), count / n)


def surely_above(sample: Binned, above: float) -> int:
    """Observations that lie above a threshold for certain; one in a bin that the threshold may cut does not.

    >>> surely_above(Binned.of_samples(np.array([0.0, 0.5, 0.7])), 0.5)
    1
    """
    beyond = int(np.searchsorted(sample.lower, above, side="right"))
    return int(sample.count[beyond:].sum()) + _just_above(sample, beyond - 1, above)


def two_valued_mean_interval(
    sample: Binned, *, low: float, high: float, alpha_lower: float, alpha_upper: float, anytime: bool = False
) -> Interval:
    """Interval for the mean of a quantity that is known to be either low or high, never between: a share, rescaled.

    Exact where `mean_interval` has to allow for anything in [low, high], and 15 to 35 % narrower. If an observation can
    be neither of the two, nothing is claimed.

    >>> agrees = Binned.of_samples(np.repeat([0.0, 1.0], [1990, 10]))
    >>> interval = two_valued_mean_interval(agrees, low=0.0, high=1.0, alpha_lower=0.005, alpha_upper=0.005)
    >>> round(interval.lower, 4), interval.estimate, round(interval.upper, 4)
    (0.0019, 0.005, 0.0107)
    """
    finite_range(low, high)
    share = fraction_interval(
        sample, (low + high) / 2.0, alpha_lower=alpha_lower, alpha_upper=alpha_upper, anytime=anytime
    )
    if not share.samples:
        return share
    is_low = (sample.lower <= low) & (low <= sample.upper)
    is_high = (sample.lower <= high) & (high <= sample.upper)
    neither = int(sample.count[~(is_low | is_high)].sum())
    if neither:
        note = f"{neither} observations are neither {low:g} nor {high:g}: no bound is claimed"
        return replace(share, estimate=sample.sum / sample.total, lower=-math.inf, upper=math.inf, note=note)
    return affine(share, high - low, low)


def _just_above(sample: Binned, place: int, above: float) -> int:
    """Observations of the bin that begins exactly at the threshold, where its lower edge is known to be open.

    Positive buckets are open below, unless the edge is the smallest observation and not the bucket's own.
    """
    if place < 0 or above <= 0.0 or sample.minimum >= above:
        return 0
    begins = sample.lower[place] == above < sample.upper[place]
    return int(sample.count[place]) if begins else 0
