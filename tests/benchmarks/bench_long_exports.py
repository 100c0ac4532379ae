"""What becomes of a hundred long exports at once: `python tests/benchmarks/bench_long_exports.py [SENDERS] [POINTS]`.

A real `kc-otel serve` with its defaults. Half of the senders speak HTTP, half gRPC, each over a connection of its own;
each has one export of 27,000 points (or POINTS) of 300 streams that nobody has seen, 14 MB, and sends it again whenever
it is told to, after as long as it is told to wait. `tests/integration/test_overload.py` runs the same with fewer.

Printed are: when they were through, every answer, the evaluator's own counts, its CPU time, its largest resident
memory, and the slowest answer of `/healthz`.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import httpx
from google.rpc.error_details_pb2 import RetryInfo
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from tests.benchmarks._beside import beside, healthy
from tests.benchmarks.bench_overload import CONTRACT
from tests.integration.conftest import Evaluator

__all__ = ["LongExports", "long_exports"]

STREAMS = 300
_BUCKETS = 160
_EXPORT = "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export"
_HEADERS = {"content-type": "application/x-protobuf"}
_NAME = "SENDER000"


@dataclass
class LongExports:
    """What happened.

    Attributes:
        size: Bytes of an export.
        through: Seconds until each sender was told that it was taken.
        answers: All that they were told, by transport and status.
        silent: Answers that did not say when to come again, and ends without an answer.
        health: Seconds of each answer of `/healthz`.
        memory: Largest resident size of the process, bytes.
        seconds: CPU time of the process.
        requests: The evaluator's own counts of requests.
        points: The same of points.
    """

    size: int = 0
    through: list[float] = field(default_factory=list)
    answers: Counter[str] = field(default_factory=Counter)
    silent: list[str] = field(default_factory=list)
    health: list[float] = field(default_factory=list)
    memory: int = 0
    seconds: float = 0.0
    requests: dict[str, int] = field(default_factory=dict)
    points: dict[str, int] = field(default_factory=dict)


def message(points: int) -> bytes:
    """Cumulative histograms of 300 streams, report after report, within the limit."""
    request, began = ExportMetricsServiceRequest(), time.time_ns()
    owner = request.resource_metrics.add()
    owner.resource.attributes.add(key="service.instance.id").value.string_value = _NAME
    data = owner.scope_metrics.add().metrics.add(name="kc.drift.tv_token", unit="1").exponential_histogram
    data.aggregation_temporality = 2
    for number in range(points):
        report, stream = divmod(number, STREAMS)
        point = data.data_points.add(start_time_unix_nano=began, time_unix_nano=began + 10**9 + report * 10**6)
        for key, value in (
            ("contract", "policy"),
            ("slice", "all"),
            ("kernel.train", "a"),
            ("kernel.inference", f"k{stream % 3}"),
            ("layer", str(stream)),
        ):
            point.attributes.add(key=f"kc.{key}").value.string_value = value
        steps = 300 * (report + 1)
        point.scale, point.count = 3, steps * _BUCKETS
        point.sum = sum(steps * 2.0 ** ((bucket - 199.5) / 8) for bucket in range(_BUCKETS))
        point.positive.offset = -200
        point.positive.bucket_counts.extend([steps] * _BUCKETS)
    return request.SerializeToString()


async def _measure(evaluator: Evaluator, senders: int, points: int) -> LongExports:  # noqa: C901 - two kinds of senders
    template, began = message(points), time.monotonic()
    found = LongExports(size=len(template))

    async def over_http(name: bytes) -> None:
        async with httpx.AsyncClient(timeout=300) as client:
            while True:
                body = template.replace(_NAME.encode(), name)
                try:
                    answer = await client.post(f"{evaluator.http}/v1/metrics", content=body, headers=_HEADERS)
                except httpx.HTTPError as error:
                    found.silent.append(repr(error))
                    return
                found.answers[f"http {answer.status_code}"] += 1
                if answer.status_code == 200:
                    return
                if "retry-after" not in answer.headers:
                    found.silent.append(f"http {answer.status_code}: {answer.text}")
                    return
                await asyncio.sleep(float(answer.headers["retry-after"]))

    async def over_grpc(name: bytes) -> None:
        own = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(evaluator.grpc, options=own) as channel:
            while True:
                try:
                    await channel.unary_unary(_EXPORT)(template.replace(_NAME.encode(), name), timeout=300)
                except grpc.aio.AioRpcError as error:
                    found.answers[f"grpc {error.code().name}"] += 1
                    said = dict(error.trailing_metadata() or ()).get("google.rpc.retryinfo-bin")
                    if said is None:
                        found.silent.append(f"grpc {error.code()}: {error.details()}")
                        return
                    wait = RetryInfo.FromString(said).retry_delay
                    await asyncio.sleep(wait.seconds + wait.nanos / 1e9)
                else:
                    found.answers["grpc OK"] += 1
                    return

    async def send(number: int) -> None:
        await (over_grpc if number % 2 else over_http)(b"SENDER%03d" % number)
        found.through.append(time.monotonic() - began)

    with beside(healthy, evaluator.api, taken=found.health):
        await asyncio.gather(*(send(number) for number in range(senders)))
    return found


def long_exports(folder: Path, senders: int, points: int) -> LongExports:
    """Let so many senders have one long export each, all at once.

    Args:
        folder: Takes contract and state.
        senders: How many.
        points: Of an export.
    """
    (folder / "policy.yaml").write_text(CONTRACT)
    evaluator = Evaluator(folder / "policy.yaml", folder / "state.sqlite", {}, "--tick", "1", "--no-webhooks")
    try:
        found = asyncio.run(_measure(evaluator, senders, points))
        health = evaluator.get("/api/v1/health")
        found.requests, found.points = health["requests"], health["points"]
        process = Path(f"/proc/{evaluator.process.pid}")
        found.memory = int(re.search(r"VmHWM:\s+(\d+)", (process / "status").read_text())[1]) * 1024  # type: ignore[index]
        used = (process / "stat").read_text().rpartition(")")[2].split()[11:13]
        found.seconds = sum(map(int, used)) / os.sysconf("SC_CLK_TCK")
    finally:
        evaluator.stop()
    return found


def main() -> None:
    """Print what was measured."""
    senders = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    points = int(sys.argv[2]) if len(sys.argv) > 2 else 27_000
    with tempfile.TemporaryDirectory() as folder:
        found = long_exports(Path(folder), senders, points)
    through = sorted(found.through)
    first, median, last = through[0], through[len(through) // 2], through[-1]
    print(
        f"{senders} exports of {points:,} points, {found.size / 1e6:.1f} MB; CPU time {found.seconds:.0f} s; through "
        f"after {first:.0f} s the first, {median:.0f} s the median, {last:.0f} s the last"
    )
    print(f"  answers {dict(found.answers)}; without a word when to come again: {len(found.silent)}")
    print(f"  requests {found.requests}\n  points {found.points}")
    print(f"  resident memory at most {found.memory / 2**20:.0f} MiB; /healthz at most {max(found.health):.2f} s")


if __name__ == "__main__":
    main()
