"""OTLP over HTTP: POST /v1/metrics, /v1/traces, /v1/logs, in protobuf or JSON.

It is bare ASGI, for the framework would do nothing here; mount it in one, or run it under any ASGI server. Under our
own, `HttpConnection` gives it most requests directly. Every failure is answered with a google.rpc.Status in the
request's own encoding; one of the data has a google.rpc.BadRequest among its details.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Hashable, Mapping, MutableMapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from google.rpc.error_details_pb2 import BadRequest
from google.rpc.status_pb2 import Status

from kc_otel.judge.otlp.decode import from_json, to_json
from kc_otel.judge.otlp.request_errors import (
    BadRequestError,
    ReceiveError,
    ThrottledError,
    UnauthenticatedError,
    UnsupportedMediaError,
)
from kc_otel.judge.otlp.request_limits import Limits, inflate
from kc_otel.judge.otlp.signals import SIGNALS, Signal
from kc_otel.judge.otlp.sink import RequestCounts, TelemetrySink
from kc_otel.serve.access.access_file import Caller
from kc_otel.serve.access.senders import Senders
from kc_otel.serve.host_names import HostNames
from kc_otel.serve.receivers.decoding import decoded
from kc_otel.serve.receivers.fair_turns import FairTurns
from kc_otel.serve.receivers.in_turns import in_turns
from kc_otel.serve.receivers.reading import LONG, Body, ReadingPlaces, Room

__all__ = ["DisconnectedError", "HttpAnswer", "HttpReceiver", "http_app"]

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

_PROTOBUF: Final = "application/x-protobuf"
_JSON: Final = "application/json"
_LONG_JSON: Final = 64 * 1024
"""Bytes of JSON that take some twenty milliseconds to be read."""
_ROUTES: Final = {signal.path: signal for signal in SIGNALS}
_DRAIN: Final = 4
"""Limits' worth of a refused body that is still read, so that the sender gets to see why it was refused."""

_LENGTH_DIGITS: Final = 15


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


class DisconnectedError(Exception):
    """The sender hung up; there is nobody to answer."""


def http_app(
    sink: TelemetrySink,
    limits: Limits | None = None,
    counts: RequestCounts | None = None,
    names: HostNames | None = None,
    senders: Senders | None = None,
    turns: FairTurns | None = None,
    room: Room | None = None,
) -> HttpReceiver:
    """The ASGI application.

    Args:
        sink: Takes what arrives.
        limits: What is accepted.
        counts: Counted into, transport `http`.
        names: By which senders may call it; None for any.
        senders: Who may send; None for anybody.
        turns: Shared with other ports; None for turns of its own.
        room: Shared with other ports; None for room of its own.
    """
    limits, counts, senders = limits or Limits(), counts or RequestCounts(), senders or Senders()
    return HttpReceiver(sink, limits, counts, names, senders, turns or FairTurns(), room or Room())


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """What a request is answered with.

    Attributes:
        status: HTTP's.
        headers: Names and values, lower case, with `content-length`.
        body: A message in the encoding that the headers say.
    """

    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes


class HttpReceiver:
    """Answers requests; see `http_app`."""

    def __init__(
        self,
        sink: TelemetrySink,
        limits: Limits,
        counts: RequestCounts,
        names: HostNames | None,
        senders: Senders,
        turns: FairTurns,
        room: Room,
    ) -> None:
        self._sink, self._limits, self._counts = sink, limits, counts
        self._names, self._senders = names, senders
        self._places, self._room, self._turns = ReadingPlaces(limits, room), room, turns

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """As an ASGI server calls it."""
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        if scope["type"] != "http":
            msg = f"{scope['type']} is not served here; OTLP/HTTP is plain POST requests"
            raise RuntimeError(msg)
        headers = _headers(scope)
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        body = self._body(headers, receive)
        answer = await self.answer(scope["method"], path, headers, body, scope.get("client"))
        if answer is not None:
            start = {"type": "http.response.start", "status": answer.status, "headers": list(answer.headers)}
            await send(start)
            await send({"type": "http.response.body", "body": answer.body})

    @property
    def max_bytes(self) -> int:
        """Longest body that is taken, as it was received."""
        return self._limits.max_bytes

    async def answer(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str],
        body: bytes | Body,
        connection: Hashable,
    ) -> HttpAnswer | None:
        """Take a request.

        Args:
            method: HTTP's.
            path: One of the signals' is known.
            headers: Names in lower case, and values.
            body: All of it, or what reads it; that raises `DisconnectedError` if it never comes.
            connection: Whose turn it is.

        Returns:
            The answer; None where nobody is there to be answered.
        """
        media, began = headers.get("content-type", "").partition(";")[0].strip().lower(), time.perf_counter()
        try:
            message, outcome = await self._handle(method, path, headers, media, body, connection)
        except ReceiveError as error:
            self._counts.add("http", error.outcome, began)
            extra = {"retry-after": str(math.ceil(error.retry_after))} if isinstance(error, ThrottledError) else {}
            if isinstance(error, _NotAllowedError):
                extra["allow"] = "POST"
            if isinstance(error, UnauthenticatedError):
                extra["www-authenticate"] = "Bearer"
            return _answer(error.http_status, _status(error), media, extra)
        except DisconnectedError:
            self._counts.add("http", "disconnected")
            return None
        self._counts.add("http", outcome, began)
        return _answer(200, message, media, {})

    async def _handle(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str],
        media: str,
        body: bytes | Body,
        connection: Hashable,
    ) -> tuple[Any, str]:
        if self._names is not None and (host := headers.get("host", "")) not in self._names:
            raise _MisdirectedError(f"this evaluator is not known as {host[:80]!a}; start it with --allowed-host NAME")
        sender = self._senders.known(headers.get("authorization", ""))
        signal = _ROUTES.get(path)
        if signal is None:
            raise _NotFoundError(f"no such path; OTLP/HTTP is served at {', '.join(_ROUTES)}")
        if method != "POST":
            raise _NotAllowedError(f"{path} takes POST requests")
        if media not in {_PROTOBUF, _JSON}:
            raise UnsupportedMediaError(f"content type {media[:80]!r} is not OTLP's; use {_PROTOBUF} or {_JSON}")
        async with AsyncExitStack() as held:
            if not isinstance(body, bytes):
                if body.size > LONG:
                    await held.enter_async_context(self._room.kept(body.size, connection))
                async with self._places.taken(connection, body):
                    body = await body.read()
            return await self._take(headers.get("content-encoding", ""), media, body, connection, signal, sender)

    async def _take(
        self, encoding: str, media: str, body: bytes, connection: Hashable, signal: Signal, sender: Caller
    ) -> tuple[Any, str]:
        if media == _JSON and (len(body) > _LONG_JSON or encoding):
            async with self._turns.place(len(body)):
                whole, seconds = await asyncio.to_thread(self._transcoded, body, encoding, signal)
                self._turns.cost(connection, 0, seconds)
            body, media, encoding = whole, _PROTOBUF, ""
        decode = partial(self._decoded, signal, media, sender)
        return await in_turns(self._turns, connection, body, encoding, decode, self._sink, signal, self._limits, "http")

    def _transcoded(self, body: bytes, encoding: str, signal: Signal) -> tuple[bytes, float]:
        """JSON as protobuf, and the seconds of work that it took; on a thread of its own nobody waits for it."""
        began = time.thread_time()
        request = from_json(inflate(body, encoding, self._limits), signal, self._limits)
        return request.SerializeToString(), time.thread_time() - began

    async def _decoded(self, signal: Signal, media: str, sender: Caller, plain: bytes) -> Any:
        if media == _JSON:
            return self._senders.admit(sender, from_json(plain, signal, self._limits))
        reader = self._sink if self._senders.anybody else None
        return self._senders.admit(sender, await decoded(reader, plain, signal, self._limits, self._turns.elsewhere))

    def _body(self, headers: Mapping[str, str], receive: Receive) -> Body:
        limit, arrived = self._limits.max_bytes, 0
        declared = headers.get("content-length", "")

        async def read() -> bytes:
            nonlocal arrived
            if len(declared) > _LENGTH_DIGITS or (declared.isdigit() and int(declared) > limit * _DRAIN):
                raise self._limits.too_large()
            parts: list[bytes] = []
            more = True
            while more and arrived <= limit * _DRAIN:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise DisconnectedError
                part: bytes = message.get("body", b"")
                arrived += len(part)
                more = message.get("more_body", False)
                if arrived <= limit:
                    parts.append(part)
                else:
                    parts.clear()
            if arrived > limit:
                raise self._limits.too_large()
            return b"".join(parts)

        known = len(declared) <= _LENGTH_DIGITS and declared.isdecimal() and declared.isascii()
        return Body(min(int(declared), limit) if known else limit, lambda: arrived, read)


def _status(error: ReceiveError) -> Any:
    status = Status(code=error.code, message=str(error))
    if isinstance(error, BadRequestError):
        violation = BadRequest.FieldViolation(description=str(error))
        status.details.add().Pack(BadRequest(field_violations=[violation]))
    return status


def _headers(scope: Message) -> dict[str, str]:
    return {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}


def _answer(status: int, message: Any, media: str, extra: Mapping[str, str]) -> HttpAnswer:
    if media == _PROTOBUF:
        body = message.SerializeToString()
    else:  # what could not be understood at all is answered in the encoding that a person can read
        media, body = _JSON, to_json(message)
    headers = {"content-type": media, "content-length": str(len(body)), **extra}
    return HttpAnswer(
        status, tuple((name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()), body
    )


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
