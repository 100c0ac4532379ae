"""Frames of HTTP/2, as a server reads and writes them: RFC 9113, sections 4 to 7. Bytes in, bytes out.

What a client does wrong is an error of its connection, which ends with it, or of one of its streams, which is reset.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Final

__all__ = [
    "ACK",
    "CONTINUATION",
    "DATA",
    "DEFAULT_WINDOW",
    "END_HEADERS",
    "END_STREAM",
    "GOAWAY",
    "HEADERS",
    "LARGEST_WINDOW",
    "PADDED",
    "PING",
    "PREFACE",
    "PRIORITY",
    "PRIORITY_GIVEN",
    "PUSH_PROMISE",
    "RST_STREAM",
    "SETTINGS",
    "WINDOW_UPDATE",
    "ConnectionFaultError",
    "ErrorCode",
    "Setting",
    "StreamFaultError",
    "data_frames",
    "frame",
    "goaway",
    "header_fragment",
    "number_of",
    "read_head",
    "read_settings",
    "rst_stream",
    "settings",
    "window_update",
]

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

DATA: Final = 0
HEADERS: Final = 1
PRIORITY: Final = 2
RST_STREAM: Final = 3
SETTINGS: Final = 4
PUSH_PROMISE: Final = 5
PING: Final = 6
GOAWAY: Final = 7
WINDOW_UPDATE: Final = 8
CONTINUATION: Final = 9

ACK: Final = 1
END_STREAM: Final = 1
END_HEADERS: Final = 4
PADDED: Final = 8
PRIORITY_GIVEN: Final = 0x20

DEFAULT_WINDOW: Final = 65_535
LARGEST_WINDOW: Final = 2**31 - 1
_HEAD: Final = struct.Struct(">BHBBL")
_NUMBER: Final = struct.Struct(">L")
_SETTING: Final = struct.Struct(">HL")
_SMALLEST_MAXIMUM: Final = 16_384
_LARGEST_MAXIMUM: Final = 2**24 - 1


class ErrorCode(IntEnum):
    """Why a stream or a connection ends: RFC 9113, section 7."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    ENHANCE_YOUR_CALM = 11


class Setting(IntEnum):
    """What is said of how one wants to be spoken to: RFC 9113, section 6.5.2; the last by RFC 9218."""

    HEADER_TABLE_SIZE = 1
    ENABLE_PUSH = 2
    MAX_CONCURRENT_STREAMS = 3
    INITIAL_WINDOW_SIZE = 4
    MAX_FRAME_SIZE = 5
    MAX_HEADER_LIST_SIZE = 6
    NO_RFC7540_PRIORITIES = 9


class ConnectionFaultError(Exception):
    """What ends the connection."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code


class StreamFaultError(Exception):
    """What ends one stream."""

    def __init__(self, code: ErrorCode) -> None:
        super().__init__(code.name)
        self.code = code


def read_head(data: memoryview, at: int) -> tuple[int, int, int, int]:
    """Length of the payload, type, flags and stream of the frame that begins there; nine bytes are there."""
    high, low, kind, flags, number = _HEAD.unpack_from(data, at)
    return high << 16 | low, kind, flags, number & LARGEST_WINDOW


def frame(kind: int, flags: int, number: int, payload: bytes = b"") -> bytes:
    """A frame of a stream, or of the connection where the number is 0."""
    size = len(payload)
    return _HEAD.pack(size >> 16, size & 0xFFFF, kind, flags, number) + payload


def data_frames(number: int, content: bytes) -> bytes:
    """Content in frames of a size that every client takes."""
    cuts = range(0, len(content), _SMALLEST_MAXIMUM)
    return b"".join(frame(DATA, 0, number, content[at : at + _SMALLEST_MAXIMUM]) for at in cuts)


def settings(said: dict[Setting, int]) -> bytes:
    """A frame of settings."""
    return frame(SETTINGS, 0, 0, b"".join(_SETTING.pack(name, value) for name, value in said.items()))


def window_update(number: int, more: int) -> bytes:
    """So many more bytes may be sent."""
    return frame(WINDOW_UPDATE, 0, number, _NUMBER.pack(more))


def rst_stream(number: int, code: ErrorCode) -> bytes:
    """The stream ends."""
    return frame(RST_STREAM, 0, number, _NUMBER.pack(code))


def goaway(last: int, code: ErrorCode, why: str = "") -> bytes:
    """No stream after the last one is taken."""
    return frame(GOAWAY, 0, 0, _NUMBER.pack(last) + _NUMBER.pack(code) + why.encode())


def number_of(payload: memoryview) -> int:
    """The increment of a window, or the code of a reset.

    Raises:
        ConnectionFaultError: If it is not four bytes.
    """
    if len(payload) != _NUMBER.size:
        raise ConnectionFaultError(ErrorCode.FRAME_SIZE_ERROR, "this frame has a payload of four bytes")
    found: int = _NUMBER.unpack(payload)[0]
    return found


def read_settings(payload: memoryview) -> dict[int, int]:
    """What a client says of itself, in the order in which it says it; the last word counts.

    Raises:
        ConnectionFaultError: If a value is none that there may be.
    """
    if len(payload) % _SETTING.size:
        raise ConnectionFaultError(ErrorCode.FRAME_SIZE_ERROR, "settings are six bytes each")
    said = dict(_SETTING.iter_unpack(payload))
    if said.get(Setting.ENABLE_PUSH, 0) > 1:
        raise ConnectionFaultError(ErrorCode.PROTOCOL_ERROR, "ENABLE_PUSH is 0 or 1")
    if said.get(Setting.INITIAL_WINDOW_SIZE, 0) > LARGEST_WINDOW:
        raise ConnectionFaultError(ErrorCode.FLOW_CONTROL_ERROR, "INITIAL_WINDOW_SIZE is more than a window may be")
    if not _SMALLEST_MAXIMUM <= said.get(Setting.MAX_FRAME_SIZE, _SMALLEST_MAXIMUM) <= _LARGEST_MAXIMUM:
        raise ConnectionFaultError(ErrorCode.PROTOCOL_ERROR, "MAX_FRAME_SIZE is 16,384 to 16,777,215")
    return said


def header_fragment(flags: int, payload: memoryview) -> memoryview:
    """What a HEADERS frame holds of a header block: without its padding, and without priorities, which are obsolete.

    Raises:
        ConnectionFaultError: If it is shorter than it says.
    """
    start, end = 0, len(payload)
    if flags & PADDED:
        if not payload:
            raise ConnectionFaultError(ErrorCode.FRAME_SIZE_ERROR, "a padded frame begins with the padding's length")
        start, end = 1, end - payload[0]
    if flags & PRIORITY_GIVEN:
        start += 5
    if start > end:
        raise ConnectionFaultError(ErrorCode.PROTOCOL_ERROR, "the padding is longer than the frame")
    return payload[start:end]
