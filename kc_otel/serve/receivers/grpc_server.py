"""OTLP over gRPC, on the event loop of the caller.

gRPC is unary calls on HTTP/2 here: whether a path, an encoding, a length, a sender are taken is decided before a
message is read, and each refusal is a status with a message, as gRPC and OTLP have it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status

from kc_otel.judge.otlp.request_errors import BadRequestError, BindError, InternalError, ReceiveError, ThrottledError
from kc_otel.judge.otlp.request_limits import Limits
from kc_otel.judge.otlp.signals import SIGNALS
from kc_otel.judge.otlp.sink import RequestCounts, TelemetrySink
from kc_otel.serve.access.access_file import Caller
from kc_otel.serve.access.senders import Senders
from kc_otel.serve.access.tls import Tls
from kc_otel.serve.listening import listen
from kc_otel.serve.receivers.decoding import decoded
from kc_otel.serve.receivers.fair_turns import FairTurns
from kc_otel.serve.receivers.grpc_call import Call, seconds_of
from kc_otel.serve.receivers.http2_connection import Http2Connection
from kc_otel.serve.receivers.http2_headers import status
from kc_otel.serve.receivers.http2_stream import Stream
from kc_otel.serve.receivers.in_turns import in_turns
from kc_otel.serve.receivers.reading import LONG, Body, ReadingPlaces, Room, TooSlowError

__all__ = ["GrpcServer", "retry_info", "start_grpc"]

_log: Final = logging.getLogger(__name__)
_USUAL: Final = 4317
_BACKLOG: Final = 2048
_NAMES: Final = tuple(f"/{signal.service}/Export" for signal in SIGNALS)
_METHODS: Final = {name.encode(): signal for name, signal in zip(_NAMES, SIGNALS, strict=True)}
_ENCODINGS: Final = {b"": "", b"identity": "", b"gzip": "gzip", b"deflate": "deflate"}
_CONTENT_TYPES: Final = (b"application/grpc", b"application/grpc+proto")
_LONGEST_FAREWELL: Final = 1.0


class _UnknownMethodError(ReceiveError):
    code = 12
    outcome = "not_found"


class _UnknownEncodingError(ReceiveError):
    code = 12
    outcome = "unsupported_media"


class _DeadlineError(TooSlowError):
    """The time that the sender gave it has passed."""


@dataclass(frozen=True, slots=True)
class GrpcServer:
    """A listening server.

    Attributes:
        host: Address that it listens on.
        port: Port that it listens on; the one the system chose when 0 was asked for.
    """

    host: str
    port: int
    _server: asyncio.Server
    _connections: set[Http2Connection]
    _receiver: _Receiver

    async def stop(self, grace: float | None = None) -> None:
        """Refuse new connections at once, and wait up to `grace` seconds for the requests that are running."""
        self._server.close()
        for connection in list(self._connections):
            connection.go_away(at_once=not grace)
        await self._gone(grace or 0.0)
        await self._receiver.cancel()
        for connection in list(self._connections):
            connection.go_away(at_once=True)
        await self._gone(_LONGEST_FAREWELL)
        for connection in list(self._connections):
            connection.abort()

    async def _gone(self, seconds: float) -> None:
        if seconds and self._connections:
            await asyncio.wait([one.closed for one in self._connections], timeout=seconds)


async def start_grpc(
    sink: TelemetrySink,
    host: str = "127.0.0.1",
    port: int = _USUAL,
    limits: Limits | None = None,
    counts: RequestCounts | None = None,
    senders: Senders | None = None,
    tls: Tls | None = None,
    connections: int = 4096,
    turns: FairTurns | None = None,
    room: Room | None = None,
) -> GrpcServer:
    """Listen for metrics, traces and logs; the default address is reachable from this machine only.

    Args:
        sink: Takes what arrives.
        host: Address or name to listen on.
        port: Port; 0 for any free one.
        limits: What is accepted.
        counts: Counted into, transport `grpc`.
        senders: Who may send; None for anybody.
        tls: What to show and ask for; None speaks without TLS.
        connections: How many there may be at a time; the oldest is closed when there would be more.
        turns: Shared with other ports; None for turns of its own.
        room: Shared with other ports; None for room of its own.

    Raises:
        BindError: If the address cannot be listened on.
    """
    try:
        sock = listen(host, port, "OTLP/gRPC", connections)
    except BindError:
        name = f"[{host}]" if ":" in host else host
        msg = (
            f"cannot listen for OTLP/gRPC on {name}:{port}: the port is taken, or the address is not this machine's; "
            f"stop the other process{' (an OpenTelemetry Collector listens there too)' if port == _USUAL else ''} "
            "or choose another port"
        )
        raise BindError(msg) from None
    limits, counts, senders = limits or Limits(), counts or RequestCounts(), senders or Senders()
    receiver = _Receiver(sink, limits, counts, senders, turns or FairTurns(), room or Room())
    made: set[Http2Connection] = set()
    server = await asyncio.get_running_loop().create_server(
        lambda: Http2Connection(receiver.accept, made),
        sock=sock,
        backlog=_BACKLOG,
        ssl=None if tls is None else tls.listening_http2,
        ssl_handshake_timeout=None if tls is None else Http2Connection.seconds,
    )
    return GrpcServer(host, sock.getsockname()[1], server, made, receiver)


def retry_info(error: ThrottledError) -> tuple[tuple[str, bytes], ...]:
    """Trailers that ask the sender to wait.

    The specification has RetryInfo among the details of a google.rpc.Status; the Python SDK's exporter reads it only
    from a trailer of its own. Both are sent.
    """
    nanos = round(error.retry_after * 1e9)
    info = RetryInfo(retry_delay=Duration(seconds=nanos // 10**9, nanos=nanos % 10**9))
    detail = AnyMessage()
    detail.Pack(info)
    said = Status(code=error.code, message=str(error), details=[detail])
    return (
        ("grpc-status-details-bin", said.SerializeToString()),
        ("google.rpc.retryinfo-bin", info.SerializeToString()),
    )


class _Receiver:
    """Answers the calls of all connections."""

    def __init__(
        self,
        sink: TelemetrySink,
        limits: Limits,
        counts: RequestCounts,
        senders: Senders,
        turns: FairTurns,
        room: Room,
    ) -> None:
        self._sink, self._limits, self._counts, self._senders, self._turns = sink, limits, counts, senders, turns
        self._places, self._room = ReadingPlaces(limits, room), room
        self._loop = asyncio.get_running_loop()
        self._running: set[asyncio.Task[None]] = set()

    def accept(self, stream: Stream, headers: dict[bytes, bytes]) -> Call | None:
        """A call, by its headers; None if it is answered already: what is not gRPC is told so in HTTP's words."""
        if headers[b":method"] != b"POST":
            stream.answer(status(405))
            return None
        if headers.get(b"content-type", b"").partition(b";")[0].strip() not in _CONTENT_TYPES:
            self._counts.add("grpc", "unsupported_media")
            stream.answer(status(415))
            return None
        path, encoding = headers[b":path"], headers.get(b"grpc-encoding", b"")
        signal, known, timeout = _METHODS.get(path), _ENCODINGS.get(encoding), None
        error: ReceiveError | None = None
        if signal is None:
            error = _UnknownMethodError(f"no such method; this port has {', '.join(_NAMES)}")
        elif known is None:
            error = _UnknownEncodingError(
                f"grpc-encoding {encoding[:40]!r} is not known here; use gzip, deflate or none"
            )
        try:
            timeout = seconds_of(headers[b"grpc-timeout"]) if b"grpc-timeout" in headers else None
        except BadRequestError as wrong:
            error = error or wrong
        authorization = headers.get(b"authorization", b"").decode("latin-1")
        call = Call(stream, signal, known or "", timeout, authorization, self._begin, self._limits)
        if error is not None:
            call.fail(error)
        return call

    async def cancel(self) -> None:
        """End what is running."""
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def _begin(self, call: Call) -> None:
        call.task = task = self._loop.create_task(self._answer(call))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _answer(self, call: Call) -> None:
        began = time.perf_counter()
        try:
            answer, outcome = await self._in_time(call)
        except ReceiveError as error:
            self._refuse(call, error, began)
        except asyncio.CancelledError:
            self._counts.add("grpc", "disconnected")
            call.refuse(14, "the evaluator stops")
            raise
        except Exception:  # noqa: BLE001 - the sender is told, and the others are still served
            _log.exception("a request could not be answered")
            self._refuse(call, InternalError("the receiver failed on this request; its log has the cause"), began)
        else:
            self._counts.add("grpc", outcome, began)
            call.answer(answer.SerializeToString())

    def _refuse(self, call: Call, error: ReceiveError, began: float) -> None:
        self._counts.add("grpc", error.outcome, began)
        call.refuse(error.code, str(error), retry_info(error) if isinstance(error, ThrottledError) else ())

    async def _in_time(self, call: Call) -> tuple[Any, str]:
        if call.timeout is None:
            return await self._taken(call)
        deadline = asyncio.timeout(call.timeout)
        try:
            async with deadline:
                return await self._taken(call)
        except TimeoutError:
            if deadline.expired():
                raise _DeadlineError("the time that the sender gave the request has passed") from None
            raise

    async def _taken(self, call: Call) -> tuple[Any, str]:
        sender = self._senders.known(call.authorization)
        if call.is_there:
            return await self._of(call, await call.message(), sender)
        async with self._arriving(call) as body:
            return await self._of(call, body, sender)

    async def _of(self, call: Call, body: bytes, sender: Caller) -> tuple[Any, str]:
        signal = call.signal
        assert signal is not None  # else there is no message of it

        async def decode(plain: bytes) -> Any:
            reader = self._sink if self._senders.anybody else None
            found = await decoded(reader, plain, signal, self._limits, self._turns.elsewhere)
            return self._senders.admit(sender, found)

        turns, peer = self._turns, call.stream.peer
        return await in_turns(turns, peer, body, call.encoding, decode, self._sink, signal, self._limits, "grpc")

    @asynccontextmanager
    async def _arriving(self, call: Call) -> AsyncIterator[bytes]:
        """A call's message. One that is longer than what is sent unasked has room first, and is asked for then."""
        peer = call.stream.peer
        async with AsyncExitStack() as held:
            async with self._places.taken(peer):
                size = await call.size()
                body = await call.message() if size <= LONG else None
            if body is None:
                await held.enter_async_context(self._room.kept(size, peer))
                async with self._places.taken(peer, Body(size, call.arrived, call.message)):
                    body = await call.message()
            yield body
