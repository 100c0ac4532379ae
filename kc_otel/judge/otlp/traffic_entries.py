"""Format of a recording: requests with their arrival times, and the times of evaluations.

One format: that of the OpenTelemetry Collector's file exporter with `format: proto`, which is an
ExportMetricsServiceRequest behind its length in 4 bytes, big-endian, and again. `kc-otel serve --record` adds to each
message a resource without any metrics, of which an attribute says when the request arrived; one that only says when the
evaluator judged is a message by itself. Whatever reads OTLP reads past both.
Source: README of opentelemetry-collector-contrib, exporter/fileexporter, "File Format".
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Final

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from kc_otel.judge.otlp.requests import BadRequestError, Limits, from_protobuf, points_in

RECEIVED: Final = "kc.recording.received"
"""Attribute of the resource that says when the request arrived, Unix time in seconds."""
EVALUATED: Final = "kc.recording.verdicts"
"""In its place where nothing arrived, but the evaluator judged; as long, so that every mark has one length."""
MOST_BYTES: Final = 64 * 1024 * 1024
"""Longest message that is written or believed; a longer one is a length that is none."""

_JUDGED_PREFIXES: Final = ("kc.", "gen_ai.")
"""Prefixes of the metrics that contracts are about."""
OWN_FILES: Final = Limits(max_items=10**9)
"""Limits for a recording: its reader chose the file, so only the bytes of a request are bounded."""


def _nobody(_: str) -> None:
    """Is told, and does nothing."""


@dataclass(frozen=True, slots=True)
class TrafficEntry:
    """One message of a recording, and the Unix time at which it arrived, or at which the evaluator judged.

    `body` is a serialized ExportMetricsServiceRequest, empty for an evaluation; `damaged` is told why it is none.
    """

    at: float
    body: bytes = b""
    damaged: Callable[[str], object] = field(default=_nobody, compare=False)

    @property
    def is_evaluation(self) -> bool:
        """True if nothing arrived and the entry marks an evaluation."""
        return not self.body

    def read(self) -> Any:
        """The request; an empty one where it is damaged, which is said."""
        try:
            return from_protobuf(self.body, OWN_FILES)
        except BadRequestError as error:
            self.damaged(str(error))
            return ExportMetricsServiceRequest()

    def arrived(self) -> TrafficEntry | None:
        """The same at the time of its newest point, for a message that does not say when it arrived; None for none."""
        scopes = (scope for resource in self.read().resource_metrics for scope in resource.scope_metrics)
        points = (point for scope in scopes for metric in scope.metrics for point in points_in(metric))
        newest = max((point.time_unix_nano for point in points), default=0)
        return replace(self, at=newest / 1e9) if newest else None


def judged_metrics(request: Any) -> Any:
    """The request without metrics that no contract can be about: a Collector may send everything that it has."""
    metrics = [
        metric.name.startswith(_JUDGED_PREFIXES)
        for resource in request.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    ]
    if metrics and all(metrics):
        return request
    kept = ExportMetricsServiceRequest()
    for resource in request.resource_metrics:
        scopes = [
            scope for scope in resource.scope_metrics if any(m.name.startswith(_JUDGED_PREFIXES) for m in scope.metrics)
        ]
        if not scopes:
            continue
        into = kept.resource_metrics.add(resource=resource.resource, schema_url=resource.schema_url)
        for scope in scopes:
            wanted = [metric for metric in scope.metrics if metric.name.startswith(_JUDGED_PREFIXES)]
            into.scope_metrics.add(scope=scope.scope, metrics=wanted, schema_url=scope.schema_url)
    return kept


def marked_frame(message: bytes, at: float, what: str = RECEIVED) -> bytes:
    """A message behind its length, with a mark at its end: RECEIVED or EVALUATED at a Unix time.

    The message is a serialized ExportMetricsServiceRequest, empty for an evaluation.
    """
    # Concatenated messages are one message: a protobuf parser appends to what it has.
    return b"".join((struct.pack(">I", len(message) + _MARK_BYTES), message, _HEADS[what], struct.pack("<d", at)))


def unmarked(message: bytes) -> tuple[str, float, bytes] | None:
    """RECEIVED or EVALUATED, when that was, and the serialized request; None where no mark is at its end."""
    mark = message[-_MARK_BYTES:]
    for what, head in _HEADS.items():
        if mark.startswith(head) and len(mark) == _MARK_BYTES:
            return what, struct.unpack("<d", mark[len(head) :])[0], message[:-_MARK_BYTES]
    return None


def _head_of_mark(name: str) -> bytes:
    """Return the bytes of a mark up to its time, which comes last."""
    request = ExportMetricsServiceRequest()
    request.resource_metrics.add().resource.attributes.add(key=name).value.double_value = 1.0
    return request.SerializeToString().removesuffix(struct.pack("<d", 1.0))


_HEADS: Final = {name: _head_of_mark(name) for name in (RECEIVED, EVALUATED)}
_MARK_BYTES: Final = len(_HEADS[RECEIVED]) + 8
