"""What a fleet costs: `python tests/benchmarks/bench_fleet.py [--processes 1024] [--contract rl-rollouts]`, 5 min.

So many recording processes, each with one of the contracts of `tests.tools.real_messages` after 100,000 tokens, export
what real recorders do every ten seconds over OTLP/HTTP, each over a connection of its own. `kc-otel serve` keeps
them on disk, judges once a second, and is asked for its page's cells every five seconds. Printed is what its process
takes after everybody has exported twice: CPU, user and system, as a share of one core; its largest resident memory; and
how long a process waits for its acknowledgement.

Beside it, one after the other in the same run: the same over OTLP/gRPC, a channel each; protobuf, which only parses the
same bytes; uvicorn and grpc.aio, which read them and answer; VictoriaMetrics, which keeps the same histograms and
judges nothing; and Prometheus with the rules that `kc-otel generate prometheus` makes of the contract, which takes the
same histograms over remote write (Debian's has no OTLP receiver). What a process of a trainer spends is in
`bench_record.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import grpc
import httpx
import yaml
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from kc_otel.generate.prometheus import standalone_file
from kc_otel.judge.otlp.requests import SERVICES
from tests.integration.conftest import Evaluator
from tests.tools import debian, remote_write
from tests.tools.real_messages import CONTRACTS, INTERVAL, Case, Sender, contract, messages
from tests.tools.servers import free_address, running

EXPORTS = 24
"""Different messages that each process goes through."""
PAGE_SECONDS, MEASURED_SECONDS = 5.0, 60.0
_TICKS = os.sysconf("SC_CLK_TCK")
Export = Callable[[bytes], Awaitable[str]]


class Use(NamedTuple):
    """What a process has used: CPU seconds, and bytes resident at most."""

    cpu: float
    memory: int


def use(pid: int) -> Use:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    peak = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    return Use((int(fields[11]) + int(fields[12])) / _TICKS, int(peak[1]) * 1024)


@dataclass
class Fleet:
    """Processes that export to an address of OTLP/HTTP, spread evenly over the interval."""

    url: str
    """Of OTLP/HTTP or remote write, or an address of OTLP/gRPC."""
    sender: Callable[[int, float], Sender | Writer]
    """Makes the process of a number that exports first at a Unix time."""
    processes: int
    answers: Counter[str] = field(default_factory=Counter)
    waits: list[float] = field(default_factory=list)

    async def export_for(self, seconds: float) -> None:
        now = time.time()
        end = time.monotonic() + seconds
        async with asyncio.TaskGroup() as tasks:
            for number in range(self.processes):
                tasks.create_task(self._process(number, now, end))

    async def _process(self, number: int, now: float, end: float) -> None:
        offset = number * INTERVAL / self.processes
        sender, due = self.sender(number, now + offset), time.monotonic() + offset
        await asyncio.sleep(offset)
        async with over_http(self.url) if "/" in self.url else over_grpc(self.url) as export:
            while due < end:
                await asyncio.sleep(max(due - time.monotonic(), 0.0))
                body, due = sender.export(), due + INTERVAL
                began, lost = time.monotonic(), False
                try:
                    answer = await export(body)
                except (OSError, asyncio.IncompleteReadError):
                    answer, lost = "connection lost", True
                self.answers[answer] += 1
                self.waits.append(time.monotonic() - began)
                if lost:
                    return


@asynccontextmanager
async def over_http(url: str) -> AsyncIterator[Export]:
    """A connection on which one request follows the other; answers are statuses."""
    address = urlsplit(url)
    wanted = remote_write.HEADERS if address.path.endswith("/write") else {}
    headers = "".join(f"{name}: {value}\r\n" for name, value in wanted.items() if name != "Content-Type")
    reader, writer = await asyncio.open_connection(address.hostname, address.port)

    async def export(body: bytes) -> str:
        writer.write(
            f"POST {address.path} HTTP/1.1\r\nhost: {address.netloc}\r\ncontent-type: application/x-protobuf\r\n"
            f"{headers}content-length: {len(body)}\r\n\r\n".encode()
            + body
        )
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        if length := re.search(r"content-length: (\d+)", head):
            await reader.readexactly(int(length[1]))
        return head.split()[1]

    try:
        yield export
    finally:
        writer.close()


@asynccontextmanager
async def over_grpc(address: str) -> AsyncIterator[Export]:
    """A channel of its own; answers are codes."""
    async with grpc.aio.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        method = channel.unary_unary(f"/{SERVICES['metrics']}/Export")

        async def export(body: bytes) -> str:
            try:
                await method(body, timeout=60)
            except grpc.RpcError as error:
                return str(error.code().name)
            return "OK"

        yield export


async def page(url: str, seconds: float) -> None:
    """Somebody who has the page open."""
    end = time.monotonic() + seconds
    async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
        while time.monotonic() < end:
            await client.get(url)
            await asyncio.sleep(PAGE_SECONDS)


async def measured(fleet: Fleet, pid: int, api: str | None) -> tuple[float, int]:
    """Share of a core that a process takes for a fleet, after two rounds of exports, and its largest memory."""
    whole = 2 * INTERVAL + MEASURED_SECONDS

    async def watched() -> tuple[float, int]:
        await asyncio.sleep(2 * INTERVAL)
        fleet.waits.clear()
        before, began = use(pid), time.monotonic()
        await asyncio.sleep(MEASURED_SECONDS)
        after = use(pid)
        return (after.cpu - before.cpu) / (time.monotonic() - began), after.memory

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(fleet.export_for(whole))
        if api is not None:
            tasks.create_task(page(api, whole))
        found = tasks.create_task(watched())
    return found.result()


def show(name: str, fleet: Fleet, pid: int, api: str | None = None) -> None:
    cores, memory = asyncio.run(measured(fleet, pid, api))
    waits = sorted(fleet.waits)
    other = {status: count for status, count in fleet.answers.items() if status not in {"200", "204", "OK"}}
    print(
        f"{name:34s} {cores:6.2f} of a core {memory / 2**20:7.0f} MiB   acknowledged after "
        f"{statistics.median(waits) * 1e3:.1f} ms, {waits[int(0.99 * len(waits))] * 1e3:.0f} ms in 99 of 100, "
        f"{sum(fleet.answers.values()):,} exports{f', of them {other}' if other else ''}",
        flush=True,
    )


@contextmanager
def bare(transport: str, folder: Path) -> Iterator[tuple[str, int]]:
    """A server of the same libraries that throws away what comes: its address, and its process."""
    address = free_address()
    server = str(Path(__file__).with_name("_bare_server.py"))
    command = [sys.executable, server, transport.lower(), address.rpartition(":")[2]]
    with (folder / "bare.log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            while not listens(address):
                assert process.poll() is None, (folder / "bare.log").read_text()
                time.sleep(0.1)
            yield f"http://{address}/v1/metrics" if transport == "HTTP" else address, process.pid
        finally:
            process.terminate()


def listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with socket.socket() as sock:
        return sock.connect_ex((host, int(port))) == 0


@contextmanager
def alternative(folder: Path) -> Iterator[tuple[str, int]]:
    """VictoriaMetrics: where it takes OTLP, and its process."""
    address = free_address()
    command = [
        debian.find("victoria-metrics"),
        f"-httpListenAddr={address}",
        f"-storageDataPath={folder / 'store'}",
        "-opentelemetry.usePrometheusNaming",
    ]
    with running(command, folder / "store.log", f"http://{address}/health") as process:
        yield f"http://{address}/opentelemetry/v1/metrics", process.pid


@contextmanager
def prometheus(case: Case, folder: Path) -> Iterator[tuple[str, int]]:
    """Prometheus with our rules on raw histograms: where it takes remote write, and its process."""
    address = free_address()
    (folder / "rules.yaml").write_text(standalone_file(contract(case.contract)).text)
    (folder / "prometheus.yml").write_text(yaml.safe_dump({"rule_files": [str(folder / "rules.yaml")]}))
    command = [
        debian.find("prometheus"),
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'prometheus'}",
        f"--web.listen-address={address}",
        "--web.enable-remote-write-receiver",
        "--enable-feature=native-histograms",
    ]
    with running(command, folder / "prometheus.log", f"http://{address}/-/ready") as process:
        yield f"http://{address}/api/v1/write", process.pid


class Writer:
    """A process whose histograms go to Prometheus: what `Sender` sends, over remote write."""

    def __init__(self, messages: Sequence[Sequence[tuple[bytes, bytes]]], number: int) -> None:
        self._messages, self._exported = messages, 0
        self._instance = remote_write.label("instance", f"sender-{number}")

    def export(self) -> bytes:
        """The next message, of now."""
        message = self._messages[self._exported % len(self._messages)]
        self._exported += 1
        return remote_write.at_present(message, self._instance)


def parsing(bodies: Sequence[bytes]) -> float:
    """Seconds in which protobuf parses one message."""
    began = time.process_time()
    for body in bodies:
        for _ in range(50):
            ExportMetricsServiceRequest.FromString(body)
    return (time.process_time() - began) / (50 * len(bodies))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=1024)
    parser.add_argument("--contract", choices=CONTRACTS, default="rl-rollouts")
    given = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4 * given.processes + 1000, hard), hard))
    case = Case(given.contract, 100_000)
    bodies = messages(case, exports=EXPORTS)
    rate, size = given.processes / INTERVAL, statistics.mean(map(len, bodies))
    print(f"{given.processes} processes, {rate:.1f} messages/s of {size:,.0f} bytes")
    parsed = parsing(bodies)
    print(f"{'protobuf parses them':34s} {rate * parsed:6.3f} of a core ({parsed * 1e6:.0f} us a message)")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "policy.yaml").write_text(
            yaml.safe_dump(contract(case.contract).model_dump(mode="json", by_alias=True, exclude_unset=True))
        )
        options = ("--no-webhooks", "--tick", "1")
        sender = partial(Sender, bodies)
        for transport in ("HTTP", "gRPC"):
            evaluator = Evaluator(folder / "policy.yaml", folder / transport, {}, *options)
            try:
                url = f"{evaluator.http}/v1/metrics" if transport == "HTTP" else evaluator.grpc
                fleet, api = Fleet(url, sender, given.processes), f"{evaluator.api}/api/v1/verdicts"
                show(f"kc-otel serve, OTLP/{transport}", fleet, evaluator.process.pid, api)
            finally:
                evaluator.stop()
            with bare(transport, folder) as (url, pid):
                show(f"the library alone, OTLP/{transport}", Fleet(url, sender, given.processes), pid)
        with alternative(folder) as (url, pid):
            show("VictoriaMetrics", Fleet(url, sender, given.processes), pid)
        translated = [remote_write.undated(ExportMetricsServiceRequest.FromString(body)) for body in bodies]
        with prometheus(case, folder) as (url, pid):
            writers = Fleet(url, lambda number, _: Writer(translated, number), given.processes)
            show("Prometheus and our rules", writers, pid)


if __name__ == "__main__":
    main()
