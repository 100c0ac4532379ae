"""An ASGI application on a socket, among other servers of one process: uvicorn, with bounds on slow clients.

uvicorn closes a connection that is idle after an answer, but waits for ever for a request's headers, and httptools
takes headers of any length. Both are bounded here, for every port.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from typing import Any, Final, cast

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from kc_otel.serve.access.tls import Tls
from kc_otel.serve.listening import Listener

_GRACE_SECONDS: Final = 3
_IDLE_SECONDS: Final = 120
"""Time that a connection is kept between two requests: longer than a recorder's longest interval, as over gRPC."""
_MAX_HEADER_BYTES: Final = 64 * 1024

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

    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _look(self) -> None:
        """Close the connection if nothing has come of what it began since the last look."""
        begun = self.cycle is None or self._heard > 0 or self.cycle.more_body
        if begun and self._is_idle() and self.cycle is self._last:
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
