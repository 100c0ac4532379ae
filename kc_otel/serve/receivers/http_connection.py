"""One connection of an HTTP port, on an event loop.

uvicorn's protocol is made for every application, and to one that takes a body of 80 kB at once it costs twice what the
kernel does. What most senders send, POST with a length to one of OTLP's paths, is therefore read here, into memory of
the body's own size. From the first request on that is anything else, or that might be understood in another way, the
connection is uvicorn's. So is every connection of another application.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable
from functools import partial
from http import HTTPStatus
from typing import Any, Final

import numpy as np
from uvicorn.protocols.http.auto import AutoHTTPProtocol
from uvicorn.protocols.utils import get_remote_addr

from kc_otel.serve.receivers.http_server import DisconnectedError, HttpAnswer, HttpReceiver
from kc_otel.serve.receivers.read_buffer import READ_BUFFER
from kc_otel.serve.receivers.reading import Body

__all__ = ["HttpConnection"]

_log: Final = logging.getLogger(__name__)
_TOKEN: Final = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_HEAD: Final = re.compile(
    rb"POST (/v1/(?:metrics|traces|logs)) HTTP/1\.1\r\n(?:" + _TOKEN + rb":[\t\x20-\x7e\x80-\xff]*\r\n){1,64}\r\n"
)
_AFTER_PATH: Final = len(" HTTP/1.1\r\n")
_MOST_OF_HEAD: Final = 16 * 1024
_UNUSUAL: Final = frozenset({"transfer-encoding", "expect", "upgrade", "trailer", "te"})
"""Headers that uvicorn is to understand."""
_LENGTH: Final = re.compile(r"[0-9]{1,15}")
_STATUS: Final = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}


class HttpConnection(asyncio.BufferedProtocol):
    """A connection, which is closed when headers do not come in time; uvicorn itself would wait for ever.

    Args:
        config: uvicorn's.
        server_state: Of uvicorn's server: which connections there are.
        app_state: Of the application.
    """

    seconds = 10.0
    """How long headers may take, and how long a connection may be idle."""

    def __init__(
        self, config: Any, server_state: Any, app_state: Any, _loop: asyncio.AbstractEventLoop | None = None
    ) -> None:
        self._loop = _loop or asyncio.get_running_loop()
        self._uvicorn: Any = None
        self._made = (config, server_state, app_state)
        self._connections: set[Any] = server_state.connections
        self._receiver: HttpReceiver | None = config.app if isinstance(config.app, HttpReceiver) else None
        self._transport: Any = None
        self._peer: Any = None
        self._timer: asyncio.TimerHandle | None = None
        self._waits_since: float | None = None
        self._answering: asyncio.Task[None] | None = None
        self._buffer = READ_BUFFER.memory
        self._body: memoryview | None = None
        self._filled = self._unwanted = self._missing = 0
        self._whole: asyncio.Future[bytes] | None = None
        self._early = b""
        self._stopping = False

    def connection_made(self, transport: Any) -> None:
        """A sender has connected."""
        self._transport, self._peer = transport, get_remote_addr(transport)
        self._connections.add(self)
        self._waits_since = self._loop.time()
        self._watch()
        if self._receiver is None:
            self._leave_to_uvicorn()

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - asyncio's interface
        """Where the next bytes go: into the body that is being read, or to where a request may begin."""
        if self._body is not None:
            return self._body[self._filled :]
        return self._buffer[: self._unwanted] if self._unwanted else self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Some bytes have come."""
        if self._body is not None:
            self._filled += nbytes
            if self._filled == len(self._body):
                assert self._whole is not None
                if not self._whole.done():  # else it was given up at this moment
                    self._whole.set_result(self._body.tobytes())
                self._body = None
        elif self._unwanted:
            self._unwanted -= nbytes
        else:
            self._take(self._buffer[:nbytes])

    def eof_received(self) -> None:
        """The sender sends no more: the transport closes."""

    def connection_lost(self, exc: Exception | None) -> None:
        """The sender has gone."""
        self._connections.discard(self)
        if self._timer is not None:
            self._timer.cancel()
        if self._body is not None and self._whole is not None:
            self._body = None
            if not self._whole.done():
                self._whole.set_exception(DisconnectedError())
        if self._uvicorn is not None:
            self._uvicorn.connection_lost(exc)

    def pause_writing(self) -> None:
        """The sender does not read what it is answered."""
        if self._uvicorn is not None:
            self._uvicorn.pause_writing()

    def resume_writing(self) -> None:
        """It does again."""
        if self._uvicorn is not None:
            self._uvicorn.resume_writing()

    def shutdown(self) -> None:
        """Close, after the answer to what has begun."""
        self._stopping = True
        if self._uvicorn is not None:
            self._uvicorn.shutdown()
        elif self._answering is None:
            self._transport.close()

    def _take(self, data: memoryview) -> None:
        """Bytes that belong to no body that is being read."""
        if self._answering is not None:  # the next request, before this one is answered
            self._early += data
            self._transport.pause_reading()
            return
        if self._uvicorn is None:
            if self._begin(data):
                return
            self._leave_to_uvicorn()
        self._uvicorn.data_received(data.tobytes())
        if self._uvicorn.cycle is not None and not self._uvicorn.cycle.response_complete:
            self._waits_since = None
        elif self._waits_since is None:
            self._waits_since = self._loop.time()

    def _begin(self, data: memoryview) -> bool:
        """Take a request, if it is one of those that are read here."""
        assert self._receiver is not None
        head = _HEAD.match(data, 0, _MOST_OF_HEAD)
        if head is None:
            return False
        headers: dict[str, str] = {}
        end = head.end()
        for line in str(data[head.end(1) + _AFTER_PATH : end - 4], "latin-1").split("\r\n"):
            name, _, value = line.partition(":")
            name = name.lower()
            if name in headers:
                return False
            headers[name] = value.strip(" \t")
        length = headers.get("content-length", "")
        if not _LENGTH.fullmatch(length) or not _UNUSUAL.isdisjoint(headers):
            return False
        size, here = int(length), len(data) - end
        if size > self._receiver.max_bytes or here > size:
            return False
        if headers.get("connection", "keep-alive").lower() != "keep-alive":
            return False
        body: bytes | Body
        if here == size:
            body = data[end:].tobytes()
        else:
            self._transport.pause_reading()  # until it has a place, or is refused and thrown away
            self._missing = size - here
            self._filled = here
            body = Body(size, lambda: self._filled, partial(self._read, data[end:].tobytes(), size))
        self._waits_since = None
        self._answering = self._loop.create_task(self._answer(str(head[1], "ascii"), headers, body))
        return True

    def _read(self, begun: bytes, size: int) -> Awaitable[bytes]:
        """The whole of a body, whose first bytes came with the headers."""
        if self._transport.is_closing():
            raise DisconnectedError
        # Memory that is only announced is not taken: nothing writes to it before the bytes have come.
        memory: Any = np.empty(size, np.uint8)
        self._body, self._filled, self._missing = memoryview(memory), len(begun), 0
        self._body[: len(begun)] = begun
        self._whole = self._loop.create_future()
        self._transport.resume_reading()
        return self._whole

    async def _answer(self, path: str, headers: dict[str, str], body: bytes | Body) -> None:
        assert self._receiver is not None
        answer: HttpAnswer | None
        try:
            answer = await self._receiver.answer("POST", path, headers, body, self._peer)
        except Exception:  # noqa: BLE001 - the sender is told, and the others are still served
            _log.exception("a request could not be answered")
            answer, self._stopping = HttpAnswer(500, ((b"content-length", b"0"),), b""), True
        self._answering = None
        if self._body is not None:  # it was given up before it had come
            self._unwanted, self._body = len(self._body) - self._filled, None
        elif self._missing:  # and before it was read
            self._unwanted, self._missing = self._missing, 0
            self._transport.resume_reading()
        if answer is None or self._transport.is_closing():
            return
        parts = [_STATUS[answer.status]]
        for name, value in (*self._made[1].default_headers, *answer.headers):
            parts += (name, b": ", value, b"\r\n")
        if self._stopping:
            parts.append(b"connection: close\r\n")
        parts += (b"\r\n", answer.body)
        self._transport.write(b"".join(parts))
        self._waits_since = self._loop.time()
        if self._stopping:
            self._transport.close()
        elif self._early:
            early, self._early = self._early, b""
            self._transport.resume_reading()
            self._take(memoryview(early))

    def _leave_to_uvicorn(self) -> None:
        """Let uvicorn have the connection, for as long as it lasts."""
        config, state, app_state = self._made
        make: Any = AutoHTTPProtocol  # which of uvicorn's it is, it chooses itself
        self._uvicorn = make(config=config, server_state=state, app_state=app_state, _loop=self._loop)
        self._uvicorn.connection_made(self._transport)
        self._connections.discard(self._uvicorn)  # we are among them

    def _watch(self) -> None:
        """Look again when headers should be there."""
        now = self._loop.time()
        since = now if self._waits_since is None else self._waits_since
        if now - since >= self.seconds:
            self._transport.close()
        else:
            self._timer = self._loop.call_at(since + self.seconds, self._watch)
