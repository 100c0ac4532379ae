"""OTLP over HTTP: POST /v1/metrics, /v1/traces, /v1/logs, in protobuf or JSON, as bare ASGI.

A failure is a google.rpc.Status in the request's own encoding, with a google.rpc.BadRequest for bad data. The sender is
authenticated before the body is read, and a long body is read once the budget has room for it.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

from google.rpc.error_details_pb2 import BadRequest
from google.rpc.status_pb2 import Status

from kc_otel._extras import extra
from kc_otel.judge.otlp.requests import (
    SIGNALS,
    BadRequestError,
    ReceiveError,
    ThrottledError,
    UnauthenticatedError,
    UnsupportedMediaError,
    to_json,
)
from kc_otel.serve.access.access_file import check_sender
from kc_otel.serve.access.site_guard import HostNames
from kc_otel.serve.receivers.request_taker import HeldBytes, RequestTaker

with extra("serve", "the evaluator"):
    from starlette.datastructures import Headers
    from starlette.responses import Response
    from starlette.types import Receive, Scope, Send

_PROTOBUF: Final = "application/x-protobuf"
_JSON: Final = "application/json"
_ROUTES: Final = {signal.path: signal for signal in SIGNALS}
_DRAINED_LIMITS: Final = 4
"""Limits' worth of a refused body that is still read, so that the sender gets to see why it was refused."""
_LENGTH_DIGITS: Final = 15
_LONG_BYTES: Final = 1024 * 1024
"""Longest declared body that is read at once; a recorder's messages have a fiftieth of it."""


class _TooSlowError(ThrottledError):
    """A request did not arrive in time; of a 408, which HTTP has for it, OTLP's exporters do not send it again."""

    outcome = "too_slow"


class _NotFoundError(ReceiveError):
    http_status = 404
    code = 5
    outcome = "not_found"


class _NotAllowedError(ReceiveError):
    http_status = 405
    code = 12
    outcome = "not_allowed"


class _MisdirectedError(ReceiveError):
    http_status = 421
    code = 7
    outcome = "misdirected"


class _DisconnectedError(Exception):
    """The sender hung up; there is nobody to answer."""


class HttpReceiver:
    """The ASGI application; senders may call it by `names`, None for any. Transport `http` is counted."""

    def __init__(self, taker: RequestTaker, counts: Counter[tuple[str, str]], names: HostNames | None) -> None:
        self._taker, self._counts, self._names = taker, counts, names
        self._limits = taker.limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer an HTTP request."""
        headers = Headers(scope=scope)
        media = headers.get("content-type", "").partition(";")[0].strip().lower()
        extra: dict[str, str] = {}
        try:
            with self._taker.budget.held() as held:
                message, outcome = await self._handle(scope, headers, media, receive, held)
            status = 200
        except ReceiveError as error:
            status, message, outcome = error.http_status, _status(error), error.outcome
            extra = _headers_of(error)
        except _DisconnectedError:
            self._counts["http", "disconnected"] += 1
            return
        self._counts["http", outcome] += 1
        if media == _PROTOBUF:
            body = message.SerializeToString()
        else:  # what could not be understood at all is answered in the encoding that a person can read
            media, body = _JSON, to_json(message)
        await Response(body, status, extra, media)(scope, receive, send)

    async def _handle(
        self, scope: Scope, headers: Mapping[str, str], media: str, receive: Receive, held: HeldBytes
    ) -> tuple[Any, str]:
        if self._names is not None and (host := headers.get("host", "")) not in self._names:
            raise _MisdirectedError(f"this evaluator is not known as {host[:80]!a}; start it with --allowed-host NAME")
        check_sender(self._taker.access, headers.get("authorization", ""))
        path = scope["path"]
        signal = _ROUTES.get(path)
        if signal is None:
            raise _NotFoundError(f"no such path; OTLP/HTTP is served at {', '.join(_ROUTES)}")
        if scope["method"] != "POST":
            raise _NotAllowedError(f"{path} takes POST requests")
        if media not in {_PROTOBUF, _JSON}:
            raise UnsupportedMediaError(f"content type {media[:80]!r} is not OTLP's; use {_PROTOBUF} or {_JSON}")
        body = await self._body(headers, receive, held)
        encoding = headers.get("content-encoding", "")
        return await self._taker.take(signal, body, encoding, "http", json=media == _JSON)

    async def _body(self, headers: Mapping[str, str], receive: Receive, held: HeldBytes) -> bytes:
        declared, reserved = headers.get("content-length", ""), False
        if declared.isascii() and declared.isdecimal():
            if len(declared) > _LENGTH_DIGITS or int(declared) > self._limits.max_bytes * _DRAINED_LIMITS:
                raise self._limits.too_large()
            if reserved := _LONG_BYTES < int(declared) <= self._limits.max_bytes:
                await held.add_soon(int(declared))
        try:
            async with asyncio.timeout(self._limits.read_timeout):
                return await self._read(receive, None if reserved else held)
        except TimeoutError:
            raise _TooSlowError("the request did not arrive in time", self._limits.retry_after) from None

    async def _read(self, receive: Receive, counted: HeldBytes | None) -> bytes:
        limit, arrived, more = self._limits.max_bytes, 0, True
        parts: list[bytes] = []
        while more and arrived <= limit * _DRAINED_LIMITS:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise _DisconnectedError
            part: bytes = message.get("body", b"")
            arrived += len(part)
            more = message.get("more_body", False)
            if arrived <= limit:
                if counted is not None:
                    counted.add(len(part))
                parts.append(part)
            else:
                parts.clear()
        if arrived > limit:
            raise self._limits.too_large()
        return parts[0] if len(parts) == 1 else b"".join(parts)


def _status(error: ReceiveError) -> Any:
    status = Status(code=error.code, message=str(error))
    if isinstance(error, BadRequestError):
        violation = BadRequest.FieldViolation(description=str(error))
        status.details.add().Pack(BadRequest(field_violations=[violation]))
    return status


def _headers_of(error: ReceiveError) -> dict[str, str]:
    if isinstance(error, ThrottledError):
        return {"retry-after": str(math.ceil(error.retry_after))}
    if isinstance(error, _NotAllowedError):
        return {"allow": "POST"}
    return {"www-authenticate": "Bearer"} if isinstance(error, UnauthenticatedError) else {}
