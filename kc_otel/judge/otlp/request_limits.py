"""Limits on the size of one request, before and after decompression.

OTLP 1.11 obliges a server to bound both. Inflating stops at the limit, so a small body that would inflate to
gigabytes costs the limit and no more.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Final

from kc_otel.judge.otlp.request_errors import BadRequestError, TooLargeError, UnsupportedMediaError

_GZIP: Final = 16 + zlib.MAX_WBITS
_ZLIB: Final = zlib.MAX_WBITS


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the receivers.

    Attributes:
        max_bytes: Largest request in bytes, as received and again after decompression. The default holds about
            350 messages of a recorder with twenty slices.
        max_items: Data points, spans or log records of one request, with what they are grouped by. Sixteen kilobytes
            of gzip hold eight million empty ones, which would take every port's time for a minute.
        retry_after: Seconds that a throttled sender is asked to wait.
        read_timeout: Seconds within which a request has to arrive once it has begun; exporters give up after ten.
    """

    max_bytes: int = 16 * 1024 * 1024
    max_items: int = 60_000
    retry_after: float = 1.0
    read_timeout: float = 10.0

    def __post_init__(self) -> None:
        for name in ("max_bytes", "max_items", "retry_after", "read_timeout"):
            if not getattr(self, name) > 0:
                msg = f"{name}: {getattr(self, name)} must be more than 0"
                raise ValueError(msg)

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
    if encoding == "gzip":
        return _inflate(body, _GZIP, encoding, limits)
    if encoding == "deflate":
        return _inflate(body, _ZLIB, encoding, limits)
    raise UnsupportedMediaError(f"content encoding {encoding[:40]!r} is not known here; use gzip, deflate or none")


def _inflate(body: bytes, window: int, encoding: str, limits: Limits) -> bytes:
    parts: list[bytes] = []
    room = limits.max_bytes
    try:
        while body:  # a gzip body may consist of several members
            stream = zlib.decompressobj(window)
            part = stream.decompress(body, room + 1)
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
