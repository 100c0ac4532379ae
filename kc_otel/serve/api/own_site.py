"""Who may speak to the API and the page: programs, and pages that the evaluator itself has served.

An evaluator on loopback is out of the network's reach, and not out of a browser's: any page that an operator has open
may send requests there, and by DNS rebinding (its own name, pointed at 127.0.0.1) also read the answers. So a request
has to be for a name of the evaluator's, and what a page of somebody else's would change is refused. Programs send no
`Origin` and are not asked for one. Sources: RFC 9110, 7.4; RFC 6454; Fetch Metadata Request Headers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any, Final
from urllib.parse import urlsplit

from fastapi import HTTPException
from fastapi.responses import JSONResponse

from kc_otel.serve.api.documented import PROBLEM
from kc_otel.serve.api.views import ProblemDetails
from kc_otel.serve.host_names import HostNames

__all__ = ["READING", "Application", "BoundedBodies", "Message", "OwnSite", "Receive", "Send"]

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]

READING: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_ORDER: Final = 64 * 1024
"""Bytes of anything that people say."""
_EVIDENCE: Final = 40 * 1024 * 1024
"""Bytes of an order with a gate's evidence in it, of which promotions keep 32 Mi characters."""
_DIAGNOSIS: Final = 4 * 1024 * 1024
"""Bytes of what locate or remedy found, every boundary of a model of a hundred layers among it."""
_LARGER: Final = {"/api/v1/promotions/": _EVIDENCE, "/api/v1/incidents/": _DIAGNOSIS}
_SLOWEST: Final = 30.0
"""Seconds that a body may take once its headers are there."""


class OwnSite:
    """Refuses requests for a name that is not the evaluator's (421), and changes that another site asks for (403).

    Args:
        app: What is asked otherwise.
        names: Other host names that the evaluator is reached by, without a port.
        external_url: How a person reaches it, where that is through a proxy.
    """

    def __init__(self, app: Application, names: Iterable[str] = (), external_url: str | None = None) -> None:
        external = urlsplit(external_url or "")
        self._app = app
        self._names = HostNames((*names, external.hostname or ""))
        self._origin = external.netloc.lower()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer one request, or hand it on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        await (self._refusal(scope) or self._app)(scope, _prompt(receive), send)

    def _refusal(self, scope: Message) -> Application | None:
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        host = headers.get("host", "").lower()
        if host not in self._names:
            return _problem(421, f"this evaluator is not known as {host[:80]!a}; start it with --allowed-host NAME")
        if scope["method"] in READING:
            return None
        origin = headers.get("origin")
        site = headers.get("sec-fetch-site", "none")
        if origin is None and site in {"none", "same-origin"}:
            return None
        if origin is not None and _netloc(origin) in {host, self._origin} - {""}:
            return None
        return _problem(403, "a page of another site asks for this; use the evaluator's own page, or kc-otel")


class BoundedBodies:
    """Refuses bodies that are larger than anything that is said to the API (413), before they are read.

    Args:
        app: What is asked otherwise.
    """

    def __init__(self, app: Application) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer one request, or hand it on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        limit = next((size for path, size in _LARGER.items() if scope["path"].startswith(path)), _ORDER)
        said = f"the body is larger than {limit:,} bytes, which nothing that is said here needs"
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if not declared.isdigit() or len(declared) > 15 or int(declared) > limit:
            await _problem(413, said)(scope, receive, send)
            return
        taken = 0

        async def counted() -> Message:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > limit:
                raise HTTPException(413, said)
            return message

        await self._app(scope, counted, send)


def _prompt(receive: Receive) -> Receive:
    """What comes of a body; that its sender has hung up, once it takes too long."""
    end: float | None = asyncio.get_running_loop().time() + _SLOWEST

    async def received() -> Message:
        nonlocal end
        try:
            async with asyncio.timeout_at(end):
                message = await receive()
        except TimeoutError:
            return {"type": "http.disconnect"}
        if not message.get("more_body", False):
            end = None  # who is answered late, as one who waits for a change, may stay
        return message

    return received


def _netloc(origin: str) -> str:
    """Host and port of an origin; empty for `null` and for what is none."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


def _problem(status: int, detail: str) -> Application:
    body = ProblemDetails(title="request refused", detail=detail, status=status)
    return JSONResponse(body.model_dump(), status, media_type=PROBLEM)
