"""Reads what a client sends on a connection of HTTP/2, however its bytes are cut: the preface, and frame after frame.

Content goes to who takes it as it comes. Everything else is short, and is taken once it is there; header blocks are put
together from their parts. How much may be kept here for a connection is therefore bounded: by one header block.
"""

from __future__ import annotations

from typing import Final, Protocol

from kc_otel.serve.receivers.http2_frames import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PADDED,
    PREFACE,
    SETTINGS,
    ConnectionFaultError,
    ErrorCode,
    header_fragment,
    read_head,
)
from kc_otel.serve.receivers.http2_headers import MOST_OF_BLOCK
from kc_otel.serve.receivers.http2_stream import Stream

__all__ = ["LONGEST_FRAME", "FrameReader", "Frames", "OtherProtocolError"]

LONGEST_FRAME: Final = 1024 * 1024
_LONGEST_SETTINGS: Final = 64 * 6
_MOST_PARTS: Final = 16
"""Of a header block."""
_DIRECTLY: Final = 64 * 1024
"""Bytes of content that are worth to be read by themselves."""
_FRAME: Final = 9


class OtherProtocolError(Exception):
    """The first bytes are those of HTTP/1.1."""


class Frames(Protocol):
    """Takes what frames say."""

    def greeted(self) -> None:
        """The client speaks HTTP/2."""

    def content(self, number: int, length: int, padding: int, *, ends: bool) -> Stream | None:
        """A frame of content begins, so much of it padding. Whoever takes it; None where nobody does."""

    def ended(self, stream: Stream) -> None:
        """The content of a stream is at its end."""

    def headers(self, number: int, block: bytes, *, ends: bool) -> None:
        """A header block is there."""

    def ignored(self, kind: int, number: int) -> None:
        """A frame begins whose payload nobody looks at."""

    def control(self, kind: int, flags: int, number: int, payload: memoryview) -> None:
        """Any other frame is there."""


class FrameReader:
    """Reads one connection.

    Args:
        frames: Takes what is read; what it raises ends the reading.

    Attributes:
        count: Frames that have begun.
        stopped: Whether nothing more is read.
    """

    def __init__(self, frames: Frames) -> None:
        self._frames = frames
        self.count = 0
        self.stopped = False
        self._greeted = self._set = False
        self._rest = b""
        # What is being read: content of a stream, then what is skipped; then the stream may be at its end.
        self._content = self._skipped = 0
        self._into: Stream | None = None
        self._ending: Stream | None = None
        self._block: bytearray | None = None
        self._block_of = self._parts = 0
        self._block_ends = False

    @property
    def in_content(self) -> bool:
        """Whether it is amid a frame of content, or of nothing."""
        return bool(self._content or self._skipped)

    @property
    def incomplete(self) -> bool:
        """Whether something has begun that is not there yet."""
        return bool(self._content or self._skipped or self._rest) or self._block is not None

    def room(self) -> memoryview | None:
        """Where the next bytes may be written, if they are much content; `filled` says how many were."""
        if self._content < _DIRECTLY or self._into is None or not self._into.open or self._into.request is None:
            return None
        return self._into.request.room(self._content)

    def filled(self, count: int) -> None:
        """Bytes have come into the room."""
        self._content -= count
        if self._into is not None and self._into.request is not None:
            self._into.request.filled(count)
        if not self._content:
            self.take(memoryview(b""))

    def take(self, data: memoryview) -> None:
        """Take bytes that have come.

        Raises:
            ConnectionFaultError: If the client does something for which the connection ends.
            OtherProtocolError: If it speaks HTTP/1.1.
        """
        if self._rest:
            data, self._rest = memoryview(self._rest + data), b""
        at = 0 if self._greeted else self._greet(data)
        while self._greeted and not self.stopped:
            at = self._pass(data, at)
            if self._content or self._skipped:
                return
            if self._ending is not None:
                ending, self._ending = self._ending, None
                self._frames.ended(ending)
            taken = self._frame(data, at) if len(data) - at >= _FRAME else 0
            if not taken:
                self._rest = data[at:].tobytes()
                return
            at += taken
            self.count += 1

    def _greet(self, data: memoryview) -> int:
        begun = data[: len(PREFACE)].tobytes()
        if begun == PREFACE:
            self._greeted = True
            self._frames.greeted()
            return len(PREFACE)
        if PREFACE.startswith(begun):
            self._rest = begun
            return 0
        if begun[:1].isalpha():
            raise OtherProtocolError
        raise ConnectionFaultError(ErrorCode.PROTOCOL_ERROR, "this port speaks HTTP/2 only")

    def _pass(self, data: memoryview, at: int) -> int:
        """Pass on what there is of content, and pass over what is skipped."""
        if self._content:
            step = min(self._content, len(data) - at)
            self._content -= step
            if step and self._into is not None and self._into.open and self._into.request is not None:
                self._into.request.take(data[at : at + step])
            at += step
        if self._skipped and not self._content:
            step = min(self._skipped, len(data) - at)
            self._skipped -= step
            at += step
        return at

    def _frame(self, data: memoryview, at: int) -> int:
        """Take the next frame, or what has to be there of it; how many bytes that were, 0 if they are not there."""
        length, kind, flags, number = read_head(data, at)
        if length > LONGEST_FRAME:
            raise ConnectionFaultError(ErrorCode.FRAME_SIZE_ERROR, f"frames are at most {LONGEST_FRAME} bytes")
        if self._block is not None and (kind != CONTINUATION or number != self._block_of):
            raise ConnectionFaultError(ErrorCode.PROTOCOL_ERROR, "nothing comes between the parts of headers")
        if not self._set and (kind != SETTINGS or flags & ACK):
            raise ConnectionFaultError(ErrorCode.PROTOCOL_ERROR, "settings come first")
        at += _FRAME
        if kind == DATA:
            return self._begin_content(number, length, flags, data[at : at + 1])
        if kind == GOAWAY or kind > CONTINUATION:
            self._frames.ignored(kind, number)
            self._skipped = length
            return _FRAME
        if length > (_LONGEST_SETTINGS if kind == SETTINGS else MOST_OF_BLOCK):
            raise ConnectionFaultError(ErrorCode.ENHANCE_YOUR_CALM, "headers and settings are shorter than that")
        if len(data) - at < length:
            return 0
        self._set = True
        payload = data[at : at + length]
        if kind == HEADERS:
            self._begin_block(number, flags, payload)
        elif kind == CONTINUATION:
            self._continue_block(flags, payload)
        else:
            self._frames.control(kind, flags, number, payload)
        return _FRAME + length

    def _begin_content(self, number: int, length: int, flags: int, first: memoryview) -> int:
        padding = 0
        if flags & PADDED:
            if length and not len(first):
                return 0
            if not length or first[0] >= length:
                raise ConnectionFaultError(ErrorCode.PROTOCOL_ERROR, "the padding is longer than the frame")
            padding = 1 + first[0]
        self._into = self._frames.content(number, length, padding, ends=bool(flags & END_STREAM))
        self._content, self._skipped = length - padding, max(padding - 1, 0)
        if flags & END_STREAM:
            self._ending = self._into
        return _FRAME + bool(padding)

    def _begin_block(self, number: int, flags: int, payload: memoryview) -> None:
        if not number & 1:
            raise ConnectionFaultError(ErrorCode.PROTOCOL_ERROR, "clients' streams have odd numbers")
        fragment, ends = header_fragment(flags, payload), bool(flags & END_STREAM)
        if flags & END_HEADERS:
            self._frames.headers(number, fragment.tobytes(), ends=ends)
        else:
            self._block, self._block_of, self._block_ends, self._parts = bytearray(fragment), number, ends, 1

    def _continue_block(self, flags: int, payload: memoryview) -> None:
        if self._block is None:
            raise ConnectionFaultError(ErrorCode.PROTOCOL_ERROR, "no headers are continued")
        self._block += payload
        self._parts += 1
        if self._parts > _MOST_PARTS or len(self._block) > MOST_OF_BLOCK:
            raise ConnectionFaultError(ErrorCode.ENHANCE_YOUR_CALM, f"headers are at most {MOST_OF_BLOCK} bytes")
        if flags & END_HEADERS:
            block, self._block = bytes(self._block), None
            self._frames.headers(self._block_of, block, ends=self._block_ends)
