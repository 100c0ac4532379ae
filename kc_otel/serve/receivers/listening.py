"""Ports: sockets that bound how many connections they hold, and an ASGI application on one, which bounds slow clients.

A process has a number of files: a client whose connections take all would stop log and state. Each port has its share;
beyond it, a newcomer gets the place of the oldest connection never answered, or of the one answered longest ago. That
is below TLS, whose handshake may not end. uvicorn waits for ever for headers, of any length: both are bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from functools import partial
from typing import Any, Final, cast

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from kc_otel.judge.otlp.requests import BindError
from kc_otel.serve.access.tls import Tls

_log: Final = logging.getLogger(__name__)
_PORT_COUNT: Final = 3
_LAST_PORT: Final = 65_535
_OTHER_FILES: Final = 128
"""The state, the log's segments, webhooks, and what the interpreter opens."""
_MAX_CONNECTIONS: Final = 4096
_REMINDER_SECONDS: Final = 60.0
_GRACE_SECONDS: Final = 3
_IDLE_SECONDS: Final = 120
"""Time that a connection is kept between two requests: longer than a recorder's longest interval, as over gRPC."""
_MAX_HEADER_BYTES: Final = 64 * 1024


class Listener(socket.socket):
    """A socket whose connections are bounded in number, for an event loop that accepts until that would block."""

    most = _MAX_CONNECTIONS
    """Connections at a time."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._silent: dict[int, socket.socket] = {}
        self._answered: dict[int, socket.socket] = {}
        """Connections by their numbers as files, the oldest first, and the one answered longest ago."""
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
        file = connection.fileno()
        for group in (self._silent, self._answered):
            group.pop(file, None)  # of one that was closed
        self._silent[file] = connection
        if self._open > self.most:
            for group in (self._silent, self._answered):
                for gone in [file for file, peer in group.items() if peer.fileno() < 0]:
                    del group[gone]
        if self._open > self.most:
            self._close_one()
        return connection, address

    def answered(self, file: int) -> None:
        """Say that a request has come by a connection, by its number as a file, and was answered."""
        connection = self._silent.pop(file, None) or self._answered.pop(file, None)
        if connection is not None:
            self._answered[file] = connection

    @property
    def _open(self) -> int:
        return len(self._silent) + len(self._answered)

    def _close_one(self) -> None:
        """Close the oldest connection without an answer (except the newest), else the one answered longest ago."""
        group = self._silent if len(self._silent) > 1 or not self._answered else self._answered
        oldest = group.pop(next(iter(group)))
        with contextlib.suppress(OSError):
            oldest.shutdown(socket.SHUT_RDWR)  # its reader or writer sees the end, and closes it
        self._closing = True
        if time.monotonic() - self._reminded > _REMINDER_SECONDS:
            self._reminded = time.monotonic()
            _log.warning("port %d has %d connections, its maximum; silent ones are closed",
                         self.getsockname()[1], self.most)  # fmt: skip


def check_ports(ports: Mapping[str, int]) -> None:
    """Refuse ports, by their option, that are none or the same twice: gRPC takes any, and one would not listen."""
    seen: dict[int, str] = {}
    for option, port in ports.items():
        if not 0 <= port <= _LAST_PORT:
            raise BindError(f"{option} {port} is no port; give one of 1 to {_LAST_PORT}, or 0 for any that is free")
        if port and port in seen:
            raise BindError(f"{seen[port]} and {option} are both {port}; give one of them another")
        seen[port] = option


def listen(host: str, port: int, what: str, most: int) -> Listener:
    """A socket that is bound, for at most so many connections; a BindError where the address is taken."""
    # With its protocol: of sockets that do not say it, asyncio does not know that short answers need not be gathered.
    sock = Listener(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.most = most
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
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


_Base: Any = AutoHTTPProtocol  # which of uvicorn's it is, it chooses itself


class BoundedProtocol(_Base):  # type: ignore[misc]  # only known at run time
    """uvicorn's connection, closed where a request does not come: none was ever begun, or headers do not end."""

    seconds = 10.0
    """Time limit for headers, and for the rest of a body that was already answered; up to twice as long in practice."""

    def __init__(self, *arguments: Any, answered: Callable[[int], None] = lambda _: None, **options: Any) -> None:
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
        h11_max_incomplete_event_size=_MAX_HEADER_BYTES,
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
