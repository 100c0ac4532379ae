"""Decode a request's bytes, in either of OTLP's two encodings.

OTLP/JSON is protobuf's JSON mapping with two exceptions of its own: trace and span ids are hex where protobuf says
base64, and enum values are integers only. Ids are therefore rewritten before protobuf's parser sees them. Fields that
nobody knows yet are ignored in both encodings, as the specification asks. Bytes that are no such message raise a
BadRequestError, those that hold too many things a TooLargeError.
"""

from __future__ import annotations

import base64
import binascii
import json
from functools import cache
from typing import Any, Final

from google.protobuf import json_format
from google.protobuf.message import DecodeError

from kc_otel.judge.otlp.request_errors import BadRequestError
from kc_otel.judge.otlp.request_limits import Limits
from kc_otel.judge.otlp.signals import METRICS, Signal
from kc_otel.judge.otlp.sink import ColumnSink

_ID_FIELDS: Final = frozenset({"traceId", "spanId", "parentSpanId", "trace_id", "span_id", "parent_span_id"})
_OBJECTS_PER_POINT: Final = 20
"""JSON objects that one data point with eight attributes is made of, and a few more."""
_MAX_QUOTED_CHARACTERS: Final = 400
"""Characters of the parser's own words that are passed on; it quotes values of any length."""
_PARSER_ERRORS: Final = (
    json_format.ParseError,
    ValueError,
    TypeError,
    KeyError,
    AttributeError,
    OverflowError,
    RecursionError,
)
"""Exceptions that protobuf's JSON parser raises on unforeseen input; only the first is documented."""
_ITEM_MESSAGES: Final = frozenset(
    {"ResourceMetrics", "ScopeMetrics", "Metric", "ResourceSpans", "ScopeSpans", "Span", "ResourceLogs", "ScopeLogs"}
    | {"NumberDataPoint", "HistogramDataPoint", "ExponentialHistogramDataPoint", "SummaryDataPoint", "LogRecord"}
)
_MESSAGES_PER_ITEM: Final = 20
"""Messages that an item counts for: it has some of its own."""
_MAX_PARTS_PER_ITEM: Final = 50
"""The same that an item may be made of in the mean: attributes are two each."""
_MAX_DEPTH: Final = 256
"""More than a parser follows: it rejects deeper nesting itself."""
_LENGTH_WIRE_TYPE: Final = 2
_FIXED_LENGTHS: Final = {1: 8, 5: 4}
"""Bytes of the wire types that have always as many."""
_Fields = dict[int, tuple[Any, int]]


def from_protobuf(body: bytes, signal: Signal, limits: Limits) -> Any:
    """The request message in `body`."""
    if holds_more_than(limits.max_items, body, signal.request.DESCRIPTOR):
        raise limits.too_many()
    request = signal.request()
    try:
        request.ParseFromString(body)
    except DecodeError as error:
        raise BadRequestError(f"the body is not an {request.DESCRIPTOR.name} in protobuf: {error}") from None
    return _bounded(request, signal, limits)


def quickly(sink: object, body: bytes, signal: Signal, limits: Limits) -> Any:
    """The request message in `body`, in the form that the sink reads by itself where it can, else as protobuf."""
    columns = sink.columns(body, limits) if signal is METRICS and isinstance(sink, ColumnSink) else None
    return from_protobuf(body, signal, limits) if columns is None else columns


def from_json(body: bytes, signal: Signal, limits: Limits) -> Any:
    """The request message in `body`, OTLP/JSON."""
    if body.count(b"{") > _OBJECTS_PER_POINT * limits.max_items:
        raise limits.too_many()  # before they are made: an empty object takes two bytes here and a hundred there
    request = signal.request()
    try:
        tree = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadRequestError(f"the body is not JSON: {error}") from None
    if not isinstance(tree, dict):
        raise BadRequestError(f"the body is not an {request.DESCRIPTOR.name}: it must be a JSON object")
    _ids_to_base64(tree)
    try:
        json_format.ParseDict(tree, request, ignore_unknown_fields=True)
    except SystemError:  # what protobuf's table of names raises of a key that is no text
        raise BadRequestError(
            f"the body is not an {request.DESCRIPTOR.name} in OTLP/JSON: a key has an unpaired surrogate"
        ) from None
    except _PARSER_ERRORS as error:
        raise BadRequestError(
            f"the body is not an {request.DESCRIPTOR.name} in OTLP/JSON: {str(error)[:_MAX_QUOTED_CHARACTERS]}"
        ) from None
    return _bounded(request, signal, limits)


def _bounded(request: Any, signal: Signal, limits: Limits) -> Any:
    found = 0
    for count in signal.items(request):
        found += count
        if found > limits.max_items:
            raise limits.too_many()
    return request


def to_json(message: Any) -> bytes:
    """A response or status message in OTLP/JSON; responses carry no ids."""
    return json_format.MessageToJson(message, indent=None).encode()


def _ids_to_base64(tree: Any) -> None:
    # A walk without recursion: how deep a request nests is the sender's choice.
    pending = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, list):
            pending.extend(item for item in node if isinstance(item, dict | list))
            continue
        for key, value in node.items():
            if isinstance(value, dict | list):
                pending.append(value)
            elif key in _ID_FIELDS and isinstance(value, str):
                try:
                    node[key] = base64.b64encode(binascii.unhexlify(value)).decode()
                except ValueError:
                    raise BadRequestError(f"{key}: {value[:40]!r} is not hex; OTLP/JSON writes ids in hex") from None


def holds_more_than(items: int, body: bytes, descriptor: Any) -> bool:  # noqa: C901 - a loop over the wire's types
    """Return whether a serialized message certainly holds more than some items and groups, or exceeds their size."""
    if len(body) <= 2 * items:
        return False
    left, outer = _MAX_PARTS_PER_ITEM * items, [(0, len(body), descriptor)]
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
