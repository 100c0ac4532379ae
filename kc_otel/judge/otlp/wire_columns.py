"""A metrics request as columns: its exponential points in arrays, and the rest of it as protobuf.

One walk along the wire format, in C (`wire_columns.c`), leaves the columns. It gives up on whatever is not exactly what
senders write, which is then read by protobuf. It decodes numbers only: names and attributes stay bytes, so a caller may
use them only where protobuf has read the same bytes before. The consumer takes the plain points from the arrays and
marks them; `ColumnMessage.left` returns the others as a request, for the code that takes points one by one.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from kc_otel.judge.points import CUMULATIVE, DRIFT_NAMES
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
    """Where a metric of any kind, its resource and its scope are in the body, and the range of its points.

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


@dataclass(frozen=True)
class WireColumns:
    """Offsets and values found by one walk along a request's bytes.

    Attributes:
        items: Resources, scopes, metrics and exponential points in it.
        points: POINT [points], in their order: where each, its attributes and the counts of its buckets are in the
            body, and what it says. `plain` is 0 where it says something that has no column.
        metrics: METRIC [metrics].
    """

    body: bytes
    items: int
    points: NDArray[Any]
    metrics: NDArray[Any]

    @cached_property
    def spans(self) -> list[MetricSpan]:
        """The same as `metrics`, for a loop."""
        return [*map(MetricSpan._make, self.metrics.tolist())]

    def origin(self, metric: int) -> tuple[bytes, bytes, bytes, int]:
        """Return the fields shared by all points of a metric: resource, scope, names and unit, temporality."""
        of, body = self.spans[metric], self.body
        resource, scope = body[of.resource_begin : of.resource_end], body[of.scope_begin : of.scope_end]
        return resource, scope, body[of.begin : of.head_end], of.temporality

    def name(self, of: MetricSpan) -> bytes:
        """Name of a metric; empty where the metric does not begin with it."""
        head = self.body[of.begin : of.begin + 2]
        return self.body[of.begin + 2 : of.begin + 2 + head[1]] if head[0] == 0x0A and head[1] < 128 else b""

    def is_drift(self, of: MetricSpan) -> bool:
        """Whether a metric is one of the drift quantities."""
        return self.name(of).decode("utf-8", "replace") in DRIFT_NAMES

    def drift_metrics(self) -> Iterator[tuple[MetricSpan, bytes, bool]]:
        """Yield the exponential drift metrics, with the resource of each and whether it is cumulative."""
        for of in self.spans:
            if of.exponential and self.is_drift(of):
                yield of, self.body[of.resource_begin : of.resource_end], of.temporality == CUMULATIVE

    def without(self, taken: NDArray[np.bool_]) -> list[tuple[int, list[int]]]:
        """Metrics that have points which are not `taken`, and those; and all metrics of other kinds."""
        if taken.all():
            return [(metric, []) for metric, of in enumerate(self.spans) if not of.exponential]
        found = []
        for metric, of in enumerate(self.spans):
            numbers = (np.flatnonzero(~taken[of.first : of.last]) + of.first).tolist() if of.exponential else []
            if numbers or not of.exponential:
                found.append((metric, numbers))
        return found

    def request_without(self, taken: NDArray[np.bool_]) -> tuple[Any, list[int]]:
        """A request with the metrics and points `without` those taken, and the numbers that its points have here."""
        parts = self.without(taken)
        return self.request_of(parts), [number for _, numbers in parts for number in numbers]

    def request_of(self, parts: Iterable[tuple[int, Sequence[int]]]) -> Any:
        """A request that has some metrics, in this order; an exponential one with these of its points."""

        def scope_of(part: tuple[int, Sequence[int]]) -> tuple[int, int]:
            of = self.spans[part[0]]
            return of.resource_begin, of.scope_begin

        request = []
        for _, some in groupby(parts, scope_of):
            whole, resource, scope = [], b"", b""
            for metric, numbers in some:
                resource, scope, head, temporality = self.origin(metric)
                of = self.spans[metric]
                if of.exponential:
                    at = self.points[list(numbers)]
                    begins, ends = at["begin"].tolist(), at["end"].tolist()
                    points = [_part(1, self.body[begin:end]) for begin, end in zip(begins, ends, strict=True)]
                    whole.append(_part(2, head + _part(10, b"".join((*points, bytes((0x10, temporality)))))))
                else:
                    whole.append(_part(2, self.body[of.begin : of.end]))
            request.append(_part(1, _part(1, resource) + _part(2, _part(1, scope) + b"".join(whole))))
        return ExportMetricsServiceRequest.FromString(b"".join(request))


@dataclass(slots=True)
class ColumnMessage:
    """A request that is to be taken."""

    wire: WireColumns
    rows: NDArray[np.int64]
    """Row of each of its points in `StreamColumns`, -1 where there is none."""
    known: object
    """`RowMemory.token` that the rows are of; None where new streams get one when it is taken."""
    odd: tuple[NDArray[np.bool_], tuple[Any, list[int]]] | None = None
    """Which points are plain, and `request_without` these; None where there is a `request`."""
    new: int = 0
    """How many of its points get a row when it is taken."""
    taken: NDArray[np.int8] = field(init=False)
    """Of each point whether it was taken from the columns."""
    series: NDArray[np.int64] = field(init=False)
    """Number of the series of each point, if it was."""
    request: Any = None
    """The whole request as protobuf read it, where most of it is not plain."""

    def __post_init__(self) -> None:
        self.taken, self.series = np.zeros(self.rows.size, np.int8), np.full(self.rows.size, -1)

    def left(self) -> tuple[Any, Sequence[int]]:
        """A request with what was not taken, in its order, and the numbers that its exponential points have here."""
        if self.request is not None:
            return self.request, range(self.rows.size)
        taken = self.taken != 0
        if self.odd is not None and np.array_equal(taken, self.odd[0]):
            return self.odd[1]
        return self.wire.request_without(taken)


def _part(field: int, content: bytes) -> bytes:
    """A field of protobuf that says its length."""
    length, said = len(content), bytearray((field << 3 | 2,))
    while length > 127:
        said.append(length & 127 | 128)
        length >>= 7
    said.append(length)
    return bytes(said) + content


_scan: Final = function("kc_scan", ADDRESS, NUMBER, ADDRESS, NUMBER, ADDRESS, NUMBER, ADDRESS, result=NUMBER)


def read_columns(body: bytes, most: int = _MAX_ITEMS) -> WireColumns | None:
    """A message as columns; None where only protobuf can say what it is, or where it has more points or metrics."""
    room = min(len(body) // _LEAST_POINT + 8, most)
    if room > _SCRATCH.points.size:
        _SCRATCH.grow(room)
    points, metrics, found = _SCRATCH.addresses
    items = _scan(body, len(body), points, room, metrics, room, found)
    if items < 0:
        return None
    size, kinds = _SCRATCH.found.tolist()
    return WireColumns(body, items, _copy(_SCRATCH.points[:size]), _copy(_SCRATCH.metrics[:kinds]))


def _copy(records: NDArray[Any]) -> NDArray[Any]:
    """Records that are copied as what they are, eight bytes for each field; NumPy copies them field by field."""
    return records.view(np.int64).copy().view(records.dtype)


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
