"""Callers of the API and the page: our own names, our own pages, and the holders of tokens.

A page that an operator has open may send requests to loopback, and by DNS rebinding read the answers. So a request has
to be for a name of the evaluator's, and what another site's page would change is refused; programs send no `Origin`.
A browser sends a token as a password, by itself, whichever page asks: with one only our own page is answered, and a
link to `/`. Without a token there are only whether the process is well, the handbook, and the page's own files.
Sources: RFC 9110, 7.4; RFC 6454; RFC 6750; RFC 7617; Fetch Metadata Request Headers.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from functools import lru_cache
from ipaddress import ip_address
from typing import Final
from urllib.parse import urlsplit

from kc_otel._extras import extra
from kc_otel.serve.access.access_file import AccessFile, Role
from kc_otel.serve.api.shapes import MAY_READ_PROMPTS, PUBLIC, SIGNER, problem

with extra("serve", "the evaluator"):
    from starlette.datastructures import Headers
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

_log: Final = logging.getLogger(__name__)
_READ_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_MAX_BODY_SECONDS: Final = 30.0
"""Seconds that a body may take once its headers are there."""
_DIAGNOSES: Final = re.compile(r"/api/v1/incidents/[^/]+/diagnoses")
_PUBLIC_PATHS: Final = PUBLIC | {"/handbook"}
_PUBLIC_BELOW: Final = ("/handbook/", "/page/")
_OWN_PAGE: Final = frozenset({"none", "same-origin"})
"""Values of `Sec-Fetch-Site` of a request that our own page, or a person, has made."""
_UNSPECIFIED: Final = frozenset({"", "*"})


class OwnSite:
    """Refuses requests for a name that is not the evaluator's (421), and changes that another site asks for (403).

    `origin` is the host and port by which people reach it through a proxy; empty for none.
    """

    def __init__(self, app: ASGIApp, names: HostNames, origin: str = "") -> None:
        self._app, self._names, self._origin = app, names, origin

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or hand it on."""
        await (self._refusal(scope) or self._app)(scope, _prompt(receive), send)

    def _refusal(self, scope: Scope) -> ASGIApp | None:
        headers = Headers(scope=scope)
        host = headers.get("host", "").lower()
        if host not in self._names:
            return problem(421, f"this evaluator is not known as {host[:80]!a}; start it with --allowed-host NAME")
        if scope["method"] in _READ_METHODS:
            return None
        origin = headers.get("origin")
        if origin is None and headers.get("sec-fetch-site", "none") in _OWN_PAGE:
            return None
        if origin is not None and _netloc(origin) in {host, self._origin} - {""}:
            return None
        return _of_another_site()


class GuardedSite:
    """Authenticates callers and checks their roles; refusals are counted with transport `api`."""

    def __init__(self, access: AccessFile, site: ASGIApp, counts: Counter[tuple[str, str]]) -> None:
        self._access, self._site, self._counts = access, site, counts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or hand it on."""
        path, reading = scope["path"], scope["method"] in _READ_METHODS
        if path in _PUBLIC_PATHS or path.startswith(_PUBLIC_BELOW):
            await self._site(scope, receive, send)
            return
        headers = Headers(scope=scope)
        authorization = headers.get("authorization", "")
        caller = self._access.bearer(authorization)
        if caller is None and (caller := self._access.password(authorization)) is not None:
            link = path == "/" and headers.get("sec-fetch-mode") == "navigate"
            if headers.get("sec-fetch-site", "none") not in _OWN_PAGE and not link:
                self._counts["api", "forbidden"] += 1
                await _of_another_site()(scope, receive, send)
                return
            caller = caller if Role.READ in caller.may else None  # the browser asks for another one
        if caller is None:
            self._counts["api", "unauthenticated"] += 1
            said = (
                "authentication required: send Authorization: Bearer and a token (kc-otel: KC_OTEL_TOKEN); a browser "
                "asks for it as the password of any user name"
            )
            asked = {"WWW-Authenticate": 'Basic realm="kc-otel", charset="UTF-8"'}
            await problem(401, said, asked)(scope, receive, send)
            return
        role = Role.READ if reading else Role.ACT
        enough = {role, Role.DIAGNOSE} if not reading and _DIAGNOSES.fullmatch(path) else {role}
        if caller.may.isdisjoint(enough):
            self._counts["api", "forbidden"] += 1
            _log.warning("%s may not %s: %s %s is refused", caller.name, role, scope["method"], ascii(path[:200]))
            said = f"the token of {caller.name} lacks the role for this; its entry needs may: [{role}]"
            await problem(403, said)(scope, receive, send)
            return
        signing, reading_prompts = SIGNER.set(caller.name), MAY_READ_PROMPTS.set(Role.PROMPTS in caller.may)
        try:
            await self._site(scope, receive, send)
        finally:
            SIGNER.reset(signing)
            MAY_READ_PROMPTS.reset(reading_prompts)


class HostNames:
    """Names that are ours. Addresses are, for no page can have one of ours as its own name; so is `localhost`.

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
        with suppress(ValueError):
            return name in self._names or bool(ip_address(name))
        return False


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


def _of_another_site() -> ASGIApp:
    return problem(403, "another site's page requested this; use the evaluator's own page, or kc-otel")


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


def _plain(name: str) -> str:
    return name.lower().strip("[]").rstrip(".")
