"""What an honest sender notices of one who floods: `python tests/benchmarks/bench_overload.py [VALUES] [POINTS]`.

A real `kc-otel serve` with its defaults on one side. On the other 40 connections that send without pause, each message
200 exponential points (or POINTS) whose kernel versions are all new: more than can be read, and a label value for each
point, until there were a million (or VALUES), and for ten seconds at least. The
webhook's receiver takes connections and never answers. Beside them one sender reports a kernel that breaks its limit
five times a second and, as OTLP says, tries again what was refused.

Printed are: how many label values arrived, what became of requests and points, the honest sender's time to an
acknowledgement, the largest resident memory, and the slowest answer of `/healthz`. `tests/integration/test_overload.py`
runs the same for seconds.
"""

from __future__ import annotations

import asyncio
import math
import re
import socket
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import httpx
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)

from tests.benchmarks._beside import beside, healthy
from tests.integration.conftest import SECRET, Evaluator

__all__ = ["Overload", "overload"]

CONNECTIONS = 40
POINTS = 200
CONTRACT = """\
apiVersion: kernel-contract/v1
kind: KernelContract
metadata: {name: policy, version: 1, owner: tests}
kernels:
  train: {engine: torch, dtype: float32}
  inference: {engine: vllm, dtype: bfloat16}
statistical:
  - {id: token-tv, metric: tv_token, unit: token, limit: 0.02}
observability: {window: 60s, long_window: 120s, min_samples: 500, heartbeat: 60s}
escalation:
  - {on: fail, severity: critical, do: [{webhook: pager}]}
"""
_HEADERS = {"content-type": "application/x-protobuf"}
_BEFORE = 3.0
"""Seconds that the honest sender is there before the others: what a kernel has is not taken from it."""


@dataclass
class Overload:
    """What happened.

    Attributes:
        values: Label values that were sent.
        flooded: Answers to who floods, by status.
        told: Answers that told who floods that something was not judged or not taken.
        waits: Seconds from a report of the honest sender to its acknowledgement, each.
        health: Seconds of each answer of `/healthz`.
        memory: Largest resident size of the process, bytes.
        status: Verdict on the honest sender's kernel, in the end.
        requests: The evaluator's own counts of requests.
        points: The same of points.
        pending: Webhooks that wait.
        tick: Seconds that the last evaluation took.
    """

    values: int = 0
    flooded: Counter[int] = field(default_factory=Counter)
    told: int = 0
    waits: list[float] = field(default_factory=list)
    health: list[float] = field(default_factory=list)
    memory: int = 0
    status: str = ""
    requests: dict[str, int] = field(default_factory=dict)
    points: dict[str, int] = field(default_factory=dict)
    pending: int = 0
    tick: float = 0.0


def message(kernels: list[str], began: int, total: int, contract: str = "policy") -> bytes:
    """A cumulative histogram of each kernel version, all of it above the limit."""
    request = ExportMetricsServiceRequest()
    data = request.resource_metrics.add().scope_metrics.add().metrics.add(name="kc.drift.tv_token", unit="1")
    data.exponential_histogram.aggregation_temporality = 2
    for kernel in kernels:
        point = data.exponential_histogram.data_points.add(start_time_unix_nano=began, time_unix_nano=time.time_ns())
        for key, value in (
            ("contract", contract),
            ("slice", "all"),
            ("kernel.train", "a"),
            ("kernel.inference", kernel),
        ):
            point.attributes.add(key=f"kc.{key}").value.string_value = value
        point.count, point.sum = total, 0.5 * total
        point.positive.offset = -2
        point.positive.bucket_counts.append(total)
    return request.SerializeToString()


async def _measure(evaluator: Evaluator, seconds: float, values: int, points: int) -> Overload:
    found, numbers, began = Overload(), count(), time.time_ns()
    end, template, written = time.monotonic() + seconds, b"", -math.inf

    def lasts() -> bool:
        return time.monotonic() < end or found.values < values

    def flooding() -> bytes:
        nonlocal template, written
        if time.monotonic() > written + 1.0:  # building them takes longer than reading them
            written = time.monotonic()
            template = message([f"v_________-{number:05d}" for number in range(points)], began, 1000)
        return template.replace(b"_________", b"%09d" % next(numbers))

    address = f"{evaluator.http}/v1/metrics"

    async def flood() -> None:
        async with httpx.AsyncClient(timeout=60) as client:
            while lasts():
                body = flooding()
                try:
                    answer = await client.post(address, content=body, headers=_HEADERS)
                except httpx.HTTPError:
                    found.flooded[0] += 1
                    continue
                found.values += points
                found.flooded[answer.status_code] += 1
                if answer.status_code == 200:
                    said = ExportMetricsServiceResponse.FromString(answer.content).partial_success
                    found.told += bool(said.error_message)

    honest = beside(_report, address, began, taken=found.waits)
    with beside(healthy, evaluator.api, taken=found.health), honest:
        await asyncio.sleep(_BEFORE)
        end += _BEFORE
        await asyncio.gather(*(flood() for _ in range(CONNECTIONS)))
    return found


def _report(client: httpx.Client, before: int, address: str, began: int) -> None:
    """An honest sender's report, until it is taken."""
    body = message(["honest"], began, 1000 * (before + 1))
    while client.post(address, content=body, headers=_HEADERS).is_error:
        time.sleep(0.1)


def overload(seconds: float, folder: Path, values: int = 0, points: int = POINTS) -> Overload:
    """Flood an evaluator for so long.

    Args:
        seconds: How long at least.
        folder: Takes contract and state.
        values: How many label values at least.
        points: Of a message.
    """
    (folder / "policy.yaml").write_text(CONTRACT)
    with socket.create_server(("127.0.0.1", 0)) as dead:  # takes a connection, and that is all
        environ = {
            "KC_OTEL_WEBHOOK_PAGER_URL": f"http://127.0.0.1:{dead.getsockname()[1]}/",
            "KC_OTEL_WEBHOOK_PAGER_SECRET": SECRET,
            "KC_OTEL_WEBHOOK_PAGER_ALLOW_PRIVATE": "1",
        }
        evaluator = Evaluator(folder / "policy.yaml", folder / "state.sqlite", environ, "--tick", "1")
        try:
            found = asyncio.run(_measure(evaluator, seconds, values, points))
            evaluator.wait("/api/v1/health", lambda answer: bool(answer["outbox"]))
            health = evaluator.get("/api/v1/health")
            found.requests, found.points = health["requests"], health["points"]
            found.tick = health["tick_seconds"]
            found.pending = sum(endpoint["waiting"] for endpoint in health["outbox"])
            cells = evaluator.get("/api/v1/cells")["cells"]
            found.status = next(
                cell["verdict"]["status"] for cell in cells if cell["verdict"]["kernel_inference"] == "honest"
            )
            said = Path(f"/proc/{evaluator.process.pid}/status").read_text()
            found.memory = int(re.search(r"VmHWM:\s+(\d+)", said)[1]) * 1024  # type: ignore[index]
        finally:
            evaluator.stop()
    return found


def main() -> None:
    """Print what was measured."""
    values = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    points = int(sys.argv[2]) if len(sys.argv) > 2 else POINTS
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        found = overload(10.0, Path(folder), values, points)
    waits, took = sorted(found.waits), time.monotonic() - began
    median, p99 = statistics.median(waits), waits[int(0.99 * (len(waits) - 1))]
    print(
        f"{found.values:,} label values in messages of {points} over {CONNECTIONS} connections, {took:.0f} s; "
        f"answers {dict(found.flooded)}"
    )
    print(f"  requests {found.requests}\n  points {found.points}; said so in {found.told} answers")
    print(
        f"  honest sender: {len(waits)} reports, median {median:.3f} s, p99 {p99:.3f} s, slowest {waits[-1]:.3f} s, "
        f"verdict {found.status}; /healthz at most {max(found.health):.3f} s"
    )
    print(
        f"  resident memory at most {found.memory / 2**20:.0f} MiB; webhooks that wait: {found.pending}; "
        f"the last evaluation took {found.tick:.2f} s"
    )


if __name__ == "__main__":
    main()
