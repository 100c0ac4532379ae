"""Many histograms in columns: their fields in arrays, their buckets one after the other.

One of them costs a hundred bytes and its buckets, in as few bytes each as the largest of them needs; as an object of
its own it costs a thousand. They are made once, from objects or from existing columns, and never change.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kc_otel.stats.histogram import EXPLICIT, MAX_BUCKETS, Buckets, Histogram
from kc_otel.stats.interval import Floats, Numbers

_COUNT_DTYPES: Final = (np.uint8, np.uint16, np.uint32, np.int64)


@dataclass(frozen=True, eq=False)
class SideColumns:
    """Buckets of one sign of n histograms: each one's first [n], how many it has [n], and all counts in turn."""

    offset: Numbers
    size: Numbers
    counts: NDArray[np.integer]

    @classmethod
    def of(cls, sides: Sequence[Buckets]) -> SideColumns:
        """Return columns of these buckets."""
        size = np.array([side.counts.size for side in sides], np.int64)
        offset = np.array([side.offset for side in sides], np.int64)
        counts = np.concatenate([side.counts for side in sides]) if sides else np.zeros(0, np.int64)
        return cls(offset, size, packed(counts))

    @classmethod
    def packed(cls, offset: Numbers, size: Numbers, counts: NDArray[np.integer], largest: int) -> SideColumns:
        """Return columns with counts in the smallest integer type that holds the largest."""
        return cls(offset, size, counts.astype(_kind(largest)))

    @classmethod
    def empty(cls, number: int) -> SideColumns:
        """Those of histograms that have none."""
        return cls(np.zeros(number, np.int64), np.zeros(number, np.int64), np.zeros(0, _COUNT_DTYPES[0]))

    @classmethod
    def joined(cls, sides: Sequence[SideColumns]) -> SideColumns:
        """Those of some, then those of the next."""
        return cls(
            np.concatenate([side.offset for side in sides]),
            np.concatenate([side.size for side in sides]),
            np.concatenate([side.counts for side in sides]),
        )

    @classmethod
    def cut(cls, counts: NDArray[np.integer], first: Numbers, begin: Numbers, end: Numbers) -> SideColumns:
        """Parts of the rows of a matrix of counts [n, B], from `begin` to `end`; `first` are their first buckets."""
        size = end - begin
        if not size.any():
            return cls.empty(size.size)
        found = counts.reshape(-1)[_ranges(begin + np.arange(len(counts)) * counts.shape[1], size)]
        return cls(np.where(size > 0, first + begin, 0), size, packed(found))

    @cached_property
    def begins(self) -> Numbers:
        """Index of each histogram's first bucket in `counts` [n]."""
        return np.cumsum(self.size) - self.size

    @cached_property
    def span(self) -> tuple[int, int]:
        """The lowest bucket of any, and the one after the highest; twice 0 for none."""
        used = self.size > 0
        if not used.any():
            return 0, 0
        return int(self.offset[used].min()), int((self.offset + self.size)[used].max())

    def taken(self, which: Numbers) -> SideColumns:
        """Some of them, in this order."""
        size = self.size[which]
        return SideColumns(self.offset[which], size, self.counts[_ranges(self.begins[which], size)])

    def added_up(self, owner: Numbers, size: int) -> SideColumns:
        """Add up the histograms of each of so many owners; together with all of `span` these fit into memory."""
        first, end = self.span
        width = max(end - first, 1)
        total = np.zeros(size * width, np.int64)
        self.add_to(total, owner * width - first + self.offset)
        counts = total.reshape(size, width)
        used = counts > 0
        begins = used.argmax(axis=1)
        after = width - used[:, ::-1].argmax(axis=1)
        return SideColumns.cut(counts, np.full(size, first), begins, np.where(used.any(axis=1), after, begins))

    def add_to(self, total: Floats | Numbers, begins: Numbers, *, step: int = 1) -> None:
        """Add all counts to `total`, of each histogram from where it `begins` [n] on, upwards or down (step -1)."""
        ends, here = self.begins + self.size, 0
        while here < self.size.size:
            till = max(int(ends.searchsorted(self.begins[here] + _BUCKETS_PER_BLOCK)), here + 1)
            sizes, first, stop = self.size[here:till], int(self.begins[here]), int(ends[till - 1])
            at = begins[here:till].repeat(sizes) + step * _ranges(np.zeros_like(sizes), sizes)
            np.add.at(total, at, self.counts[first:stop].astype(total.dtype))
            here = till

    def buckets(self, number: int) -> Buckets:
        """Those of one histogram."""
        size = int(self.size[number])
        if not size:
            return Buckets.empty()
        begin = int(self.begins[number])
        return Buckets(int(self.offset[number]), self.counts[begin : begin + size].astype(np.int64))


@dataclass(frozen=True, slots=True, eq=False)
class HistogramColumns:
    """Histograms [n] with a column for each field of `Histogram`; `observed` is its `maximum_observed`."""

    scale: Numbers
    zero_threshold: Floats
    count: Numbers
    zero_count: Numbers
    sum: Floats
    minimum: Floats
    maximum: Floats
    observed: NDArray[np.bool_]
    layout: NDArray[np.object_]
    positive: SideColumns
    negative: SideColumns

    @classmethod
    def of(cls, parts: Sequence[Histogram]) -> HistogramColumns:
        """Return columns of these histograms."""
        layout = np.full(len(parts), None)
        for number, part in enumerate(parts):
            layout[number] = part.layout
        return cls(
            np.array([part.scale for part in parts], np.int64),
            np.array([part.zero_threshold for part in parts], np.float64),
            np.array([part.count for part in parts], np.int64),
            np.array([part.zero_count for part in parts], np.int64),
            np.array([part.sum for part in parts], np.float64),
            np.array([part.minimum for part in parts], np.float64),
            np.array([part.maximum for part in parts], np.float64),
            np.array([part.maximum_observed for part in parts], np.bool_),
            layout,
            SideColumns.of([part.positive for part in parts]),
            SideColumns.of([part.negative for part in parts]),
        )

    @classmethod
    def joined(cls, parts: Sequence[HistogramColumns]) -> HistogramColumns:
        """Those of some, then those of the next; at least one."""
        if len(parts) == 1:
            return parts[0]
        plain: dict[str, Any] = {name: np.concatenate([getattr(part, name) for part in parts]) for name in _FIELDS}
        return cls(
            **plain,
            positive=SideColumns.joined([part.positive for part in parts]),
            negative=SideColumns.joined([part.negative for part in parts]),
        )

    def __len__(self) -> int:
        return self.count.size

    def __getitem__(self, number: int) -> Histogram:
        return Histogram(
            int(self.scale[number]),
            int(self.count[number]),
            float(self.sum[number]),
            int(self.zero_count[number]),
            self.positive.buckets(number),
            self.negative.buckets(number),
            float(self.minimum[number]),
            float(self.maximum[number]),
            float(self.zero_threshold[number]),
            bool(self.observed[number]),
            self.layout[number],
        )

    def taken(self, which: Numbers) -> HistogramColumns:
        """Some of them, in this order."""
        plain: dict[str, Any] = {name: getattr(self, name)[which] for name in _FIELDS}
        return HistogramColumns(**plain, positive=self.positive.taken(which), negative=self.negative.taken(which))

    def objects(self) -> Iterator[Histogram]:
        """Return the histograms one by one."""
        return (self[number] for number in range(len(self)))


def merged(rows: Numbers, columns: HistogramColumns) -> tuple[Numbers, HistogramColumns]:
    """The union of what each row has: the rows [m], ascending, and a histogram of each [m].

    `rows` are the numbers of the rows that histograms belong to [n], `columns` these, each of at least one observation.
    """
    if (rows[1:] > rows[:-1]).all():
        return rows, columns
    found, owner = np.unique(rows, return_inverse=True)
    sizes = np.bincount(owner)
    if found.size == rows.size:
        return found, columns.taken(np.argsort(owner))
    plain = sizes > 1
    known = (columns.minimum <= columns.maximum) & (columns.scale != EXPLICIT)
    plain[owner[~known]] = False
    plain &= np.bincount(owner, columns.count) < MAX_EXACT_COUNT
    for kind in (columns.scale, columns.zero_threshold):
        plain &= _reduced(np.maximum, kind, owner, found.size) == _reduced(np.minimum, kind, owner, found.size)
    together = np.flatnonzero(plain[owner])
    unions = [*_united(columns if together.size == rows.size else columns.taken(together), owner[together])]
    if unions and unions[0][0].size == found.size:  # all of them, as mostly
        return found, unions[0][1]
    alone = np.flatnonzero((sizes == 1)[owner])
    numbers, parts = [owner[alone]], [columns.taken(alone)]
    for some, united in unions:
        numbers.append(some)
        parts.append(united)
    odd = np.setdiff1d(np.arange(found.size), np.concatenate(numbers))
    if odd.size:
        groups = (columns.taken(np.flatnonzero(owner == number)).objects() for number in odd.tolist())
        numbers.append(odd)
        parts.append(HistogramColumns.of([Histogram.union(group) for group in groups]))
    return found, HistogramColumns.joined(parts).taken(np.argsort(np.concatenate(numbers)))


def _united(columns: HistogramColumns, owner: Numbers) -> Iterator[tuple[Numbers, HistogramColumns]]:
    """Owners and their unions, of one kind each, whose extremes are known; nothing of one too wide by itself."""
    if not owner.size:
        return
    numbers, row = np.unique(owner, return_inverse=True)
    widest = max(end - first for first, end in (columns.positive.span, columns.negative.span))
    if widest > MAX_BUCKETS or numbers.size * widest > _MAX_SUMMED_BUCKETS:
        middle = numbers.size // 2
        for half in (row < middle, row >= middle) if middle else ():
            yield from _united(columns.taken(np.flatnonzero(half)), owner[half])
        return
    maximum = _reduced(np.maximum, columns.maximum, row, numbers.size)
    reached = np.bincount(row, columns.observed & (columns.maximum == maximum[row]), numbers.size)
    first = np.zeros(numbers.size, np.int64)
    first[row] = np.arange(row.size)
    yield (
        numbers,
        HistogramColumns(
            columns.scale[first],
            columns.zero_threshold[first],
            _reduced(np.add, columns.count, row, numbers.size),
            _reduced(np.add, columns.zero_count, row, numbers.size),
            np.asarray(np.bincount(row, columns.sum, numbers.size), np.float64),
            _reduced(np.minimum, columns.minimum, row, numbers.size),
            maximum,
            reached > 0.0,
            columns.layout[first],
            *(side.added_up(row, numbers.size) for side in (columns.positive, columns.negative)),
        ),
    )


def _reduced(by: np.ufunc, values: NDArray[Any], owner: Numbers, size: int) -> NDArray[Any]:
    """The largest or the smallest of each owner's values, or their sum."""
    found = np.zeros(size, values.dtype)
    if by is not np.add:
        found[owner] = values
    by.at(found, owner, values)
    return found


MAX_EXACT_COUNT: Final = 2**53
"""Observations up to which a double counts them exactly."""
_MAX_SUMMED_BUCKETS: Final = 2**21
"""Buckets that are added up at once, of all rows together: 16 MB."""
_BUCKETS_PER_BLOCK: Final = 2**18
"""Buckets whose places are listed at a time."""
_FIELDS: Final = tuple(field.name for field in fields(HistogramColumns))[:-2]


def packed(counts: NDArray[np.integer]) -> NDArray[np.integer]:
    """The same counts in as few bytes as the largest needs; none is negative."""
    return counts.astype(_kind(int(counts.max(initial=0))), copy=False)


def _kind(largest: int) -> type[np.integer]:
    return next(kind for kind in _COUNT_DTYPES if largest <= np.iinfo(kind).max)


def _ranges(begins: Numbers, sizes: Numbers) -> Numbers:
    """begin, begin + 1, ... of each range, one after the other."""
    if not sizes.size:
        return np.zeros(0, np.int64)
    ends = sizes.cumsum()
    found: Numbers = (begins - ends + sizes).repeat(sizes)
    found += np.arange(int(ends[-1]))
    return found
