"""An answer that a reader already has is not sent again: entity tags on everything that is read, RFC 9110, 13.1.2."""

from __future__ import annotations

import hashlib

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["EntityTags"]


class EntityTags:
    """Middleware: the answer to a GET has its content's hash as its tag, and is 304 for who names that tag.

    The tag is weak, since the same content may be compressed on its way. What comes in parts passes as it is.

    Args:
        app: What answers.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http" or scope["method"] != "GET":
            await self._app(scope, receive, send)
            return
        known = {tag.strip() for tag in Headers(scope=scope).get("if-none-match", "").split(",")}
        held: list[Message] = []

        async def tagged(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] == 200:
                held.append(message)
                return
            if held:
                start = held.pop()
                if not message.get("more_body", False):
                    message = _tag(start, message, known)
                await send(start)
            await send(message)

        await self._app(scope, receive, tagged)


def _tag(start: Message, body: Message, known: set[str]) -> Message:
    """The body, or none where the reader knows it; the beginning of the answer is changed to say so."""
    tag = f'W/"{hashlib.sha256(body.get("body", b"")).hexdigest()[:16]}"'
    headers = MutableHeaders(raw=start["headers"])
    headers["ETag"] = tag
    headers.setdefault("Cache-Control", "no-cache")
    if tag not in known:
        return body
    start["status"] = 304
    del headers["Content-Length"], headers["Content-Type"]
    return {**body, "body": b""}
