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
numbers of each alert's clause in the same order. The same receiver accepts the messages of Alertmanager about a
contract's generated alerts: `bearer` is the token of its `http_config.authorization`.

Signatures are those of Standard Webhooks 1.0.0, "Verifying webhook authenticity": `webhook-id` (stable across retries),
`webhook-timestamp` (of this attempt, unix seconds) and `webhook-signature`, a space-separated list of
`v1,base64(HMAC-SHA256(id.timestamp.body))`, one per secret while secrets are rotated.

    WebhookError
    ├── SecretError              the secret itself is wrong: fix the configuration
    └── VerificationError        do not trust this request: answer 401
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import inspect
import json
import re
import secrets as random_secrets
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

__all__ = [
    "Secret",
    "SecretError",
    "VerificationError",
    "WebhookError",
    "new_secret",
    "receiver",
    "sign",
    "verify",
]

_Message = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[_Message]]
_Send = Callable[[_Message], Awaitable[None]]

_PREFIX: Final = "whsec_"
_TIMESTAMP: Final = re.compile(r"[0-9]{1,12}")
_MESSAGE_ID: Final = re.compile(r"[A-Za-z0-9_-]{1,128}")
_MAX_SIGNATURES: Final = 32


class WebhookError(Exception):
    """Base of everything that signing and verifying raise."""


class SecretError(WebhookError):
    """A secret is not `whsec_` and base64 of 24 to 64 bytes. The message never contains the secret."""


class VerificationError(WebhookError):
    """The request cannot be trusted; the message says why, and may be sent back."""


@dataclass(frozen=True, slots=True)
class Secret:
    """A signing secret, 24 to 64 random bytes, which never show in a repr, a log or an error."""

    key: bytes = field(repr=False)

    @classmethod
    def parse(cls, text: str) -> Secret:
        """The secret in its serialised form, `whsec_` and base64; the prefix and the padding may be missing.

        Raises:
            SecretError: If it is not base64, or not of 24 to 64 bytes.
        """
        encoded = text.strip().removeprefix(_PREFIX)
        try:
            key = base64.b64decode(encoded + "=" * (-len(encoded) % 4), validate=True)
        except (binascii.Error, ValueError):
            raise SecretError("the secret is not base64; write whsec_ and the base64 of 24 to 64 bytes") from None
        if not 24 <= len(key) <= 64:
            raise SecretError(f"the secret has {len(key)} bytes; Standard Webhooks asks for 24 to 64 random ones")
        return cls(key)


def new_secret() -> str:
    """A fresh secret of 32 random bytes, in its serialised form."""
    return _PREFIX + base64.b64encode(random_secrets.token_bytes(32)).decode()


def sign(secrets: Sequence[Secret], message_id: str, body: bytes, *, now: float) -> dict[str, str]:
    """The three headers of one attempt.

    Args:
        secrets: One signature is made with each; two while a secret is rotated.
        message_id: Stays the same when the message is sent again.
        body: The very bytes that are sent.
        now: Unix time of this attempt, seconds.

    Raises:
        SecretError: If there is no secret.
        ValueError: If the message id has other characters than letters, digits, `_` and `-`.
    """
    if not secrets:
        raise SecretError("there is no secret to sign with; give at least one")
    if not _MESSAGE_ID.fullmatch(message_id):
        raise ValueError(f"message id {message_id!r} is not made of 1 to 128 letters, digits, _ and -")
    timestamp = str(int(now))
    signatures = (base64.b64encode(_digest(secret, message_id, timestamp, body)).decode() for secret in secrets)
    return {
        "webhook-id": message_id,
        "webhook-timestamp": timestamp,
        "webhook-signature": " ".join(f"v1,{signature}" for signature in signatures),
    }


def verify(
    secrets: str | Secret | Sequence[str | Secret],
    headers: Mapping[str, str],
    body: bytes | str,
    *,
    tolerance: float = 300.0,
    now: float | None = None,
) -> Any:
    """Return the body of a webhook that was signed recently with one of the secrets.

    Args:
        secrets: One secret, or several while it is rotated; `whsec_...` text or `Secret`.
        headers: Headers of the request; upper and lower case do not matter.
        body: The body exactly as received. Parsing it and serialising it again breaks the signature.
        tolerance: Seconds by which the attempt's timestamp may differ from `now`.
        now: Unix time, seconds; the system's when None.

    Returns:
        The parsed JSON. `webhook-id` is not remembered: a message can arrive twice, so use it as the key when
        handling a message twice would hurt.

    Raises:
        VerificationError: If the request cannot be trusted.
        SecretError: If a secret is malformed, or there is none.
    """
    keys = [secrets] if isinstance(secrets, str | Secret) else list(secrets)
    parsed = [key if isinstance(key, Secret) else Secret.parse(key) for key in keys]
    if not parsed:
        raise SecretError("there is no secret to verify with; give at least one")
    lowered = {name.lower(): value for name, value in headers.items()}
    message_id, timestamp, signature = (
        _header(lowered, f"webhook-{name}") for name in ("id", "timestamp", "signature")
    )
    if not message_id.isprintable():  # neither is a lone surrogate
        raise VerificationError("webhook-id has characters that no header carries")
    if not _TIMESTAMP.fullmatch(timestamp):
        raise VerificationError("webhook-timestamp is not a unix time in whole seconds")
    late = (time.time() if now is None else now) - int(timestamp)
    if abs(late) > tolerance:
        side = "old" if late > 0 else "new"
        raise VerificationError(f"the attempt is {abs(late):.0f} s too {side}; {tolerance:.0f} s are allowed")
    try:
        raw = body.encode() if isinstance(body, str) else bytes(body)
    except UnicodeEncodeError:
        raise VerificationError(
            "the body has characters that no request can carry; verify the bytes as received"
        ) from None
    expected = [_digest(secret, message_id, timestamp, raw) for secret in parsed]
    given = [_decoded(part) for part in signature.split(" ")[:_MAX_SIGNATURES]]
    # Every pair is compared, so that the time taken says nothing about which one matched.
    if not sum(hmac.compare_digest(ours, theirs) for ours in expected for theirs in given):
        raise VerificationError(
            "no signature matches; check that sender and receiver share the secret and the raw body"
        )
    return parsed_body(raw)


def parsed_body(raw: bytes) -> Any:
    """Parse a body that is trusted; VerificationError if it is not JSON, or nests deeper than can be read."""
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):  # the one is not JSON, the other nests too deeply
        raise VerificationError("the body is not JSON that can be read") from None


def _digest(secret: Secret, message_id: str, timestamp: str, body: bytes) -> bytes:
    return hmac.new(secret.key, f"{message_id}.{timestamp}.".encode() + body, hashlib.sha256).digest()


def _header(headers: Mapping[str, str], name: str) -> str:
    value = headers.get(name, "")
    if not value:
        raise VerificationError(f"header {name} is missing")
    return value


def _decoded(part: str) -> bytes:
    version, _, encoded = part.partition(",")
    if version != "v1":
        return b""
    try:
        return base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):
        return b""


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
            Alertmanager sends no ids.
        bearer: Token of Alertmanager's `http_config.authorization`; None to accept nothing from Alertmanager.

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
    ) -> None:
        self._secrets = [Secret.parse(text) for text in ([secret] if isinstance(secret, str) else secret or ())]
        self._bearer = bearer
        if not (self._secrets or bearer):
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
        if self._bearer and "webhook-signature" not in headers:
            given = headers.get("authorization", "").encode(errors="surrogatepass")
            if not hmac.compare_digest(given, f"Bearer {self._bearer}".encode()):
                raise VerificationError("the bearer token is missing or does not match")
            return parsed_body(raw)
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
