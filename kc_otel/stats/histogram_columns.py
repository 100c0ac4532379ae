"""Many exponential histograms in columns: what they say in arrays, their buckets one after the other.

One of them costs a hundred bytes and its buckets, in as few bytes each as the largest of them needs; as an object of
its own it costs a thousand. They are made once, from objects or by whoever has columns already, and never change.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kc_otel.stats.histogram import MAX_BUCKETS, Buckets, ExponentialHistogram

__all__ = ["MOST", "HistogramColumns", "SideColumns", "merged"]

Floats = NDArray[np.float64]
Numbers = NDArray[np.int64]

_TYPES: Final = (np.uint8, np.uint16, np.uint32, np.int64)


@dataclass(frozen=True, eq=False)
class SideColumns:
    """The buckets of one sign of n histograms.

    Attributes:
        offset: Number of the first bucket of each [n].
        size: How many buckets each has [n].
        counts: Observations in the buckets of all of them, of any integer type [sum of size].
    """

    offset: Numbers
    size: Numbers
    counts: NDArray[np.integer]

    @classmethod
    def of(cls, sides: Sequence[Buckets]) -> SideColumns:
        """These buckets."""
        size = np.array([side.counts.size for side in sides], np.int64)
        offset = np.array([side.offset for side in sides], np.int64)
        counts = np.concatenate([side.counts for side in sides]) if sides else np.zeros(0, np.int64)
        return cls(offset, size, _packed(counts))

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
        """Parts of the rows of a matrix [n, B].

        Args:
            counts: Observations.
            first: Number of the bucket in which each row begins [n].
            begin: Where the part of each row begins [n].
            end: Where it ends [n].
        """
        size = end - begin
        flat = _ranges(begin + np.arange(len(counts)) * counts.shape[1], size)
        return cls(np.where(size > 0, first + begin, 0), size, _packed(counts.reshape(-1)[flat]))

    @cached_property
    def begins(self) -> Numbers:
        """Where the buckets of each begin in `counts` [n]."""
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
        return SideColumns(
            self.offset[which], self.size[which], self.counts[_ranges(self.begins[which], self.size[which])]
        )

    def owners(self) -> Numbers:
        """Number of the histogram that each bucket is of [sum of size]."""
        return np.repeat(np.arange(self.size.size), self.size)

    def numbers(self) -> Numbers:
        """Number of each bucket [sum of size]."""
        return _ranges(self.offset, self.size)

    def buckets(self, number: int) -> Buckets:
        """Those of one histogram."""
        size = int(self.size[number])
        if not size:
            return Buckets.empty()
        begin = int(self.begins[number])
        return Buckets(int(self.offset[number]), self.counts[begin : begin + size].astype(np.int64))


@dataclass(frozen=True, slots=True, eq=False)
class HistogramColumns:
    """Histograms [n]; see `ExponentialHistogram` for what each column says.

    Attributes:
        scale: Resolution, int64.
        zero_threshold: Half width of the zero bucket.
        count: Observations, int64.
        zero_count: Observations in the zero bucket, int64.
        sum: Sums.
        minimum: No observation is smaller; nan where that is unknown.
        maximum: No observation is larger; nan where that is unknown.
        observed: Whether `maximum` is an observation.
        positive: Buckets of positive observations.
        negative: Buckets of negative ones.
    """

    scale: Numbers
    zero_threshold: Floats
    count: Numbers
    zero_count: Numbers
    sum: Floats
    minimum: Floats
    maximum: Floats
    observed: NDArray[np.bool_]
    positive: SideColumns
    negative: SideColumns

    @classmethod
    def of(cls, parts: Sequence[ExponentialHistogram]) -> HistogramColumns:
        """These histograms."""
        return cls(
            np.array([part.scale for part in parts], np.int64),
            np.array([part.zero_threshold for part in parts], np.float64),
            np.array([part.count for part in parts], np.int64),
            np.array([part.zero_count for part in parts], np.int64),
            np.array([part.sum for part in parts], np.float64),
            np.array([part.minimum for part in parts], np.float64),
            np.array([part.maximum for part in parts], np.float64),
            np.array([part.maximum_observed for part in parts], np.bool_),
            SideColumns.of([part.positive for part in parts]),
            SideColumns.of([part.negative for part in parts]),
        )

    @classmethod
    def joined(cls, parts: Sequence[HistogramColumns]) -> HistogramColumns:
        """Those of some, then those of the next; at least one."""
        if len(parts) == 1:
            return parts[0]
        plain: dict[str, Any] = {name: np.concatenate([getattr(part, name) for part in parts]) for name in _PLAIN}
        return cls(
            **plain,
            positive=SideColumns.joined([part.positive for part in parts]),
            negative=SideColumns.joined([part.negative for part in parts]),
        )

    def __len__(self) -> int:
        return self.count.size

    def __getitem__(self, number: int) -> ExponentialHistogram:
        return ExponentialHistogram(
            scale=int(self.scale[number]),
            count=int(self.count[number]),
            sum=float(self.sum[number]),
            zero_count=int(self.zero_count[number]),
            positive=self.positive.buckets(number),
            negative=self.negative.buckets(number),
            minimum=float(self.minimum[number]),
            maximum=float(self.maximum[number]),
            zero_threshold=float(self.zero_threshold[number]),
            maximum_observed=bool(self.observed[number]),
        )

    def taken(self, which: Numbers) -> HistogramColumns:
        """Some of them, in this order."""
        plain: dict[str, Any] = {name: getattr(self, name)[which] for name in _PLAIN}
        return HistogramColumns(**plain, positive=self.positive.taken(which), negative=self.negative.taken(which))

    def objects(self) -> Iterator[ExponentialHistogram]:
        """Each by itself."""
        return (self[number] for number in range(len(self)))


def merged(rows: Numbers, columns: HistogramColumns) -> tuple[Numbers, HistogramColumns]:
    """The union of what each row has.

    Args:
        rows: Of each histogram, the number of the row that it belongs to [n].
        columns: The histograms, each of at least one observation [n].

    Returns:
        The rows [m], ascending, and a histogram of each [m].
    """
    if (np.diff(rows) > 0).all():
        return rows, columns
    order = np.argsort(rows, kind="stable")
    rows, columns = rows[order], columns.taken(order)
    begins = np.flatnonzero(np.diff(rows, prepend=-1))
    sizes = np.diff(begins, append=rows.size)
    if begins.size == rows.size:
        return rows, columns
    plain = np.logical_and.reduceat(columns.minimum <= columns.maximum, begins)  # false where one is not known
    plain &= np.add.reduceat(columns.count.astype(np.float64), begins) < MOST
    for kind in (columns.scale, columns.zero_threshold):
        plain &= np.maximum.reduceat(kind, begins) == np.minimum.reduceat(kind, begins)
    alone = np.flatnonzero(sizes == 1)
    numbers, found = [alone], [columns.taken(begins[alone])]
    together = np.flatnonzero(plain & (sizes > 1))
    for begin in range(0, together.size, _ROWS):
        for some, united in _united(columns, begins, sizes, together[begin : begin + _ROWS]):
            numbers.append(some)
            found.append(united)
    odd = np.setdiff1d(np.arange(begins.size), np.concatenate(numbers))
    if odd.size:
        parts = [columns.taken(np.arange(begins[row], begins[row] + sizes[row])).objects() for row in odd.tolist()]
        numbers.append(odd)
        found.append(HistogramColumns.of([ExponentialHistogram.union(part) for part in parts]))
    back = np.argsort(np.concatenate(numbers))
    return rows[begins], HistogramColumns.joined(found).taken(back)


def _united(
    columns: HistogramColumns, begins: Numbers, sizes: Numbers, rows: Numbers
) -> Iterator[tuple[Numbers, HistogramColumns]]:
    """Unions of rows of one kind each, whose extremes are known; nothing of a row that is too wide by itself."""
    which = _ranges(begins[rows], sizes[rows])
    parts, owner = columns.taken(which), np.repeat(np.arange(rows.size), sizes[rows])
    sides = []
    for side in (parts.positive, parts.negative):
        first, end = side.span
        if end - first > MAX_BUCKETS:
            middle = rows.size // 2
            for half in (rows[:middle], rows[middle:]) if middle else ():
                yield from _united(columns, begins, sizes, half)
            return
        width = max(end - first, 1)
        at = np.repeat(owner * width - first, side.size) + side.numbers()
        counts = np.bincount(at, side.counts, rows.size * width).astype(np.int64).reshape(rows.size, width)
        used = counts > 0
        begin = used.argmax(axis=1)
        last = width - used[:, ::-1].argmax(axis=1)
        sides.append(SideColumns.cut(counts, np.full(rows.size, first), begin, np.where(used.any(axis=1), last, begin)))
    start = np.cumsum(sizes[rows]) - sizes[rows]
    maximum = np.maximum.reduceat(parts.maximum, start)
    yield (
        rows,
        HistogramColumns(
            parts.scale[start],
            parts.zero_threshold[start],
            np.add.reduceat(parts.count, start),
            np.add.reduceat(parts.zero_count, start),
            np.add.reduceat(parts.sum, start),
            np.minimum.reduceat(parts.minimum, start),
            maximum,
            np.logical_or.reduceat(parts.observed & (parts.maximum == maximum[owner]), start),
            *sides,
        ),
    )


MOST: Final = 2**53
"""Observations up to which a double counts them exactly."""
_ROWS: Final = 512
"""Rows at a time: their matrices stay in a core's cache."""
_PLAIN: Final = tuple(field.name for field in fields(HistogramColumns))[:-2]


def _packed(counts: NDArray[np.integer]) -> NDArray[np.integer]:
    """The same counts in as few bytes as the largest needs; none is negative."""
    most = int(counts.max(initial=0))
    return counts.astype(next(kind for kind in _TYPES if most <= np.iinfo(kind).max), copy=False)


def _ranges(begins: Numbers, sizes: Numbers) -> Numbers:
    """begin, begin + 1, ... of each range, one after the other."""
    return np.repeat(begins - (np.cumsum(sizes) - sizes), sizes) + np.arange(int(sizes.sum()))
