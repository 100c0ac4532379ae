"""Header blocks of HTTP/2: read by hpack (RFC 7541), within bounds, and written so that nothing has to be remembered.

A request that is not well formed (RFC 9113, section 8) is refused: what a proxy would understand otherwise is not
guessed at.
"""

from __future__ import annotations

import logging
import re
from typing import Final

import hpack

from kc_otel.serve.receivers.http2_frames import ConnectionFaultError, ErrorCode

__all__ = ["MOST_OF_BLOCK", "MOST_OF_LIST", "HeaderReader", "MalformedError", "check_trailers", "length_of",
           "literal", "request_of", "status"]  # fmt: skip

MOST_OF_BLOCK: Final = 16 * 1024
"""Bytes of a header block, as it is sent."""
MOST_OF_LIST: Final = 16 * 1024
"""Bytes of what a header block says, with 32 for each header."""
_MOST_KEPT: Final = 8
_LONGEST_KEPT: Final = 32
"""Headers of a block that is remembered; each is a byte of it, and a hundred here."""
_NAME: Final = re.compile(rb"[!#$%&'*+.^_`|~0-9a-z-]+")
_VALUE: Final = re.compile(rb"(?:[^\x00\t\r\n ](?:[^\x00\r\n]*[^\x00\t\r\n ])?)?")
_LENGTH: Final = re.compile(rb"[0-9]{1,15}")
_PSEUDO: Final = frozenset({b":method", b":scheme", b":path", b":authority"})
_NEEDED: Final = frozenset({b":method", b":scheme", b":path"})
_OF_HTTP_1: Final = frozenset({b"connection", b"proxy-connection", b"keep-alive", b"transfer-encoding", b"upgrade"})
_INDEXED: Final = re.compile(rb"[\x81-\xfe]+")
"""A block whose headers are all in the tables already, which it leaves as they are."""
_STATUS_OK: Final = b"\x88"
_STATUS: Final = b"\x08"

Headers = list[tuple[bytes, bytes]]

logging.getLogger("hpack").setLevel(logging.INFO)  # its DEBUG writes every header, tokens among them


class MalformedError(Exception):
    """Headers that no request may have."""


class HeaderReader:
    """Reads the header blocks of one connection, each of which may refer to those before."""

    def __init__(self) -> None:
        self._decoder = hpack.Decoder(max_header_list_size=MOST_OF_LIST)
        self._known: dict[bytes, Headers] = {}

    def read(self, block: bytes) -> Headers:
        """Names and values.

        Raises:
            ConnectionFaultError: If it cannot be read, or is too long: what later blocks refer to would not be known.
        """
        found = self._known.get(block)
        if found is not None:
            return found
        try:
            headers = [(bytes(name), bytes(value)) for name, value in self._decoder.decode(block, raw=True)]
        except hpack.OversizedHeaderListError:
            said = f"the headers are more than {MOST_OF_LIST} bytes"
            raise ConnectionFaultError(ErrorCode.ENHANCE_YOUR_CALM, said) from None
        except Exception:  # noqa: BLE001 - whatever a block makes of the decoder, it is its sender's
            raise ConnectionFaultError(ErrorCode.COMPRESSION_ERROR, "the headers cannot be read") from None
        if not _INDEXED.fullmatch(block):
            self._known.clear()  # the table may be another now
        elif len(block) <= _LONGEST_KEPT and len(self._known) < _MOST_KEPT:
            self._known[block] = headers
        return headers


def request_of(headers: Headers) -> dict[bytes, bytes]:
    """The headers of a request by their names; values of one name as one, as RFC 9110 has it.

    Raises:
        MalformedError: If no request may have them.
    """
    found: dict[bytes, bytes] = {}
    regular = False
    for name, value in headers:
        if name[:1] == b":":
            if regular or name in found or name not in _PSEUDO:
                raise MalformedError("pseudo-headers come first, once each")
        else:
            regular = True
            if not _NAME.fullmatch(name) or name in _OF_HTTP_1 or (name == b"te" and value != b"trailers"):
                raise MalformedError("a header's name is none of HTTP/2")
        if not _VALUE.fullmatch(value):
            raise MalformedError("a header's value has characters that it may not have")
        found[name] = found[name] + b", " + value if name in found else value
    if not found.keys() >= _NEEDED or not found[b":path"]:
        raise MalformedError("a request has :method, :scheme and :path")
    return found


def length_of(request: dict[bytes, bytes]) -> int | None:
    """Bytes that a request says it has; None if it does not say.

    Raises:
        MalformedError: If it says something else.
    """
    said = request.get(b"content-length")
    if said is None:
        return None
    if not _LENGTH.fullmatch(said):
        raise MalformedError("content-length is no number")
    return int(said)


def check_trailers(headers: Headers) -> None:
    """See that these may stand at a request's end.

    Raises:
        MalformedError: If they may not.
    """
    for name, value in headers:
        if not _NAME.fullmatch(name) or not _VALUE.fullmatch(value):
            raise MalformedError("no trailers are like this")


def literal(name: bytes, value: bytes) -> bytes:
    """A header that nobody is to remember: RFC 7541, section 6.2.2."""
    return b"\x00" + _length(len(name)) + name + _length(len(value)) + value


def status(code: int) -> bytes:
    """The header that every answer begins with."""
    return _STATUS_OK if code == 200 else _STATUS + _length(3) + str(code).encode()


def _length(size: int) -> bytes:
    """An integer with a prefix of seven bits: RFC 7541, section 5.1."""
    if size < 127:
        return bytes([size])
    said, left = [127], size - 127
    while left > 127:
        said.append(left & 127 | 128)
        left >>= 7
    return bytes([*said, left])
