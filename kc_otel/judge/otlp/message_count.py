"""How many messages a request in protobuf is made of, before it is parsed.

An empty message takes two bytes on the wire and a hundred in memory, so that a request within its limit of bytes could
take a gigabyte, and seconds. This walks along the wire, by the fields that the schema has, and stops where it is too
much. What it cannot make sense of it passes over: the parser says what is wrong.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

__all__ = ["holds_more_than"]

_ITEMS: Final = frozenset(
    {"ResourceMetrics", "ScopeMetrics", "Metric", "ResourceSpans", "ScopeSpans", "Span", "ResourceLogs", "ScopeLogs"}
    | {"NumberDataPoint", "HistogramDataPoint", "ExponentialHistogramDataPoint", "SummaryDataPoint", "LogRecord"}
)
_WEIGHT: Final = 20
"""Messages that an item counts for: it has some of its own."""
_MOST: Final = 50
"""The same that an item may be made of in the mean: attributes are two each."""

_DEEPEST: Final = 256
"""More than a parser follows; what is nested deeper is refused by it."""
_LENGTH: Final = 2
_FIXED: Final = {1: 8, 5: 4}
"""Bytes of the wire types that have always as many."""

_Fields = dict[int, tuple[Any, int]]


def holds_more_than(items: int, body: bytes, descriptor: Any) -> bool:  # noqa: C901 - a loop over the wire's types
    """Whether a serialized message is certainly more than so many items, or than they can be made of.

    Args:
        items: Data points, spans or log records, with what they are grouped by.
        body: The message.
        descriptor: Of its type.
    """
    if len(body) <= 2 * items:
        return False
    left, outer = _MOST * items, [(0, len(body), descriptor)]
    while outer and len(outer) < _DEEPEST:
        at, end, kind = outer.pop()
        fields = _fields(kind)
        try:
            while at < end:
                key, at = _varint(body, at)
                wire = key & 7
                if wire == _LENGTH:
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
                elif wire in _FIXED:
                    at += _FIXED[wire]
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
        field.number: (field.message_type, _WEIGHT if field.message_type.name in _ITEMS else 1)
        for field in descriptor.fields
        if field.message_type is not None
    }
