"""One who floods does not stop, blind or fill the evaluator for others."""

import asyncio
import math
import socket
import statistics
import threading
import time
from collections import Counter
from contextlib import closing
from http.client import HTTPConnection
from itertools import count
from pathlib import Path

import grpc
import httpx
import pytest
from google.protobuf.internal.encoder import _VarintBytes
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)

from kc_otel.judge.otlp.requests import Limits
from tests.integration.conftest import CONTRACT, Evaluator, paging
from tests.tools.contracts import contract_text
from tests.tools.load import EXPORT, HEADERS, beside, healthy, largest_resident, message, report

SMALL = 400 * 2**20
"""Bytes that the process may have at any time."""
QUICK = 0.05
"""Seconds in which an honest sender is answered in the median, beside what it takes where nobody floods."""
BEFORE = 3.0
"""Seconds that the honest sender is there before the others: what a kernel has is not taken from it."""
CONNECTIONS = 40
POINTS = 200
_STREAMS, _BUCKETS = 300, 160
_NAME = "SENDER000"


def paged(name: str = "policy", minutes: int = 1) -> str:
    """A contract whose breach the pager is told of."""
    return contract_text(
        name,
        statistical=[{"id": "token-tv", "metric": "tv_token", "unit": "token", "limit": 0.02}],
        observability={
            "window": f"{minutes}m", "long_window": f"{2 * minutes}m", "min_samples": 500, "heartbeat": f"{minutes}m",
        },
        escalation=[{"on": "fail", "severity": "critical", "do": [{"webhook": "pager"}]}],
    )  # fmt: skip


def allowed(waits: list[float]) -> float:
    """Seconds that the median may be: what is promised, on a machine that may have much else to do."""
    return QUICK + 2 * statistics.median(waits[:8])  # before the flood


def long_message(points: int) -> bytes:
    """Cumulative histograms of 300 streams, report after report, within the limit."""
    request, began = ExportMetricsServiceRequest(), time.time_ns()
    owner = request.resource_metrics.add()
    owner.resource.attributes.add(key="service.instance.id").value.string_value = _NAME
    data = owner.scope_metrics.add().metrics.add(name="kc.drift.tv_token", unit="1").exponential_histogram
    data.aggregation_temporality = 2
    for number in range(points):
        report, stream = divmod(number, _STREAMS)
        point = data.data_points.add(start_time_unix_nano=began, time_unix_nano=began + 10**9 + report * 10**6)
        for key, value in (
            *(("contract", "policy"), ("slice", "all"), ("kernel.train", "a")),
            *(("kernel.inference", f"k{stream % 3}"), ("layer", str(stream))),
        ):
            point.attributes.add(key=f"kc.{key}").value.string_value = value
        steps = 300 * (report + 1)
        point.scale, point.count = 3, steps * _BUCKETS
        point.sum = sum(steps * 2.0 ** ((bucket - 199.5) / 8) for bucket in range(_BUCKETS))
        point.positive.offset = -200
        point.positive.bucket_counts.extend([steps] * _BUCKETS)
    return request.SerializeToString()


@pytest.mark.slow
def test_a_flood_of_label_values_keeps_no_honest_sender_out(tmp_path: Path) -> None:
    """Forty connections, 30,000 new kernel versions, a webhook that never answers: bounded, counted, told, judged."""
    (tmp_path / "policy.yaml").write_text(paged())
    flooded, told, values, waits, health_waits = Counter[int](), 0, 0, list[float](), list[float]()
    numbers, began, template, written = count(), time.time_ns(), b"", -math.inf

    def flooding() -> bytes:
        nonlocal template, written
        if time.monotonic() > written + 1.0:  # building them takes longer than reading them
            written = time.monotonic()
            template = message([f"v_________-{number:05d}" for number in range(POINTS)], began, 1000)
        return template.replace(b"_________", b"%09d" % next(numbers))

    async def flood(address: str, end: float) -> None:
        nonlocal told, values
        async with httpx.AsyncClient(timeout=60) as client:
            while time.monotonic() < end or values < 30_000:
                answer = await client.post(address, content=flooding(), headers=HEADERS)
                values += POINTS
                flooded[answer.status_code] += 1
                if answer.status_code == 200:
                    said = ExportMetricsServiceResponse.FromString(answer.content).partial_success
                    told += bool(said.error_message)

    async def floods(evaluator: Evaluator) -> None:
        address = f"{evaluator.http}/v1/metrics"
        honest = beside(report, address, began, taken=waits)
        with beside(healthy, evaluator.api, taken=health_waits), honest:
            await asyncio.sleep(BEFORE)
            await asyncio.gather(*(flood(address, time.monotonic() + 6.0) for _ in range(CONNECTIONS)))

    with socket.create_server(("127.0.0.1", 0)) as dead:  # takes a connection, and that is all
        environ = paging(f"http://127.0.0.1:{dead.getsockname()[1]}/")
        evaluator = Evaluator(tmp_path / "policy.yaml", tmp_path / "state.sqlite", environ, "--tick", "1")
        try:
            asyncio.run(floods(evaluator))
            evaluator.wait("/api/v1/health", lambda answer: bool(answer["outbox"]))
            health, verdicts = evaluator.get("/api/v1/health"), evaluator.get("/api/v1/verdicts")["verdicts"]
            memory = largest_resident(evaluator.process.pid)
        finally:
            evaluator.stop()
    assert [found["status"] for found in verdicts if found["kernel_inference"] == "honest"] == ["FAIL"]
    assert len(waits) >= 3
    assert sum(endpoint["waiting"] for endpoint in health["outbox"]) > 0
    assert memory < SMALL
    assert statistics.median(waits) < allowed(waits)
    assert max(health_waits) < 5.0
    assert set(flooded) <= {200, 503}
    requests, points = health["requests"], health["points"]
    assert flooded[200] + len(waits) == requests["http accepted"] + requests.get("http partial", 0)
    assert sum(points.values()) == flooded[200] * POINTS + len(waits), "every point is counted"
    assert points["unjudged"] > 0
    assert told > 0


@pytest.mark.slow
def test_a_hundred_senders_of_the_largest_message_leave_it_small_and_quick(tmp_path: Path) -> None:
    """Sixteen megabytes each, over both transports, again and again for some seconds: some are taken, others wait."""
    (tmp_path / "policy.yaml").write_text(CONTRACT)
    body, most = long_message(3_000), Limits().max_bytes
    filler = most - len(body) - 10
    body += b"\xfa\x01" + _VarintBytes(filler) + bytes(filler)  # a field that nobody knows
    assert most - 100 < len(body) <= most
    evaluator, waits = Evaluator(tmp_path / "policy.yaml", tmp_path / "state", {}, "--no-webhooks"), list[float]()
    answers, end = Counter[str](), time.monotonic() + 12.0

    def over_http() -> None:
        with closing(HTTPConnection(evaluator.http.partition("://")[2], timeout=60)) as connection:
            while time.monotonic() < end:
                connection.request("POST", "/v1/metrics", body, HEADERS)
                answer = connection.getresponse()
                answer.read()
                answers[f"http {answer.status}"] += 1
                if answer.status == 503:
                    time.sleep(float(answer.headers["retry-after"]))

    def over_grpc() -> None:
        with grpc.insecure_channel(evaluator.grpc, [("grpc.use_local_subchannel_pool", 1)]) as channel:
            while time.monotonic() < end:
                try:
                    channel.unary_unary(EXPORT)(body, timeout=60)
                    answers["grpc OK"] += 1
                except grpc.RpcError as error:
                    told = "google.rpc.retryinfo-bin" in dict(error.trailing_metadata())
                    answers[f"grpc {error.code().name}" if told else "told nothing"] += 1
                    time.sleep(1.0)

    try:
        threads = [threading.Thread(target=over_grpc if number % 5 == 0 else over_http) for number in range(100)]
        with beside(report, f"{evaluator.http}/v1/metrics", time.time_ns(), taken=waits):
            time.sleep(3.0)
            end += 3.0
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        memory = largest_resident(evaluator.process.pid)
    finally:
        evaluator.stop()
    assert set(answers) <= {"http 200", "http 503", "grpc OK", "grpc RESOURCE_EXHAUSTED"}
    assert min(answers["http 200"], answers["grpc OK"]) > 0, answers
    assert memory < SMALL, (memory / 2**20, answers)
    assert statistics.median(waits) < allowed(waits), (waits, answers)
