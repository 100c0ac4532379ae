"""The intervals of `means`, `quantiles` and `fractions` for all rows of a matrix at once, for sizes fixed beforehand.

The same numbers, up to rounding, as the functions for one sample give, which say what each interval is and where it
comes from. For means the edges of the bins are shared, so what each bet wins from each bin is one matrix [B, J], and
the wealth of all rows is a product of counts with it. A row about which there is more to say (observations outside of a
range) is None, and is for the function for one sample.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kc_otel._extras import extra
from kc_otel.stats.histogram_rows import HistogramRows
from kc_otel.stats.interval import Interval, affine, largest
from kc_otel.stats.mixture import grid_of, span_of
from kc_otel.stats.quantiles import upper_bound_needs
from kc_otel.stats.ranged import note_of

__all__ = [
    "fraction_intervals",
    "maximum_intervals",
    "mean_intervals",
    "quantile_intervals",
    "two_valued_mean_intervals",
]

Floats = NDArray[np.float64]

_TOLERANCE: Final = 1e-9
_STEPS: Final = 50


def maximum_intervals(rows: HistogramRows) -> list[Interval | None]:
    """`maximum_interval` of each row."""
    row, last = np.arange(rows.total.size), rows.ends[1]
    edges = zip(rows.lower[row, last].tolist(), rows.upper[row, last].tolist(), strict=True)
    said = zip(rows.observed.tolist(), rows.maximum.tolist(), rows.total.tolist(), edges, strict=True)
    return [largest(maximum if seen else None, low, high, int(n)) for seen, maximum, n, (low, high) in said]


def fraction_intervals(
    rows: HistogramRows, above: float, *, alpha_lower: float, alpha_upper: float
) -> list[Interval | None]:
    """`fraction_interval` of each row."""
    with extra("stats", "an exact interval"):
        from scipy.special import betainccinv, betaincinv  # noqa: PLC0415 - a third of a second that not everybody needs

    n = rows.total
    surely = rows.surely_above(above)
    maybe = (rows.count * (rows.upper > above)).sum(axis=1)
    with np.errstate(invalid="ignore"):
        lower = np.where(surely > 0, betaincinv(surely, n - surely + 1, alpha_lower), 0.0)
        upper = np.where(maybe < n, betainccinv(maybe + 1, n - maybe, alpha_upper), 1.0)
    said = zip(*(each.tolist() for each in (surely, maybe, n, lower, upper)), strict=True)
    return [
        Interval(
            (least + most) / (2.0 * count),
            low,
            high,
            int(count),
            "Clopper-Pearson",
            "" if least == most else f"{int(most - least)} of them in the bin of the threshold {above:g}",
        )
        for least, most, count, low, high in said
    ]


def two_valued_mean_intervals(
    rows: HistogramRows, *, low: float, high: float, alpha_lower: float, alpha_upper: float
) -> list[Interval | None]:
    """`two_valued_mean_interval` of each row; None where an observation is neither of the two values."""
    is_low = (rows.lower <= low) & (low <= rows.upper)
    is_high = (rows.lower <= high) & (high <= rows.upper)
    neither = np.any((rows.count > 0) & ~(is_low | is_high), axis=1)
    shares = fraction_intervals(rows, (low + high) / 2.0, alpha_lower=alpha_lower, alpha_upper=alpha_upper)
    return [
        None if odd or share is None else affine(share, high - low, low)
        for odd, share in zip(neither.tolist(), shares, strict=True)
    ]


def quantile_intervals(
    rows: HistogramRows, rank: float, *, alpha_lower: float, alpha_upper: float
) -> list[Interval | None]:
    """`quantile_interval` of each row."""
    n, row = rows.total, np.arange(rows.total.size)
    first, last = _binomial_ranks(n, rank, alpha_lower, alpha_upper)
    middle = np.clip(np.ceil(n * rank), 1.0, n)
    reached = np.cumsum(rows.count, axis=1)

    def bin_of(order: Floats) -> NDArray[np.int64]:
        found: NDArray[np.int64] = (reached >= order[:, None]).argmax(axis=1)
        return found

    m, r, s = bin_of(middle), bin_of(np.maximum(first, 1.0)), bin_of(np.minimum(last, n))
    low, count = rows.lower[row, m], rows.count[row, m]
    estimate = low + (middle - 0.5 - (reached[row, m] - count)) / count * (rows.upper[row, m] - low)
    lower = np.where(first >= 1.0, rows.lower[row, r], -math.inf)
    upper = np.where(last <= n, rows.upper[row, s], math.inf)
    return [
        Interval(
            middle_value,
            least,
            most,
            int(count),
            "order statistics",
            "" if most < math.inf else upper_bound_needs(rank, alpha_upper),
        )
        for middle_value, least, most, count in zip(
            estimate.tolist(), lower.tolist(), upper.tolist(), n.tolist(), strict=True
        )
    ]


def mean_intervals(
    rows: HistogramRows,
    *,
    low: float,
    high: float,
    cap: float,
    alpha_lower: float,
    alpha_upper: float,
    cut: bool = False,
) -> list[Interval | None]:
    """`capped_mean_interval` of each row; None where an observation is, or may be, beyond the range or the cap."""
    floor, ceiling = max(low, -cap), min(high, cap)
    n, count = rows.total, rows.count
    lower, upper = np.clip(rows.lower, floor, ceiling), np.clip(rows.upper, floor, ceiling)
    odd = np.zeros(n.size, np.bool_)
    if floor == low or not cut:
        odd |= ((count > 0) & ((rows.upper if floor == low else rows.lower) < floor)).any(axis=1)
    if ceiling == high or not cut:
        odd |= ((count > 0) & ((rows.lower if ceiling == high else rows.upper) > ceiling)).any(axis=1)
    total = np.where(np.isfinite(rows.sum), rows.sum, math.nan)
    at_least, at_most = _dot(count, lower), _dot(count, upper)
    one = np.fmax(at_least, total - _dot(count, rows.upper - upper))
    other = np.fmin(at_most, total - _dot(count, rows.lower - lower))
    least, most = np.minimum(one, other) / n, np.maximum(one, other) / n
    estimate = (least + most) / 2.0 if cut else np.where(np.isnan(total), (least + most) / 2.0, total / n)

    width = ceiling - floor
    room = count * (upper - lower)
    reach = np.cumsum(room[:, ::-1], axis=1)[:, ::-1] - room

    def side(mean: Floats, place: Callable[[Floats], Floats], alpha: float) -> Floats:
        raised = np.clip((mean * n - at_least)[:, None] - reach, 0.0, room)
        raised = count * (raised / np.where(room > 0.0, room, 1.0))
        bets, log_weights = grid_of([span_of(int(size)) for size in n.tolist()])

        def won(edges: Floats) -> Floats:
            return np.asarray(np.log(1.0 + bets * place(np.clip(edges, floor, ceiling))[:, None]))

        grown = rows.added_up(won, count - raised) + rows.added_up(won, raised, upper=True)
        return _lower_bounds(bets, grown + log_weights + math.log(alpha), n)

    below = floor + width * side(least, lambda x: (x - floor) / width, alpha_lower)
    above = ceiling - width * side(most, lambda x: (ceiling - x) / width, alpha_upper)
    below = np.maximum(floor, np.minimum(least, below))
    above = np.minimum(ceiling, np.maximum(most, above))
    note = note_of(low, high, floor, ceiling, cut=cut)
    said = zip(*(each.tolist() for each in (odd, estimate, below, above, n)), strict=True)
    return [
        None if strange else Interval(middle, down, up, int(size), "mixture betting", note)
        for strange, middle, down, up, size in said
    ]


def _dot(a: Floats, b: Floats) -> Floats:
    product: Floats = np.einsum("rb,rb->r", a, b)
    return product


def _lower_bounds(bets: Floats, scores: Floats, n: Floats) -> Floats:
    """`mixture.lower_bound` of each row [R], of bets [J] and their scores [R, J]."""
    mean = np.clip((np.expm1(scores / n[:, None]) / bets).max(axis=1), 0.0, 1.0)
    active = np.arange(n.size)
    for _ in range(_STEPS):
        stakes = 1.0 + bets * mean[active, None]
        each = scores[active] - n[active, None] * np.log(stakes)
        top = each.max(axis=1)
        share = np.exp(each - top[:, None])
        whole = share.sum(axis=1)
        excess = top + np.log(whole)
        slope = -n[active] * _dot(bets / stakes, share) / whole
        on = excess > _TOLERANCE
        if not on.any():
            break
        active = active[on]
        mean[active] = np.minimum(mean[active] - excess[on] / slope[on], 1.0)
    bounds: Floats = mean
    return bounds


def _binomial_ranks(n: Floats, rank: float, alpha_lower: float, alpha_upper: float) -> tuple[Floats, Floats]:
    """`quantiles._binomial_ranks` of each size."""
    with extra("stats", "an exact interval"):
        from scipy.special import betainc, betaincc, ndtri  # noqa: PLC0415 - as above

    def holds(tail: Callable[..., Floats], small: float) -> tuple[Callable[[Floats], NDArray[np.bool_]], float]:
        if tail is betaincc:
            return (lambda k: np.asarray(betaincc(k + 1.0, n - k, rank) > small)), float(ndtri(small))
        return (lambda k: np.asarray(betainc(k + 1.0, n - k, rank) <= small)), -float(ndtri(small))

    deviation = np.sqrt(n * rank * (1.0 - rank))

    def first(tail: Callable[..., Floats], small: float) -> Floats:
        """Smallest k in [0, n] for which a monotone condition, true at n, holds: around where a normal law has it."""
        condition, z = holds(tail, small)
        guess = n * rank + z * deviation + (1.0 - 2.0 * rank) * (z * z - 1.0) / 6.0
        low, high = np.clip(np.floor(guess) - 1.0, 0.0, n), np.clip(np.floor(guess) + 1.0, 0.0, n)
        for power in range(64):
            wrong = (low > 0.0) & condition(np.maximum(low - 1.0, 0.0))
            if not wrong.any():
                break
            low = np.where(wrong, np.maximum(low - 2.0**power, 0.0), low)
        for power in range(64):
            wrong = (high < n) & ~condition(np.minimum(high, n - 1.0))
            if not wrong.any():
                break
            low, high = np.where(wrong, high + 1.0, low), np.where(wrong, np.minimum(high + 2.0**power, n), high)
        while (open_ := low < high).any():
            middle = np.floor((low + high) / 2.0)
            true = (middle >= n) | condition(np.minimum(middle, n - 1.0))
            low, high = np.where(open_ & ~true, middle + 1.0, low), np.where(open_ & true, middle, high)
        return high

    return first(betaincc, alpha_lower), first(betainc, alpha_upper) + 1.0
