"""Assignment of senders to shards: all series of a resource, of every contract, have one owner.

A resource is one process that sends; an export is split where it is of several, and its metrics are not looked at. Jump
consistent hashing moves a sender only to a shard that is added, or from one that goes.
Source: Lamping and Veach, A Fast, Minimal Memory, Consistent Hash Algorithm, 2014 (arXiv:1406.2294).
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b
from typing import Final

from google.protobuf.message import DecodeError
from opentelemetry.proto.resource.v1.resource_pb2 import Resource

from kc_otel.judge.otlp.requests import BadRequestError

_FIRST_FIELD: Final = 0x0A
"""Field 1, which says its length: of a request its resources with their metrics, of those the resource."""
_MAX_KNOWN_RESOURCES: Final = 65_536
"""Resources whose key is remembered."""


class SenderRouting:
    """Splits exports by who sent them. Spellings of resources are remembered, as long as there are not too many."""

    def __init__(self) -> None:
        self._keys: dict[bytes, int] = {}

    def split(self, body: bytes, shards: int) -> dict[int, bytes]:
        """Parts of a serialized ExportMetricsServiceRequest by the shard that owns them; together they are all."""
        if shards == 1:
            return {0: body}
        parts: dict[int, list[bytes]] = {}
        for tag, begin, at, end in _fields(body, 0, len(body)):
            if tag == _FIRST_FIELD:
                resource = b"".join(
                    body[first:last] for inner, _, first, last in _fields(body, at, end) if inner == _FIRST_FIELD
                )
                parts.setdefault(owner(self._key(resource), shards), []).append(body[begin:end])
        return {shard: b"".join(some) for shard, some in parts.items()}

    def _key(self, resource: bytes) -> int:
        key = self._keys.get(resource)
        if key is None:
            try:
                attributes = Resource.FromString(resource).attributes
            except DecodeError as error:
                raise BadRequestError(f"the body is not an ExportMetricsServiceRequest in protobuf: {error}") from None
            # As streams are told apart: a set of attributes.
            parts = sorted(pair.SerializeToString() for pair in attributes)
            key = int.from_bytes(blake2b(b"\0".join(parts), digest_size=8).digest(), "little")
            if len(self._keys) >= _MAX_KNOWN_RESOURCES:
                self._keys.clear()
            self._keys[resource] = key
        return key


def owner(key: int, shards: int) -> int:
    """Number of the shard that owns a key of 64 bits, by jump consistent hashing."""
    chosen, jump = -1, 0
    while jump < shards:
        chosen = jump
        key = (key * 2862933555777941757 + 1) & (2**64 - 1)
        jump = int((chosen + 1) * (2**31 / ((key >> 33) + 1)))
    return chosen


def _fields(body: bytes, at: int, until: int) -> Iterator[tuple[int, int, int, int]]:
    """Tag, beginning, beginning of the content, and end of the fields of a message; numbers are passed over."""
    while at < until:
        begin = at
        tag, at = _varint(body, at, until)
        match tag & 7:
            case 0:
                _, at = _varint(body, at, until)
            case 1:
                at += 8
            case 5:
                at += 4
            case 2:
                length, at = _varint(body, at, until)
                if at + length <= until:
                    yield tag, begin, at, at + length
                at += length
            case _:
                at = until + 1
        if at > until:
            raise _malformed()


def _varint(body: bytes, at: int, until: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 64, 7):
        if at >= until:
            break
        byte = body[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise _malformed()


def _malformed() -> BadRequestError:
    return BadRequestError("the body is not an ExportMetricsServiceRequest in protobuf: it ends within a field")
