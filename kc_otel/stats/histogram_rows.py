"""Many exponential histograms as the rows of one matrix, so that bounds of all of them come from array operations.

Rows share the edges of their bins; where a histogram's extremes draw in the outermost bins, the row has edges of its
own there, as `ExponentialHistogram.binned` would give it. A histogram that does not fit beside the others (another
scale or zero bucket that has to be aligned first, extremes that only some parts know, edges that are not finite) is
left to the code that takes them one by one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kc_otel.stats.histogram import ExponentialHistogram, edges_of
from kc_otel.stats.histogram_columns import MAX_EXACT_COUNT, HistogramColumns

Floats = NDArray[np.float64]

_BLOCK_ROWS: Final = 512
"""Rows at a time: their matrices stay in a core's cache."""
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
        """Lower and upper edges of these, drawn in to the extremes as `binned.clipped` draws them in [2, 2, R]."""
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

    def added_up(
        self, of: Callable[[Floats], Floats], weight: Floats, *, upper: bool = False, shared: Floats | None = None
    ) -> Floats:
        """Return the sum of a function of the bins' lower edges, or their upper ones, in each row [R, J].

        The function takes edges [k] to values [k, J]; `weight` is how often each edge counts [R, B]. `shared` are its
        values at the shared edges, if known [B, J].
        """
        side = int(upper)
        values = of(self.shared[side]) if shared is None else shared
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


def rows_of(samples: Sequence[Sequence[ExponentialHistogram]]) -> Iterator[HistogramRows]:
    """The samples, each the union of some histograms, that fit beside each other, a few hundred at a time."""
    row = np.repeat(np.arange(len(samples)), [len(parts) for parts in samples])
    yield from rows_of_columns(HistogramColumns.of([part for parts in samples for part in parts]), row)


def rows_of_columns(columns: HistogramColumns, row: NDArray[np.int64]) -> Iterator[HistogramRows]:
    """Samples that fit beside each other, a few hundred at a time: histograms [n] and the sample of each, ascending."""
    if not row.size:
        return
    known = columns.minimum <= columns.maximum
    if row.size <= _BLOCK_ROWS and known.all() and (row[1:] > row[:-1]).all():  # mostly, and quicker than what follows
        count, scale, threshold = columns.count, columns.scale, columns.zero_threshold
        few = count.min() > 0 and count.max() < MAX_EXACT_COUNT
        if few and (scale == scale[0]).all() and (threshold == threshold[0]).all():
            yield from _fitting(row, columns, np.arange(row.size), int(scale[0]), float(threshold[0]), known=True)
            return
    begins = np.flatnonzero(np.diff(row, prepend=-1))
    sizes = np.diff(begins, append=row.size)
    kinds = np.array([columns.scale, columns.zero_threshold, known])
    fits = (np.maximum.reduceat(kinds, begins, axis=1) == np.minimum.reduceat(kinds, begins, axis=1)).all(axis=0)
    neither = np.isnan(columns.minimum) & np.isnan(columns.maximum)
    fits &= np.logical_and.reduceat((columns.count > 0) & (known | neither), begins)
    fits &= np.add.reduceat(columns.count.astype(np.float64), begins) < MAX_EXACT_COUNT
    left, kind = np.flatnonzero(fits), kinds[:, begins]
    while left.size:
        scale, threshold, is_known = kind[:, left[0]].tolist()
        alike = (kind[:, left] == kind[:, left[:1]]).all(axis=0)
        group, left = left[alike], left[~alike]
        for begin in range(0, group.size, _BLOCK_ROWS):
            some = group[begin : begin + _BLOCK_ROWS]
            of = np.repeat(np.arange(some.size), sizes[some])
            which = begins[some][of] + np.arange(of.size) - (np.cumsum(sizes[some]) - sizes[some])[of]
            parts = columns if which.size == len(columns) else columns.taken(which)
            yield from _fitting(row[begins[some]], parts, of, int(scale), threshold, known=bool(is_known))


def _fitting(
    places: NDArray[np.int64],
    parts: HistogramColumns,
    row: NDArray[np.int64],
    scale: int,
    threshold: float,
    *,
    known: bool,
) -> Iterator[HistogramRows]:
    """Rows of one kind; those that are too far apart for one matrix are in several."""
    rows = _rows(places, parts, row, scale, threshold, known=known)
    if rows is not None:
        yield rows
    elif places.size > 1:
        middle = places.size // 2
        for half, first, which in (
            (places[:middle], 0, np.flatnonzero(row < middle)),
            (places[middle:], middle, np.flatnonzero(row >= middle)),
        ):
            yield from _fitting(half, parts.taken(which), row[which] - first, scale, threshold, known=known)


def _rows(
    places: NDArray[np.int64],
    parts: HistogramColumns,
    row: NDArray[np.int64],
    scale: int,
    threshold: float,
    *,
    known: bool,
) -> HistogramRows | None:
    bins = Bins(*_rounded(parts.negative.span), *_rounded(parts.positive.span))
    if bins.size > _MAX_BINS:
        return None
    size = places.size * bins.size
    at = row * bins.size
    flat: Floats = np.bincount(at + bins.zero, parts.zero_count, size).astype(np.float64, copy=False)
    parts.positive.add_to(flat, at + bins.of_positive(parts.positive.offset))
    parts.negative.add_to(flat, at + bins.of_negative(parts.negative.offset), step=-1)
    count = flat.reshape(places.size, bins.size)
    shared, total = bins.edges(scale, threshold), count.sum(axis=1)
    if not np.isfinite(shared).all() or not total.all():
        return None
    if known and row.size == places.size:
        sums, minimum, maximum, observed = parts.sum, parts.minimum, parts.maximum, parts.observed
    else:
        begins = np.flatnonzero(np.diff(row, prepend=-1))
        minimum, maximum = np.minimum.reduceat(parts.minimum, begins), np.maximum.reduceat(parts.maximum, begins)
        sums = np.add.reduceat(parts.sum, begins)
        if known:
            observed = np.logical_or.reduceat(parts.observed & (parts.maximum == maximum[row]), begins)
        else:  # a merged histogram begins and ends at its outermost buckets
            alone = np.diff(begins, append=row.size) == 1
            minimum = np.where(alone, -math.inf, shared[0][(count > 0).argmax(axis=1)])
            maximum, observed = np.full(places.size, math.inf), np.zeros(places.size, np.bool_)
    return HistogramRows(places, shared, count, total, sums, minimum, maximum, observed)


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

    def with_room_for(self, down: tuple[int, int], up: tuple[int, int], spare: int) -> Bins:
        """Bins that have these ranges of buckets, too, and some more than that where they have to be other ones."""
        sides = []
        for first, end, (begin, stop) in ((self.down_first, self.down_end, down), (self.up_first, self.up_end, up)):
            if begin == stop or (first <= begin and stop <= end):
                sides += [first, end]
            elif first == end:
                sides += [begin - spare, stop + spare]
            else:
                sides += [first if first <= begin else begin - spare, end if stop <= end else stop + spare]
        return Bins(*sides)

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
