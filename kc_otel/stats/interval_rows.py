"""Samples as the rows of one matrix, and intervals of all of them in columns: of one, or of many histograms.

Rows share the edges of their bins; where a histogram's extremes draw in the outermost bins, the row has edges of its
own there, as `Histogram.binned` would give it. A histogram that does not fit beside the others (edges that
are not finite, one extreme that is unknown) is a matrix of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kc_otel.stats.histogram import EXPLICIT, edges_of
from kc_otel.stats.histogram_columns import MAX_EXACT_COUNT, HistogramColumns
from kc_otel.stats.interval import Binned, Floats, Interval, Numbers, level, usable

_BLOCK_ROWS: Final = 512
"""Rows at a time: their matrices stay in a core's cache."""
_BINS_PER_BLOCK: Final = 1024
"""Bins at a time, for the same reason: an exact sample has one for each value."""
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

    places: Numbers
    shared: Floats
    count: Floats
    total: Floats
    sum: Floats
    minimum: Floats
    maximum: Floats
    observed: NDArray[np.bool_]

    @classmethod
    def of(cls, sample: Binned, place: int = 0) -> HistogramRows:
        """One row, of a sample that is not empty."""
        usable(sample)
        unknown = math.isnan(sample.maximum)
        return cls(
            places=np.array([place]),
            shared=np.array([sample.lower, sample.upper], np.float64),
            count=sample.count[None].astype(np.float64),
            total=np.array([sample.total], np.float64),
            sum=np.array([sample.sum], np.float64),
            minimum=np.array([-math.inf if math.isnan(sample.minimum) else sample.minimum]),
            maximum=np.array([math.inf if unknown else sample.maximum]),
            observed=np.array([sample.maximum_observed and not unknown]),
        )

    @cached_property
    def ends(self) -> Numbers:
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

    def taken(self, which: Numbers) -> HistogramRows:
        """Some of the rows."""
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        return HistogramRows(**{name: of if name == "shared" else of[which] for name, of in own.items()})

    @cached_property
    def lower(self) -> Floats:
        """Lower edges [R, B]."""
        return self._edges(0)

    @cached_property
    def upper(self) -> Floats:
        """Upper edges [R, B]."""
        return self._edges(1)

    def _edges(self, side: int) -> Floats:
        row = np.arange(len(self.count))
        edges: Floats = self.shared[side][None].repeat(row.size, axis=0)
        for end in (0, 1):
            edges[row, self.ends[end]] = self.own[side, end]
        return edges

    def added_up(self, of: Callable[[Floats], Floats], weight: Floats, *, upper: bool = False) -> Floats:
        """Return the sum of a function of the bins' lower edges, or their upper ones, in each row [R, J].

        The function takes edges [k] to values [k, J]; `weight` is how often each edge counts [R, B].
        """
        edges, side = self.shared[int(upper)], int(upper)
        total: Floats = weight[:, :_BINS_PER_BLOCK] @ of(edges[:_BINS_PER_BLOCK])
        for begin in range(_BINS_PER_BLOCK, edges.size, _BINS_PER_BLOCK):
            total += weight[:, begin : begin + _BINS_PER_BLOCK] @ of(edges[begin : begin + _BINS_PER_BLOCK])
        drawn = self.own[side] != self.shared[side][self.ends]
        drawn[1] &= self.ends[1] != self.ends[0]
        which, row = drawn.nonzero()
        if row.size:
            bins = self.ends[which, row]
            moved = (of(self.own[side][which, row]) - of(edges[bins])) * weight[row, bins][:, None]
            firsts = np.count_nonzero(drawn[0])  # a row is among them once
            total[row[:firsts]] += moved[:firsts]
            total[row[firsts:]] += moved[firsts:]
        return total

    def surely_above(self, threshold: float) -> Floats:
        """Observations of each row above a threshold for certain: none in a bin that it may cut [R]."""
        surely: Floats = self.added_up(lambda edges: (edges > threshold)[:, None].astype(np.float64), self.count)[:, 0]
        if threshold > 0.0:  # a positive bucket that begins at the threshold is open there
            (begins,) = np.nonzero((self.shared[0] == threshold) & (self.shared[1] > threshold))
            for bin in begins.tolist():  # at most one has a width
                ends_above = np.where(self.ends[1] == bin, self.own[1, 1], self.shared[1, bin]) > threshold
                surely += self.count[:, bin] * (ends_above & (self.minimum < threshold))
        return surely


def rows_of(columns: HistogramColumns) -> Iterator[HistogramRows]:
    """Histograms that fit beside each other, a few hundred at a time, and those that do not; none that is empty."""
    known = columns.minimum <= columns.maximum
    fits = (columns.count > 0) & (columns.count < MAX_EXACT_COUNT) & (columns.scale != EXPLICIT)
    fits &= known | (np.isnan(columns.minimum) & np.isnan(columns.maximum))
    for place in np.flatnonzero(~fits & (columns.count > 0)).tolist():
        yield HistogramRows.of(columns[place].binned(), place)
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
    (down, down_end), (up, up_end) = _rounded(parts.negative.span), _rounded(parts.positive.span)
    zero, size = down_end - down, down_end - down + 1 + up_end - up  # the zero bucket's bin, and how many there are
    kind = int(parts.scale[0]), float(parts.zero_threshold[0])
    edges = _edges(down, down_end, up, up_end, *kind) if size <= _MAX_BINS else None
    if edges is None or not np.isfinite(edges).all():
        middle = places.size // 2
        if not middle:
            yield HistogramRows.of(parts[0].binned(), int(places[0]))
            return
        for half in (slice(None, middle), slice(middle, None)):
            yield from _fitting(places[half], parts.taken(np.arange(places.size)[half]))
        return
    begins = np.arange(places.size) * size
    flat = np.zeros(places.size * size)
    flat[begins + zero] = parts.zero_count
    parts.positive.add_to(flat, begins + zero + 1 - up + parts.positive.offset)
    parts.negative.add_to(flat, begins + down_end - 1 - parts.negative.offset, step=-1)
    count = flat.reshape(places.size, size)
    minimum, maximum, observed = parts.minimum, parts.maximum, parts.observed
    if np.isnan(minimum[0]):
        minimum, maximum = np.full(places.size, -math.inf), np.full(places.size, math.inf)
        observed = np.zeros(places.size, np.bool_)
    yield HistogramRows(places, edges, count, count.sum(axis=1), parts.sum, minimum, maximum, observed)


@lru_cache(maxsize=256)
def _edges(down: int, down_end: int, up: int, up_end: int, scale: int, threshold: float) -> Floats:
    """Lower and upper edges of negative buckets, the zero bucket and positive ones [2, B], not to be written."""
    above = np.maximum(edges_of(up, up_end, scale), threshold)
    below = -np.maximum(edges_of(down, down_end, scale), threshold)[::-1]
    edges = np.array([[*below[:-1], -threshold, *above[:-1]], [*below[1:], threshold, *above[1:]]])
    edges.flags.writeable = False
    return edges


def _rounded(span: tuple[int, int]) -> tuple[int, int]:
    """The same buckets and a few more, so that what came a moment later mostly has the same bins."""
    first, end = span
    return first // _BIN_MULTIPLE * _BIN_MULTIPLE, -(-end // _BIN_MULTIPLE) * _BIN_MULTIPLE


@dataclass(frozen=True, slots=True, eq=False)
class IntervalRows:
    """Intervals of many samples, in columns [R]."""

    estimate: Floats
    lower: Floats
    upper: Floats
    samples: Floats
    method: str
    note: Sequence[str]

    def __getitem__(self, row: int) -> Interval:
        estimate, lower, upper = (float(column[row]) for column in (self.estimate, self.lower, self.upper))
        return Interval(estimate, lower, upper, int(self.samples[row]), self.method, self.note[row])


def of_sample(
    intervals: Callable[..., IntervalRows],
    sample: Binned,
    empty: Interval,
    *,
    alpha_lower: float,
    alpha_upper: float,
    **options: Any,
) -> Interval:
    """The interval of one sample, by a function of rows; `empty` where it has no observations."""
    level("alpha_lower", alpha_lower)
    level("alpha_upper", alpha_upper)
    if not sample.total:
        return empty
    return intervals(HistogramRows.of(sample), alpha_lower=alpha_lower, alpha_upper=alpha_upper, **options)[0]
