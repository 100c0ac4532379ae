"""OTLP over HTTP: POST /v1/metrics, /v1/traces, /v1/logs, in protobuf or JSON, as bare ASGI; and ports for ASGI.

A failure is a google.rpc.Status in the request's own encoding, with a google.rpc.BadRequest for bad data. The sender is
authenticated before the body is read, and a long body is read once the budget has room for it.

A process has a number of files: a client whose connections take all would stop log and state. Each port has its share;
beyond it, a newcomer gets the place of the oldest connection never answered, or of the one answered longest ago. That
is below TLS, whose handshake may not end. uvicorn waits for ever for headers, of any length: both are bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import resource
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Final, cast

import uvicorn
from google.rpc.error_details_pb2 import BadRequest
from google.rpc.status_pb2 import Status
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from kc_otel._extras import extra
from kc_otel.judge.otlp.requests import (
    SERVICES,
    BadRequestError,
    BindError,
    ReceiveError,
    ThrottledError,
    UnsupportedMediaError,
    to_json,
)
from kc_otel.serve.access.access_file import check_sender
from kc_otel.serve.access.site_guard import HostNames
from kc_otel.serve.access.tls import Tls
from kc_otel.serve.receivers.request_taker import Hold, RequestTaker

with extra("serve", "the evaluator"):
    from starlette.datastructures import Headers
    from starlette.responses import Response
    from starlette.types import Receive, Scope, Send

_log: Final = logging.getLogger(__name__)
_PROTOBUF: Final = "application/x-protobuf"
_JSON: Final = "application/json"
_ROUTES: Final = {f"/v1/{signal}": signal for signal in SERVICES}
_LONG_BYTES: Final = 1024 * 1024
"""Longest declared body that is counted as it comes; a recorder's messages have a fiftieth of it."""
_PORT_COUNT: Final = 3
_OTHER_FILES: Final = 128
"""The state, the log's segments, webhooks, and what the interpreter opens."""
_MAX_CONNECTIONS: Final = 4096
_REMINDER_SECONDS: Final = 60.0
_GRACE_SECONDS: Final = 3
_IDLE_SECONDS: Final = 120
"""Time that a connection is kept between two requests: longer than a recorder's longest interval, as over gRPC."""
_MAX_HEADER_BYTES: Final = 64 * 1024


class _TooSlowError(ThrottledError):
    """A request did not arrive in time; of a 408, which HTTP has for it, OTLP's exporters do not send it again."""

    outcome = "too_slow"


class _NotFoundError(ReceiveError):
    outcome, http_status, rpc_code = "not_found", 404, 5


class _NotAllowedError(ReceiveError):
    outcome, http_status, rpc_code = "not_allowed", 405, 12
    headers = MappingProxyType({"allow": "POST"})


class _MisdirectedError(ReceiveError):
    outcome, http_status, rpc_code = "misdirected", 421, 7


class _DisconnectedError(Exception):
    """The sender hung up; there is nobody to answer."""


class HttpReceiver:
    """The ASGI application; senders may call it by `names`, None for any. Transport `http` is counted."""

    def __init__(self, taker: RequestTaker, counts: Counter[tuple[str, str]], names: HostNames | None) -> None:
        self._taker, self._counts, self._names = taker, counts, names
        self._limits = taker.limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer an HTTP request."""
        headers = Headers(scope=scope)
        media = headers.get("content-type", "").partition(";")[0].strip().lower()
        extra: Mapping[str, str] = {}
        try:
            with self._taker.budget.held() as hold:
                message, outcome = await self._handle(scope, headers, media, receive, hold)
            status = 200
        except ReceiveError as error:
            status, message, outcome = error.http_status, _status(error), error.outcome
            extra = error.headers
        except _DisconnectedError:
            self._counts["http", "disconnected"] += 1
            return
        self._counts["http", outcome] += 1
        if media == _PROTOBUF:
            body = message.SerializeToString()
        else:  # what could not be understood at all is answered in the encoding that a person can read
            media, body = _JSON, to_json(message)
        await Response(body, status, extra, media)(scope, receive, send)

    async def _handle(
        self, scope: Scope, headers: Mapping[str, str], media: str, receive: Receive, hold: Hold
    ) -> tuple[Any, str]:
        if self._names is not None and (host := headers.get("host", "")) not in self._names:
            raise _MisdirectedError(f"this evaluator is not known as {host[:80]!a}; start it with --allowed-host NAME")
        check_sender(self._taker.access, headers.get("authorization", ""))
        path = scope["path"]
        signal = _ROUTES.get(path)
        if signal is None:
            raise _NotFoundError(f"no such path; OTLP/HTTP is served at {', '.join(_ROUTES)}")
        if scope["method"] != "POST":
            raise _NotAllowedError(f"{path} takes POST requests")
        if media not in {_PROTOBUF, _JSON}:
            raise UnsupportedMediaError(f"content type {media[:80]!r} is not OTLP's; use {_PROTOBUF} or {_JSON}")
        declared = headers.get("content-length", "")
        size = int(declared) if declared.isdecimal() else 0
        if size > self._limits.max_bytes:
            raise self._limits.too_large()
        if size > _LONG_BYTES:
            hold(size, long=True)
        try:
            async with asyncio.timeout(self._limits.read_timeout):
                body = await self._read(receive, hold, counted=size > _LONG_BYTES)
        except TimeoutError:
            raise _TooSlowError("the request did not arrive in time", self._limits.retry_after) from None
        encoding = headers.get("content-encoding", "")
        return await self._taker.take(signal, body, encoding, "http", json=media == _JSON)

    async def _read(self, receive: Receive, hold: Hold, *, counted: bool) -> bytes:
        """Read a body, whose bytes are counted already or as they come; uvicorn drops the rest of a refused one."""
        parts, arrived, more = list[bytes](), 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise _DisconnectedError
            parts.append(message.get("body", b""))
            arrived, more = arrived + len(parts[-1]), message.get("more_body", False)
            if arrived > self._limits.max_bytes:
                raise self._limits.too_large()
            if not counted:
                hold(len(parts[-1]))
        return parts[0] if len(parts) == 1 else b"".join(parts)


def _status(error: ReceiveError) -> Any:
    status = Status(code=error.rpc_code, message=str(error))
    if isinstance(error, BadRequestError):
        violation = BadRequest.FieldViolation(description=str(error))
        status.details.add().Pack(BadRequest(field_violations=[violation]))
    return status


class Listener(socket.socket):
    """A socket whose connections are bounded in number, for an event loop that accepts until that would block."""

    most = _MAX_CONNECTIONS
    """Connections at a time."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._open: dict[int, tuple[float, socket.socket]] = {}
        """Connections by their numbers as files, the oldest first, and when each was answered last; some are closed."""
        self._closing = False
        self._reminded = -_REMINDER_SECONDS

    def accept(self) -> tuple[socket.socket, Any]:
        """The next connection; for its place another one is closed, where all are taken.

        A BlockingIOError if nobody waits, or the event loop has to see first that a connection was closed.
        """
        if self._closing:
            self._closing = False
            raise BlockingIOError
        connection, address = super().accept()
        if len(self._open) >= self.most:
            self._open = {file: known for file, known in self._open.items() if known[1].fileno() == file}
        if len(self._open) >= self.most:
            _, oldest = self._open.pop(min(self._open, key=lambda file: self._open[file][0]))
            with contextlib.suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)  # its reader or writer sees the end, and closes it
            self._closing = True
            if time.monotonic() - self._reminded > _REMINDER_SECONDS:
                self._reminded = time.monotonic()
                _log.warning("port %d has %d connections, its maximum; silent ones are closed",
                             self.getsockname()[1], self.most)  # fmt: skip
        self._open.pop(connection.fileno(), None)  # of one that was closed
        self._open[connection.fileno()] = -math.inf, connection
        return connection, address

    def answered(self, file: int) -> None:
        """Note that a request was answered on a connection, by its number as a file."""
        if file in self._open:
            self._open[file] = time.monotonic(), self._open[file][1]


def listen(host: str, port: int, what: str, most: int) -> Listener:
    """A socket that listens, for at most so many connections; a BindError where the address is taken, or none."""
    # With its protocol: of sockets that do not say it, asyncio does not know that short answers need not be gathered.
    sock = Listener(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.most = most
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        sock.listen()  # else a second socket of this process could have the same address
    except (OSError, OverflowError) as error:
        sock.close()
        why = getattr(error, "strerror", None) or error
        msg = f"cannot listen for {what} on {host}:{port} ({why}); stop the other process, or choose a port"
        raise BindError(msg) from None
    return sock


def connections_per_port() -> int:
    """Return the number of connections per port, after raising this process's limit on files to the system's."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
        except (OSError, ValueError):  # some systems say unlimited and mean less
            pass
    unlimited = soft == resource.RLIM_INFINITY
    return _MAX_CONNECTIONS if unlimited else max(16, min(_MAX_CONNECTIONS, (soft - _OTHER_FILES) // _PORT_COUNT))


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's connection, closed where a request does not come: none was ever begun, or headers do not end."""

    seconds = 10.0
    """Time limit for headers, and for the rest of a body that was already answered; up to twice as long in practice."""

    def __init__(self, *arguments: Any, answered: Callable[[int], None], **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._answered = answered

    def connection_made(self, transport: Any) -> None:
        """Begin to watch a new connection."""
        super().connection_made(transport)
        self._heard = 0
        self._last: Any = None
        self._watch = self.loop.call_later(self.seconds, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop watching the connection."""
        self._watch.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take bytes, and count those of headers."""
        before = self.cycle
        is_body = before is not None and before.more_body
        super().data_received(data)
        self._heard = 0 if is_body or self.cycle is not before else self._heard + len(data)
        if self._heard > _MAX_HEADER_BYTES:
            self.transport.close()

    def on_response_complete(self) -> None:
        """Note an answered request."""
        self._answered(self.transport.get_extra_info("socket").fileno())
        super().on_response_complete()

    def on_message_complete(self) -> None:
        """Note that the body has ended, of a request that was answered before it had, too."""
        super().on_message_complete()
        self.cycle.more_body = False

    def _look(self) -> None:
        """Close the connection if nothing has come of what it began since the last look."""
        begun = self.cycle is None or self._heard > 0 or self.cycle.more_body
        idle = self.cycle is None or self.cycle.response_complete
        if begun and idle and self.cycle is self._last:
            self.transport.close()
            return
        self._last = self.cycle
        self._watch = self.loop.call_later(self.seconds, self._look)


class _Server(uvicorn.Server):
    """One of several servers in a process whose signals somebody else handles."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the process's signal handlers alone."""
        yield


@contextlib.asynccontextmanager
async def serving_http(app: Any, sock: Listener, tls: Tls | None = None) -> AsyncIterator[None]:
    """Serve for as long as the context lasts."""
    config = uvicorn.Config(
        app,
        http=cast("type[asyncio.Protocol]", partial(BoundedProtocol, answered=sock.answered)),
        ws="none",
        lifespan="off",
        log_level="warning",
        access_log=False,
        proxy_headers=False,  # who sends is who is connected: a name in a header is anybody's to choose
        timeout_keep_alive=_IDLE_SECONDS,
        timeout_graceful_shutdown=_GRACE_SECONDS,
    )
    config.load()
    config.ssl = None if tls is None else tls.listening
    server = _Server(config)
    serving = asyncio.create_task(server.serve([sock]))
    while not server.started and not serving.done():  # noqa: ASYNC110 - uvicorn offers a flag and no event
        await asyncio.sleep(0.01)
    try:
        yield
    finally:
        server.should_exit = True
        await serving
