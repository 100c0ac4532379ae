"""Prometheus remote write 1.0: what an exporter of this repository sends over OTLP, and plain numbers.

Debian's Prometheus has no OTLP receiver. This does what that receiver does: an exponential histogram becomes a native
one, its bucket i the bucket i + 1, for Prometheus counts buckets by their upper edge. Source of the message:
prometheus/prompb/types.proto; of the framing: the snappy block format, of which only literals are needed.
"""

import re
import struct
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

ZERO_THRESHOLD = 1e-128
HEADERS = {
    "Content-Encoding": "snappy",
    "Content-Type": "application/x-protobuf",
    "X-Prometheus-Remote-Write-Version": "0.1.0",
}


@dataclass(frozen=True, slots=True)
class Series:
    labels: Mapping[str, str]
    histograms: Sequence[tuple[int, Any]] = ()
    samples: Sequence[tuple[int, float]] = ()


def body(series: Iterable[Series]) -> bytes:
    return snappy(b"".join(_message(1, _series(entry)) for entry in series))


def undated(request: ExportMetricsServiceRequest) -> list[tuple[bytes, bytes]]:
    """(Labels, histogram) of each drift histogram of a request, encoded, for `at_present`."""
    found = []
    for resource in request.resource_metrics:
        for scope in resource.scope_metrics:
            for metric in scope.metrics:
                for point in metric.exponential_histogram.data_points:
                    labels = {_name(item.key): item.value.string_value for item in point.attributes}
                    found.append((_labels({**labels, "__name__": _name(metric.name)}), _histogram(point, 0)))
    return found


def at_present(series: Iterable[tuple[bytes, bytes]], added: bytes) -> bytes:
    """The body of a request with those histograms at this time, each with an encoded label more."""
    time_ = _integer(15, time.time_ns() // 10**6)
    return snappy(
        b"".join(_message(1, labels + added + _message(4, histogram + time_)) for labels, histogram in series)
    )


def snappy(content: bytes) -> bytes:
    chunks = [content[start : start + 65536] for start in range(0, len(content), 65536)]
    return _varint(len(content)) + b"".join(b"\xf4" + struct.pack("<H", len(chunk) - 1) + chunk for chunk in chunks)


def _series(series: Series) -> bytes:
    samples = b"".join(_message(2, _double(1, value) + _integer(2, at)) for at, value in series.samples)
    return (
        _labels(series.labels)
        + samples
        + b"".join(_message(4, _histogram(point, at)) for at, point in series.histograms)
    )


def _labels(labels: Mapping[str, str]) -> bytes:
    return b"".join(label(name, value) for name, value in sorted(labels.items()))


def label(name: str, value: str) -> bytes:
    return _message(1, _message(1, name.encode()) + _message(2, value.encode()))


def _histogram(point: Any, at: int) -> bytes:
    return b"".join(
        (
            _integer(1, point.count),
            _double(3, point.sum),
            _integer(4, _zigzag(point.scale)),
            _double(5, ZERO_THRESHOLD),
            _integer(6, point.zero_count),
            *_buckets(8, 9, point.negative),
            *_buckets(11, 12, point.positive),
            _integer(15, at),
        )
    )


def _buckets(span: int, deltas: int, buckets: Any) -> tuple[bytes, ...]:
    counts = list(buckets.bucket_counts)
    if not counts:
        return ()
    steps = (count - before for count, before in zip(counts, [0, *counts], strict=False))
    packed = b"".join(_varint(_zigzag(step)) for step in steps)
    return (
        _message(span, _integer(1, _zigzag(buckets.offset + 1)) + _integer(2, len(counts))),
        _message(deltas, packed),
    )


def _name(name: str) -> str:
    return re.sub(r"[^a-zA-Z0-9_]", "_", name)


def _message(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def _integer(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _double(field: int, value: float) -> bytes:
    return _varint(field << 3 | 1) + struct.pack("<d", value)


def _zigzag(value: int) -> int:
    return (value << 1) ^ (value >> 63)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
