"""OTLP/gRPC as gRPC's own client in Python speaks it, and what slow ones are told."""

from __future__ import annotations

import asyncio
import socket
import statistics
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from kc_otel.judge.otlp.requests import ExportResult, Limits
from kc_otel.serve.receivers import grpc_server as grpc_module
from kc_otel.serve.receivers.grpc_server import serve_grpc
from kc_otel.serve.receivers.request_taker import ByteBudget, RequestTaker
from tests.serve.receivers.test_exporters import EXPORT, export, grpc_server
from tests.tools.receivers import start_grpc


def large(size: int) -> bytes:
    """A request of so many bytes, all of them in one attribute."""
    request = ExportMetricsServiceRequest()
    attribute = request.resource_metrics.add().resource.attributes.add(key="k")
    attribute.value.string_value = "x" * (size - 100)
    return request.SerializeToString()


@asynccontextmanager
async def served(sink: Any, **options: Any) -> AsyncIterator[grpc.aio.Channel]:
    server, port = await start_grpc(sink, port=0, **options)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel
    await server.stop(None)


@pytest.mark.slow
def test_cancelled_calls_leave_their_channel_as_it_is() -> None:
    """Amid their message or while they are worked on; what comes after is answered."""

    class Slow:
        waits = True

        async def metrics(self, _: Any) -> ExportResult:
            if self.waits:
                await asyncio.sleep(60)
            return ExportResult()

    async def scenario() -> Any:
        slow, counts = Slow(), Counter()
        async with served(slow, counts=counts) as channel:
            for size in (1000, 8 * 2**20):
                calls = [channel.unary_unary(EXPORT)(large(size)) for _ in range(3)]
                await asyncio.sleep(0.3)
                for call in calls:
                    call.cancel()
                await asyncio.sleep(0.2)
            slow.waits = False
            await channel.unary_unary(EXPORT)(large(1000), timeout=10)
        return counts

    counts = asyncio.run(scenario())
    assert counts["grpc", "accepted"] == 1
    assert counts["grpc", "disconnected"] == 6


@pytest.mark.slow
def test_what_runs_is_answered_when_the_server_stops() -> None:
    """Within its grace; what would take longer is told to come again, and a new call finds nobody."""

    class Slow:
        async def metrics(self, request: Any) -> ExportResult:
            await asyncio.sleep(60 if request.resource_metrics else 0.3)
            return ExportResult()

    async def scenario() -> Any:
        server, port = await start_grpc(Slow(), port=0)  # type: ignore[arg-type]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            send: Callable[..., Awaitable[bytes]] = channel.unary_unary(EXPORT)
            calls = [asyncio.ensure_future(_code(send(body, timeout=20))) for body in (b"", large(1000))]
            await asyncio.sleep(0.15)
            began = asyncio.get_running_loop().time()
            await server.stop(1.0)
            took = asyncio.get_running_loop().time() - began
            return [await call for call in calls], took, await _code(send(b"", timeout=2))

    codes, took, late = asyncio.run(scenario())
    assert codes[0] == "OK"
    assert codes[1] in {"UNAVAILABLE", "CANCELLED"}, "exporters send both again"
    assert 0.9 < took < 3
    assert late == "UNAVAILABLE"


async def _code(call: Awaitable[bytes]) -> str:
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return str(error.code().name)
    return "OK"


def silent_calls(channel: Any, number: int) -> list[Any]:
    """Calls that begin and never send their message."""
    asked = threading.Event()

    def nothing() -> Iterator[bytes]:
        asked.wait(60)
        yield from ()

    return [channel.stream_unary(EXPORT).future(nothing(), timeout=60) for _ in range(number)]


@pytest.mark.slow
def test_silent_calls_keep_nobody_out_who_says_something(sink: Any) -> None:
    """Of those that send nothing some are waited for, the others are told to come back, and both are counted."""
    counts, limits = Counter(), Limits(read_timeout=1.0)
    with grpc_server(sink, limits, counts) as port, grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        silent = silent_calls(channel, 32)
        time.sleep(0.5)
        waits = []
        for _ in range(20):
            began = time.monotonic()
            export(channel, large(20_000))
            waits.append(time.monotonic() - began)
        codes = Counter(call.code() for call in silent)
    assert codes == {grpc.StatusCode.RESOURCE_EXHAUSTED: 29, grpc.StatusCode.DEADLINE_EXCEEDED: 3}
    assert statistics.median(waits) < 0.05
    assert counts == {("grpc", "accepted"): 20, ("grpc", "throttled"): 29, ("grpc", "too_slow"): 3}


@pytest.mark.slow
def test_what_is_over_the_budget_is_told_to_come_back() -> None:
    """With both of the trailers that exporters read; a call that was refused leaves no bytes behind."""
    released, limits = asyncio.Event(), Limits(max_bytes=1000)
    budget = ByteBudget(limits, 1500)

    class Stuck:
        async def metrics(self, _: Any) -> ExportResult:
            await released.wait()
            return ExportResult()

    async def scenario() -> Any:
        taker = RequestTaker(Stuck(), limits, budget)  # type: ignore[arg-type]
        server, port = await serve_grpc(taker, "127.0.0.1", 0, Counter())
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            first = asyncio.ensure_future(channel.unary_unary(EXPORT)(large(900), timeout=30))
            while not budget.in_flight:  # noqa: ASYNC110 - a few turns of the loop
                await asyncio.sleep(0.01)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary(EXPORT)(large(900), timeout=30)
            released.set()
            await first
        await server.stop(None)
        return caught.value

    error = asyncio.run(scenario())
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert {"google.rpc.retryinfo-bin", "grpc-status-details-bin"} <= {name for name, _ in error.trailing_metadata()}
    assert budget.in_flight == 0


@pytest.mark.slow
def test_connections_that_say_nothing_are_closed(sink: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a preface, with settings and no more, or amid a frame: none stays for ever."""
    times = ("grpc.server_handshake_timeout_ms", "grpc.http2.settings_timeout", "grpc.max_connection_idle_ms")
    options = tuple((name, 500 if name in times else value) for name, value in grpc_module._OPTIONS)
    monkeypatch.setattr(grpc_module, "_OPTIONS", options)
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    settings = preface + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
    with grpc_server(sink) as port, ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_connection(("127.0.0.1", port), 20)) for _ in range(4)]
        for connection, said in zip(sockets, (b"", preface, settings, settings + bytes(3) + b"\4"), strict=True):
            connection.sendall(said)
        for connection in sockets:
            while connection.recv(65536):
                pass
