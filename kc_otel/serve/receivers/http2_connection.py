"""One connection of HTTP/2 (RFC 9113), on an event loop: the server's side, for requests whose answers are short.

There is a library for HTTP/2 in Python, h2, which takes three times as long for a message of 80 kB, and one for gRPC,
whose threads take turns with the event loop and which holds whole messages before anybody can say whether there is
memory for them. Here bytes go from the socket into the message's own memory, and a client may send no more than there
is room for: flow control is what bounds memory.

Whatever a client sends, nothing is raised and nobody else is held up: the stream is reset, or the connection ends with
the reason. What a client may cost is bounded: its streams, its header blocks, frames that bring nothing, the time that
anything takes, and what it does not read of its answers.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Final

from kc_otel.serve.receivers.http2_frames import (
    ACK,
    DEFAULT_WINDOW,
    GOAWAY,
    LARGEST_WINDOW,
    PING,
    PRIORITY,
    PUSH_PROMISE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    ConnectionFaultError,
    ErrorCode,
    Setting,
    frame,
    goaway,
    number_of,
    read_settings,
    settings,
    window_update,
)
from kc_otel.serve.receivers.http2_headers import MOST_OF_LIST
from kc_otel.serve.receivers.http2_patience import RESET, Patience
from kc_otel.serve.receivers.http2_reading import LONGEST_FRAME, FrameReader, OtherProtocolError
from kc_otel.serve.receivers.http2_stream import Stream
from kc_otel.serve.receivers.http2_streams import STREAMS, UNASKED, WINDOW, Accept, Streams
from kc_otel.serve.receivers.read_buffer import READ_BUFFER

__all__ = ["Http2Connection"]

_log: Final = logging.getLogger(__name__)

_FIRST: Final = settings(
    {
        Setting.MAX_CONCURRENT_STREAMS: STREAMS,
        Setting.INITIAL_WINDOW_SIZE: UNASKED,
        Setting.MAX_FRAME_SIZE: LONGEST_FRAME,
        Setting.MAX_HEADER_LIST_SIZE: MOST_OF_LIST,
        Setting.NO_RFC7540_PRIORITIES: 1,
    }
) + window_update(0, WINDOW - DEFAULT_WINDOW)
_GOODBYE: Final = b"goodbye!"
_STILL_THERE: Final = frame(PING, 0, 0, b"still on")
_WHAT_IT_SPEAKS: Final = "This port speaks OTLP over gRPC, which is HTTP/2; OTLP over HTTP has a port of its own.\n"
_NOT_HTTP_2: Final = (
    "HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-type: text/plain\r\n"
    f"content-length: {len(_WHAT_IT_SPEAKS)}\r\n\r\n{_WHAT_IT_SPEAKS}"
).encode()


class Http2Connection(asyncio.BufferedProtocol):
    """A connection.

    Args:
        accept: Takes a request that begins on a stream, with its headers; None if it has answered.
        connections: Which there are; this one is among them from its beginning to its end.
    """

    seconds = 10.0
    """How long a connection's beginning, headers and other frames may take."""
    content_seconds = 30.0
    """How long a frame of content may take."""
    idle = 60.0
    """After how long of silence a client is asked whether it is still there."""
    silence = 20.0
    """How long it may take to say so; so long may also no answer be taken."""
    farewell = 1.0
    """How long it may take to learn that no more requests are taken."""

    def __init__(self, accept: Accept, connections: set[Http2Connection]) -> None:
        self._loop = asyncio.get_running_loop()
        self._connections = connections
        self._transport: Any = None
        self._timer: asyncio.TimerHandle | None = None
        self._patience = Patience(self._loop.time)
        self._streams = Streams(accept, self, self._patience, self._loop.time)
        self._reader = FrameReader(self)
        self.closed: asyncio.Future[None] = self._loop.create_future()
        """Done when the connection has ended."""
        self._buffer, self._direct = READ_BUFFER.memory, False
        self._reading, self._out = False, list[bytes]()
        self._set = False
        self._leaving = self._closing = False
        self._made = self._heard = self._loop.time()
        self._frames_then = 0
        self._incomplete: float | None = None
        self._unread: float | None = None
        self._asked: float | None = None

    # The transport's side.

    def connection_made(self, transport: Any) -> None:
        """A client has connected."""
        self._transport = transport
        address = transport.get_extra_info("peername")
        self._streams.peer = f"{address[0]}:{address[1]}" if address else self
        self._connections.add(self)
        self._timer = self._loop.call_later(self._often, self._watch)
        secured = transport.get_extra_info("ssl_object")
        if secured is not None and secured.selected_alpn_protocol() != "h2":
            self._close()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's interface
        """The client has gone."""
        self._connections.discard(self)
        if self._timer is not None:
            self._timer.cancel()
        self._closing = self._reader.stopped = True
        self._streams.lose_all()
        if not self.closed.done():
            self.closed.set_result(None)

    def eof_received(self) -> None:
        """The client sends no more: the transport closes."""

    def pause_writing(self) -> None:
        """The client does not read what it is answered: nothing more is read of it either."""
        self._unread = self._loop.time()
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        """It does again."""
        self._unread = self._incomplete = None
        self._heard = self._loop.time()
        if not self._closing:
            self._transport.resume_reading()

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - asyncio's interface
        """Where the next bytes go: into the message that is being read, if much of it is to come."""
        room = self._reader.room()
        self._direct = room is not None
        return self._buffer if room is None else room

    def buffer_updated(self, nbytes: int) -> None:
        """Some bytes have come."""
        if self._closing:
            return
        self._heard, self._asked = self._loop.time(), None
        self._reading = True
        try:
            if self._direct:
                self._reader.filled(nbytes)
            else:
                self._reader.take(self._buffer[:nbytes])
            self._streams.begin_new()
        except ConnectionFaultError as error:
            self.fail(error)
        except OtherProtocolError:
            self.write(_NOT_HTTP_2)
            self._close()
        except Exception:  # noqa: BLE001 - whatever a client brings about, the others are still served
            _log.exception("a connection had to be closed")
            self.fail(ConnectionFaultError(ErrorCode.INTERNAL_ERROR, ""))
        self._note_incomplete()
        self._reading = False
        if self._out:
            out, self._out = self._out, []
            self._transport.write(out[0] if len(out) == 1 else b"".join(out))
        if self._closing:
            self._transport.close()

    # What its frames say; those of streams are for `Streams`.

    def greeted(self) -> None:
        """The client speaks HTTP/2."""
        self.write(_FIRST)

    def content(self, number: int, length: int, padding: int, *, ends: bool) -> Stream | None:
        """A frame of content begins."""
        return self._streams.content(number, length, padding, ends=ends)

    def ended(self, stream: Stream) -> None:
        """The content of a stream is at its end."""
        self._streams.ended(stream)

    def headers(self, number: int, block: bytes, *, ends: bool) -> None:
        """A request begins, or is at its end."""
        self._streams.headers(number, block, ends=ends)

    def ignored(self, kind: int, number: int) -> None:
        """A frame that nobody knows, or one that says goodbye: its client closes the connection when it wants to."""
        self._patience.spend()
        if kind == GOAWAY and number:
            raise ConnectionFaultError(ErrorCode.PROTOCOL_ERROR, "GOAWAY is of no stream")

    def control(self, kind: int, flags: int, number: int, payload: memoryview) -> None:
        """Any other frame."""
        if kind == WINDOW_UPDATE:
            self._streams.widen(number, number_of(payload) & LARGEST_WINDOW)
        elif kind == RST_STREAM:
            number_of(payload)
            self._streams.reset_by_client(number)
        elif kind == SETTINGS:
            self._settings(flags, number, payload)
        elif kind == PING:
            self._ping(flags, number, payload)
        elif kind == PRIORITY:
            self._patience.spend()
            if len(payload) != 5 or not number:
                code = ErrorCode.FRAME_SIZE_ERROR if number else ErrorCode.PROTOCOL_ERROR
                raise ConnectionFaultError(code, "a priority is five bytes, of a stream")
        elif kind == PUSH_PROMISE:
            raise ConnectionFaultError(ErrorCode.PROTOCOL_ERROR, "clients push nothing")

    def _settings(self, flags: int, number: int, payload: memoryview) -> None:
        self._patience.spend(1 if flags & ACK else RESET)
        if number:
            raise ConnectionFaultError(ErrorCode.PROTOCOL_ERROR, "settings are of no stream")
        if flags & ACK:
            if len(payload):
                raise ConnectionFaultError(ErrorCode.FRAME_SIZE_ERROR, "an acknowledgement says nothing")
            return
        self._set = True
        initial = read_settings(payload).get(Setting.INITIAL_WINDOW_SIZE)
        if initial is not None:
            self._streams.windows_begin_with(initial)
        self.write(frame(SETTINGS, ACK, 0))

    def _ping(self, flags: int, number: int, payload: memoryview) -> None:
        self._patience.spend()
        if number or len(payload) != 8:
            code = ErrorCode.PROTOCOL_ERROR if number else ErrorCode.FRAME_SIZE_ERROR
            raise ConnectionFaultError(code, "a ping is eight bytes, of no stream")
        said = payload.tobytes()
        if not flags & ACK:
            self.write(frame(PING, ACK, 0, said))
        elif said == _GOODBYE and self._leaving:
            self._leave()

    # What is sent, and the end.

    def write(self, data: bytes) -> None:
        """Send frames: those that answer what is being read at its end, together."""
        if self._reading:
            self._out.append(data)
        elif not self._transport.is_closing():
            self._transport.write(data)

    def fail(self, error: ConnectionFaultError) -> None:
        """End the connection, and say why."""
        if not self._closing:
            self.write(goaway(min(self._streams.last, self._streams.last_taken), error.code, str(error)))
            self._close()

    def emptied(self) -> None:
        """No request is left."""
        if self._streams.last_taken < LARGEST_WINDOW:
            self._close()

    def go_away(self, *, at_once: bool = False) -> None:
        """Take no more requests, in two steps: what the client has sent before it knows of it is answered, too."""
        if self._closing:
            return
        if at_once or not self._set:
            self._leave()
        elif not self._leaving:
            self.write(goaway(LARGEST_WINDOW, ErrorCode.NO_ERROR) + frame(PING, 0, 0, _GOODBYE))
            self._loop.call_later(self.farewell, self._leave)
        self._leaving = True

    def abort(self) -> None:
        """End it at once."""
        self._transport.abort()

    def _leave(self) -> None:
        if self._closing or self._streams.last_taken < LARGEST_WINDOW:
            return
        self._streams.last_taken = self._streams.last
        self.write(goaway(self._streams.last, ErrorCode.NO_ERROR))
        if not len(self._streams):
            self._close()

    def _close(self) -> None:
        """End it when what was written is sent."""
        if self._closing:
            return
        self._closing = self._reader.stopped = True
        self._streams.lose_all()
        if not self._reading:
            self._transport.close()

    # Time.

    @property
    def _often(self) -> float:
        return min(self.seconds, self.idle, self.silence)

    def _note_incomplete(self) -> None:
        """Remember since when a frame has been on its way."""
        if not self._reader.incomplete:
            self._incomplete = None
        elif self._incomplete is None or self._reader.count != self._frames_then:
            self._incomplete, self._frames_then = self._heard, self._reader.count

    def _watch(self) -> None:
        """See whether something takes too long, and look again."""
        now = self._loop.time()
        if self._closing:
            self._transport.abort()  # what was said last is not read
            return
        self._timer = self._loop.call_at(now + self._often, self._watch)
        if self._unread is not None:
            if now - self._unread >= self.silence:
                self._transport.abort()
        elif (late := self._late(now)) is not None:
            self.fail(ConnectionFaultError(ErrorCode.PROTOCOL_ERROR, late))
        else:
            self._streams.drop_stalled(now - self.silence)
            self._ask(now)

    def _late(self, now: float) -> str | None:
        if not self._set and now - self._made >= self.seconds:
            return "nothing was said"
        limit = self.content_seconds if self._reader.in_content else self.seconds
        if self._incomplete is not None and now - self._incomplete >= limit:
            return "a frame did not arrive in time"
        return None

    def _ask(self, now: float) -> None:
        """A client that has been silent for long says that it is there, or is gone."""
        if self._asked is not None:
            if now - self._asked >= self.silence:
                self._transport.abort()
        elif now - self._heard >= self.idle:
            self._asked = now
            self.write(_STILL_THERE)
