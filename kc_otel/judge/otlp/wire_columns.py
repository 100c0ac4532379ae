"""A metrics request as columns: its exponential points in arrays.

One walk along the wire format, in C (`wire_columns.c`), leaves the columns. It gives up on whatever is not exactly what
senders write. It decodes numbers only: names and attributes stay bytes. The consumer takes the plain points from the
arrays and marks them; protobuf reads only the metrics of the others, which are taken one by one.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric

from kc_otel.judge.points import ImpossiblePoint, Point, origin_of, points_of
from kc_otel.judge.series import SeriesKey
from kc_otel.machine_code import ADDRESS, NUMBER, function

POINT: Final = np.dtype(
    [(name, np.int64) for name in ("begin", "end", "key_begin", "key_end", "metric", "plain")]
    + [(name, np.int64) for name in ("start", "time", "count", "zero_count", "scale", "has_sum")]
    + [(name, np.int64) for name in ("positive", "positive_end", "positive_size", "positive_offset")]
    + [(name, np.int64) for name in ("negative", "negative_end", "negative_size", "negative_offset")]
    + [(name, np.float64) for name in ("sum", "min", "max", "zero_threshold")]
)
_MAX_ITEMS: Final = 60_000
"""Points or metrics of a message; the arrays for them take 17 MB."""
_LEAST_POINT: Final = 32
"""Bytes that a point has at least which is one of ours: it names a contract, a slice and two kernels."""


class MetricSpan(NamedTuple):
    """Places of a metric of any kind, its resource and its scope in the body, and the range of its points.

    Its name, unit and description end at `head_end`.
    """

    begin: int
    end: int
    resource_begin: int
    resource_end: int
    scope_begin: int
    scope_end: int
    head_end: int
    exponential: int
    temporality: int
    first: int
    last: int


METRIC: Final = np.dtype([(name, np.int64) for name in MetricSpan._fields])


@dataclass
class ColumnMessage:
    """A request, as one walk along its bytes finds it, and what becomes of its points."""

    body: bytes
    items: int
    """Resources, scopes, metrics and exponential points in it."""
    points: NDArray[Any]
    """POINT [points]: where each, its attributes and its counts are, and what it says. `plain` is 0 where that has no
    column."""
    spans: list[MetricSpan]
    contracts: NDArray[np.int64] = field(init=False)
    """Number of each point's contract in `MessageStreams`, -1 where it is not known."""
    rows: NDArray[np.int64] = field(init=False)
    """Row of each point's stream in that, -1 where there is none."""
    known: int = -1
    """Rows that had been taken back when these were found; -1 where new streams get one when it is taken."""
    whole: bool = True
    """Whether nothing is to be taken from the columns, because most of it is not plain."""
    new: int = 0
    """Number of its points that get a row when it is taken."""
    taken: NDArray[np.int8] = field(init=False)
    """Of each point whether it was taken from the columns."""
    grown: list[SeriesKey | None] = field(init=False)
    """Series of each point that was taken and has new observations."""
    _read: dict[int, Any] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        size = self.points.size
        self.contracts, self.rows = np.full(size, -1), np.full(size, -1)
        self.taken, self.grown = np.zeros(size, np.int8), [None] * size

    @cached_property
    def names(self) -> list[bytes]:
        """Name of each metric; empty where the metric does not begin with it."""
        heads = ((of.begin + 2, self.body[of.begin : of.begin + 2]) for of in self.spans)
        return [self.body[at : at + head[1]] if head[0] == 0x0A and head[1] < 128 else b"" for at, head in heads]

    def origin(self, of: MetricSpan) -> tuple[bytes, bytes]:
        """Return the serialized Resource and InstrumentationScope of a metric."""
        return self.body[of.resource_begin : of.resource_end], self.body[of.scope_begin : of.scope_end]

    def sender(self, point: int) -> str:
        """The sender of a point, for people."""
        return origin_of(*self.origin(self.spans[self.points["metric"][point]])).sender

    def metrics(self, taken: bytes) -> Iterator[tuple[MetricSpan, Any]]:
        """Yield the metrics with points that are not taken [points], as protobuf reads them; a DecodeError if not."""
        for number, of in enumerate(self.spans):
            if not of.exponential or of.first == of.last or 0 in taken[of.first : of.last]:
                if number not in self._read:
                    self._read[number] = Metric.FromString(self.body[of.begin : of.end])
                yield of, self._read[number]

    def left(self, gen_ai: Collection[str], counts: Counter[str], taken: bytes) -> Iterator[Point | ImpossiblePoint]:
        """`points.walk` of those that are not taken [points]."""
        for of, metric in self.metrics(taken):
            here = taken[of.first : of.last]
            yield from points_of(metric, origin_of(*self.origin(of)), gen_ai, counts, taken=here, first=of.first)


_scan: Final = function("kc_scan", ADDRESS, NUMBER, ADDRESS, NUMBER, ADDRESS, NUMBER, ADDRESS, result=NUMBER)


def read_columns(body: bytes, most: int = _MAX_ITEMS) -> ColumnMessage | None:
    """A message as columns; None where only protobuf can say what it is, or where it has more points or metrics."""
    room = min(len(body) // _LEAST_POINT + 8, most)
    if room > _SCRATCH.points.size:
        _SCRATCH.grow(room)
    points, metrics, found = _SCRATCH.addresses
    items = _scan(body, len(body), points, room, metrics, room, found)
    if items < 0:
        return None
    size, kinds = _SCRATCH.found.tolist()
    # Eight bytes for each field: NumPy would copy records field by field.
    copied = _SCRATCH.points[:size].view(np.int64).copy().view(POINT)
    return ColumnMessage(body, items, copied, [*map(MetricSpan._make, _SCRATCH.metrics[:kinds].tolist())])


class _Scratch(threading.local):
    """Per-thread buffers in which a message is taken apart before the needed parts are copied."""

    def __init__(self) -> None:
        self.found = np.zeros(2, np.int64)
        self.grow(4096)

    def grow(self, points: int) -> None:
        self.points = np.empty(points, POINT)
        self.metrics = np.empty(points, METRIC)
        self.addresses = self.points.ctypes.data, self.metrics.ctypes.data, self.found.ctypes.data


_SCRATCH: Final = _Scratch()
