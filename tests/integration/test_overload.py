"""One who floods does not stop, blind or fill the evaluator for others; `bench_overload.py` is the same for minutes."""

from __future__ import annotations

import re
import statistics
import threading
import time
from collections import Counter
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path

import grpc
import pytest
from google.protobuf.internal.encoder import _VarintBytes

from kc_otel.judge.otlp.request_limits import Limits
from tests.benchmarks._beside import beside
from tests.benchmarks.bench_long_exports import long_exports
from tests.benchmarks.bench_long_exports import message as long_message
from tests.benchmarks.bench_overload import POINTS, _report, overload
from tests.integration.conftest import CONTRACT, Evaluator

EXPORT = "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export"
SMALL = 400 * 2**20
"""Bytes that the process may have at any time."""
QUICK = 0.05
"""Seconds in which an honest sender is answered in the median, beside what it takes where nobody floods."""


def allowed(waits: list[float]) -> float:
    """Seconds that the median may be: what is promised, on a machine that may have much else to do."""
    return QUICK + 2 * statistics.median(waits[:8])  # before the flood


@pytest.mark.slow
def test_a_flood_of_label_values_keeps_no_honest_sender_out(tmp_path: Path) -> None:
    """Forty connections, 30,000 new kernel versions, a webhook that never answers: bounded, counted, told, judged."""
    found = overload(6.0, tmp_path, values=30_000)
    assert found.values >= 30_000
    assert found.status == "FAIL"
    assert len(found.waits) >= 3
    assert found.pending > 0
    assert found.memory < SMALL
    assert statistics.median(found.waits) < allowed(found.waits)
    assert max(found.health) < 5.0
    assert found.flooded[0] == 0, "every connection was answered"
    assert set(found.flooded) <= {200, 503}
    taken = found.requests["http accepted"] + found.requests.get("http partial", 0)
    assert found.flooded[200] + len(found.waits) == taken
    assert sum(found.points.values()) == found.flooded[200] * POINTS + len(found.waits), "every point is counted"
    assert found.points["unjudged"] > 0
    assert found.told > 0


@pytest.mark.slow
def test_long_exports_at_once_all_get_through(tmp_path: Path) -> None:
    """Twenty of them over both transports, more than there is room for: each is answered, counted, and taken."""
    found = long_exports(tmp_path, senders=20, points=12_000)
    assert found.silent == []
    assert found.answers["http 200"] == found.answers["grpc OK"] == 10
    assert set(found.answers) <= {"http 200", "grpc OK", "http 503", "grpc RESOURCE_EXHAUSTED"}
    counted = Counter[str]()
    for said, number in found.requests.items():
        counted[said.split()[0]] += number
    told = Counter[str]()
    for said, number in found.answers.items():
        told[said.split()[0]] += number
    assert counted == told, "every answer is counted"
    assert sum(found.points.get(outcome, 0) for outcome in ("accepted", "baseline", "behind", "late")) >= 20 * 12_000
    assert max(found.health) < 5.0
    assert found.memory < SMALL


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
                connection.request("POST", "/v1/metrics", body, {"content-type": "application/x-protobuf"})
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
        with beside(_report, f"{evaluator.http}/v1/metrics", time.time_ns(), taken=waits):
            time.sleep(3.0)
            end += 3.0
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        memory = int(re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{evaluator.process.pid}/status").read_text())[1]) * 1024
    finally:
        evaluator.stop()
    assert set(answers) <= {"http 200", "http 503", "grpc OK", "grpc RESOURCE_EXHAUSTED"}
    assert min(answers["http 200"], answers["grpc OK"]) > 0, answers
    assert memory < SMALL, (memory / 2**20, answers)
    assert statistics.median(waits) < allowed(waits), (waits, answers)
