"""The streams of one connection of HTTP/2: requests begin, their content is counted, and answers go out as they may.

RFC 9113, sections 5, 6.9 and 8. What a client may have here is bounded: streams at a time, bytes of each that it sends
unasked, answers that it does not take.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Final, Protocol

from kc_otel.serve.receivers.http2_frames import (
    DEFAULT_WINDOW,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    LARGEST_WINDOW,
    ConnectionFaultError,
    ErrorCode,
    StreamFaultError,
    data_frames,
    frame,
    rst_stream,
    window_update,
)
from kc_otel.serve.receivers.http2_headers import HeaderReader, MalformedError, check_trailers, length_of, request_of
from kc_otel.serve.receivers.http2_patience import RESET, Patience
from kc_otel.serve.receivers.http2_stream import Request, Stream

__all__ = ["STREAMS", "UNASKED", "WINDOW", "Accept", "Streams"]

STREAMS: Final = 100
"""Streams at a time."""
UNASKED: Final = 256 * 1024
"""Bytes of a request that a client may send before anybody asks for them."""
WINDOW: Final = 16 * 1024 * 1024
"""Bytes of all streams of a connection that may be on their way; what is read of them is given back at once."""
_GIVE_BACK: Final = 4 * 1024 * 1024
_SMALL: Final = 256
"""Bytes of content that are not worth a frame, but at a request's end."""
_USUAL_HEADERS: Final = 256
"""Bytes of a header block that cost no patience."""
_MORE_HEADERS: Final = 64
"""Those beyond that cost as much as anything that brings nothing: reading them takes as long."""
_STALLED: Final = 16
"""Answers of a connection that may wait for its client."""
_REMEMBERED: Final = 256
"""Streams that were reset here, whose client may not know yet."""

Accept = Callable[[Stream, dict[bytes, bytes]], Request | None]


class Sends(Hashable, Protocol):
    """A connection, as its streams see it."""

    def write(self, data: bytes) -> None:
        """Send frames."""

    def fail(self, error: ConnectionFaultError) -> None:
        """End it for what the client does."""

    def emptied(self) -> None:
        """No stream is left."""


class Streams:
    """Those of one connection.

    Args:
        accept: Takes a request that begins on a stream, with its headers; None if it has answered.
        connection: Sends what is answered.
        patience: With the client.
        clock: Seconds.

    Attributes:
        peer: Who the client is.
        last: The newest stream's number.
        last_taken: The number after which none is taken any more.
    """

    def __init__(self, accept: Accept, connection: Sends, patience: Patience, clock: Callable[[], float]) -> None:
        self._accept, self._connection, self._patience, self._clock = accept, connection, patience, clock
        self._write = connection.write
        self.peer: Hashable = connection
        self.last, self.last_taken = 0, LARGEST_WINDOW
        self._headers = HeaderReader()
        self._open: dict[int, Stream] = {}
        self._new: list[Stream] = []
        self._reset: dict[int, None] = {}
        self._stalled: dict[int, Stream] = {}
        self._window, self._read = WINDOW, 0
        self._peer_window, self._peer_initial = DEFAULT_WINDOW, DEFAULT_WINDOW

    def __len__(self) -> int:
        return len(self._open)

    # Requests come in.

    def headers(self, number: int, block: bytes, *, ends: bool) -> None:
        """A request begins, or is at its end.

        Raises:
            ConnectionFaultError: If the connection ends for it.
        """
        self._patience.spend(max(0, len(block) - _USUAL_HEADERS) // _MORE_HEADERS)
        headers = self._headers.read(block)
        try:
            if number <= self.last:
                self._trailers(number, headers, ends=ends)
                return
            self.last = number
            if number <= self.last_taken:
                self._begin(number, headers, ends=ends)
        except MalformedError:
            self._reset_stream(number, ErrorCode.PROTOCOL_ERROR)
        except StreamFaultError as error:
            self._reset_stream(number, error.code)

    def content(self, number: int, length: int, padding: int, *, ends: bool) -> Stream | None:
        """A frame of content begins.

        Raises:
            ConnectionFaultError: If the connection ends for it.
        """
        if not number or number > self.last:
            raise ConnectionFaultError(ErrorCode.PROTOCOL_ERROR, "content of a stream that has not begun")
        self._window -= length
        if self._window < 0:
            raise ConnectionFaultError(ErrorCode.FLOW_CONTROL_ERROR, "more than the connection's window")
        self._read += length
        if self._read >= _GIVE_BACK:
            self._window += self._read
            self._write(window_update(0, self._read))
            self._read = 0
        if length - padding < _SMALL and not ends:
            self._patience.spend()
        stream = self._open.get(number)
        if stream is None:
            if number not in self._reset and number <= self.last_taken:
                raise ConnectionFaultError(ErrorCode.STREAM_CLOSED, "content of a stream that has ended")
            return None
        try:
            self._count(stream, length, padding, ends=ends)
        except StreamFaultError as error:
            self._reset_stream(number, error.code)
            return None
        return stream

    def ended(self, stream: Stream) -> None:
        """All of a request has been sent."""
        if not stream.open:
            self._reset.pop(stream.number, None)
        elif stream.length:
            self._reset_stream(stream.number, ErrorCode.PROTOCOL_ERROR)  # less than content-length says
        else:
            stream.ended = True
            if stream.request is not None:
                stream.request.end()

    def begin_new(self) -> None:
        """Let work begin for the requests that have come in."""
        new, self._new = self._new, []
        for stream in new:
            if stream.request is not None:  # else it has ended already
                stream.request.begin()

    def reset_by_client(self, number: int) -> None:
        """A client does not want its answer any more.

        Raises:
            ConnectionFaultError: If there is no such stream, or this happens too often.
        """
        if not number or number > self.last:
            raise ConnectionFaultError(ErrorCode.PROTOCOL_ERROR, "a reset of a stream that has not begun")
        stream = self._open.get(number)
        self._reset.pop(number, None)
        if stream is not None:
            self._lose(stream)
        self._patience.spend(1 if stream is None else RESET)

    def lose_all(self) -> None:
        """The client is gone."""
        for stream in list(self._open.values()):
            self._lose(stream)

    # Answers go out.

    def answer(self, stream: Stream, head: bytes, content: bytes, trailers: bytes) -> None:
        """Send an answer, as far as the client takes it at the moment."""
        if not stream.open:
            return
        if not trailers:
            self._write(frame(HEADERS, END_HEADERS | END_STREAM, stream.number, head))
            self._done(stream)
            return
        stream.unsent, stream.trailers = content, trailers
        if not self._send(stream, frame(HEADERS, END_HEADERS, stream.number, head)):
            stream.stalled = self._clock()
            self._stalled[stream.number] = stream
            if len(self._stalled) > _STALLED:
                said = "too many answers that are not taken"
                self._connection.fail(ConnectionFaultError(ErrorCode.ENHANCE_YOUR_CALM, said))

    def grant(self, stream: Stream, more: int) -> None:
        """Let a client send more."""
        if stream.open and more > 0 and not stream.ended:
            stream.window += more
            self._write(window_update(stream.number, more))

    def widen(self, number: int, more: int) -> None:
        """A client takes more.

        Raises:
            ConnectionFaultError: If that is more than it may say.
        """
        self._patience.spend()
        if number > self.last:
            raise ConnectionFaultError(ErrorCode.PROTOCOL_ERROR, "a window of a stream that has not begun")
        stream = self._open.get(number)
        if not number:
            self._peer_window += more
            if not more or self._peer_window > LARGEST_WINDOW:
                code = ErrorCode.FLOW_CONTROL_ERROR if more else ErrorCode.PROTOCOL_ERROR
                raise ConnectionFaultError(code, "a window grows, to at most 2^31-1 bytes")
            self._send_stalled()
        elif stream is not None:
            stream.peer_window += more
            if not more or stream.peer_window > LARGEST_WINDOW:
                self._reset_stream(number, ErrorCode.FLOW_CONTROL_ERROR if more else ErrorCode.PROTOCOL_ERROR)
            elif number in self._stalled:
                self._send(stream)

    def windows_begin_with(self, initial: int) -> None:
        """A client says how much it takes of each stream; also of those that are open.

        Raises:
            ConnectionFaultError: If that is more than it may say.
        """
        more, self._peer_initial = initial - self._peer_initial, initial
        for stream in self._open.values():
            stream.peer_window += more
            if stream.peer_window > LARGEST_WINDOW:
                raise ConnectionFaultError(ErrorCode.FLOW_CONTROL_ERROR, "a window of more than 2^31-1 bytes")
        self._send_stalled()

    def drop_stalled(self, before: float) -> None:
        """Give up answers that have waited since then."""
        for stream in [one for one in self._stalled.values() if one.stalled <= before]:
            self._write(rst_stream(stream.number, ErrorCode.CANCEL))
            self._remember(stream.number)
            self._forget(stream)

    def _begin(self, number: int, headers: list[tuple[bytes, bytes]], *, ends: bool) -> None:
        if len(self._open) >= STREAMS:
            raise StreamFaultError(ErrorCode.REFUSED_STREAM)
        found = request_of(headers)
        stream = Stream(self, number, UNASKED, self._peer_initial, length_of(found))
        self._open[number] = stream
        stream.request = self._accept(stream, found)
        if stream.request is None:
            self._patience.spend(RESET)
        else:
            self._new.append(stream)
        if ends:
            self.ended(stream)

    def _trailers(self, number: int, headers: list[tuple[bytes, bytes]], *, ends: bool) -> None:
        stream = self._open.get(number)
        if stream is None:
            if number not in self._reset and number <= self.last_taken:
                raise ConnectionFaultError(ErrorCode.STREAM_CLOSED, "headers of a stream that has ended")
            self._patience.spend()
            return
        if stream.ended:
            raise StreamFaultError(ErrorCode.STREAM_CLOSED)
        if not ends:
            raise StreamFaultError(ErrorCode.PROTOCOL_ERROR)
        check_trailers(headers)
        self.ended(stream)

    def _count(self, stream: Stream, length: int, padding: int, *, ends: bool) -> None:
        if stream.ended:
            raise StreamFaultError(ErrorCode.STREAM_CLOSED)
        stream.window -= length
        if stream.window < 0:
            raise StreamFaultError(ErrorCode.FLOW_CONTROL_ERROR)
        if padding and not ends:
            self.grant(stream, padding)  # the message is as long as it was
        if stream.length is not None:
            stream.length -= length - padding
            if stream.length < 0:
                raise StreamFaultError(ErrorCode.PROTOCOL_ERROR)

    def _send(self, stream: Stream, said: bytes = b"") -> bool:
        """Send what may be sent of an answer; whether that was all of it."""
        most = min(len(stream.unsent), self._peer_window, stream.peer_window)
        if most > 0:
            said += data_frames(stream.number, stream.unsent[:most])
            stream.unsent = stream.unsent[most:]
            self._peer_window -= most
            stream.peer_window -= most
        done = not stream.unsent
        if done:
            said += frame(HEADERS, END_HEADERS | END_STREAM, stream.number, stream.trailers)
        if said:
            self._write(said)
        if done:
            self._patience.answered()
            self._done(stream)
        return done

    def _send_stalled(self) -> None:
        for stream in list(self._stalled.values()):
            if self._peer_window > 0:
                self._send(stream)

    def _done(self, stream: Stream) -> None:
        if not stream.ended:  # the rest is not needed any more: RFC 9113, section 8.1
            self._remember(stream.number)
            self._write(rst_stream(stream.number, ErrorCode.NO_ERROR))
        self._forget(stream)

    def _reset_stream(self, number: int, code: ErrorCode) -> None:
        """End a stream for what its client does wrong, or because there are too many."""
        self._patience.spend(1 if code is ErrorCode.REFUSED_STREAM else RESET)
        stream = self._open.get(number)
        self._remember(number)
        self._write(rst_stream(number, code))
        if stream is not None:
            self._lose(stream)

    def _lose(self, stream: Stream) -> None:
        request = stream.request
        self._forget(stream)
        if request is not None:
            request.lose()

    def _remember(self, number: int) -> None:
        self._reset[number] = None
        if len(self._reset) > _REMEMBERED:
            del self._reset[next(iter(self._reset))]

    def _forget(self, stream: Stream) -> None:
        stream.open, stream.request = False, None
        self._open.pop(stream.number, None)
        self._stalled.pop(stream.number, None)
        if not self._open:
            self._connection.emptied()
