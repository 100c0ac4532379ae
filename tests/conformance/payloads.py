"""What is sent: one small, valid request of each signal, as OTLP/JSON and as protobuf."""

import base64
import copy
import json
from dataclasses import dataclass
from typing import Any

from google.protobuf import json_format
from google.protobuf.internal.encoder import _VarintBytes
from opentelemetry.proto.collector.logs.v1 import logs_service_pb2 as logs
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as metrics
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as traces

PROTOBUF = "application/x-protobuf"
JSON = "application/json"
ENCODINGS = (PROTOBUF, JSON)
TIME = "1700000000000000000"


@dataclass(frozen=True)
class Signal:
    """One of OTLP's stable signals."""

    name: str
    service: str
    request: Any
    response: Any
    json: dict[str, Any]
    """A valid request in OTLP/JSON."""

    @property
    def path(self) -> str:
        return f"/v1/{self.name}"

    @property
    def method(self) -> str:
        return f"/opentelemetry.proto.collector.{self.service}/Export"

    def body(self, encoding: str) -> bytes:
        return encoded(self, self.json, encoding)


RESOURCE = {"attributes": [{"key": "service.name", "value": {"stringValue": "otlp-conformance"}}]}
SCOPE = {"name": "otlp-conformance"}
POINT = {"startTimeUnixNano": TIME, "timeUnixNano": TIME, "asInt": "7"}
SUM = {"name": "conformance.requests", "sum": {"aggregationTemporality": 2, "isMonotonic": True, "dataPoints": [POINT]}}
SPAN = {
    "traceId": "5B8EFFF798038103D269B633813FC60C",
    "spanId": "EEE19B7EC3C1B174",
    "name": "conformance",
    "kind": 2,
    "startTimeUnixNano": TIME,
    "endTimeUnixNano": TIME,
}
RECORD = {"timeUnixNano": TIME, "severityNumber": 9, "body": {"stringValue": "conformance"}}

METRICS = Signal(
    "metrics",
    "metrics.v1.MetricsService",
    metrics.ExportMetricsServiceRequest,
    metrics.ExportMetricsServiceResponse,
    {"resourceMetrics": [{"resource": RESOURCE, "scopeMetrics": [{"scope": SCOPE, "metrics": [SUM]}]}]},
)
TRACES = Signal(
    "traces",
    "trace.v1.TraceService",
    traces.ExportTraceServiceRequest,
    traces.ExportTraceServiceResponse,
    {"resourceSpans": [{"resource": RESOURCE, "scopeSpans": [{"scope": SCOPE, "spans": [SPAN]}]}]},
)
LOGS = Signal(
    "logs",
    "logs.v1.LogsService",
    logs.ExportLogsServiceRequest,
    logs.ExportLogsServiceResponse,
    {"resourceLogs": [{"resource": RESOURCE, "scopeLogs": [{"scope": SCOPE, "logRecords": [RECORD]}]}]},
)
SIGNALS = (METRICS, TRACES, LOGS)

A_MEGABYTE = b"\xfa\x01\x80\x80\x3c" + bytes(15 * 2**16)
"""To follow a message, in a field that nobody knows: what is there at once, with its headers, may need no place."""
NEW_FIELD = bytes([0xFA, 0x7F, 3]) + b"new"
"""Field 2047 with a string: a message of a later version of OTLP ends so."""
NOT_PROTOBUF = b"\xff\xff\xff not a message"


def metrics_with(**fields: Any) -> dict[str, Any]:
    """The request of metrics with fields of its data point set."""
    tree = copy.deepcopy(METRICS.json)
    tree["resourceMetrics"][0]["scopeMetrics"][0]["metrics"][0]["sum"]["dataPoints"][0].update(fields)
    return tree


def encoded(signal: Signal, tree: dict[str, Any], encoding: str) -> bytes:
    return json.dumps(tree).encode() if encoding == JSON else to_protobuf(signal, tree)


def to_protobuf(signal: Signal, tree: dict[str, Any]) -> bytes:
    """A request in OTLP/JSON as protobuf, whose own JSON has ids in base64."""

    def base64_ids(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        return {k: base64.b64encode(bytes.fromhex(v)).decode() if k in {"traceId", "spanId"} else v for k, v in pairs}

    own = json.loads(json.dumps(tree), object_pairs_hook=base64_ids)
    return json_format.ParseDict(own, signal.request()).SerializeToString()


def too_large(encoding: str, size: int) -> bytes:
    """A request with nothing wrong but its size: one unknown field, a little over `size` bytes."""
    if encoding == JSON:
        return b'{"newField":"' + b"0" * size + b'"}'
    return bytes([0xFA, 0x7F]) + _VarintBytes(size) + b"0" * size
