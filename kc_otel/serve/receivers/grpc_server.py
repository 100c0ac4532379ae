"""OTLP over gRPC, by `grpc.aio` on the caller's event loop: generic handlers that receive bytes.

grpcio takes a whole message once one is asked for, up to the limit, so each handler begins before its message is read.
Messages that are there at once are read one after the other; of long or late ones only as many are waited for as the
budget holds of the longest, and the rest is told to come back.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator
from functools import partial
from typing import Any, Final

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status

from kc_otel.judge.otlp.requests import (
    SERVICES,
    BadRequestError,
    BindError,
    InternalError,
    ReceiveError,
    ThrottledError,
)
from kc_otel.serve.access.access_file import check_sender
from kc_otel.serve.access.tls import Tls
from kc_otel.serve.receivers.request_taker import Hold, RequestTaker

_log: Final = logging.getLogger(__name__)
_DEFAULT_PORT: Final = 4317
_CODES: Final = {code.value[0]: code for code in grpc.StatusCode}
_AT_ONCE_SECONDS: Final = 0.025
"""Within which a message that came with its call has been read."""
_MAX_CALLS: Final = 500
"""Calls at a time; more are told to come back."""
_OPTIONS: Final = (
    ("grpc.so_reuseport", 0),  # else who comes second to a port would have a share of it
    ("grpc.max_concurrent_streams", _MAX_CALLS),
    ("grpc.http2.bdp_probe", 0),  # the buffer before a message is requested stays at 64 KiB a call
    ("grpc.max_metadata_size", 16 * 1024),
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.http2.settings_timeout", 10_000),
    ("grpc.max_connection_idle_ms", 120_000),  # more than a recorder's longest interval
    ("grpc.keepalive_time_ms", 60_000),  # finds those who are gone without a word
    ("grpc.keepalive_timeout_ms", 20_000),
)


class _TooSlowError(ReceiveError):
    """A message did not arrive in time."""

    outcome, http_status, rpc_code = "too_slow", 408, 4


async def serve_grpc(
    taker: RequestTaker,
    host: str,
    port: int,
    counts: Counter[tuple[str, str]],
    tls: Tls | None = None,
    connections: int = 4096,
) -> tuple[grpc.aio.Server, int]:
    """Listen, and return the server and its port, which the system chooses for 0; a BindError where it is taken."""
    receiver = _Receiver(taker, counts)
    server = grpc.aio.server(
        handlers=[
            # On the wire a call of one message is the same; this handler begins before the message is read.
            grpc.method_handlers_generic_handler(
                service, {"Export": grpc.stream_unary_rpc_method_handler(partial(receiver.export, signal))}
            )
            for signal, service in SERVICES.items()
        ],
        options=[
            *_OPTIONS,
            ("grpc.max_receive_message_length", taker.limits.max_bytes),
            ("grpc.max_allowed_incoming_connections", connections),
        ],
        maximum_concurrent_rpcs=2 * _MAX_CALLS,  # grpcio's own refusal has no RetryInfo
    )
    name = f"[{host}]" if ":" in host else host
    address = f"{name}:{port}"
    try:
        if tls is None:
            bound = server.add_insecure_port(address)
        else:
            bound = server.add_secure_port(address, tls.grpc_credentials())
    except RuntimeError:
        msg = (
            f"cannot listen for OTLP/gRPC on {address}: the port is taken, or the address is not this machine's; stop "
            f"the other process{' (an OpenTelemetry Collector listens there too)' if port == _DEFAULT_PORT else ''} "
            "or choose another port"
        )
        raise BindError(msg) from None
    await server.start()
    return server, bound


def retry_info(error: ThrottledError) -> tuple[tuple[str, bytes], ...]:
    """Trailers that ask the sender to wait: RetryInfo where the specification has it, and where the SDK reads it."""
    nanos = round(error.retry_after * 1e9)
    info = RetryInfo(retry_delay=Duration(seconds=nanos // 10**9, nanos=nanos % 10**9))
    detail = AnyMessage()
    detail.Pack(info)
    said = Status(code=error.rpc_code, message=str(error), details=[detail])
    return (
        ("grpc-status-details-bin", said.SerializeToString()),
        ("google.rpc.retryinfo-bin", info.SerializeToString()),
    )


class _Receiver:
    """Answers the calls of all connections."""

    def __init__(self, taker: RequestTaker, counts: Counter[tuple[str, str]]) -> None:
        self._taker, self._counts = taker, counts
        self._limits = taker.limits
        self._at_once = asyncio.Lock()
        self._calls = 0
        self._reading: set[asyncio.Future[Any]] = set()

    async def export(self, signal: str, _messages: AsyncIterator[bytes], context: Any) -> bytes:
        """Answer a call."""
        self._calls += 1
        try:
            answer = await self._answered(signal, context)
        except asyncio.CancelledError:
            self._counts["grpc", "disconnected"] += 1
            raise
        finally:
            self._calls -= 1
        if isinstance(answer, ReceiveError):
            # grpcio keeps what `abort` raises, and with it this frame: there is no message in it any more.
            self._counts["grpc", answer.outcome] += 1
            trailers = retry_info(answer) if isinstance(answer, ThrottledError) else ()
            await context.abort(_CODES[answer.rpc_code], str(answer), trailers)
        message, outcome = answer
        self._counts["grpc", outcome] += 1
        return message  # type: ignore[no-any-return]

    async def _answered(self, signal: str, context: Any) -> Any:
        """The response and its outcome, or the error to be answered."""
        try:
            metadata = dict(context.invocation_metadata() or ())
            check_sender(self._taker.access, str(metadata.get("authorization", "")))
            with self._taker.budget.held() as hold:
                body = await self._message(context, hold)
                answer, outcome = await self._taker.take(signal, body, "", "grpc")
        except ReceiveError as error:
            return error.with_traceback(None)
        except Exception:  # noqa: BLE001 - the sender is told, and the others are still served
            _log.exception("a request could not be answered")
            return InternalError("the receiver failed on this request; its log has the cause")
        return answer.SerializeToString(), outcome

    async def _message(self, context: Any, hold: Hold) -> bytes:
        if self._calls > _MAX_CALLS:
            raise self._taker.budget.busy("too many calls at the same time; send again")
        reserved = 0
        async with self._at_once:
            # It is never cancelled: grpcio frees a message only with the task that reads it, which ends with its call.
            reading = asyncio.ensure_future(context.read())
            self._reading.add(reading)
            reading.add_done_callback(self._read)
            await asyncio.wait({reading}, timeout=_AT_ONCE_SECONDS)
        if not reading.done():  # it is long, or its sender is slow
            hold(self._limits.max_bytes, long=True)
            reserved = self._limits.max_bytes
            await asyncio.wait({reading}, timeout=self._limits.read_timeout)
            if not reading.done():
                raise _TooSlowError("the message did not arrive in time")
        message = reading.result()
        if message is grpc.aio.EOF:
            raise BadRequestError("the call ended without a message")
        hold(-reserved)
        hold(len(message))
        return message  # type: ignore[no-any-return]

    def _read(self, reading: asyncio.Future[Any]) -> None:
        self._reading.discard(reading)
        if not reading.cancelled():
            reading.exception()  # of a call that was refused meanwhile nobody asks
