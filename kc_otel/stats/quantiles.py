"""Confidence intervals for a quantile, and for a share of observations above a threshold, for any distribution.

The `rank` quantile is the smallest x with P(X <= x) >= rank. Its interval is a pair of order statistics: the r-th
smallest observation below and the s-th smallest above.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from kc_otel._extras import extra
from kc_otel.stats.interval import Binned, Interval, affine, finite_range, level, nothing, usable
from kc_otel.stats.means import bets_for, growth, lower_bound

Floats = NDArray[np.float64]
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


def quantile_interval(
    sample: Binned, rank: float, *, alpha_lower: float, alpha_upper: float, anytime: bool = False
) -> Interval:
    """Exact order-statistic interval for one quantile, of a rank in (0, 1): 0.999 for p99.9.

    The number of observations at or below the quantile is binomial, so the r-th smallest is a lower bound with error
    probability P(Bin(n, rank) < r) and the s-th smallest an upper bound with P(Bin(n, rank) >= s). The sharpest r and s
    that keep to the alphas are taken. An upper bound exists only where rank^n <= alpha_upper; until then it is inf and
    the note says how many observations it needs. With `anytime` r and s are those that a betting confidence sequence
    for the share at or below the quantile allows.

    Source: David and Nagaraja 2003, Order Statistics, section 7.1.

    >>> drift = Binned.of_samples(np.arange(2000) / 2000)
    >>> interval = quantile_interval(drift, 0.99, alpha_lower=0.005, alpha_upper=0.005)
    >>> interval.lower, interval.estimate, interval.upper
    (0.9835, 0.9895, 0.995)
    """
    level("alpha_lower", alpha_lower)
    level("alpha_upper", alpha_upper)
    if not 0.0 < rank < 1.0:
        raise ValueError(f"rank: {rank!r} is not strictly between 0 and 1; write 0.999 for p99.9")
    n, method = sample.total, "anytime order statistics" if anytime else "order statistics"
    if not n:
        return nothing(method)
    usable(sample)
    first, last = (_ranks_ever if anytime else _binomial_ranks)(n, rank, alpha_lower, alpha_upper)
    reached = np.cumsum(sample.count)
    middle = min(max(math.ceil(n * rank), 1), n)
    r, m, s = (int(i) for i in np.searchsorted(reached, (max(first, 1), middle, min(last, n))))
    low, high = float(sample.lower[m]), float(sample.upper[m])
    share = (middle - 0.5 - (reached[m] - sample.count[m])) / sample.count[m]
    inside = low + share * (high - low) if math.isfinite(high - low) else (low if math.isfinite(low) else high)
    return Interval(
        estimate=float(inside),
        lower=float(sample.lower[r]) if first >= 1 else -math.inf,
        upper=float(sample.upper[s]) if last <= n else math.inf,
        samples=n,
        method=method,
        note="" if last <= n else upper_bound_needs(rank, alpha_upper, anytime=anytime),
    )


def upper_bound_needs(rank: float, alpha_upper: float, *, anytime: bool = False) -> str:
    """Return the note of an interval with too few observations for an upper bound."""
    return f"an upper bound needs at least {_needed(rank, alpha_upper, anytime)} observations"


@lru_cache(maxsize=256)
def _needed(rank: float, alpha_upper: float, anytime: bool) -> int:
    least = math.ceil(math.log(alpha_upper) / math.log(rank))
    if not anytime:
        return least
    high = least
    while share_ever(high, high, alpha_upper) < rank:
        high *= 2
    return bisect_left(range(high), True, lo=least, key=lambda n: share_ever(n, n, alpha_upper) >= rank)


@lru_cache(maxsize=4096)
def _ranks_ever(n: int, rank: float, alpha_lower: float, alpha_upper: float) -> tuple[int, int]:
    """(r, s): no x below the r-th smallest has a share of `rank` at or below it, every one from the s-th on has."""
    below = bisect_left(range(n), True, key=lambda k: 1.0 - share_ever(n - k, n, alpha_lower) >= rank)
    return below, bisect_left(range(n + 1), True, key=lambda k: share_ever(k, n, alpha_upper) >= rank)


@lru_cache(maxsize=4096)
def _binomial_ranks(n: int, rank: float, alpha_lower: float, alpha_upper: float) -> tuple[int, int]:
    below, above = binomial_ranks(np.array([float(n)]), rank, alpha_lower, alpha_upper)
    return int(below[0]), int(above[0])


def binomial_ranks(n: Floats, rank: float, alpha_lower: float, alpha_upper: float) -> tuple[Floats, Floats]:
    """Largest r with P(Bin < r) <= alpha_lower, and smallest s with P(Bin >= s) <= alpha_upper, for many n [R]."""
    with extra("stats", "an exact interval"):
        from scipy.special import betainc, betaincc, ndtri  # noqa: PLC0415 - a third of a second that not everybody needs

    # P(Bin <= k) and P(Bin > k) as incomplete beta functions: SciPy's own binomial tails are nan from n = 2^31 on.
    def holds(tail: Callable[..., Floats], small: float, k: Floats, n: Floats) -> NDArray[np.bool_]:
        beyond = np.asarray(tail(k + 1.0, n - k, rank))
        return beyond > small if tail is betaincc else beyond <= small

    def first(tail: Callable[..., Floats], small: float) -> Floats:
        """Smallest k in [0, n] for which `holds`, as it does for n and all that are larger: around a normal law's."""
        z = float(ndtri(small)) if tail is betaincc else -float(ndtri(small))
        guess = n * rank + z * np.sqrt(n * rank * (1.0 - rank)) + (1.0 - 2.0 * rank) * (z * z - 1.0) / 6.0
        low, high = np.full(n.size, -1.0), n.copy()  # the largest that is known not to hold, the smallest that does
        probe, step = np.clip(np.ceil(guess), 0.0, n - 1.0), 1.0
        while (open_ := np.flatnonzero(high - low > 1.0)).size:
            at = probe[open_]
            true = holds(tail, small, at, n[open_])
            low[open_], high[open_] = np.where(true, low[open_], at), np.where(true, at, high[open_])
            probe[open_] = np.where(true, at - step, at + step)
            within = (low < probe) & (probe < high)
            probe, step = np.where(within, probe, np.floor((low + high) / 2.0)), 2.0 * step
        return high

    return first(betaincc, alpha_lower), first(betainc, alpha_upper) + 1.0
