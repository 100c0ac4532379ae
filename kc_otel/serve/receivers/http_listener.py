"""An ASGI application on a socket, among other servers of one process."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Any, Final

import uvicorn

from kc_otel.serve.access.tls import Tls
from kc_otel.serve.receivers.http_connection import HttpConnection

__all__ = ["serving_http"]

_GRACE: Final = 3


class _Server(uvicorn.Server):
    """One of several servers in a process whose signals somebody else handles."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the process's signal handlers alone."""
        yield


@contextlib.asynccontextmanager
async def serving_http(app: Any, sock: socket.socket, tls: Tls | None = None) -> AsyncIterator[None]:
    """Serve for as long as the context lasts."""
    config = uvicorn.Config(
        app,
        http=HttpConnection,  # type: ignore[arg-type]  # a protocol with buffers of its own
        ws="none",
        log_level="warning",
        access_log=False,
        proxy_headers=False,  # who sends is who is connected: a name in a header is anybody's to choose
        timeout_graceful_shutdown=_GRACE,
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
