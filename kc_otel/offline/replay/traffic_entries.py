"""What a recording holds: requests with the time at which they arrived, and the times of evaluations.

The log that `kc-otel serve` writes, and keeps with `--record`, is the OpenTelemetry Collector's own file format
`proto`: each message is an ExportMetricsServiceRequest behind its length in 4 bytes, big-endian, so that whatever reads
the Collector's files reads these. When a request arrived, or that the evaluator judged then, is said by a resource
without any metrics at the end of the message, with a checksum.
Source: README of opentelemetry-collector-contrib, exporter/fileexporter, "File Format".
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from kc_otel.judge.otlp.decode import from_protobuf
from kc_otel.judge.otlp.request_errors import BadRequestError
from kc_otel.judge.otlp.request_limits import Limits
from kc_otel.judge.otlp.signals import METRICS

try:
    from isal.isal_zlib import crc32
except ImportError:  # the extra `fast` has one that takes a tenth of the time
    from zlib import crc32

__all__ = [
    "CHECKSUM",
    "EVALUATED",
    "MOST_BYTES",
    "OWN_FILES",
    "RECEIVED",
    "SEAL_BYTES",
    "TrafficEntry",
    "entry_of",
    "is_sealed",
    "ours",
    "sealed_frame",
    "sealed_parts",
    "unsealed",
]

RECEIVED: Final = "kc.recording.received"
"""Attribute of the resource that says when the request arrived, Unix time in seconds."""
CHECKSUM: Final = "kc.recording.crc32"
"""Attribute beside it: CRC-32 of the request and of that time (IEEE 754, little-endian), in hex."""
EVALUATED: Final = "kc.recording.verdicts"
"""In its place where nothing arrived, but the evaluator judged; as long, so that every mark has one length."""
MOST_BYTES: Final = 64 * 1024 * 1024
"""Longest message that is written or believed; a longer one is a length that is none."""

_OURS: Final = ("kc.", "gen_ai.")
OWN_FILES: Final = Limits(max_items=10**9)
"""Who reads a recording chose it; what one request of it may hold is not bounded further than its bytes."""


def _nobody(_: str) -> None:
    """Is told, and does nothing."""


@dataclass(frozen=True, slots=True)
class TrafficEntry:
    """One message of a recording.

    Attributes:
        at: Unix time in seconds at which it arrived, or at which the evaluator judged.
        request: ExportMetricsServiceRequest; None for an evaluation, and where there is a `body`.
        body: The same serialized, where an evaluator has taken it: it may be read as columns. Else empty.
        damaged: Is told why `body` is no such request, if it is none.
    """

    at: float
    request: Any = None
    body: bytes = b""
    damaged: Callable[[str], object] = field(default=_nobody, compare=False)

    @property
    def is_evaluation(self) -> bool:
        """Whether nothing arrived, but the evaluator judged."""
        return self.request is None and not self.body

    def read(self) -> Any:
        """The request; an empty one where it is damaged, which is said."""
        if self.request is not None:
            return self.request
        try:
            return from_protobuf(self.body, METRICS, OWN_FILES)
        except BadRequestError as error:
            self.damaged(str(error))
            return ExportMetricsServiceRequest()


def entry_of(request: Any) -> TrafficEntry | None:
    """The entry that a message is; None when there is nothing in it.

    Where the message does not say when it arrived, the newest of its points does.
    """
    last = request.resource_metrics[-1] if request.resource_metrics else None
    if last is not None and not last.scope_metrics and len(last.resource.attributes) == 2:
        mark = last.resource.attributes[0]
        if mark.key == EVALUATED:
            return TrafficEntry(mark.value.double_value)
        if mark.key == RECEIVED:
            return TrafficEntry(mark.value.double_value, request)
    newest = _newest(request)
    return TrafficEntry(newest / 1e9, request) if newest else None


def ours(request: Any) -> Any:
    """The request without metrics that no contract can be about: a Collector may send everything that it has."""
    metrics = [
        metric.name.startswith(_OURS)
        for resource in request.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    ]
    if metrics and all(metrics):
        return request
    kept = ExportMetricsServiceRequest()
    for resource in request.resource_metrics:
        scopes = [scope for scope in resource.scope_metrics if any(m.name.startswith(_OURS) for m in scope.metrics)]
        if not scopes:
            continue
        into = kept.resource_metrics.add(resource=resource.resource, schema_url=resource.schema_url)
        for scope in scopes:
            wanted = [metric for metric in scope.metrics if metric.name.startswith(_OURS)]
            into.scope_metrics.add(scope=scope.scope, metrics=wanted, schema_url=scope.schema_url)
    return kept


def sealed_frame(message: bytes, at: float, what: str = RECEIVED) -> bytes:
    """A message of the log behind its length, with a mark at its end that `is_sealed` accepts.

    Args:
        message: A serialized ExportMetricsServiceRequest; empty for an evaluation.
        at: When it arrived, or was judged, Unix seconds.
        what: RECEIVED or EVALUATED.
    """
    return b"".join(sealed_parts(message, at, what))


def sealed_parts(message: bytes, at: float, what: str = RECEIVED) -> tuple[bytes, bytes, bytes]:
    """The same as length, message and mark, of which no copy is made."""
    # Concatenated messages are one message: a protobuf parser appends to what it has.
    mark = _mark(what, at, _checksum(message, at))
    return struct.pack(">I", len(message) + len(mark)), message, mark


def is_sealed(message: bytes) -> bool:
    """Whether a message is a sealed one of which nothing is damaged."""
    return unsealed(message) is not None


def unsealed(message: bytes) -> tuple[str, float, bytes] | None:
    """RECEIVED or EVALUATED, when that was, and the serialized request; None where it is not sealed, or is damaged."""
    seal, body = message[-SEAL_BYTES:], message[:-SEAL_BYTES]
    mark = ExportMetricsServiceRequest()
    try:
        mark.ParseFromString(seal)
        said = mark.resource_metrics[0].resource.attributes[0]
    except (DecodeError, IndexError):
        return None
    at = said.value.double_value
    whole = said.key in {RECEIVED, EVALUATED} and seal == _mark(said.key, at, _checksum(body, at))
    return (said.key, at, body) if whole else None


def _checksum(message: bytes, at: float) -> str:
    return f"{crc32(struct.pack('<d', at), crc32(message)):08x}"


def _mark(name: str, at: float, checksum: str) -> bytes:
    head, middle = _PARTS[name]
    return b"".join((head, struct.pack("<d", at), middle, checksum.encode()))


def _parts_of_mark(name: str) -> tuple[bytes, bytes]:
    """What a mark has before its time, and between it and the checksum, which ends it."""
    request = ExportMetricsServiceRequest()
    attributes = request.resource_metrics.add().resource.attributes
    attributes.add(key=name).value.double_value = 1.0
    attributes.add(key=CHECKSUM).value.string_value = "0" * 8
    head, middle = request.SerializeToString().split(struct.pack("<d", 1.0))
    return head, middle[:-8]


def _newest(request: Any) -> int:
    times = [0]
    for resource in request.resource_metrics:
        for scope in resource.scope_metrics:
            for metric in scope.metrics:
                field = metric.WhichOneof("data")
                if field:
                    times += [point.time_unix_nano for point in getattr(metric, field).data_points]
    return max(times)


_PARTS: Final = {name: _parts_of_mark(name) for name in (RECEIVED, EVALUATED)}
SEAL_BYTES: Final = len(_mark(RECEIVED, 0.0, _checksum(b"", 0.0)))
"""Length of the mark at the end of a sealed message."""
