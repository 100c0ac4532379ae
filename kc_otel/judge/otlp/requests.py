"""An OTLP request: its errors and limits, how its bytes are decoded, who takes it, and the answer.

    ReceiveError
    |-- BadRequestError        do not retry: the same bytes will fail again
    |-- UnauthenticatedError   do not retry: give a token
    |-- ForbiddenError         do not retry: the token is not for this
    |-- UnsupportedMediaError  do not retry
    |-- TooLargeError          do not retry: send smaller batches
    |-- ThrottledError         retry after `retry_after` seconds
    |-- InternalError          a fault of the receiver; its log has the cause
    BindError                  the address cannot be listened on

OTLP 1.11 obliges a server to bound a request before and after decompression. OTLP/JSON is protobuf's JSON mapping, but
enum values are integers only. Fields that nobody knows yet are ignored in both encodings.
"""

from __future__ import annotations

import json
import logging
import math
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any, ClassVar, Final

from google.protobuf import json_format
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)

_log: Final = logging.getLogger(__name__)
_WINDOWS: Final = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
_NO_REQUEST: Final = "the body is not an ExportMetricsServiceRequest"
_OBJECTS_PER_POINT: Final = 20
"""JSON objects that one data point with eight attributes is made of, and a few more."""
_MAX_QUOTED_CHARACTERS: Final = 400
"""Characters of the parser's own words that are passed on; it quotes values of any length."""
_PARSER_ERRORS: Final = (
    *(json_format.ParseError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError),
)
"""Exceptions that protobuf's JSON parser raises on unforeseen input; only the first is documented."""
_ITEM_MESSAGES: Final = frozenset(
    {"ResourceMetrics", "ScopeMetrics", "Metric", "NumberDataPoint", "HistogramDataPoint"}
    | {"ExponentialHistogramDataPoint", "SummaryDataPoint"}
)
_MESSAGES_PER_ITEM: Final = 20
"""Messages that an item counts for: it has some of its own."""
_MAX_PARTS_PER_ITEM: Final = 50
"""The same that an item may be made of in the mean: attributes are two each."""
_MAX_REASONS: Final = 3
"""Different reasons for rejected points that one answer says."""
_MAX_DEPTH: Final = 256
"""More than a parser follows: it rejects deeper nesting itself."""
_LENGTH_WIRE_TYPE: Final = 2
_FIXED_LENGTHS: Final = {1: 8, 5: 4}
"""Bytes of the wire types that have always as many."""
_Fields = dict[int, tuple[Any, int]]


class ReceiveError(Exception):
    """A request that is not accepted."""

    outcome: ClassVar[str] = "bad_request"
    """Value of `kc.outcome` on kc.evaluator.requests."""
    http_status: ClassVar[int] = 400
    rpc_code: ClassVar[int] = 3
    """google.rpc.Code, whose numbers are those of gRPC. Source: OTLP 1.11, "Failures" and "OTLP/HTTP Response"."""
    headers: Mapping[str, str] = MappingProxyType({})
    """Of the answer over HTTP."""


class BadRequestError(ReceiveError):
    """The bytes are not what the content type says."""


class UnauthenticatedError(ReceiveError):
    """Nobody knows who sends this."""

    outcome, http_status, rpc_code = "unauthenticated", 401, 16
    headers = MappingProxyType({"www-authenticate": "Bearer"})


class ForbiddenError(ReceiveError):
    """The sender is known and lacks the role."""

    outcome, http_status, rpc_code = "forbidden", 403, 7


class UnsupportedMediaError(ReceiveError):
    """The content type or the content encoding is not one that OTLP has."""

    outcome, http_status = "unsupported_media", 415


class TooLargeError(ReceiveError):
    """The request is over the limit, as received or after decompression."""

    outcome, http_status, rpc_code = "too_large", 413, 8


class ThrottledError(ReceiveError):
    """The receiver cannot take more at the moment; a sink may raise it.

    Senders give up when `retry_after` is more than is left of their own deadline (10 s by default), so keep it short.
    """

    outcome, http_status, rpc_code = "throttled", 503, 14

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        self.headers = {"retry-after": str(math.ceil(retry_after))}


class InternalError(ReceiveError):
    """A fault of the receiver, not of the request."""

    outcome, http_status, rpc_code = "internal_error", 500, 13


class BindError(OSError):
    """An address cannot be listened on; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the receivers; times are in seconds."""

    max_bytes: int = 16 * 1024 * 1024
    """Of a request as received, and again after decompression: some 350 messages of a recorder with twenty slices."""
    max_items: int = 60_000
    """Points, with what they are grouped by: 16 kB of gzip hold eight million empty ones."""
    retry_after: float = 1.0
    read_timeout: float = 10.0
    """Within which a request has to arrive once it has begun; exporters give up after ten."""

    def too_large(self) -> TooLargeError:
        """The error for a request over `max_bytes`."""
        return TooLargeError(f"the request is larger than {self.max_bytes} bytes; send smaller batches")

    def too_many(self) -> TooLargeError:
        """The error for a request over `max_items`."""
        return TooLargeError(f"the request holds more than {self.max_items} items; send smaller batches")


def inflate(body: bytes, encoding: str, limits: Limits) -> bytes:
    """A request's body without its content encoding: none, `identity`, `gzip` or `deflate`."""
    encoding = encoding.strip().lower()
    if encoding in {"", "identity"}:
        if len(body) > limits.max_bytes:
            raise limits.too_large()
        return body
    if encoding not in _WINDOWS:
        raise UnsupportedMediaError(f"content encoding {encoding[:40]!r} is not known here; use gzip, deflate or none")
    parts: list[bytes] = []
    room = limits.max_bytes
    try:
        while body:  # a gzip body may consist of several members
            stream = zlib.decompressobj(_WINDOWS[encoding])
            part = stream.decompress(body, room + 1)  # stops there: a small body may inflate to gigabytes
            if len(part) > room:
                raise limits.too_large()
            if not stream.eof:
                raise BadRequestError(f"the {encoding} body ends too early; nothing was accepted")
            parts.append(part)
            room -= len(part)
            body = stream.unused_data
    except zlib.error as error:
        raise BadRequestError(f"the body is not {encoding}: {error}") from None
    return b"".join(parts)


@dataclass(frozen=True, slots=True)
class ExportResult:
    """Outcome of a request that was read: items that the sender must not send again, why, and the seconds it took."""

    rejected: int = 0
    message: str = ""
    seconds: float = 0.0

    @staticmethod
    def joined(results: Sequence[ExportResult]) -> ExportResult:
        """The result of a request whose parts have these."""
        messages = dict.fromkeys(result.message for result in results if result.message)
        return ExportResult(sum(result.rejected for result in results), "; ".join([*messages][:_MAX_REASONS]))


class MetricsSink(ABC):
    """Takes metrics, on the servers' event loop."""

    @abstractmethod
    async def metrics(self, request: Any) -> ExportResult:
        """Take what `read` has returned; a `ThrottledError` makes the sender wait and send again."""

    def columns(self, body: bytes, limits: Limits) -> Any | None:  # noqa: ARG002 - for sinks that read them
        """A serialized ExportMetricsServiceRequest as `metrics` takes it; None where protobuf has to read it."""
        return None

    def read(self, body: bytes, limits: Limits) -> Any:
        """A serialized ExportMetricsServiceRequest, as columns where it can be."""
        columns = self.columns(body, limits)
        return from_protobuf(body, limits) if columns is None else columns

    async def deliver(self, request: Any, transport: str) -> ExportResult:
        """Take decoded metrics; a fault of the sink's own is logged here, and an InternalError."""
        try:
            return await self.metrics(request)
        except ReceiveError:
            raise
        except Exception:  # noqa: BLE001 - the server outlives whatever the sink does
            _log.exception("%s: the sink failed; the request was not taken", transport)
            raise InternalError("the receiver failed on this request; its log has the cause") from None


SERVICES: Final = {
    "metrics": "opentelemetry.proto.collector.metrics.v1.MetricsService",
    "traces": "opentelemetry.proto.collector.trace.v1.TraceService",
    "logs": "opentelemetry.proto.collector.logs.v1.LogsService",
}
"""gRPC services by signal, the last part of the HTTP path. Spans and logs are dropped unread, so that a Collector does
not retry them; their responses are empty, as that of metrics that are all taken."""


def answer(outcome: ExportResult) -> Any:
    """The response message that says this outcome."""
    response = ExportMetricsServiceResponse()
    if outcome.rejected or outcome.message:
        response.partial_success.rejected_data_points = outcome.rejected
        response.partial_success.error_message = outcome.message
    return response


def from_protobuf(body: bytes, limits: Limits) -> Any:
    """The ExportMetricsServiceRequest in `body`."""
    if holds_more_than(limits.max_items, body):
        raise limits.too_many()
    request = ExportMetricsServiceRequest()
    try:
        request.ParseFromString(body)
    except DecodeError as error:
        raise BadRequestError(f"{_NO_REQUEST} in protobuf: {error}") from None
    return _bounded(request, limits)


def from_json(body: bytes, limits: Limits) -> Any:
    """The ExportMetricsServiceRequest in `body`, OTLP/JSON; ids of spans in exemplars, which are hex, say nothing."""
    if body.count(b"{") > _OBJECTS_PER_POINT * limits.max_items:
        raise limits.too_many()  # before they are made: an empty object takes two bytes here and a hundred there
    request = ExportMetricsServiceRequest()
    try:
        tree = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadRequestError(f"the body is not JSON: {error}") from None
    if not isinstance(tree, dict):
        raise BadRequestError(f"{_NO_REQUEST}: it must be a JSON object")
    try:
        json_format.ParseDict(tree, request, ignore_unknown_fields=True)
    except SystemError:  # what protobuf's table of names raises of a key that is no text
        raise BadRequestError(f"{_NO_REQUEST} in OTLP/JSON: a key has an unpaired surrogate") from None
    except _PARSER_ERRORS as error:
        raise BadRequestError(f"{_NO_REQUEST} in OTLP/JSON: {str(error)[:_MAX_QUOTED_CHARACTERS]}") from None
    return _bounded(request, limits)


def item_counts(request: Any) -> Iterator[int]:
    """Yield the number of items in a request, group by group; a caller that adds them up may stop early."""
    yield len(request.resource_metrics)
    for resource in request.resource_metrics:
        yield len(resource.scope_metrics)
        for scope in resource.scope_metrics:
            yield len(scope.metrics)
            yield from (len(points_in(metric)) for metric in scope.metrics)


def points_in(metric: Any) -> Any:
    """The data points of a metric of any kind."""
    kind = metric.WhichOneof("data")
    return getattr(metric, kind).data_points if kind else ()


def _bounded(request: Any, limits: Limits) -> Any:
    found = 0
    for count in item_counts(request):
        found += count
        if found > limits.max_items:
            raise limits.too_many()
    return request


def to_json(message: Any) -> bytes:
    """A response or status message in OTLP/JSON; responses carry no ids."""
    return json_format.MessageToJson(message, indent=None).encode()


def holds_more_than(items: int, body: bytes) -> bool:  # noqa: C901 - a loop over the wire's types
    """Return whether a serialized message certainly holds more than some items and groups, or exceeds their size."""
    if len(body) <= 2 * items:
        return False
    left, outer = _MAX_PARTS_PER_ITEM * items, [(0, len(body), ExportMetricsServiceRequest.DESCRIPTOR)]
    while outer and len(outer) < _MAX_DEPTH:
        at, end, kind = outer.pop()
        fields = _fields(kind)
        try:
            while at < end:
                key, at = _varint(body, at)
                wire = key & 7
                if wire == _LENGTH_WIRE_TYPE:
                    length, at = _varint(body, at)
                    inner = fields.get(key >> 3)
                    if inner is not None:
                        left -= inner[1]
                        if left < 0:
                            return True
                        if length:
                            outer += [(at + length, end, kind), (at, min(at + length, end), inner[0])]
                            break
                    at += length
                elif wire in _FIXED_LENGTHS:
                    at += _FIXED_LENGTHS[wire]
                elif wire == 0:
                    _, at = _varint(body, at)
                else:
                    break
        except IndexError:
            continue
    return False


def _varint(body: bytes, at: int) -> tuple[int, int]:
    value = body[at]
    if value < 128:
        return value, at + 1
    value, shift = value & 127, 7
    while True:
        at += 1
        byte = body[at]
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at + 1
        shift += 7
        if shift > 63:
            raise IndexError(at)


@cache
def _fields(descriptor: Any) -> _Fields:
    return {
        field.number: (field.message_type, _MESSAGES_PER_ITEM if field.message_type.name in _ITEM_MESSAGES else 1)
        for field in descriptor.fields
        if field.message_type is not None
    }
