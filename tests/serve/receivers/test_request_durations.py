"""How long requests take, from their beginning to their answer, by transport and outcome."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import grpc
import httpx
import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2_grpc import MetricsServiceStub
from prometheus_client.parser import text_string_to_metric_families

from kc_otel.judge.otlp.sink import DURATION_BOUNDS, ExportResult, RequestCounts
from kc_otel.serve.core import Core
from kc_otel.serve.self_metrics import exposition, read
from tests.tools.receivers import http_app, start_grpc

TAKES = 0.12
PROTOBUF = {"content-type": "application/x-protobuf"}


class Slow:
    """Takes metrics after a while."""

    async def metrics(self, _request: Any) -> ExportResult:
        await asyncio.sleep(TAKES)
        return ExportResult()


@pytest.mark.slow
def test_each_request_is_timed_by_transport_and_outcome(make_core: Callable[..., Core]) -> None:
    """Those that are taken and those that are refused, on both ports; `/metrics` has them as a histogram."""
    counts, told = RequestCounts(), list[tuple[str, str, float]]()
    counts.tell = lambda *of: told.append(of)
    request = ExportMetricsServiceRequest()

    async def send() -> float:
        began = time.perf_counter()
        transport = httpx.ASGITransport(http_app(Slow(), counts=counts))  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://evaluator") as client:
            for body in (request.SerializeToString(), b"\xff"):
                await client.post("/v1/metrics", content=body, headers=PROTOBUF)
        server = await start_grpc(Slow(), port=0, counts=counts)  # type: ignore[arg-type]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            await MetricsServiceStub(channel).Export(request)
        await server.stop()
        return time.perf_counter() - began

    took = asyncio.run(send())
    outcomes = {("http", "accepted"), ("http", "bad_request"), ("grpc", "accepted")}
    assert counts.snapshot() == dict.fromkeys(outcomes, 1)
    assert {of[:2] for of in told} == outcomes
    page = exposition(read(make_core(), counts, Counter())).decode()
    found = {family.name: family for family in text_string_to_metric_families(page)}
    durations = found["kc_evaluator_request_duration_seconds"]
    assert durations.type == "histogram"
    buckets: dict[tuple[str, str], dict[float, float]] = {}
    for sample in durations.samples:
        of = sample.labels["kc_transport"], sample.labels["kc_outcome"]
        if sample.name.endswith("_bucket"):
            buckets.setdefault(of, {})[float(sample.labels["le"])] = sample.value
        elif sample.name.endswith("_sum"):
            assert sample.value == pytest.approx(next(seconds for *labels, seconds in told if tuple(labels) == of))
            assert sample.value < took
    assert buckets.keys() == outcomes
    for (_, outcome), counted in buckets.items():
        assert list(counted) == [*DURATION_BOUNDS, float("inf")]
        assert counted[0.1] == (outcome == "bad_request")
        assert counted[float("inf")] == 1
