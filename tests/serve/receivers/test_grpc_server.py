"""OTLP/gRPC as gRPC's own client in Python speaks it, and what slow ones are told."""

import asyncio
import statistics
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from kc_otel.judge.otlp.requests import ExportResult, Limits, MetricsSink
from kc_otel.serve.receivers.grpc_server import serve_grpc
from kc_otel.serve.receivers.request_taker import ByteBudget, RequestTaker
from tests.serve.receivers.test_exporters import EXPORT, export, grpc_server
from tests.tools.receivers import start_grpc

pytestmark = [pytest.mark.slow, pytest.mark.anyio]


def large(size: int) -> bytes:
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


async def test_cancelled_calls_leave_their_channel_as_it_is() -> None:
    """Amid their message or while they are worked on; what comes after is answered."""

    class Slow(MetricsSink):
        waits = True

        async def metrics(self, _: Any) -> ExportResult:
            if self.waits:
                await asyncio.sleep(60)
            return ExportResult()

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
    assert counts["grpc", "accepted"] == 1
    assert counts["grpc", "disconnected"] == 6


def silent_calls(channel: Any, number: int) -> list[Any]:
    asked = threading.Event()

    def nothing() -> Iterator[bytes]:
        asked.wait(60)
        yield from ()

    return [channel.stream_unary(EXPORT).future(nothing(), timeout=60) for _ in range(number)]


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


async def test_what_is_over_the_budget_is_told_to_come_back() -> None:
    """With both of the trailers that exporters read; a call that was refused leaves no bytes behind."""
    released, limits = asyncio.Event(), Limits(max_bytes=1000)
    budget = ByteBudget(limits, 1500)

    class Stuck(MetricsSink):
        async def metrics(self, _: Any) -> ExportResult:
            await released.wait()
            return ExportResult()

    taker = RequestTaker(Stuck(), limits, budget)
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
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert {"google.rpc.retryinfo-bin", "grpc-status-details-bin"} <= {
        name for name, _ in caught.value.trailing_metadata()
    }
    assert budget.in_flight == 0
