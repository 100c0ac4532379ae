"""Confidence intervals for a quantile, from samples or from histograms, without any assumption on the distribution.

The `rank` quantile is the smallest x with P(X <= x) >= rank. Its interval is a pair of order statistics: the r-th
smallest observation below and the s-th smallest above.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from kc_otel._extras import extra
from kc_otel.stats._check import level
from kc_otel.stats.binned import Binned, usable
from kc_otel.stats.fractions import share_ever
from kc_otel.stats.interval import Interval, nothing

Floats = NDArray[np.float64]


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
