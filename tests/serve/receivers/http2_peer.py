"""A connection without a socket: what is fed to it, what it answers, and what requests it makes of that."""

from __future__ import annotations

import asyncio
import struct
from typing import Any

import hpack
from hyperframe.frame import DataFrame, Frame, GoAwayFrame, HeadersFrame, RstStreamFrame

from kc_otel.serve.receivers import http2_connection
from kc_otel.serve.receivers.http2_connection import Http2Connection
from kc_otel.serve.receivers.http2_frames import PREFACE, frame, settings
from kc_otel.serve.receivers.http2_headers import literal, status

EXPORT = "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export"
HELLO = PREFACE + settings({})
OK = status(200) + literal(b"content-type", b"application/grpc")


def head(*more: tuple[bytes, bytes], path: bytes = EXPORT.encode()) -> bytes:
    """The header block of a call, which refers to nothing."""
    usual = [
        (b":method", b"POST"), (b":scheme", b"http"), (b":path", path), (b"te", b"trailers"),
        (b"content-type", b"application/grpc"),
    ]  # fmt: skip
    return b"".join(literal(name, value) for name, value in [*usual, *more])


def headers(number: int, block: bytes | None = None, *, ends: bool = False) -> bytes:
    """A frame that begins a request."""
    return frame(1, 4 | ends, number, head() if block is None else block)


def message(body: bytes) -> bytes:
    """As gRPC has it on the wire."""
    return b"\0" + struct.pack(">L", len(body)) + body


def data(number: int, content: bytes, *, ends: bool = False) -> bytes:
    """A frame of content."""
    return frame(0, int(ends), number, content)


class Transport:
    """Keeps what is written."""

    def __init__(self) -> None:
        self.written = bytearray()
        self.closing = self.aborted = self.paused = False
        self.protocol: Any = None

    def write(self, sent: bytes) -> None:
        assert not self.closing, "nothing is written after the end"
        self.written += sent

    def get_extra_info(self, name: str) -> Any:
        return ("192.0.2.1", id(self)) if name == "peername" else None

    def is_closing(self) -> bool:
        return self.closing

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False

    def close(self) -> None:
        if not self.closing:
            self.closing = True
            asyncio.get_running_loop().call_soon(self.protocol.connection_lost, None)

    def abort(self) -> None:
        self.aborted = True
        self.close()


class Taken:
    """A request that keeps what comes, and answers when all of it is there."""

    def __init__(self, stream: Any, found: dict[bytes, bytes], said: list[Any], answers: bool) -> None:
        self.stream, self.found, self.said, self.answers = stream, found, said, answers
        self.body, self.memory = bytearray(), memoryview(b"")

    def begin(self) -> None:
        self.said.append(("begin", self.stream.number))

    def room(self, most: int) -> memoryview | None:
        self.memory = memoryview(bytearray(most))
        return self.memory

    def filled(self, count: int) -> None:
        self.body += self.memory[:count]

    def take(self, more: memoryview) -> None:
        self.body += more

    def end(self) -> None:
        self.said.append((self.stream.number, self.found[b":path"], bytes(self.body)))
        if self.answers:
            self.stream.answer(OK, b"\0\0\0\0\0", literal(b"grpc-status", b"0"))

    def lose(self) -> None:
        self.said.append(("lose", self.stream.number))


class Peer:
    """A client of one connection; to be made on a running event loop."""

    def __init__(self, accept: Any = None, *, answers: bool = True, greeting: bytes = HELLO) -> None:
        self.said: list[Any] = []
        self.requests: list[Taken] = []
        self.open: set[Any] = set()
        self.transport = Transport()
        self.connection = Http2Connection(accept or self._accept, self.open)
        self.transport.protocol = self.connection
        self._answers = answers
        self.connection.connection_made(self.transport)
        if greeting:
            self.feed(greeting)

    def _accept(self, stream: Any, found: dict[bytes, bytes]) -> Taken:
        self.requests.append(Taken(stream, found, self.said, self._answers))
        return self.requests[-1]

    def feed(self, sent: bytes, size: int = 1 << 20) -> None:
        """As a transport does: until the connection is closed, or reads no more."""
        at = 0
        while at < len(sent) and not self.transport.closing and not self.transport.paused:
            room = self.connection.get_buffer(-1)
            step = min(size, len(room), len(sent) - at)
            assert step
            room[:step] = sent[at : at + step]
            self.connection.buffer_updated(step)
            at += step

    def frames(self) -> list[Any]:
        """What was answered so far."""
        found, left = [], memoryview(bytes(self.transport.written))
        while left:
            one, length = Frame.parse_frame_header(left[:9])
            one.parse_body(left[9 : 9 + length])
            left = left[9 + length :]
            found.append(one)
        return found

    def ended(self) -> tuple[int, str] | None:
        """Why the connection ended, if it says so: the code, and the words."""
        found = [one for one in self.frames() if isinstance(one, GoAwayFrame)]
        return (found[-1].error_code, found[-1].additional_data.decode()) if found else None

    def resets(self) -> dict[int, int]:
        """Codes by stream."""
        return {one.stream_id: one.error_code for one in self.frames() if isinstance(one, RstStreamFrame)}

    def answered(self) -> dict[int, dict[str, str]]:
        """Headers and trailers by stream."""
        decoder, found = hpack.Decoder(), dict[int, dict[str, str]]()
        for one in self.frames():
            if isinstance(one, HeadersFrame):
                found.setdefault(one.stream_id, {}).update(decoder.decode(one.data))
        return found

    def content(self, number: int) -> bytes:
        """Of an answer."""
        return b"".join(one.data for one in self.frames() if isinstance(one, DataFrame) and one.stream_id == number)


def on_a_loop(scenario: Any) -> Any:
    """Run it, and fail where the connection had to be closed for a fault of ours."""
    faults: list[Any] = []

    async def running() -> Any:
        return await scenario()

    log = http2_connection._log.exception
    http2_connection._log.exception = lambda *_: faults.append(__import__("traceback").format_exc())  # type: ignore[method-assign]
    try:
        found = asyncio.run(running())
    finally:
        http2_connection._log.exception = log  # type: ignore[method-assign]
    assert not faults, faults[0]
    return found
