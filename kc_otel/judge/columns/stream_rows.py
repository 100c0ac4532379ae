"""Rows of streams: the newest value of each, as the fold needs it.

A row mirrors one writer of a `PointStream`: the one that was heard last. While it is ahead of the stream it is `dirty`;
`write_back` brings streams up to date.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from kc_otel.judge.columns.fold import ROW, SIDE, used_ends
from kc_otel.judge.contract_state import ContractState
from kc_otel.judge.histograms import magnitude
from kc_otel.judge.point_streams import PointStream
from kc_otel.judge.points import Point
from kc_otel.judge.series import SeriesKey
from kc_otel.stats import Buckets, ExponentialHistogram

_FIELDS_FOR_FINDINGS: Final = (
    *("contract", "time", "heard", "scale", "count", "sum", "zero_count", "min", "max", "zero_threshold"),
    *("positive_offset", "negative_offset"),
)


class StreamRows:
    """The rows, and whose they are.

    Args:
        states: Where the streams are, by the number of their contract.

    Attributes:
        rows: The points without their buckets: ROW [n].
        buckets: Counts of the positive and of the negative buckets of each [2, n, SIDE].
        names: Digest and series of the stream of each row.
    """

    def __init__(self, states: Sequence[ContractState]) -> None:
        self._states = states
        self._row_of: dict[bytes, int] = {}
        self.rows = np.zeros(64, ROW)
        self.buckets = np.zeros((2, 64, SIDE), np.int64)
        self.names: list[tuple[bytes, SeriesKey]] = []

    def _grow(self) -> None:
        """Make room for twice as many; buckets that nobody has cost no memory as long as they are not written."""
        size = self.rows.size
        rows, buckets = np.zeros(2 * size, ROW), np.zeros((2, 2 * size, SIDE), np.int64)
        rows[:size] = self.rows
        for side, name in enumerate(("positive_size", "negative_size")):
            if self.rows[name].any():
                buckets[side, :size] = self.buckets[side]
        self.rows, self.buckets = rows, buckets

    def find(self, point: Point) -> int | None:
        """The row of a point's stream; None where it has none."""
        return self._row_of.get(point.stream)

    def load(self, name: bytes, key: SeriesKey, stream: PointStream) -> tuple[int, bool]:
        """A stream's row, with its newest value, and whether it may be folded into."""
        row = self._row_of.get(name)
        if row is None:
            row = self._row_of[name] = len(self.names)
            self.names.append((name, key))
            if row == self.rows.size:
                self._grow()
        into, value = self.rows[row], stream.writers[-1]
        histogram = value.histogram
        into["loaded"] = into["dirty"] = 0
        into["heard"] = stream.heard
        if any(other.start == value.start for other in stream.writers[:-1]):
            return row, False
        if not isinstance(histogram, ExponentialHistogram) or not histogram.maximum_observed or value.doubted:
            return row, False
        positive, negative = histogram.positive, histogram.negative
        if max(positive.counts.size, negative.counts.size) > SIDE:
            return row, False
        into["start"], into["time"], into["scale"] = value.start, value.time, histogram.scale
        into["count"], into["zero_count"], into["sum"] = histogram.count, histogram.zero_count, histogram.sum
        into["min"], into["max"] = histogram.minimum, histogram.maximum
        into["zero_threshold"] = histogram.zero_threshold
        into["positive_offset"], into["positive_size"] = positive.offset, positive.counts.size
        into["negative_offset"], into["negative_size"] = negative.offset, negative.counts.size
        self.buckets[0, row, : positive.counts.size] = positive.counts
        self.buckets[1, row, : negative.counts.size] = negative.counts
        into["least"], into["least_negative"] = _least(positive, histogram.scale), _least(negative, histogram.scale)
        into["magnitude"] = magnitude(histogram)
        into["loaded"] = 1
        return row, True

    def unload(self, contract: int) -> None:
        """Fold no more into the rows of a contract whose streams or series are gone."""
        state = self._states[contract]
        for row in np.flatnonzero((self.rows["contract"] == contract) & (self.rows["loaded"] == 1)).tolist():
            stream, key = self.names[row]
            if stream not in state.streams:
                self.rows[row]["loaded"] = self.rows[row]["dirty"] = 0
            elif key not in state.series:
                self.write_back(row)
                self.rows[row]["loaded"] = 0

    def tell_heard(self) -> None:
        """Say in the streams when they were heard of last."""
        dirty = np.flatnonzero(self.rows["dirty"])
        for row, contract, heard in zip(
            dirty.tolist(), self.rows["contract"][dirty].tolist(), self.rows["heard"][dirty].tolist(), strict=True
        ):
            self._states[contract].streams[self.names[row][0]].heard = heard

    def write_back(self, only: int | None = None) -> None:
        """Bring streams up to date: all, or that of one row."""
        rows = np.flatnonzero(self.rows["dirty"]) if only is None else np.array([only])
        rows = rows[self.rows["dirty"][rows] == 1]
        self.rows["dirty"][rows] = 0
        said = {name: self.rows[name][rows].tolist() for name in _FIELDS_FOR_FINDINGS}
        zero = np.zeros_like(rows)
        above = used_ends(self.buckets[0], rows, zero, self.rows["positive_size"][rows]).tolist()
        below = used_ends(self.buckets[1], rows, zero, self.rows["negative_size"][rows]).tolist()
        for at, row in enumerate(rows.tolist()):
            contract, time, heard, scale, count, sum, zeros, low, high, threshold, up, down = [
                said[name][at] for name in _FIELDS_FOR_FINDINGS
            ]
            (first, end), (first_below, end_below) = above[at], below[at]
            positive, negative = self.buckets[0, row, first:end], self.buckets[1, row, first_below:end_below]
            name, _ = self.names[row]
            state = self._states[contract]
            stream = state.streams[name]
            latest = stream.writers[-1]
            latest.time, stream.heard = time, heard
            latest.histogram = ExponentialHistogram(
                scale=scale,
                count=count,
                sum=sum,
                zero_count=zeros,
                positive=Buckets(up + first if end else 0, positive.copy()),
                negative=Buckets(down + first_below if end_below else 0, negative.copy()),
                minimum=low,
                maximum=high,
                zero_threshold=threshold,
            )
            state.changed_streams.add(name)


def _least(side: Buckets, scale: int) -> float:
    """The sum of |x| if every observation lay at the lower edge of the bucket below its own, as `sum_fits` has it."""
    edges = np.exp2((np.arange(side.counts.size, dtype=np.float64) + (side.offset - 1)) * 2.0**-scale)
    return float(edges @ side.counts)
