"""Many exponential histograms as the rows of one matrix, and the intervals of all of them by array operations.

Rows share the edges of their bins; where a histogram's extremes draw in the outermost bins, the row has edges of its
own there, as `ExponentialHistogram.binned` would give it. The intervals are those of `means` and
`shares`, up to rounding, for sizes fixed beforehand. For means the edges are shared, so what each bet wins from each
bin is one matrix [B, J], and the wealth of all rows is a product of counts with it. What does not fit beside the others
(edges that are not finite, one extreme that is unknown), and rows about which there is more to say (observations
outside of a range), are for the functions for one sample.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kc_otel.stats.histogram import EXPLICIT, edges_of
from kc_otel.stats.histogram_columns import MAX_EXACT_COUNT, HistogramColumns
from kc_otel.stats.interval import MAXIMUM, MAXIMUM_NOTE, note_in_unit
from kc_otel.stats.means import grid_of, lower_bounds, note_of, span_of
from kc_otel.stats.quantiles import binomial_ranks, clopper_pearson, upper_bound_needs

Floats = NDArray[np.float64]
Numbers = NDArray[np.int64]

_BLOCK_ROWS: Final = 512
"""Rows at a time: their matrices stay in a core's cache."""
_ROWS_PER_SEARCH: Final = 128
"""Rows whose bounds are looked for together, for the same reason."""
_BIN_MULTIPLE: Final = 16
"""Buckets that rows' bins are a multiple of."""
_MAX_BINS: Final = 2048
"""Bins that rows may have together."""


@dataclass(frozen=True, eq=False)
class HistogramRows:
    """Samples [R] of at least one observation each, in the same bins [B], in ascending order.

    `places` are the numbers of the rows among what was given, `shared` lower and upper edges that no extreme draws in
    [2, B], `count` and `total` observations as doubles [R, B] and [R]. `minimum` and `maximum` are infinite where they
    are unknown; `observed` says whether the maximum is an observation.
    """

    places: NDArray[np.int64]
    shared: Floats
    count: Floats
    total: Floats
    sum: Floats
    minimum: Floats
    maximum: Floats
    observed: NDArray[np.bool_]

    @cached_property
    def ends(self) -> NDArray[np.int64]:
        """The first and the last bin with an observation, int64 [2, R]."""
        used = self.count > 0
        return np.array([used.argmax(axis=1), used.shape[1] - 1 - used[:, ::-1].argmax(axis=1)])

    @cached_property
    def own(self) -> Floats:
        """Lower and upper edges of these, drawn in to the extremes as `interval.clipped` draws them in [2, 2, R]."""
        (low, last_low), (high, last_high) = self.shared[:, self.ends]
        only = self.ends[0] == self.ends[1]
        low = np.maximum(low, np.minimum(self.minimum, high))
        last_low = np.where(only, low, last_low)
        last_high = np.maximum(np.minimum(last_high, np.maximum(self.maximum, last_low)), last_low)
        return np.array([[low, last_low], [np.where(only, last_high, np.maximum(high, low)), last_high]])

    def part(self, begin: int, end: int) -> HistogramRows:
        """Some of the rows that follow on each other."""
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        return HistogramRows(**{name: of if name == "shared" else of[begin:end] for name, of in own.items()})

    @cached_property
    def lower(self) -> Floats:
        """Lower edges [R, B]."""
        return self._edges(0)

    @cached_property
    def upper(self) -> Floats:
        """Upper edges [R, B]."""
        return self._edges(1)

    def _edges(self, side: int) -> Floats:
        edges, row = np.tile(self.shared[side], (len(self.count), 1)), np.arange(len(self.count))
        for end in (0, 1):
            edges[row, self.ends[end]] = self.own[side, end]
        return edges

    def added_up(self, of: Callable[[Floats], Floats], weight: Floats, *, upper: bool = False) -> Floats:
        """Return the sum of a function of the bins' lower edges, or their upper ones, in each row [R, J].

        The function takes edges [k] to values [k, J]; `weight` is how often each edge counts [R, B].
        """
        side = int(upper)
        values = of(self.shared[side])
        total: Floats = weight @ values
        drawn = self.own[side] != self.shared[side][self.ends]
        drawn[1] &= self.ends[1] != self.ends[0]
        which, row = drawn.nonzero()
        if row.size:
            bins = self.ends[which, row]
            moved = (of(self.own[side][which, row]) - values[bins]) * weight[row, bins][:, None]
            firsts = np.count_nonzero(drawn[0])  # a row is among them once
            total[row[:firsts]] += moved[:firsts]
            total[row[firsts:]] += moved[firsts:]
        return total

    def surely_above(self, threshold: float) -> Floats:
        """`fractions.surely_above` of each row [R]."""
        surely: Floats = self.added_up(lambda edges: (edges > threshold)[:, None].astype(np.float64), self.count)[:, 0]
        if threshold > 0.0:  # a positive bucket that begins at the threshold is open there
            (begins,) = np.nonzero((self.shared[0] == threshold) & (self.shared[1] > threshold))
            for bin in begins.tolist():  # at most one has a width
                ends_above = np.where(self.ends[1] == bin, self.own[1, 1], self.shared[1, bin]) > threshold
                surely += self.count[:, bin] * (ends_above & (self.minimum < threshold))
        return surely


def rows_of(columns: HistogramColumns) -> Iterator[HistogramRows]:
    """The exponential histograms that fit beside each other, a few hundred at a time."""
    known = columns.minimum <= columns.maximum
    fits = (columns.count > 0) & (columns.count < MAX_EXACT_COUNT) & (columns.scale != EXPLICIT)
    fits &= known | (np.isnan(columns.minimum) & np.isnan(columns.maximum))
    left = np.flatnonzero(fits)
    while left.size:
        alike = np.ones(left.size, np.bool_)
        for kind in (columns.scale, columns.zero_threshold, known):
            alike &= kind[left] == kind[left[0]]
        group, left = left[alike], left[~alike]
        for begin in range(0, group.size, _BLOCK_ROWS):
            places = group[begin : begin + _BLOCK_ROWS]
            yield from _fitting(places, columns if places.size == len(columns) else columns.taken(places))


def _fitting(places: Numbers, parts: HistogramColumns) -> Iterator[HistogramRows]:
    """Rows of one kind; those that are too far apart for one matrix are in several."""
    bins = Bins(*_rounded(parts.negative.span), *_rounded(parts.positive.span))
    edges = bins.edges(int(parts.scale[0]), float(parts.zero_threshold[0])) if bins.size <= _MAX_BINS else None
    if edges is None or not np.isfinite(edges).all():
        middle = places.size // 2
        for half in (slice(None, middle), slice(middle, None)) if middle else ():
            yield from _fitting(places[half], parts.taken(np.arange(places.size)[half]))
        return
    begins = np.arange(places.size) * bins.size
    flat = np.zeros(places.size * bins.size)
    flat[begins + bins.zero] = parts.zero_count
    parts.positive.add_to(flat, begins + bins.of_positive(parts.positive.offset))
    parts.negative.add_to(flat, begins + bins.of_negative(parts.negative.offset), step=-1)
    count = flat.reshape(places.size, bins.size)
    minimum, maximum, observed = parts.minimum, parts.maximum, parts.observed
    if np.isnan(minimum[0]):
        minimum, maximum = np.full(places.size, -math.inf), np.full(places.size, math.inf)
        observed = np.zeros(places.size, np.bool_)
    yield HistogramRows(places, edges, count, count.sum(axis=1), parts.sum, minimum, maximum, observed)


class Bins(NamedTuple):
    """Bins that rows share: negative observations (`down`, by absolute value), the zero bucket, others (`up`).

    Each side is the number of its first bucket, and that of the bucket after the last one.
    """

    down_first: int
    down_end: int
    up_first: int
    up_end: int

    @property
    def zero(self) -> int:
        """Number of the zero bucket's bin."""
        return self.down_end - self.down_first

    @property
    def size(self) -> int:
        """Number of bins."""
        return self.zero + 1 + self.up_end - self.up_first

    def of_positive(self, bucket: NDArray[np.int64]) -> NDArray[np.int64]:
        """Bins of buckets of positive observations."""
        return bucket + (self.zero + 1 - self.up_first)

    def of_negative(self, bucket: NDArray[np.int64]) -> NDArray[np.int64]:
        """Bins of buckets of negative observations."""
        return self.down_end - 1 - bucket

    def edges(self, scale: int, threshold: float) -> Floats:
        """Lower and upper edges [2, B], not to be written; the same object for the same bins, mostly."""
        return _edges(self, scale, threshold)


@lru_cache(maxsize=256)
def _edges(bins: Bins, scale: int, threshold: float) -> Floats:
    above = np.maximum(edges_of(bins.up_first, bins.up_end, scale), threshold)
    below = -np.maximum(edges_of(bins.down_first, bins.down_end, scale), threshold)[::-1]
    edges = np.array([[*below[:-1], -threshold, *above[:-1]], [*below[1:], threshold, *above[1:]]])
    edges.flags.writeable = False
    return edges


def _rounded(span: tuple[int, int]) -> tuple[int, int]:
    """The same buckets and a few more, so that what came a moment later mostly has the same bins."""
    first, end = span
    return first // _BIN_MULTIPLE * _BIN_MULTIPLE, -(-end // _BIN_MULTIPLE) * _BIN_MULTIPLE


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

    def affine(self, scale: float, offset: float) -> IntervalRows:
        """`interval.affine` of each row."""
        ends = (self.lower * scale + offset, self.upper * scale + offset)
        lower, upper = ends if scale > 0 else ends[::-1]
        notes = {text: note_in_unit(text, scale, offset) for text in set(self.note)}
        note = [notes[text] for text in self.note]
        return IntervalRows(self.estimate * scale + offset, lower, upper, self.samples, self.method, note, self.odd)


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
    """`two_valued_mean_interval` of each row; odd where an observation is neither of the two values."""
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
    """`capped_mean_interval` of each row; odd where an observation is, or may be, beyond the range or the cap."""
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
    parts = [slice(begin, begin + _ROWS_PER_SEARCH) for begin in range(0, sizes.size, _ROWS_PER_SEARCH)]
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
