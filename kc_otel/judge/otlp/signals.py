"""The three signals of OTLP: their messages, their paths, and how an outcome is said in each."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest, ExportLogsServiceResponse
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from kc_otel.judge.otlp.request_errors import InternalError, ReceiveError
from kc_otel.judge.otlp.sink import ExportResult, TelemetrySink

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Signal:
    """One of metrics, traces, logs.

    Attributes:
        name: Method of `TelemetrySink`, and last part of the HTTP path.
        rejected: Field of the response's partial success that counts what was not taken.
        groups: Fields from the request down to what it is a list of: by resource, by scope, one by one.
    """

    name: Literal["metrics", "traces", "logs"]
    service: str
    request: Any
    response: Any
    rejected: str
    groups: tuple[str, str, str]

    @property
    def path(self) -> str:
        """Path of OTLP/HTTP."""
        return f"/v1/{self.name}"

    def items(self, request: Any) -> Iterator[int]:
        """Yield the number of items in a request, group by group; a caller that adds them up may stop early."""
        by_resource, by_scope, leaves = self.groups
        resources = getattr(request, by_resource)
        yield len(resources)
        for resource in resources:
            scopes = getattr(resource, by_scope)
            yield len(scopes)
            for scope in scopes:
                found = getattr(scope, leaves)
                yield len(found)
                if self.name == "metrics":
                    for metric in found:
                        data = metric.WhichOneof("data")
                        yield len(getattr(metric, data).data_points) if data else 0

    def answer(self, outcome: ExportResult) -> Any:
        """The response message that says this outcome."""
        response = self.response()
        if outcome.rejected or outcome.message:
            setattr(response.partial_success, self.rejected, outcome.rejected)
            response.partial_success.error_message = outcome.message
        return response


METRICS: Final = Signal(
    "metrics",
    "opentelemetry.proto.collector.metrics.v1.MetricsService",
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
    "rejected_data_points",
    ("resource_metrics", "scope_metrics", "metrics"),
)
TRACES: Final = Signal(
    "traces",
    "opentelemetry.proto.collector.trace.v1.TraceService",
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
    "rejected_spans",
    ("resource_spans", "scope_spans", "spans"),
)
LOGS: Final = Signal(
    "logs",
    "opentelemetry.proto.collector.logs.v1.LogsService",
    ExportLogsServiceRequest,
    ExportLogsServiceResponse,
    "rejected_log_records",
    ("resource_logs", "scope_logs", "log_records"),
)
SIGNALS: Final = (METRICS, TRACES, LOGS)


async def deliver(sink: TelemetrySink, signal: Signal, request: Any, transport: str) -> ExportResult:
    """Hand decoded metrics to the sink; a fault of the sink's own is logged here, and an InternalError.

    Spans and logs are taken and dropped, so that a Collector's pipeline does not retry them.
    """
    if signal is not METRICS:
        return ExportResult()
    try:
        began = time.perf_counter()
        taken: ExportResult | Awaitable[ExportResult] = sink.metrics(request)
        if isinstance(taken, Awaitable):
            return await taken
        return replace(taken, seconds=time.perf_counter() - began)
    except ReceiveError:
        raise
    except Exception:  # noqa: BLE001 - the server outlives whatever the sink does
        _log.exception("%s of %s: the sink failed; the request was not taken", transport, signal.name)
        raise InternalError("the receiver failed on this request; its log has the cause") from None
