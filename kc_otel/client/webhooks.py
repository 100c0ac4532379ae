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

Answer 2xx to accept a message and 410 to receive no more. After 400, 413, 415 or 422 this message is sent again only
once the endpoint's credentials have changed or the evaluator has restarted; after any other answer, or none, it is
repeated with longer and longer pauses. A message can arrive twice, with the same `webhook-id`.

`body["alerts"]` is what Alertmanager would send; `body["kernelContract"]` holds the contract and, in `cells`, the
numbers of each alert's clause in the same order.

Signatures are those of Standard Webhooks 1.0.0, "Verifying webhook authenticity": `webhook-id` (stable across retries),
`webhook-timestamp` (of this attempt, unix seconds) and `webhook-signature`, a space-separated list of
`v1,base64(HMAC-SHA256(id.timestamp.body))`, one per secret while secrets are rotated.

    WebhookError
    ├── SecretError              the secret itself is wrong: fix the configuration
    └── VerificationError        do not trust this request: answer 401
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import re
import secrets as random_secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

__all__ = ["Secret", "SecretError", "VerificationError", "WebhookError", "new_secret", "sign", "verify"]

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
