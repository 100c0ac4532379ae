"""Headers of the HTTP request that an engine's request came with.

vLLM's server hands only `traceparent` and `tracestate` on to its engine. This middleware leaves the rest where code of
the same request finds it. `--middleware kc_otel.instrument.vllm.http.RequestHeaders` adds it by hand.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from contextvars import ContextVar
from typing import Any, Final

__all__ = ["HEADERS", "RequestHeaders"]

HEADERS: Final[ContextVar[Iterable[tuple[bytes, bytes]]]] = ContextVar("kc_otel_vllm_headers", default=())
"""Names (lower case) and values, as ASGI has them."""

_Scope = MutableMapping[str, Any]


class RequestHeaders:
    """ASGI middleware that keeps a reference to the headers; it looks at nothing and changes nothing."""

    def __init__(self, app: Callable[[_Scope, Any, Any], Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: _Scope, receive: Any, send: Any) -> None:
        """Handle one connection."""
        if scope["type"] == "http":
            HEADERS.set(scope["headers"])
        await self._app(scope, receive, send)
