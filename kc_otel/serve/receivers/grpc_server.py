"""OTLP over gRPC, on the event loop of the caller.

gRPC's own core refuses a message that is over the limit, as received or while inflating. Requests are decoded here
and not by gRPC, so that bytes that are no message are answered with INVALID_ARGUMENT. To gRPC they are streams of one
message, which is the same on the wire: a call is then known before its message is there, and one that never comes
holds no place for good.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status

from kc_otel.judge.otlp.request_errors import BadRequestError, BindError, ReceiveError, ThrottledError
from kc_otel.judge.otlp.request_limits import Limits
from kc_otel.judge.otlp.signals import SIGNALS, Signal
from kc_otel.judge.otlp.sink import RequestCounts, TelemetrySink
from kc_otel.serve.access.senders import Senders
from kc_otel.serve.access.tls import Tls
from kc_otel.serve.receivers.decoding import decoded
from kc_otel.serve.receivers.fair_turns import FairTurns
from kc_otel.serve.receivers.in_turns import in_turns
from kc_otel.serve.receivers.reading import ReadingPlaces

__all__ = ["GrpcServer", "retry_info", "start_grpc"]

_CONNECTIONS: Final = (
    # A connection that does not finish its handshake, or that nobody answers on any more, is closed.
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
)
_USUAL: Final = 4317
_CODES: Final = {code.value[0]: code for code in grpc.StatusCode}


@dataclass(frozen=True, slots=True)
class GrpcServer:
    """A listening server.

    Attributes:
        host: Address that it listens on.
        port: Port that it listens on; the one the system chose when 0 was asked for.
    """

    host: str
    port: int
    _server: Any

    async def stop(self, grace: float | None = None) -> None:
        """Refuse new requests at once, and wait up to `grace` seconds for those that are running."""
        await self._server.stop(grace)


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
) -> GrpcServer:
    """Listen for metrics, traces and logs; the default address is reachable from this machine only.

    Args:
        sink: Takes what arrives.
        host: Address or name to listen on.
        port: Port; 0 for any free one.
        limits: What is accepted.
        counts: Counted into, transport `grpc`. Requests that gRPC itself refuses for their size do not reach us.
        senders: Who may send; None for anybody.
        tls: What to show and ask for; None speaks without TLS.
        connections: How many there may be at a time; who comes when there are as many is turned away.
        turns: Shared with other ports; None for turns of its own.

    Raises:
        BindError: If the address cannot be listened on.
    """
    limits, counts = limits or Limits(), counts or RequestCounts()
    places, senders, turns = ReadingPlaces(limits), senders or Senders(), turns or FairTurns()
    server = grpc.aio.server(
        options=[
            ("grpc.max_receive_message_length", limits.max_bytes),
            ("grpc.max_allowed_incoming_connections", connections),
            *_CONNECTIONS,
            # Without this a second evaluator would share the port and each would see half of every stream.
            ("grpc.so_reuseport", 0),
        ],
    )
    server.add_generic_rpc_handlers(
        tuple(
            grpc.method_handlers_generic_handler(
                signal.service,
                {
                    "Export": grpc.stream_unary_rpc_method_handler(
                        _handler(sink, signal, counts, places, limits, senders, turns)
                    )
                },
            )
            for signal in SIGNALS
        )
    )
    name = f"[{host}]" if ":" in host else host
    try:
        where = f"{name}:{port}"
        bound = (
            server.add_insecure_port(where) if tls is None else server.add_secure_port(where, tls.grpc_credentials())
        )
    except RuntimeError:
        bound = 0
    if not bound:
        msg = (
            f"cannot listen for OTLP/gRPC on {name}:{port}: the port is taken, or the address is not this machine's; "
            f"stop the other process{' (an OpenTelemetry Collector listens there too)' if port == _USUAL else ''} "
            "or choose another port"
        )
        raise BindError(msg)
    await server.start()
    return GrpcServer(host, bound, server)


def retry_info(error: ThrottledError) -> tuple[tuple[str, bytes], ...]:
    """Trailers that ask the sender to wait.

    The specification has RetryInfo among the details of a google.rpc.Status; the Python SDK's exporter reads it only
    from a trailer of its own. Both are sent.
    """
    nanos = round(error.retry_after * 1e9)
    info = RetryInfo(retry_delay=Duration(seconds=nanos // 10**9, nanos=nanos % 10**9))
    detail = AnyMessage()
    detail.Pack(info)
    status = Status(code=error.code, message=str(error), details=[detail])
    return (
        ("grpc-status-details-bin", status.SerializeToString()),
        ("google.rpc.retryinfo-bin", info.SerializeToString()),
    )


def _authorization(context: Any) -> str:
    metadata = {name.lower(): value for name, value in context.invocation_metadata() or ()}
    return str(metadata.get("authorization", ""))


def _handler(
    sink: TelemetrySink,
    signal: Signal,
    counts: RequestCounts,
    places: ReadingPlaces,
    limits: Limits,
    senders: Senders,
    turns: FairTurns,
) -> Callable[[Any, Any], Awaitable[bytes]]:
    async def export(_messages: Any, context: Any) -> bytes:
        began = time.perf_counter()
        try:
            sender = senders.known("" if senders.anybody else _authorization(context))
            async with places.taken():
                body = await context.read()
            if body is grpc.aio.EOF:
                raise BadRequestError("the call ended without a message")

            async def decode() -> Any:
                if senders.anybody:
                    return await decoded(sink, body, signal, limits)
                return senders.admit(sender, await decoded(None, body, signal, limits))

            answer, outcome = await in_turns(turns, context.peer(), len(body), decode, sink, signal, limits, "grpc")
        except ReceiveError as error:
            counts.add("grpc", error.outcome, began)
            trailers = retry_info(error) if isinstance(error, ThrottledError) else ()
            await context.abort(_CODES[error.code], str(error), trailers)
            raise  # never reached: abort raises gRPC's own exception
        counts.add("grpc", outcome, began)
        serialized: bytes = answer.SerializeToString()
        return serialized

    return export
