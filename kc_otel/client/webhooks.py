"""Receiving kc-otel's webhooks: signatures checked, in a service that knows nothing else of kc-otel.

A receiver with Starlette (FastAPI's `Request` is the same):

    from starlette.applications import Starlette
    from starlette.responses import Response
    from starlette.routing import Route
    from kc_otel.client.webhooks import VerificationError, verify

    async def alerts(request):
        try:
            body = verify(SECRET, request.headers, await request.body())
        except VerificationError as error:
            return Response(str(error), 401)
        handle(body)
        return Response(status_code=204)

    app = Starlette(routes=[Route("/alerts", alerts, methods=["POST"])])

`receiver(SECRET, handle)` is such a receiver, an ASGI application for any server; it also limits the size of requests
and calls `handle` once for a message that arrives twice. Answer 2xx to accept a message and 410 to receive no more.
400, 413, 415 and 422 reject this message for good; after any other answer, or none, it is sent again.

`body["alerts"]` is what Alertmanager would send; `body["kernelContract"]` holds the contract and, in `cells`, the
numbers of each alert's clause in the same order. The same receiver accepts the messages of Alertmanager and Grafana
about a contract's generated alerts, once it knows how they authenticate: `bearer` for the credentials of Alertmanager's
`http_config.authorization`, `grafana_secret` for the HMAC of a Grafana contact point.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import inspect
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from typing import Any, Final

from kc_otel.client.signing import Secret, SecretError, VerificationError, WebhookError, new_secret, parsed_body, verify

__all__ = [
    "SecretError",
    "VerificationError",
    "WebhookError",
    "new_secret",
    "receiver",
    "verify",
    "verify_bearer",
    "verify_grafana",
]

_Message = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[_Message]]
_Send = Callable[[_Message], Awaitable[None]]


_GRAFANA_SIGNATURE: Final = "x-grafana-alerting-signature"
_GRAFANA_TIMESTAMP: Final = "x-grafana-alerting-timestamp"


def verify_grafana(
    secret: str, headers: Mapping[str, str], body: bytes, *, tolerance: float = 300.0, now: float | None = None
) -> Any:
    """The body of a webhook of a Grafana contact point with an HMAC secret.

    Replays are refused where the contact point's `Timestamp Header` is `X-Grafana-Alerting-Timestamp`, as
    `kc-otel generate grafana` writes it.

    Args:
        secret: The contact point's HMAC secret.
        headers: Headers of the request; upper and lower case do not matter.
        body: The body exactly as received.
        tolerance: Seconds by which the timestamp may differ from `now`.
        now: Unix time, seconds; the system's when None.

    Raises:
        VerificationError: If the request cannot be trusted.
        SecretError: If the secret is empty.
    """
    if not secret:
        raise SecretError("there is no secret to verify with; give the contact point's")
    lowered = {name.lower(): value for name, value in headers.items()}
    given = lowered.get(_GRAFANA_SIGNATURE, "")
    if not given:
        raise VerificationError(f"header {_GRAFANA_SIGNATURE} is missing")
    signed, timestamp = body, lowered.get(_GRAFANA_TIMESTAMP)
    if timestamp is not None:
        if not (timestamp.isascii() and timestamp.isdigit()) or len(timestamp) > 12:
            raise VerificationError(f"{_GRAFANA_TIMESTAMP} is not a unix time in whole seconds")
        if abs((time.time() if now is None else now) - int(timestamp)) > tolerance:
            raise VerificationError(f"the attempt's timestamp is more than {tolerance:.0f} s off")
        signed = timestamp.encode() + b":" + body
    expected = hmac.new(secret.encode(), signed, hashlib.sha256).hexdigest()
    if not hmac.compare_digest(expected.encode(), given.lower().encode(errors="surrogatepass")):
        raise VerificationError("the signature does not match; check that Grafana and receiver share the secret")
    return parsed_body(body)


def verify_bearer(token: str, headers: Mapping[str, str], body: bytes) -> Any:
    """The body of a webhook that is authenticated by `Authorization: Bearer`, as Alertmanager's can.

    Raises:
        VerificationError: If the request cannot be trusted.
        SecretError: If the token is empty.
    """
    if not token:
        raise SecretError("there is no token to verify with; give the one of http_config.authorization")
    given = next((value for name, value in headers.items() if name.lower() == "authorization"), "")
    if not given:
        raise VerificationError("header authorization is missing")
    scheme, _, credentials = given.partition(" ")
    if scheme.lower() != "bearer" or not hmac.compare_digest(
        credentials.strip().encode(errors="surrogatepass"), token.encode()
    ):
        raise VerificationError("the bearer token does not match")
    return parsed_body(body)


class receiver:  # noqa: N801 - reads as the function it is used as
    """An ASGI application that verifies webhooks and hands their bodies to `handler`.

    It answers 204 when the handler has returned, 401 to what cannot be verified, 405 to anything but POST, 413 to large
    bodies. An error of the handler reaches the server, which answers 500, and the message is sent again.

    Args:
        secret: `whsec_...`, or several while it is rotated; None to accept nothing that kc-otel sends itself.
        handler: Called with the parsed body, on the event loop; may be `async`.
        tolerance: Seconds by which the attempt's timestamp may differ from the clock.
        max_body: Largest body, bytes.
        remember: How many ids of handled messages are remembered, so that one sent again is not handled again.
            Alertmanager and Grafana send no ids.
        bearer: Token of Alertmanager's `http_config.authorization`; None to accept nothing from Alertmanager.
        grafana_secret: HMAC secret of Grafana's contact point; None to accept nothing from Grafana.

    Raises:
        SecretError: If a secret is malformed, or there is none.
    """

    def __init__(
        self,
        secret: str | Sequence[str] | None,
        handler: Callable[[Any], Awaitable[None] | None],
        *,
        tolerance: float = 300.0,
        max_body: int = 1 << 20,
        remember: int = 4096,
        bearer: str | None = None,
        grafana_secret: str | None = None,
    ) -> None:
        self._secrets = [Secret.parse(text) for text in ([secret] if isinstance(secret, str) else secret or ())]
        self._bearer = bearer
        self._grafana = grafana_secret
        if not (self._secrets or bearer or grafana_secret):
            raise SecretError("there is no secret to verify with; give at least one")
        self._handler = handler
        self._tolerance = tolerance
        self._max_body = max_body
        self._remember = remember
        self._handled: OrderedDict[str, None] = OrderedDict()
        self._handling: dict[str, asyncio.Event] = {}

    async def __call__(self, scope: _Message, receive: _Receive, send: _Send) -> None:
        """Answer an ASGI connection."""
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
            body = self._verified(headers, raw)
        except VerificationError as error:
            return 401, str(error)
        await self._handle_once(headers.get("webhook-id", ""), body)
        return 204, ""

    async def _handle_once(self, message_id: str, body: Any) -> None:
        """Deliver a message unless it was or is being delivered: a concurrent duplicate waits for the outcome."""
        while (ended := self._handling.get(message_id)) is not None:
            await ended.wait()
        if message_id in self._handled:
            return
        if message_id:
            self._handling[message_id] = asyncio.Event()
        try:
            result = self._handler(body)
            if inspect.isawaitable(result):
                await result
        finally:
            if message_id:
                self._handling.pop(message_id).set()
        if message_id:
            self._handled[message_id] = None
        if len(self._handled) > self._remember:
            self._handled.popitem(last=False)

    def _verified(self, headers: Mapping[str, str], raw: bytes) -> Any:
        if self._grafana and _GRAFANA_SIGNATURE in headers:
            return verify_grafana(self._grafana, headers, raw, tolerance=self._tolerance)
        if self._bearer and "webhook-signature" not in headers:
            return verify_bearer(self._bearer, headers, raw)
        if not self._secrets:
            raise VerificationError("the request carries no signature that this receiver knows")
        return verify(self._secrets, headers, raw, tolerance=self._tolerance)


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
