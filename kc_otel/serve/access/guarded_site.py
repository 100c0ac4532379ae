"""API and page for those who have a token.

Programs send `Authorization: Bearer`. A browser logs in at `/login`, where a form takes a token for a cookie that no
script reads and no other site sends (HttpOnly, SameSite=Strict); the cookie names a session in this process's memory,
which ends after twelve hours, with the process, and with its token. Without a token there are only whether the process
is well, the handbook, and the page's own files. Sources: RFC 6750; RFC 6265bis, 8.8; OWASP Session Management.
"""

from __future__ import annotations

import html
import logging
import re
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Final
from urllib.parse import parse_qs

from kc_otel._extras import extra
from kc_otel.serve.access.access_file import AccessFile, Caller, Role, digest_of
from kc_otel.serve.api.documented import PUBLIC, problem
from kc_otel.serve.api.people_input import MAY_READ_PROMPTS, SIGNER

with extra("serve", "the evaluator"):
    from fastapi import Response
    from fastapi.responses import HTMLResponse, RedirectResponse
    from starlette.types import ASGIApp, Receive, Scope, Send

_log: Final = logging.getLogger(__name__)


_COOKIE: Final = "kc-otel-session"
_HOST_ONLY: Final = "__Host-"
"""A browser takes a cookie with this prefix over TLS only, and from nobody but this host."""
_SESSION_SECONDS: Final = 12 * 3600.0
_MAX_SESSIONS: Final = 100
"""Of one token; a browser that logs in once more ends the oldest."""
_MAX_FORM_BYTES: Final = 4096
_DIAGNOSES: Final = re.compile(r"/api/v1/incidents/[^/]+/diagnoses")
_READ_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_PUBLIC_PATHS: Final = PUBLIC | {"/handbook"}
_PUBLIC_BELOW: Final = ("/handbook/", "/page/")
_CSP: Final = (
    "default-src 'none'; style-src 'self'; img-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
_HEADERS: Final = {
    "Content-Security-Policy": _CSP,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class GuardedSite:
    """Asks who somebody is, and lets in those whose token says so.

    Args:
        access: The tokens.
        site: The API and the page.
        counts: Refusals are counted into, transport `api`.
        secure: Whether browsers reach it by TLS only, here or at a proxy.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        access: AccessFile,
        site: ASGIApp,
        counts: Counter[tuple[str, str]],
        *,
        secure: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._access, self._site, self._counts, self._secure, self._clock = access, site, counts, secure, clock
        self._cookie = _HOST_ONLY + _COOKIE if secure else _COOKIE
        self._sessions: dict[str, tuple[str, float]] = {}
        """SHA-256 of the cookie -> that of the token, and when it ends."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or hand it on."""
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        path, method = scope["path"], scope["method"]
        if path == "/login":
            await (await self._login(method, headers, receive))(scope, receive, send)
        elif path == "/logout" and method == "POST":
            await self._logout(headers)(scope, receive, send)
        elif path in _PUBLIC_PATHS or path.startswith(_PUBLIC_BELOW):
            await self._site(scope, receive, send)
        else:
            await self._known(headers, scope, receive, send)

    async def _known(self, headers: Mapping[str, str], scope: Scope, receive: Receive, send: Send) -> None:
        caller = self._caller(headers)
        reading = scope["method"] in _READ_METHODS
        if caller is None:
            self._counts["api", "unauthenticated"] += 1
            said = "authentication required: send Authorization: Bearer and a token (kc-otel: KC_OTEL_TOKEN), or /login"
            unknown: Response = problem(401, said, {"WWW-Authenticate": "Bearer"})
            if scope["path"] == "/" and reading:
                unknown = RedirectResponse("/login", 303, headers=_HEADERS)
            await unknown(scope, receive, send)
            return
        role = Role.READ if reading else Role.ACT
        enough = {role, Role.DIAGNOSE} if not reading and _DIAGNOSES.fullmatch(scope["path"]) else {role}
        if caller.roles.isdisjoint(enough):
            self._counts["api", "forbidden"] += 1
            path = ascii(scope["path"][:200])
            _log.warning("%s may not %s: %s %s is refused", caller.name, role, scope["method"], path)
            await problem(403, f"the token of {caller.name} lacks the role for this; its entry needs may: [{role}]")(
                scope, receive, send
            )
            return
        signing, reading_prompts = SIGNER.set(caller.name), MAY_READ_PROMPTS.set(Role.PROMPTS in caller.roles)
        try:
            await self._site(scope, receive, send)
        finally:
            SIGNER.reset(signing)
            MAY_READ_PROMPTS.reset(reading_prompts)

    def _caller(self, headers: Mapping[str, str]) -> Caller | None:
        if "authorization" in headers:
            return self._access.bearer(headers["authorization"])
        token, ends = self._sessions.get(digest_of(_cookie(headers, self._cookie)), ("", 0.0))
        return self._access.caller(token) if self._clock() < ends else None

    async def _login(self, method: str, headers: Mapping[str, str], receive: Receive) -> Response:
        if method == "GET":
            return _form(self._caller(headers))
        if method != "POST":
            return problem(405, "/login takes GET and POST", {"Allow": "GET, POST"})
        token = _token_of(await _body(receive))
        caller = self._access.bearer(f"Bearer {token}") if token else None
        if caller is None or not caller.roles & {Role.READ, Role.ACT}:
            self._counts["api", "unauthenticated"] += 1
            return _form(None, "This is not a token with the role read.", 401)
        value = secrets.token_urlsafe(32)
        self._sessions[digest_of(value)] = (caller.digest, self._clock() + _SESSION_SECONDS)
        for session in [key for key, (whose, _) in self._sessions.items() if whose == caller.digest][:-_MAX_SESSIONS]:
            del self._sessions[session]
        _log.info("%s has logged in", caller.name)
        answer = RedirectResponse("/", 303, headers=_HEADERS)
        answer.set_cookie(
            self._cookie,
            value,
            max_age=int(_SESSION_SECONDS),
            path="/",
            httponly=True,
            samesite="strict",
            secure=self._secure,
        )
        return answer

    def _logout(self, headers: Mapping[str, str]) -> Response:
        self._sessions.pop(digest_of(_cookie(headers, self._cookie)), None)
        answer = RedirectResponse("/login", 303, headers=_HEADERS)
        answer.delete_cookie(self._cookie, path="/", httponly=True, samesite="strict", secure=self._secure)
        return answer


def _cookie(headers: Mapping[str, str], name: str) -> str:
    """The session that a browser names; none where it names two, of which another port of this host has set one.

    Python's own `http.cookies` is not asked: before 3.11.10 and 3.12.6 a header of 100 KB keeps it busy for a minute.
    """
    pairs = (pair.partition("=") for pair in headers.get("cookie", "").split(";"))
    found = {value.strip() for key, _, value in pairs if key.strip() == name}
    return found.pop() if len(found) == 1 else ""


async def _body(receive: Receive) -> bytes:
    """Largest size of the form; a larger body is rejected."""
    body, more = b"", True
    while more and len(body) <= _MAX_FORM_BYTES:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return body if len(body) <= _MAX_FORM_BYTES else b""


def _token_of(body: bytes) -> str:
    try:
        return parse_qs(body.decode("ascii"), max_num_fields=4).get("token", [""])[0].strip()
    except ValueError:
        return ""


def _form(caller: Caller | None, said: str = "", status: int = 200) -> Response:
    if caller is None:
        text = (
            f'<p role="alert">{html.escape(said)}</p>'
            * bool(said)
            + '<form method="post" action="/login"><p><label for="token">Token</label></p><p>'
            '<input id="token" name="token" type="password" autocomplete="current-password" required autofocus> '
            "<button>Log in</button></p></form>"
        )
    else:
        text = (
            f'<p>You are {html.escape(caller.name)}. <a href="/">What is broken now</a></p>'
            '<form method="post" action="/logout"><button>Log out</button></form>'
        )
    return HTMLResponse(_LOGIN_PAGE.format(text), status, headers=_HEADERS)


_LOGIN_PAGE: Final = """\
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>Log in - kc-otel</title>
<link rel="icon" href="/page/icon.svg" type="image/svg+xml">
<link rel="stylesheet" href="/page/page.css">
<main><h1>kc-otel</h1>{}</main>
</html>
"""
