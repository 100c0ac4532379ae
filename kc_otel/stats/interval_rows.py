"""The intervals of `means`, `quantiles` and `fractions` for all rows of a matrix at once, for sizes fixed beforehand.

The same numbers, up to rounding, as the functions for one sample give, which say what each interval is and where it
comes from. For means the edges of the bins are shared, so what each bet wins from each bin is one matrix [B, J], and
the wealth of all rows is a product of counts with it. A row about which there is more to say (observations outside of a
range) is None, and is for the function for one sample.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kc_otel.stats.fractions import clopper_pearson
from kc_otel.stats.histogram_rows import HistogramRows
from kc_otel.stats.interval import MAXIMUM, MAXIMUM_NOTE, Interval, note_in_unit
from kc_otel.stats.means import note_of
from kc_otel.stats.mixture import grid_of, lower_bounds, span_of
from kc_otel.stats.quantiles import binomial_ranks, upper_bound_needs

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class IntervalRows:
    """Intervals of many samples, in columns [R]; of an `odd` row the others say nothing."""

    estimate: Floats
    lower: Floats
    upper: Floats
    samples: Floats
    method: str
    note: Sequence[str]
    odd: NDArray[np.bool_]

    def __iter__(self) -> Iterator[Interval | None]:
        columns = (column.tolist() for column in (self.estimate, self.lower, self.upper, self.samples, self.odd))
        for estimate, lower, upper, samples, odd, note in zip(*columns, self.note, strict=True):
            yield None if odd else Interval(estimate, lower, upper, int(samples), self.method, note)

    def affine(self, scale: float, offset: float) -> IntervalRows:
        """`interval.affine` of each row."""
        ends = (self.lower * scale + offset, self.upper * scale + offset)
        lower, upper = ends if scale > 0 else ends[::-1]
        notes = {text: note_in_unit(text, scale, offset) for text in set(self.note)}
        note = [notes[text] for text in self.note]
        return IntervalRows(self.estimate * scale + offset, lower, upper, self.samples, self.method, note, self.odd)


_BLOCK_ROWS: Final = 128
"""Rows whose bounds are looked for together: their matrices stay in a core's cache."""


def maximum_intervals(rows: HistogramRows) -> IntervalRows:
    """`maximum_interval` of each row."""
    row, last = np.arange(rows.total.size), rows.ends[1]
    low = np.where(rows.observed, rows.maximum, rows.lower[row, last])
    high = np.where(rows.observed, rows.maximum, rows.upper[row, last])
    return IntervalRows(high, low, high, rows.total, MAXIMUM, [MAXIMUM_NOTE] * row.size, np.zeros(row.size, np.bool_))


def fraction_intervals(rows: HistogramRows, above: float, *, alpha_lower: float, alpha_upper: float) -> IntervalRows:
    """`fraction_interval` of each row."""
    n = rows.total
    surely = rows.surely_above(above)
    maybe = (rows.count * (rows.upper > above)).sum(axis=1)
    lower, upper = clopper_pearson(surely, maybe, n, alpha_lower, alpha_upper)
    within = f" of them in the bin of the threshold {above:g}"
    note = [f"{int(more)}{within}" if more else "" for more in (maybe - surely).tolist()]
    estimate = (surely + maybe) / (2.0 * n)
    return IntervalRows(estimate, lower, upper, n, "Clopper-Pearson", note, np.zeros(n.size, np.bool_))


def two_valued_mean_intervals(
    rows: HistogramRows, *, low: float, high: float, alpha_lower: float, alpha_upper: float
) -> IntervalRows:
    """`two_valued_mean_interval` of each row; None where an observation is neither of the two values."""
    is_low = (rows.lower <= low) & (low <= rows.upper)
    is_high = (rows.lower <= high) & (high <= rows.upper)
    neither = np.any((rows.count > 0) & ~(is_low | is_high), axis=1)
    shares = fraction_intervals(rows, (low + high) / 2.0, alpha_lower=alpha_lower, alpha_upper=alpha_upper)
    return replace(shares.affine(high - low, low), odd=neither)


def quantile_intervals(rows: HistogramRows, rank: float, *, alpha_lower: float, alpha_upper: float) -> IntervalRows:
    """`quantile_interval` of each row."""
    n, row = rows.total, np.arange(rows.total.size)
    first, last = binomial_ranks(n, rank, alpha_lower, alpha_upper)
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
    note = ["" if most < math.inf else upper_bound_needs(rank, alpha_upper) for most in upper.tolist()]
    return IntervalRows(estimate, lower, upper, n, "order statistics", note, np.zeros(n.size, np.bool_))


def mean_intervals(
    rows: HistogramRows,
    *,
    low: float,
    high: float,
    cap: float,
    alpha_lower: float,
    alpha_upper: float,
    cut: bool = False,
) -> IntervalRows:
    """`capped_mean_interval` of each row; None where an observation is, or may be, beyond the range or the cap."""
    floor, ceiling = max(low, -cap), min(high, cap)
    width, n, count = ceiling - floor, rows.total, rows.count
    # Edges ascend, so that what is beyond the range is beyond it in the outermost bins.
    (low_begin, high_begin), (low_end, high_end) = rows.own
    odd = np.zeros(n.size, np.bool_)
    if floor == low or not cut:
        odd |= (low_end if floor == low else low_begin) < floor
    if ceiling == high or not cut:
        odd |= (high_begin if ceiling == high else high_end) > ceiling
    total = np.where(np.isfinite(rows.sum), rows.sum, math.nan)
    lower, upper, taken_least, taken_most = rows.lower, rows.upper, np.zeros(1), np.zeros(1)
    if low_begin.min() < floor or ceiling < high_end.max():
        lower, upper = np.clip(lower, floor, ceiling), np.clip(upper, floor, ceiling)
        taken_least, taken_most = _dot(count, rows.lower - lower), _dot(count, rows.upper - upper)
    at_least = _dot(count, lower)
    raised, other = np.fmax(at_least, total - taken_most), np.fmin(_dot(count, upper), total - taken_least)
    least, most = np.minimum(raised, other) / n, np.maximum(raised, other) / n
    # The worst placement with a mean: upper edges go to the highest bins first.
    room = count * (upper - lower)
    reach, divisor = np.cumsum(room[:, ::-1], axis=1)[:, ::-1] - room, np.where(room > 0.0, room, 1.0)
    bets, log_weights = grid_of([span_of(int(size)) for size in n.tolist()])

    def scores(mean: Floats, place: Callable[[Floats], Floats], alpha: float) -> Floats:
        """Logarithms of the wealth of bets on `place`, of their weights and of alpha [R, J]."""
        raised = (mean * n - at_least)[:, None] - reach
        np.minimum(np.maximum(raised, 0.0, out=raised), room, out=raised)
        raised /= divisor
        raised *= count

        def won(edges: Floats) -> Floats:
            return np.asarray(np.log(1.0 + bets * place(np.clip(edges, floor, ceiling))[:, None]))

        grown = rows.added_up(won, count - raised) + rows.added_up(won, raised, upper=True)
        return grown + log_weights + math.log(alpha)

    below = scores(least, lambda x: (x - floor) / width, alpha_lower)
    above = scores(most, lambda x: (ceiling - x) / width, alpha_upper)
    both, sizes = np.concatenate([below, above]), np.tile(n, 2)
    parts = [slice(begin, begin + _BLOCK_ROWS) for begin in range(0, sizes.size, _BLOCK_ROWS)]
    shares = np.concatenate([lower_bounds(bets, both[part], sizes[part]) for part in parts])
    bound_below = np.maximum(floor, np.minimum(least, floor + width * shares[: n.size]))
    bound_above = np.minimum(ceiling, np.maximum(most, ceiling - width * shares[n.size :]))
    middle = (least + most) / 2.0
    estimate = middle if cut else np.where(np.isfinite(rows.sum), rows.sum / n, middle)
    note = [note_of(low, high, floor, ceiling, cut=cut)] * n.size
    return IntervalRows(estimate, bound_below, bound_above, n, "mixture betting", note, odd)


def _dot(a: Floats, b: Floats) -> Floats:
    product: Floats = np.einsum("rb,rb->r", a, b)
    return product
