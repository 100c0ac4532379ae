"""Origin checks of the API and the page: only programs and the evaluator's own pages may call them.

An evaluator on loopback is out of the network's reach, and not out of a browser's: any page that an operator has open
may send requests there, and by DNS rebinding (its own name, pointed at 127.0.0.1) also read the answers. So a request
has to be for a name of the evaluator's, and what a page of somebody else's would change is refused. Programs send no
`Origin` and are not asked for one. Sources: RFC 9110, 7.4; RFC 6454; Fetch Metadata Request Headers.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable
from functools import lru_cache
from ipaddress import ip_address
from typing import Final
from urllib.parse import urlsplit

from fastapi import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kc_otel.serve.api.documented import problem

READING: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_MAX_ORDER_BYTES: Final = 64 * 1024
"""Bytes of anything that people say."""
_MAX_EVIDENCE_BYTES: Final = 40 * 1024 * 1024
"""Bytes of an order with a gate's evidence in it, of which promotions keep 32 Mi characters."""
_MAX_DIAGNOSIS_BYTES: Final = 4 * 1024 * 1024
"""Bytes of what locate or remedy found, every boundary of a model of a hundred layers among it."""
_MAX_BYTES_BY_PATH: Final = {"/api/v1/promotions/": _MAX_EVIDENCE_BYTES, "/api/v1/incidents/": _MAX_DIAGNOSIS_BYTES}
_MAX_BODY_SECONDS: Final = 30.0
"""Seconds that a body may take once its headers are there."""


class OwnSite:
    """Refuses requests for a name that is not the evaluator's (421), and changes that another site asks for (403).

    Args:
        app: The application behind the checks.
        names: Host names that the evaluator is reached by.
        origin: Host and port by which people reach it through a proxy; empty for none.
    """

    def __init__(self, app: ASGIApp, names: HostNames, origin: str = "") -> None:
        self._app, self._names, self._origin = app, names, origin

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or hand it on."""
        await (self._refusal(scope) or self._app)(scope, _prompt(receive), send)

    def _refusal(self, scope: Scope) -> ASGIApp | None:
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        host = headers.get("host", "").lower()
        if host not in self._names:
            return problem(421, f"this evaluator is not known as {host[:80]!a}; start it with --allowed-host NAME")
        if scope["method"] in READING:
            return None
        origin = headers.get("origin")
        site = headers.get("sec-fetch-site", "none")
        if origin is None and site in {"none", "same-origin"}:
            return None
        if origin is not None and _netloc(origin) in {host, self._origin} - {""}:
            return None
        return problem(403, "another site's page requested this; use the evaluator's own page, or kc-otel")


class BoundedBodies:
    """Refuses bodies that are larger than anything that is said to the API (413), before they are read.

    Args:
        app: The application behind the checks.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or hand it on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        limit = next(
            (size for path, size in _MAX_BYTES_BY_PATH.items() if scope["path"].startswith(path)), _MAX_ORDER_BYTES
        )
        said = f"the body is larger than {limit:,} bytes, which no request here needs"
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if not declared.isdigit() or len(declared) > 15 or int(declared) > limit:
            await problem(413, said)(scope, receive, send)
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
    """Return a `receive` that reports a disconnect once the sender takes too long over a body."""
    end: float | None = asyncio.get_running_loop().time() + _MAX_BODY_SECONDS

    async def received() -> Message:
        nonlocal end
        try:
            async with asyncio.timeout_at(end):
                message = await receive()
        except TimeoutError:
            return {"type": "http.disconnect"}
        if not message.get("more_body", False):
            end = None  # a request that waits for a change may stay open
        return message

    return received


def _netloc(origin: str) -> str:
    """Host and port of an origin; empty for `null` and for what is none."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


_UNSPECIFIED: Final = frozenset({"", "*"})


class HostNames:
    """Names that are ours. Addresses are, for no page can have one of ours as its own name; so is `localhost`.

    Args:
        names: Other host names, without a port.

    >>> "evil.example:4318" in HostNames(["evaluator"]), "evaluator:4318" in HostNames(["evaluator"])
    (False, True)
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._names = {"localhost", *map(_plain, names)} - {""}
        self._is_ours = lru_cache(1024)(self._names_us)

    def __contains__(self, host: str) -> bool:
        """Return True if the value of a `Host` header is a name of this server."""
        return self._is_ours(host)

    def _names_us(self, host: str) -> bool:
        try:
            name = _plain(urlsplit(f"//{host}").hostname or "")
        except ValueError:
            return False
        return name in self._names or _is_address(name)


def reachable_from_elsewhere(host: str) -> bool:
    """Return True if other machines can reach a server on this host; an unresolvable name counts as reachable."""
    name = host.strip("[]")
    if name in _UNSPECIFIED:
        return True
    try:
        found = {str(where[0]).partition("%")[0] for *_, where in socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)}
    except OSError:
        return True
    return not all(ip_address(address).is_loopback for address in found)


def _plain(name: str) -> str:
    return name.lower().strip("[]").rstrip(".")


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
