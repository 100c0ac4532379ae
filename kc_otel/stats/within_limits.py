"""Which of many samples have their upper bound at or below a limit, said without looking for the bound.

An interval is the set of what a test does not refute, so one test, of the limit, says on which side of it the bound
is; a bound takes a search. Where it is close, the answer is no: then the bounds of `interval_rows` decide.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from kc_otel._extras import extra
from kc_otel.stats.histogram_rows import HistogramRows
from kc_otel.stats.mean_rows import MeanRows, wealth

__all__ = ["fractions_within", "means_within", "quantiles_within"]

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

_SURELY: Final = 1e-6
"""Logarithm of wealth, beside 1/alpha, from which it is certain on which side of it an iteration ends."""
_CLEARLY: Final = 1.0 - 1e-6
"""Of an alpha: a tail below this part of it is below it however it is rounded."""


def means_within(
    rows: HistogramRows, limits: Floats, *, low: float, high: float, cap: float, alpha_upper: float, cut: bool = False
) -> Flags:
    """Of which rows the upper bound of `mean_intervals` is surely at most a limit [R].

    Bets that the mean is smaller than the limit have won more than 1/alpha there: so few need to be looked at, and the
    values of bins taken for as large as they can be, where the limit is far. Bets know nothing of a sum that its bins
    forbid: a mean that may be above the limit is not within it.

    Args:
        rows: The samples.
        limits: Of each [R].
        low: As of `mean_intervals`, and so are the others.
        high: The same.
        cap: The same.
        alpha_upper: The same.
        cut: The same.
    """
    means = MeanRows(rows, low, high, cap, cut=cut)
    within = _refuted_by_one_bet(means, limits, alpha_upper) & ~means.odd
    left = np.flatnonzero(~within & ~means.odd)
    if left.size:
        means, limits = MeanRows(rows.taken(left), low, high, cap, cut=cut), limits[left]
        excess, _ = wealth(means.bets, means.scores_above(alpha_upper), means.rows.total, _shares(means, limits))
        within[left] = (excess > _SURELY) & (means.most <= limits)
    return within


def _refuted_by_one_bet(means: MeanRows, limits: Floats, alpha: float) -> Flags:
    """Whether the luckiest bet alone refutes a mean as large as the limit, were values at the upper edges of bins."""
    if means.cuts:  # what is cut is in the sums, too
        return np.zeros(limits.size, np.bool_)
    scores, most = means.at_upper_edges(alpha)
    shares, which = np.unique(_shares(means, limits), return_inverse=True)
    won = scores - means.rows.total[:, None] * np.log(1.0 + means.bets * shares[:, None])[which]
    refuted: Flags = (won.max(axis=1) > _SURELY) & (np.fmax(most, means.rows.sum / means.rows.total) <= limits)
    return refuted


def _shares(means: MeanRows, limits: Floats) -> Floats:
    """Limits as what bets are about: how far below the ceiling they are, as a share of the range [R]."""
    return np.maximum((means.ceiling - limits) / means.width, 0.0)


def quantiles_within(rows: HistogramRows, rank: float, limits: Floats, *, alpha_upper: float) -> Flags:
    """Of which rows the upper bound of `quantile_intervals` is surely at most a limit [R].

    It is where more observations are surely at or below the limit than a binomial of this rank has, but for alpha.

    Args:
        rows: The samples.
        rank: As of `quantile_intervals`.
        limits: Of each [R].
        alpha_upper: As of `quantile_intervals`.
    """
    with extra("stats", "an exact interval"):
        from scipy.special import betainc  # noqa: PLC0415 - a third of a second that not everybody needs

    different, which = np.unique(limits, return_inverse=True)
    below = rows.added_up(lambda edges: (edges[:, None] <= different).astype(np.float64), rows.count, upper=True)
    some = below[np.arange(limits.size), which]
    tail = betainc(np.maximum(some, 1.0), rows.total - np.maximum(some, 1.0) + 1.0, rank)
    within: Flags = (some > 0.0) & (tail <= alpha_upper * _CLEARLY)
    return within


def fractions_within(rows: HistogramRows, above: float, limits: Floats, *, alpha_upper: float) -> Flags:
    """Of which rows the upper bound of `fraction_intervals` is surely at most a limit [R].

    It is where a binomial whose share is the limit has as few as may be above, with a probability of at most alpha.

    Args:
        rows: The samples.
        above: As of `fraction_intervals`.
        limits: Of each [R].
        alpha_upper: As of `fraction_intervals`.
    """
    with extra("stats", "an exact interval"):
        from scipy.special import betaincc  # noqa: PLC0415 - as above

    maybe = rows.added_up(lambda edges: (edges > above)[:, None].astype(np.float64), rows.count, upper=True)[:, 0]
    others = rows.total - maybe
    tail = betaincc(maybe + 1.0, np.maximum(others, 1.0), np.clip(limits, 0.0, 1.0))
    within: Flags = (others > 0.0) & (tail <= alpha_upper * _CLEARLY)
    return within
