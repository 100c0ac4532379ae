"""OTLP/gRPC as real clients speak it: gRPC's own in Python, nghttp2's in C; and what slow ones are told."""

from __future__ import annotations

import asyncio
import socket
import statistics
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from kc_otel.judge.otlp.request_limits import Limits
from kc_otel.judge.otlp.sink import ExportResult, RequestCounts
from kc_otel.serve.access.access_file import Senders
from kc_otel.serve.receivers import grpc_server as grpc_module
from kc_otel.serve.receivers.byte_budget import ByteBudget
from kc_otel.serve.receivers.grpc_server import GrpcServer, serve_grpc
from kc_otel.serve.receivers.request_taker import RequestTaker
from tests.serve.receivers.test_exporters import EXPORT, export, grpc_server
from tests.tools import debian
from tests.tools.receivers import start_grpc


def large(size: int) -> bytes:
    """A request of so many bytes, all of them in one attribute."""
    request = ExportMetricsServiceRequest()
    attribute = request.resource_metrics.add().resource.attributes.add(key="k")
    attribute.value.string_value = "x" * (size - 100)
    return request.SerializeToString()


@asynccontextmanager
async def served(sink: Any, **options: Any) -> AsyncIterator[tuple[GrpcServer, grpc.aio.Channel]]:
    server = await start_grpc(sink, port=0, **options)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        yield server, channel
    await server.stop()


@pytest.mark.slow
@pytest.mark.parametrize("how", [grpc.Compression.NoCompression, grpc.Compression.Gzip, grpc.Compression.Deflate])
@pytest.mark.parametrize("size", [0, 1000, 100_000, 15 * 2**20])
def test_messages_of_all_sizes_arrive(sink: Any, how: Any, size: int) -> None:
    """In both kinds of compression that gRPC has, and without."""
    body = large(size) if size else b""
    with grpc_server(sink) as port, grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        for _ in range(2):
            assert channel.unary_unary(EXPORT)(body, timeout=30, compression=how) == b""
    assert [request.SerializeToString() for _, request in sink.requests] == [body] * 2


@pytest.mark.slow
def test_a_hundred_large_messages_at_once_are_taken_or_told_to_come_again(sink: Any) -> None:
    """From ten channels: those that are refused are told when to come back, and all others arrive whole."""
    body, found = large(4 * 2**20), []
    with grpc_server(sink) as port:
        options = [("grpc.use_local_subchannel_pool", 1)]
        channels = [grpc.insecure_channel(f"127.0.0.1:{port}", options) for _ in range(10)]

        def send(number: int) -> str:
            try:
                return str(export(channels[number % 10], body, timeout=120))
            except grpc.RpcError as error:
                told = "google.rpc.retryinfo-bin" in dict(error.trailing_metadata())
                return str(error.code().name) if told else "told nothing"

        with ThreadPoolExecutor(100) as pool:
            found = list(pool.map(send, range(100)))
        for channel in channels:
            channel.close()
    assert set(found) <= {"b''", "RESOURCE_EXHAUSTED"}
    assert found.count("b''") == len(sink.requests) >= 4
    assert all(request.ByteSize() == len(body) for _, request in sink.requests)


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
        slow, counts = Slow(), RequestCounts()
        async with served(slow, counts=counts) as (_, channel):
            for size in (1000, 8 * 2**20):
                calls = [channel.unary_unary(EXPORT)(large(size)) for _ in range(3)]
                await asyncio.sleep(0.3)
                for call in calls:
                    call.cancel()
                await asyncio.sleep(0.2)
            slow.waits = False
            await channel.unary_unary(EXPORT)(large(1000), timeout=10)
        return counts.snapshot()

    counts = asyncio.run(scenario())
    assert counts["grpc", "accepted"] == 1
    assert counts["grpc", "disconnected"] == 6


@pytest.mark.slow
def test_a_deadline_is_kept() -> None:
    """On both sides: the sender is told in time, and the work ends."""

    async def scenario() -> Any:
        ended = asyncio.Event()

        class Slow:
            async def metrics(self, _: Any) -> ExportResult:
                try:
                    await asyncio.sleep(60)
                finally:
                    ended.set()
                return ExportResult()

        async with served(Slow()) as (_, channel):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary(EXPORT)(b"", timeout=0.3)
            await asyncio.wait_for(ended.wait(), 5)
        return caught.value.code()

    assert asyncio.run(scenario()) is grpc.StatusCode.DEADLINE_EXCEEDED


@pytest.mark.slow
def test_what_runs_is_answered_when_the_server_stops() -> None:
    """Within its grace; what would take longer is told to come again, and a new call finds nobody."""

    class Slow:
        async def metrics(self, request: Any) -> ExportResult:
            await asyncio.sleep(60 if request.resource_metrics else 0.3)
            return ExportResult()

    async def scenario() -> Any:
        server = await start_grpc(Slow(), port=0)  # type: ignore[arg-type]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
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


@pytest.mark.slow
def test_a_server_that_stops_and_comes_back_loses_no_call(sink: Any) -> None:
    """A client that sends one after the other, and again where it was not answered, sees each taken once or more."""

    async def scenario() -> int:
        server, sent, end = await start_grpc(sink, port=0), 0, asyncio.Event()
        port = server.port
        async with grpc.aio.insecure_channel(
            f"127.0.0.1:{port}", [("grpc.initial_reconnect_backoff_ms", 50)]
        ) as channel:

            async def send() -> None:
                nonlocal sent
                while not end.is_set():
                    if await _code(channel.unary_unary(EXPORT)(b"", timeout=5, wait_for_ready=True)) == "OK":
                        sent += 1

            senders = [asyncio.create_task(send()) for _ in range(4)]
            for _ in range(3):
                await asyncio.sleep(0.2)
                await server.stop(2)
                server = await start_grpc(sink, port=port)
            await asyncio.sleep(0.2)
            end.set()
            await asyncio.gather(*senders)
        await server.stop()
        return sent

    sent = asyncio.run(scenario())
    assert 10 < sent <= len(sink.requests)


@pytest.mark.slow
def test_h2load_is_answered(sink: Any, request_of_metrics: Any, tmp_path: Path) -> None:
    """nghttp2's client, with frames of 16 KiB and a hundred streams at a time, over connections of every kind."""
    try:
        program = debian.command("h2load")
    except debian.UnavailableError as error:
        pytest.skip(str(error))
    metric = request_of_metrics.resource_metrics[0].scope_metrics[0].metrics[0]
    metric.description = "x" * 80_000
    body = request_of_metrics.SerializeToString()
    (tmp_path / "message").write_bytes(b"\0" + len(body).to_bytes(4, "big") + body)

    async def scenario() -> str:
        counts = RequestCounts()
        server = await start_grpc(sink, port=0, counts=counts)
        command = [
            *(*program, "-n", "3000", "-c", "20", "-m", "50", "-d", str(tmp_path / "message")),
            *("-H", "content-type: application/grpc", "-H", "te: trailers", f"http://127.0.0.1:{server.port}{EXPORT}"),
        ]
        running = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        said, _ = await running.communicate()
        await server.stop()
        answered = counts.snapshot()
        assert answered.keys() <= {("grpc", "accepted"), ("grpc", "throttled")}
        assert sum(answered.values()) == 3000
        assert answered["grpc", "accepted"] == len(sink.requests) > 0
        return said.decode()

    said = asyncio.run(scenario())
    assert "3000 succeeded, 0 failed, 0 errored" in said
    assert all(request.ByteSize() == len(body) for _, request in sink.requests)


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
    counts, limits = RequestCounts(), Limits(read_timeout=1.0)
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
    assert counts.snapshot() == {("grpc", "accepted"): 20, ("grpc", "throttled"): 29, ("grpc", "too_slow"): 3}


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
        taker = RequestTaker(Stuck(), limits, Senders(), budget)  # type: ignore[arg-type]
        server = await serve_grpc(taker, "127.0.0.1", 0, RequestCounts())
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            first = asyncio.ensure_future(channel.unary_unary(EXPORT)(large(900), timeout=30))
            while not budget.in_flight:  # noqa: ASYNC110 - a few turns of the loop
                await asyncio.sleep(0.01)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary(EXPORT)(large(900), timeout=30)
            released.set()
            await first
        await server.stop()
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
