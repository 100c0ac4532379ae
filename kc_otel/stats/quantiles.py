"""Confidence intervals for a quantile, for a share of observations above a threshold, and the maximum.

The `rank` quantile is the smallest x with P(X <= x) >= rank. Its interval is a pair of order statistics: the r-th
smallest observation below and the s-th smallest above.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kc_otel._extras import extra
from kc_otel.stats.interval import Binned, Floats, Interval, finite_range, nothing
from kc_otel.stats.interval_rows import HistogramRows, IntervalRows, of_sample
from kc_otel.stats.means import EVER, METHOD, grid_of, lower_bounds

MAXIMUM_METHOD: Final = "observed maximum"
SHARE_METHOD: Final = ("Clopper-Pearson", METHOD[True])
QUANTILE_METHOD: Final = ("order statistics", "anytime order statistics")
"""Names of the intervals, of a size fixed beforehand and of all sizes at once."""
_MAXIMUM_NOTE: Final = "largest observation; larger ones may exist that were not observed"


def maximum_interval(sample: Binned) -> Interval:
    """The largest observation. It describes the sample only: nothing bounds what was not observed.

    Where the sample does not say which value was the largest, the sides are the edges of the bin that holds it.
    """
    return maximum_intervals(HistogramRows.of(sample))[0] if sample.total else nothing(MAXIMUM_METHOD)


def maximum_intervals(rows: HistogramRows, *, whole: bool = False) -> IntervalRows:
    """`maximum_interval` of each row, of values that may be `whole`."""
    row, last = np.arange(rows.total.size), rows.ends[1]
    low = np.where(rows.observed, rows.maximum, rows.lower[row, last])
    high = np.where(rows.observed, rows.maximum, rows.upper[row, last])
    high[(rows.sum == 0.0) & (rows.minimum >= 0.0)] = 0.0  # all are 0, however wide their bin is
    if whole:
        low, high = np.ceil(low), np.floor(high)
    return IntervalRows(high, low, high, rows.total, MAXIMUM_METHOD, [_MAXIMUM_NOTE] * row.size)


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
    if math.isnan(above):
        raise ValueError(f"above: {above!r} is not a threshold")
    levels = {"alpha_lower": alpha_lower, "alpha_upper": alpha_upper}
    return of_sample(fraction_intervals, sample, nothing(SHARE_METHOD[anytime]), **levels, above=above, anytime=anytime)


def fraction_intervals(
    rows: HistogramRows, above: float, *, alpha_lower: float, alpha_upper: float, anytime: bool = False
) -> IntervalRows:
    """`fraction_interval` of each row."""
    n, surely = rows.total, rows.surely_above(above)
    maybe = (rows.count * (rows.upper > above)).sum(axis=1)
    if anytime:
        lower, upper = _shares_ever(surely, n, alpha_lower), 1.0 - _shares_ever(n - maybe, n, alpha_upper)
    else:
        lower, upper = clopper_pearson(surely, maybe, n, alpha_lower, alpha_upper)
    within = f" of them in the bin of the threshold {above:g}"
    note = [f"{int(more)}{within}" if more else "" for more in (maybe - surely).tolist()]
    return IntervalRows((surely + maybe) / (2.0 * n), lower, upper, n, SHARE_METHOD[anytime], note)


def clopper_pearson(
    surely: Floats, maybe: Floats, n: Floats, alpha_lower: float, alpha_upper: float
) -> tuple[Floats, Floats]:
    """Both sides of many samples [R], from the observations surely above the threshold, and those maybe above it."""
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
    bets, log_weights = grid_of([EVER])
    bound = lower_bounds(bets, count * np.log(1.0 + bets) + log_weights + math.log(alpha), np.array([float(n)]))
    return min(float(bound[0]), count / n)


def _shares_ever(counts: Floats, n: Floats, alpha: float) -> Floats:
    sizes = zip(counts.tolist(), n.tolist(), strict=True)
    return np.array([share_ever(int(count), int(size), alpha) for count, size in sizes])


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
    levels = {"alpha_lower": alpha_lower, "alpha_upper": alpha_upper}
    empty = nothing(SHARE_METHOD[anytime])
    return of_sample(two_valued_mean_intervals, sample, empty, **levels, low=low, high=high, anytime=anytime)


def two_valued_mean_intervals(
    rows: HistogramRows, *, low: float, high: float, alpha_lower: float, alpha_upper: float, anytime: bool = False
) -> IntervalRows:
    """`two_valued_mean_interval` of each row."""
    levels = {"alpha_lower": alpha_lower, "alpha_upper": alpha_upper}
    share, width = fraction_intervals(rows, (low + high) / 2.0, **levels, anytime=anytime), high - low
    is_low = (rows.lower <= low) & (low <= rows.upper)
    is_high = (rows.lower <= high) & (high <= rows.upper)
    neither = (rows.count * ~(is_low | is_high)).sum(axis=1)
    odd, no_bound = neither > 0, f"observations are neither {low:g} nor {high:g}: no bound is claimed"
    return replace(
        share,
        estimate=np.where(odd, rows.sum / rows.total, low + width * share.estimate),
        lower=np.where(odd, -math.inf, low + width * share.lower),
        upper=np.where(odd, math.inf, low + width * share.upper),
        note=[f"{int(many)} {no_bound}" if many else said for many, said in zip(neither, share.note, strict=True)],
    )


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
    if not 0.0 < rank < 1.0:
        raise ValueError(f"rank: {rank!r} is not strictly between 0 and 1; write 0.999 for p99.9")
    levels = {"alpha_lower": alpha_lower, "alpha_upper": alpha_upper}
    return of_sample(
        quantile_intervals, sample, nothing(QUANTILE_METHOD[anytime]), **levels, rank=rank, anytime=anytime
    )


def quantile_intervals(
    rows: HistogramRows, rank: float, *, alpha_lower: float, alpha_upper: float, anytime: bool = False
) -> IntervalRows:
    """`quantile_interval` of each row."""
    n, row = rows.total, np.arange(rows.total.size)
    if anytime:
        ranks = [_ranks_ever(int(size), rank, alpha_lower, alpha_upper) for size in n.tolist()]
        first, last = np.array(ranks, np.float64).T
    else:
        first, last = binomial_ranks(n, rank, alpha_lower, alpha_upper)
    middle = np.clip(np.ceil(n * rank), 1.0, n)
    reached = np.cumsum(rows.count, axis=1)

    def bin_of(order: Floats) -> NDArray[np.int64]:
        found: NDArray[np.int64] = (reached >= order[:, None]).argmax(axis=1)
        return found

    m, r, s = bin_of(middle), bin_of(np.maximum(first, 1.0)), bin_of(np.minimum(last, n))
    low, high, count = rows.lower[row, m], rows.upper[row, m], rows.count[row, m]
    with np.errstate(invalid="ignore"):
        inside = low + (middle - 0.5 - (reached[row, m] - count)) / count * (high - low)
    estimate = np.where(np.isfinite(high - low), inside, np.where(np.isfinite(low), low, high))
    lower = np.where(first >= 1.0, rows.lower[row, r], -math.inf)
    upper = np.where(last <= n, rows.upper[row, s], math.inf)
    needs = upper_bound_needs(rank, alpha_upper, anytime=anytime) if (last > n).any() else ""
    note = [needs if over else "" for over in (last > n).tolist()]
    return IntervalRows(estimate, lower, upper, n, QUANTILE_METHOD[anytime], note)


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
