"""What receiving costs: `python tests/benchmarks/bench_ingest.py` prints points per second of one core, end to end.

`kc-otel serve` as a process, pinned to one core, with its log and its state on disk, and 10 senders (`SENDERS=24` for
others) on the other cores, on connections that stay open; each waits for its answer, so that by the clock few of them
leave a server idle. A message has 200 cumulative exponential points of 80 buckets and 8 attributes, some 80 kB; every
report adds to each bucket. Of each way to send there are two numbers: points by CPU time of the server's
process, user and system, threads and ticks included, after warming up, so that senders and other programs do not count;
and points by the clock on the wall, which say the same on a machine that does nothing else. Beside each, in the same
run: a receiver that reads the same bodies and does nothing, and the server without machine code, point by point.
Besides, in this process: protobuf's parser alone, the walk along the wire, the walk with folding and settling, and what
a tick costs. Three minutes of a quiet machine.
"""

from __future__ import annotations

import argparse
import gzip
import http.client
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import yaml
from google.protobuf import json_format
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from kc_otel.judge.evaluator import Evaluator
from kc_otel.judge.otlp.wire_columns import read_columns
from tests.benchmarks.bench_evaluate import Fleet, contract
from tests.tools.servers import free_address, running

SENDERS = int(os.environ.get("SENDERS", "10"))
POINTS = 200
TICK = "a tick: judging 200 cells"
CORES = sorted(os.sched_getaffinity(0))
PINNED = f"import os; os.sched_setaffinity(0, {{{CORES[0]}}}); "
PAIR = ("a" * 12, "b" * 12)
JUDGED = contract(20)


def reports(count: int) -> Iterator[list[bytes]]:
    """Messages of all senders, report after report."""
    fleets = [Fleet(["all", *JUDGED.slices], [PAIR], 1) for _ in range(SENDERS)]
    start = time.time() - 3000.0
    for number in range(count):
        messages = []
        for sender, fleet in enumerate(fleets):
            message = fleet.request(0.0)
            [resource] = message.resource_metrics
            resource.resource.attributes.add(key="service.instance.id").value.string_value = str(sender)
            for metric in resource.scope_metrics[0].metrics:
                for point in metric.exponential_histogram.data_points:
                    point.start_time_unix_nano = round(start * 1e9)
                    point.time_unix_nano = round((start + 2900.0 + 0.05 * number) * 1e9)
                    for name in range(4):
                        point.attributes.add(key=f"service.attribute.{name}").value.string_value = f"value-{name}"
            messages.append(message.SerializeToString())
        yield messages


def as_json(body: bytes) -> bytes:
    return json_format.MessageToJson(ExportMetricsServiceRequest.FromString(body), indent=None).encode()


@contextmanager
def served(folder: Path, *, columns: bool) -> Iterator[tuple[int, str, str]]:
    """Process id, address of OTLP/HTTP and of OTLP/gRPC."""
    path = folder / "contract.yaml"
    said = JUDGED.model_dump(mode="json", by_alias=True, exclude_unset=True)
    clauses = said.pop("statistical")
    said |= {"statistical": clauses[:6], "numerical": clauses[6:9], "runtime": clauses[9:]}
    path.write_text(yaml.safe_dump(said))
    level = "" if columns else "os.environ['KC_OTEL_MACHINE_CODE'] = '0'; "
    code = f"{PINNED}import os; {level}from kc_otel.__main__ import main; main()"
    addresses = [free_address() for _ in range(3)]
    command = [sys.executable, "-c", code, "serve", path, "--state", folder / "state"]
    for name, address in zip(("http", "grpc", "api"), addresses, strict=True):
        command += [f"--{name}-port", address.split(":")[1]]
    with running(command, folder / "log", f"http://{addresses[2]}/healthz") as process:
        yield process.pid, addresses[0], addresses[1]


def seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident(pid: int) -> float:
    [line] = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS")]
    return int(line.split()[1]) / 1024


def by_http(address: str, headers: dict[str, str]) -> list[Callable[[bytes], None]]:
    def sender() -> Callable[[bytes], None]:
        connection = http.client.HTTPConnection(address)

        def send(body: bytes) -> None:
            try:
                connection.request("POST", "/v1/metrics", body, headers)
            except ConnectionError:  # closed while nothing was sent
                connection.close()
                connection.request("POST", "/v1/metrics", body, headers)
            answer = connection.getresponse()
            said = answer.read()
            assert answer.status == 200, said
            assert not said or said == b"{}", said

        return send

    return [sender() for _ in range(SENDERS)]


def by_grpc(address: str) -> list[Callable[[bytes], None]]:
    def sender() -> Callable[[bytes], None]:
        export = grpc.insecure_channel(address).unary_unary(
            "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export"
        )

        def send(body: bytes) -> None:
            assert export(body) == b""

        return send

    return [sender() for _ in range(SENDERS)]


def packed(name: str, count: int) -> tuple[list[list[bytes]], dict[str, str]]:
    """Reports as they travel, and their headers."""
    pack: Callable[[bytes], bytes] = {"HTTP, gzip": gzip.compress, "HTTP, JSON": as_json}.get(name, bytes)
    headers = {"content-type": "application/json" if "JSON" in name else "application/x-protobuf"}
    if "gzip" in name:
        headers["content-encoding"] = "gzip"
    return [[pack(body) for body in bodies] for bodies in reports(count)], headers


def send(senders: list[Callable[[bytes], None]], some: list[list[bytes]]) -> None:
    """Everything of a sender one after the other, all senders at a time."""
    with ThreadPoolExecutor(SENDERS) as pool:
        list(pool.map(lambda pair: [pair[0](bodies[pair[1]]) for bodies in some], zip(senders, range(SENDERS))))  # noqa: B905


def run(name: str, count: int, *, columns: bool) -> None:
    all_reports, headers = packed(name, count + 2)  # the server is never waited for
    with tempfile.TemporaryDirectory() as folder, served(Path(folder), columns=columns) as (pid, address, rpc):
        senders = by_grpc(rpc) if name == "gRPC" else by_http(address, headers)
        send(senders, all_reports[:2])  # by which streams and layouts become known
        time.sleep(3.0)  # the first evaluation loads what statistics need
        measured(name, "columns" if columns else "point by point", senders, all_reports[2:], pid)


def no_op(name: str, count: int) -> None:
    all_reports, headers = packed(name, count)
    address, rpc = free_address(), free_address()
    ports = ", ".join(one.split(":")[1] for one in (address, rpc))
    code = f"{PINNED}import asyncio; from tests.benchmarks.no_op_receiver import serve; asyncio.run(serve({ports}))"
    command = [sys.executable, "-c", code]
    with (
        tempfile.TemporaryDirectory() as folder,
        running(command, Path(folder) / "log", f"http://{address}/") as process,
    ):
        senders = by_grpc(rpc) if name == "gRPC" else by_http(address, headers)
        send(senders, all_reports[:2])
        measured(name, "taken by nobody", senders, all_reports[2:], process.pid)


def measured(name: str, how: str, senders: list[Callable[[bytes], None]], some: list[list[bytes]], pid: int) -> None:
    begin, began = seconds(pid), time.monotonic()
    send(senders, some)
    messages = SENDERS * len(some)
    each, wall = (seconds(pid) - begin) / messages, (time.monotonic() - began) / messages
    print(
        f"  {name:12s} {how:16s} {POINTS / each:10,.0f} points/s of CPU, {each * 1e6:6,.0f} us/message; "
        f"{POINTS / wall:10,.0f} points/s; {resident(pid):4.0f} MB resident",
        flush=True,
    )


def alone(count: int) -> None:
    spent = dict.fromkeys(
        ("protobuf, parsing only", "walk along the wire only", "walk, fold and settle", "point by point", TICK), 0.0
    )
    fast, slow = Evaluator([JUDGED]), Evaluator([JUDGED])
    fast.use_columns()

    def timed(name: str, call: Callable[[], Any]) -> Any:
        begin = time.process_time()
        result = call()
        spent[name] += (time.process_time() - begin) if number > 1 else 0.0
        return result

    for number, bodies in enumerate(reports(count + 2)):
        now = time.time()
        for body in bodies:
            request = timed("protobuf, parsing only", lambda: ExportMetricsServiceRequest.FromString(body))  # noqa: B023
            timed("walk along the wire only", lambda: read_columns(body))  # noqa: B023
            columns = timed("walk, fold and settle", lambda: fast.columns_of(body, 10**6))  # noqa: B023
            timed("walk, fold and settle", lambda: fast.ingest_metrics(columns, now))  # noqa: B023
            timed("point by point", lambda: slow.ingest_metrics(request, now))  # noqa: B023
        if number % 10 == 0:  # what a tick does before it judges; an evaluator at this rate takes more in between
            timed("walk, fold and settle", fast.settle)
            timed(TICK, lambda: fast.evaluate(now))  # noqa: B023
            slow.evaluate(now)
    ticks = len(range(10, count + 2, 10))
    print(f"  in one process: {TICK:26s} {spent.pop(TICK) / ticks * 1e3:10,.1f} ms")
    for name, value in spent.items():
        print(f"  in one process: {name:26s} {count * SENDERS * POINTS / value:10,.0f} points/s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--reports", type=int, default=100)
    count = parser.parse_args().reports
    print(f"messages of {len(next(reports(1))[0]):,} bytes, {POINTS} points; points per second of one core")
    alone(max(count // 5, 10))
    os.sched_setaffinity(0, set(CORES[1:] or CORES))
    for name in ("HTTP", "HTTP, gzip", "gRPC"):
        no_op(name, count)
        run(name, count, columns=True)
    run("HTTP", 10, columns=False)
    no_op("HTTP, JSON", 30)
    run("HTTP, JSON", 30, columns=True)
    run("HTTP, JSON", 10, columns=False)


if __name__ == "__main__":
    main()
