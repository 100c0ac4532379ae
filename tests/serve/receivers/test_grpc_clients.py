"""OTLP/gRPC as real clients speak it: gRPC's own in Python, rotel's tonic in Rust, nghttp2's in C."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from kc_otel.judge.otlp import ExportResult, Limits, RequestCounts
from kc_otel.serve.receivers.grpc_server import GrpcServer, start_grpc
from tests.serve.receivers.http2_peer import EXPORT
from tests.serve.receivers.test_servers import export, grpc_server, loop
from tests.tools import debian


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
def test_many_calls_on_one_channel_get_their_own_answers(sink: Any) -> None:
    """More than there may be streams at a time, small and large ones among each other."""
    sink.answer = ExportResult(1, "one")
    counts, limits = RequestCounts(), Limits(max_concurrent=1000)
    with grpc_server(sink, limits, counts) as port, grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        bodies = [large(300_000) if number % 20 == 0 else large(500) for number in range(400)]
        with ThreadPoolExecutor(150) as pool:
            answers = list(pool.map(lambda body: export(channel, body, timeout=60), bodies))
    assert len(set(answers)) == 1
    assert b"one" in answers[0]
    assert counts.snapshot() == {("grpc", "partial"): 400}


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
    assert set(found) <= {"b''", "UNAVAILABLE"}
    assert found.count("b''") == len(sink.requests) >= 32
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
                calls = [channel.unary_unary(EXPORT)(large(size)) for _ in range(5)]
                await asyncio.sleep(0.3)
                for call in calls:
                    call.cancel()
                await asyncio.sleep(0.2)
            slow.waits = False
            await channel.unary_unary(EXPORT)(large(1000), timeout=10)
        return counts.snapshot()

    counts = asyncio.run(scenario())
    assert counts["grpc", "accepted"] == 1
    assert counts["grpc", "disconnected"] == 10


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
            return [await one for one in calls], took, await _code(send(b"", timeout=2))

    codes, took, late = asyncio.run(scenario())
    assert codes == ["OK", "UNAVAILABLE"]
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
        server = await start_grpc(sink, port=0, counts=counts, limits=Limits(max_concurrent=5000))
        command = [
            *(*program, "-n", "3000", "-c", "20", "-m", "50", "-d", str(tmp_path / "message")),
            *("-H", "content-type: application/grpc", "-H", "te: trailers", f"http://127.0.0.1:{server.port}{EXPORT}"),
        ]
        running = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        said, _ = await running.communicate()
        await server.stop()
        assert counts.snapshot().keys() <= {("grpc", "accepted"), ("grpc", "throttled")}
        assert counts.snapshot()["grpc", "accepted"] > 1000
        return said.decode()

    said = asyncio.run(scenario())
    assert "3000 succeeded, 0 failed, 0 errored" in said
    assert all(request.ByteSize() == len(body) for _, request in sink.requests)


def test_a_channel_in_another_thread_is_served(sink: Any) -> None:
    """As the SDK's exporters are: each loop has its own server, side by side."""
    with loop() as one, loop() as two:
        servers = [
            (running, asyncio.run_coroutine_threadsafe(start_grpc(sink, port=0), running).result(10))
            for running in (one, two)
        ]
        failed: list[Any] = []

        def send(port: int) -> None:
            with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
                try:
                    for _ in range(50):
                        export(channel, large(50_000))
                except grpc.RpcError as error:
                    failed.append(error)

        threads = [threading.Thread(target=send, args=(server.port,)) for _, server in servers * 2]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        for running, server in servers:
            asyncio.run_coroutine_threadsafe(server.stop(0), running).result(10)
    assert not failed
    assert len(sink.requests) == 200
