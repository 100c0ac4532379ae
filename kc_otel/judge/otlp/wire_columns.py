"""Walks the wire format of an ExportMetricsServiceRequest and leaves columns: what each exponential point says.

Compiled by Numba. The walk believes nothing: lengths are held against what encloses them, and whatever is not exactly
what senders write (an unknown field, a field twice where protobuf would merge, another order of parts) makes it give up
on the message, which is then read by protobuf. It decodes numbers only. Names and attributes stay bytes, so a caller
may use them only where protobuf has read the same bytes before. Source: protobuf.dev, "Encoding", and OTLP 1.11.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from kc_otel._extras import machine_code
from kc_otel.judge.column_message import WireColumns

__all__ = ["compiled", "compiled_in_any_order", "read_columns"]

F = TypeVar("F", bound=Callable[..., Any])

_POINT: Final = np.dtype(
    [(name, np.int64) for name in ("begin", "end", "key_begin", "key_end", "metric", "plain")]
    + [(name, np.int64) for name in ("start", "time", "count", "zero_count", "scale", "has_sum")]
    + [(name, np.int64) for name in ("positive", "positive_end", "positive_size", "positive_offset")]
    + [(name, np.int64) for name in ("negative", "negative_end", "negative_size", "negative_offset")]
    + [(name, np.float64) for name in ("sum", "min", "max", "zero_threshold")]
)
_METRIC: Final = np.dtype(
    [(name, np.int64) for name in ("begin", "end", "resource_begin", "resource_end", "scope_begin", "scope_end")]
    + [(name, np.int64) for name in ("head_end", "exponential", "temporality", "first", "last")]
)
_MOST: Final = 60_000
"""Points or metrics of a message; the arrays for them take 17 MB."""
_LEAST_POINT: Final = 32
"""Bytes that a point has at least which is one of ours: it names a contract, a slice and two kernels."""


def compiled(function: F) -> F:
    """The function as machine code."""
    return machine_code(function)


def compiled_in_any_order(function: F) -> F:
    """The same of a function that adds up doubles, in whichever order is quick."""
    return machine_code(function, fastmath={"reassoc", "contract"})


def read_columns(body: bytes, most: int = _MOST) -> WireColumns | None:
    """A message as columns; None where only protobuf can say what it is, or where it has more points or metrics."""
    room = min(len(body) // _LEAST_POINT + 8, most)
    if room > _SCRATCH.points.size:
        _SCRATCH.grow(room)
    points, metrics = _SCRATCH.points[:room], _SCRATCH.metrics[:room]
    content = np.frombuffer(body, np.uint8)
    items, found, kinds = _scan(content, points, metrics)
    if items < 0:
        return None
    return WireColumns(body, content, items, _copy(points[:found]), _copy(metrics[:kinds]))


def _copy(records: NDArray[Any]) -> NDArray[Any]:
    """Records that are copied as what they are, eight bytes for each field; NumPy copies them field by field."""
    return records.view(np.int64).copy().view(records.dtype)


class _Scratch(threading.local):
    """Where a message is taken apart, before what it needs is copied: one at a time in each thread."""

    def __init__(self) -> None:
        self.grow(4096)

    def grow(self, points: int) -> None:
        self.points = np.empty(points, _POINT)
        self.metrics = np.empty(points, _METRIC)


_SCRATCH: Final = _Scratch()


@compiled
def _varint(body: Any, at: int, end: int) -> Any:
    """A number of seven bits a byte, and where it ends; -1 where it does not, or is no int64."""
    value, shift = np.int64(0), np.int64(0)
    while at < end and shift < 63:
        byte = np.int64(body[at])
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
    return np.int64(0), -1


@compiled
def _fixed(body: Any, at: int) -> Any:
    value = np.uint64(0)
    for byte in range(8):
        value |= np.uint64(body[at + byte]) << np.uint64(8 * byte)
    return np.int64(value)


@compiled
def _part(body: Any, at: int, end: int) -> Any:
    """Begin and end of a part that says its length; -1 where it is longer than what it is in."""
    length, at = _varint(body, at, end)
    if at < 0 or length > end - at:
        return -1, -1
    return at, at + length


@compiled
def _zigzag(body: Any, at: int, end: int) -> Any:
    value, at = _varint(body, at, end)
    if value > 0xFFFFFFFF:
        return np.int64(0), -1
    return (value >> 1) ^ -(value & 1), at


@compiled
def _is_ascii(body: Any, at: int, end: int) -> Any:
    for here in range(at, end):  # noqa: SIM110 - Numba knows no generators here
        if body[here] >= 128:
            return False
    return True


@compiled
def _exemplar_fits(body: Any, at: int, end: int) -> Any:
    """Whether an exemplar is times, values and ids only."""
    while at < end:
        tag = body[at]
        at += 1
        if tag in (0x11, 0x19, 0x31):  # time, double, integer
            at += 8
        elif tag in (0x22, 0x2A):  # ids of span and trace
            _, at = _part(body, at, end)
            if at < 0:
                return False
        else:
            return False
    return at == end


@compiled
def _varints(body: Any, at: int, end: int) -> Any:
    """How many numbers are packed in a part; -1 where one has more than nine bytes, or does not end."""
    begin, until = np.uint64(at), np.uint64(end)
    if begin == until:
        return 0
    if body[until - np.uint64(1)] > 127:
        return -1
    size = np.int64(0)
    for here in range(begin, until):
        size += body[here] < 128
    if until - begin < 10:
        return size
    # A number of ten bytes has four in a row that do not end it, as hardly any has: all are looked at together.
    long = np.uint8(0)
    for here in range(begin, until - np.uint64(3)):
        long |= body[here] & body[here + np.uint64(1)] & body[here + np.uint64(2)] & body[here + np.uint64(3)]
    if long < 128:
        return size
    open = 0
    for here in range(begin, until):
        open = open + 1 if body[here] > 127 else 0
        if open > 8:
            return -1
    return size


@compiled
def _side(body: Any, at: int, end: int) -> Any:
    """Offset, begin, end and number of the packed counts; the number is -1 where it is not what it should be."""
    offset, size, begin, until = np.int64(0), np.int64(0), np.int64(end), np.int64(end)
    seen = False
    while at < end:
        tag = body[at]
        at += 1
        if tag == 0x08:
            offset, at = _zigzag(body, at, end)
            if at < 0:
                return offset, begin, until, -1
        elif tag == 0x12 and not seen:
            seen = True
            begin, until = _part(body, at, end)
            if begin < 0:
                return offset, begin, until, -1
            size = _varints(body, begin, until)
            if size < 0:
                return offset, begin, until, -1
            at = until
        else:
            return offset, begin, until, -1
    return offset, begin, until, size


@compiled
def _point(body: Any, at: int, end: int, doubles: Any, point: Any) -> Any:
    """One point's columns; returns False where it is not what it should be."""
    bits, number = doubles  # one int64 and one float64 in the same memory
    point.begin, point.end, point.plain = at, end, 1
    point.key_begin = point.key_end = at
    point.start = point.time = point.count = point.zero_count = point.scale = point.has_sum = 0
    point.positive_size = point.negative_size = point.positive_offset = point.negative_offset = 0
    point.positive = point.positive_end = point.negative = point.negative_end = end
    point.sum = point.zero_threshold = 0.0
    point.min = point.max = np.nan
    positive = negative = False
    while at < end:
        tag_at = at
        tag = body[at]
        at += 1
        if tag == 0x0A:  # attributes
            _, at = _part(body, at, end)
            if at < 0:
                return False
            if point.key_end == point.key_begin:
                point.key_begin = tag_at
            elif point.key_end != tag_at:
                point.plain = 0
            point.key_end = at
        elif tag in (0x11, 0x19, 0x21, 0x39, 0x29, 0x61, 0x69, 0x71):
            if end - at < 8:
                return False
            bits[0] = _fixed(body, at)
            at += 8
            if tag == 0x11:
                point.start = bits[0]
            elif tag == 0x19:
                point.time = bits[0]
            elif tag == 0x21:
                point.count = bits[0]
            elif tag == 0x39:
                point.zero_count = bits[0]
            elif tag == 0x29:
                point.sum = number[0]
                point.has_sum = 1
            elif tag == 0x61:
                point.min = number[0]
            elif tag == 0x69:
                point.max = number[0]
            else:
                point.zero_threshold = number[0]
        elif tag == 0x30:
            point.scale, at = _zigzag(body, at, end)
            if at < 0:
                return False
        elif tag == 0x42 and not positive:
            positive = True
            at, until = _part(body, at, end)
            if at < 0:
                return False
            point.positive_offset, point.positive, point.positive_end, point.positive_size = _side(body, at, until)
            if point.positive_size < 0:
                return False
            at = until
        elif tag == 0x4A and not negative:
            negative = True
            at, until = _part(body, at, end)
            if at < 0:
                return False
            point.negative_offset, point.negative, point.negative_end, point.negative_size = _side(body, at, until)
            if point.negative_size < 0:
                return False
            at = until
        elif tag == 0x50:
            flags, at = _varint(body, at, end)
            if at < 0:
                return False
            if flags != 0:
                point.plain = 0
        elif tag == 0x5A:
            at, until = _part(body, at, end)
            if at < 0 or not _exemplar_fits(body, at, until):
                return False
            at = until
        else:
            return False
    return True


@compiled
def _scan(body: Any, points: Any, metrics: Any) -> Any:
    """(items, points, metrics) of a message; items is -1 where protobuf has to read it."""
    no = (-1, 0, 0)
    bits = np.zeros(1, np.int64)
    doubles = (bits, bits.view(np.float64))
    items = found = kinds = 0
    at, size = 0, body.size
    while at < size:
        if body[at] != 0x0A:
            return no
        at, resource_metrics_end = _part(body, at + 1, size)
        if at < 0:
            return no
        items += 1
        resource_begin = resource_end = at
        scopes = 0
        while at < resource_metrics_end:
            tag = body[at]
            begin, end = _part(body, at + 1, resource_metrics_end)
            if begin < 0:
                return no
            at = end
            if tag == 0x0A and not scopes and resource_end == resource_begin:
                resource_begin, resource_end = begin, end
                continue
            if tag == 0x1A and _is_ascii(body, begin, end):
                continue
            if tag != 0x12:
                return no
            scopes += 1
            items += 1
            inner = begin
            scope_begin = scope_end = inner
            here = 0
            while inner < end:
                tag = body[inner]
                metric_begin, metric_end = _part(body, inner + 1, end)
                if metric_begin < 0:
                    return no
                inner = metric_end
                if tag == 0x0A and not here and scope_end == scope_begin:
                    scope_begin, scope_end = metric_begin, metric_end
                    continue
                if tag == 0x1A and _is_ascii(body, metric_begin, metric_end):
                    continue
                if tag != 0x12 or kinds == metrics.size:
                    return no
                here += 1
                items += 1
                metric = metrics[kinds]
                metric.begin, metric.end = metric_begin, metric_end
                metric.resource_begin, metric.resource_end = resource_begin, resource_end
                metric.scope_begin, metric.scope_end = scope_begin, scope_end
                metric.first, metric.exponential, metric.temporality = found, 0, 0
                part = metric_begin
                data_begin = data_end = -1
                while part < metric_end:
                    tag = body[part]
                    part_begin, part_end = _part(body, part + 1, metric_end)
                    if part_begin < 0 or data_begin >= 0:
                        return no
                    if tag not in (0x0A, 0x12, 0x1A):
                        if tag not in (0x2A, 0x3A, 0x4A, 0x52):  # gauge, sum, histogram, exponential histogram
                            return no
                        data_begin, data_end = part_begin, part_end
                        metric.head_end = part
                        metric.exponential = tag == 0x52
                    part = part_end
                if data_begin < 0:
                    return no
                part = data_begin
                while metric.exponential and part < data_end:
                    tag = body[part]
                    if tag == 0x10 and metric.temporality == 0:
                        metric.temporality, part = _varint(body, part + 1, data_end)
                        if part < 0:
                            return no
                        continue
                    if tag != 0x0A or found == points.size:
                        return no
                    point_begin, part = _part(body, part + 1, data_end)
                    if point_begin < 0:
                        return no
                    if not _point(body, point_begin, part, doubles, points[found]):
                        return no
                    points[found].metric = kinds
                    found += 1
                    items += 1
                metric.last = found
                kinds += 1
            if not here:
                return no
        if not scopes:
            return no
    return items, found, kinds
