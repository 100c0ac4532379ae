"""Receiving kc-otel's webhooks: signatures checked, in a service that knows nothing else of kc-otel.

A receiver with Starlette (FastAPI's `Request` is the same):

    from starlette.applications import Starlette
    from starlette.responses import Response
    from starlette.routing import Route
    from kc_otel.webhooks import VerificationError, verify

    async def alerts(request):
        try:
            body = verify(SECRET, request.headers, await request.body())
        except VerificationError as error:
            return Response(str(error), 401)
        handle(body)
        return Response(status_code=204)

    app = Starlette(routes=[Route("/alerts", alerts, methods=["POST"])])

`receiver(SECRET, handle)` is the same as an ASGI application, for any server, which also limits the size of requests
and calls `handle` once for a message that arrives twice. Answer 2xx when a message is taken and 410 to get no more;
400, 413, 415 and 422 refuse this one message for good, and after any other answer, or none, it comes again.

`body["alerts"]` is what Alertmanager would send; `body["kernelContract"]` holds the contract and, in `cells`, the
numbers of each alert's clause in the same order.

The errors are those of the Standard Webhooks signature:

    WebhookError
    ├── SecretError
    └── VerificationError
        ├── HeaderError
        ├── TimestampError
        ├── SignatureError
        └── BodyError
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

from kc_otel.escalation.signing import (
    BodyError,
    HeaderError,
    Secret,
    SecretError,
    SignatureError,
    TimestampError,
    VerificationError,
    WebhookError,
    new_secret,
    verify,
)

__all__ = [
    "BodyError",
    "HeaderError",
    "SecretError",
    "SignatureError",
    "TimestampError",
    "VerificationError",
    "WebhookError",
    "new_secret",
    "receiver",
    "verify",
]

_Message = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[_Message]]
_Send = Callable[[_Message], Awaitable[None]]


class receiver:  # noqa: N801 - reads as the function it is used as
    """An ASGI application that verifies webhooks and hands their bodies to `handler`.

    It answers 204 when the handler has returned, 401 to what cannot be verified, 405 to anything but POST, 413 to large
    bodies. An error of the handler reaches the server, which answers 500, and the message comes again.

    Args:
        secret: `whsec_...`, or several while it is rotated.
        handler: Called with the parsed body, on the event loop; may be `async`.
        tolerance: Seconds by which the attempt's timestamp may differ from the clock.
        max_body: Largest body, bytes.
        remember: How many ids of handled messages are remembered, so that one sent again is not handled again.

    Raises:
        SecretError: If a secret is malformed, or there is none.
    """

    def __init__(
        self,
        secret: str | Sequence[str],
        handler: Callable[[Any], Awaitable[None] | None],
        *,
        tolerance: float = 300.0,
        max_body: int = 1 << 20,
        remember: int = 4096,
    ) -> None:
        self._secrets = [Secret.parse(text) for text in ([secret] if isinstance(secret, str) else secret)]
        if not self._secrets:
            raise SecretError("there is no secret to verify with; give at least one")
        self._handler = handler
        self._tolerance = tolerance
        self._max_body = max_body
        self._remember = remember
        self._handled: OrderedDict[str, None] = OrderedDict()

    async def __call__(self, scope: _Message, receive: _Receive, send: _Send) -> None:
        """One ASGI connection."""
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
        elif scope["type"] == "http":
            await _answer(send, *await self._respond(scope, receive))
        else:
            raise RuntimeError(f"a webhook receiver speaks http, not {scope['type']}")

    async def _respond(self, scope: _Message, receive: _Receive) -> tuple[int, str]:
        if scope["method"] != "POST":
            return 405, "webhooks are POSTed"
        raw = await _body(receive, self._max_body)
        if raw is None:
            return 413, f"more than {self._max_body} bytes"
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        try:
            body = verify(self._secrets, headers, raw, tolerance=self._tolerance)
        except VerificationError as error:
            return 401, str(error)
        message_id = headers["webhook-id"]
        if message_id not in self._handled:
            result = self._handler(body)
            if inspect.isawaitable(result):
                await result
            self._handled[message_id] = None
            if len(self._handled) > self._remember:
                self._handled.popitem(last=False)
        return 204, ""


async def _body(receive: _Receive, max_body: int) -> bytes | None:
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        chunks.append(message.get("body", b""))
        size += len(chunks[-1])
        if size > max_body:
            return None
        if not message.get("more_body"):
            return b"".join(chunks)


async def _answer(send: _Send, status: int, text: str) -> None:
    headers = [(b"content-type", b"text/plain; charset=utf-8")] if text else []
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": text.encode()})


async def _lifespan(receive: _Receive, send: _Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
