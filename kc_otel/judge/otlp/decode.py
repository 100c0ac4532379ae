"""From a request's bytes to its message, in either of OTLP's two encodings.

OTLP/JSON is protobuf's JSON mapping with two exceptions of its own: trace and span ids are hex where protobuf says
base64, and enum values are integers only. Ids are therefore rewritten before protobuf's parser sees them. Fields that
nobody knows yet are ignored in both encodings, as the specification asks.
"""

from __future__ import annotations

import base64
import binascii
import json
from typing import Any, Final

from google.protobuf import json_format
from google.protobuf.message import DecodeError

from kc_otel.judge.otlp.message_count import holds_more_than
from kc_otel.judge.otlp.request_errors import BadRequestError
from kc_otel.judge.otlp.request_limits import Limits
from kc_otel.judge.otlp.signals import METRICS, Signal
from kc_otel.judge.otlp.sink import ColumnSink

__all__ = ["from_json", "from_protobuf", "quickly", "to_json"]

_IDS: Final = frozenset({"traceId", "spanId", "parentSpanId", "trace_id", "span_id", "parent_span_id"})
_OBJECTS: Final = 20
"""JSON objects that one data point with eight attributes is made of, and a few more."""
_QUOTED: Final = 400
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
"""What protobuf's JSON parser raises on input it did not foresee; it documents only the first."""


def from_protobuf(body: bytes, signal: Signal, limits: Limits) -> Any:
    """The request message in `body`.

    Raises:
        BadRequestError: If `body` is not such a message.
        TooLargeError: If it holds too many things.
    """
    if holds_more_than(limits.max_items, body, signal.request.DESCRIPTOR):
        raise limits.too_many()
    request = signal.request()
    try:
        request.ParseFromString(body)
    except DecodeError as error:
        raise BadRequestError(f"the body is not an {request.DESCRIPTOR.name} in protobuf: {error}") from None
    return _bounded(request, signal, limits)


def quickly(sink: object, body: bytes, signal: Signal, limits: Limits) -> Any:
    """The request message in `body`, in the form that the sink reads by itself where it can, else as protobuf.

    Raises:
        BadRequestError: If `body` is not such a message.
        TooLargeError: If it holds too many things.
    """
    columns = sink.columns(body, limits) if signal is METRICS and isinstance(sink, ColumnSink) else None
    return from_protobuf(body, signal, limits) if columns is None else columns


def from_json(body: bytes, signal: Signal, limits: Limits) -> Any:
    """The request message in `body`, OTLP/JSON.

    Raises:
        BadRequestError: If `body` is not JSON, or not such a message.
        TooLargeError: If it holds too many things.
    """
    if body.count(b"{") > _OBJECTS * limits.max_items:
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
            f"the body is not an {request.DESCRIPTOR.name} in OTLP/JSON: {str(error)[:_QUOTED]}"
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
            elif key in _IDS and isinstance(value, str):
                try:
                    node[key] = base64.b64encode(binascii.unhexlify(value)).decode()
                except ValueError:
                    raise BadRequestError(f"{key}: {value[:40]!r} is not hex; OTLP/JSON writes ids in hex") from None
