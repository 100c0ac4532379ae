"""What shards cost and bring: `python tests/benchmarks/bench_shards.py` prints CPU time of judge, shards and Ray.

The messages of bench_ingest.py over HTTP into one process, and into a judge before one and two shards of a Ray cluster
that begins and ends with it. What is divided is CPU time, so that other programs count for little: a message costs the
judge's process so much, a shard so much, and Ray's own processes so much. How many shards one judge's process can feed
is the ratio of the first two; efficiency from one core to two is what a message costs all of them with one shard, by
what it costs with two. Wall time is said as well, and means something on an idle machine only. Three minutes.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import yaml

from tests.benchmarks.bench_ingest import JUDGED, POINTS, SENDERS, by_http, reports, seconds, send
from tests.tools.servers import free_address, running

WARM = 60
"""Reports before anything is measured: 24 MB for each of two shards, after 16 of which they compile their loop."""
SETTLE = 15.0
"""Seconds that compiling takes at most, where it was kept."""


@dataclass(frozen=True)
class Spent:
    """CPU seconds."""

    judge: float
    shards: float
    ray: float
    wall: float

    def since(self, before: Spent) -> Spent:
        return Spent(*(getattr(self, name) - getattr(before, name) for name in ("judge", "shards", "ray", "wall")))

    @property
    def total(self) -> float:
        return self.judge + self.shards + self.ray


@contextmanager
def served(folder: Path, shards: int) -> Iterator[tuple[int, str, str]]:
    """Process id, address of OTLP/HTTP, and of the API."""
    said = JUDGED.model_dump(mode="json", by_alias=True, exclude_unset=True)
    clauses = said.pop("statistical")
    said |= {"statistical": clauses[:6], "numerical": clauses[6:9], "runtime": clauses[9:]}
    (folder / "contract.yaml").write_text(yaml.safe_dump(said))
    http, grpc, api = (free_address() for _ in range(3))
    command = [sys.executable, "-m", "kc_otel", "serve", folder / "contract.yaml", "--state", folder / "state"]
    for name, address in (("http", http), ("grpc", grpc), ("api", api)):
        command += [f"--{name}-port", address.split(":")[1]]
    if shards:
        command += [
            "--engine",
            "ray",
            "--ray-address",
            "local",
            "--shards",
            shards,
            "--shard-folder",
            folder / "shards",
        ]
    with running(command, folder / "log", f"http://{api}/healthz") as process:
        yield process.pid, http, f"http://{api}"


def spent(pid: int, api: str) -> Spent:
    shards = httpx.get(f"{api}/api/v1/shards").json()
    own = {pid, *(one["pid"] for one in shards)}
    others = sum(seconds(one) for one in below(pid) if one not in own)
    return Spent(seconds(pid), sum(one["cpu_seconds"] for one in shards), others, time.monotonic())


def below(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            found += [child, *below(child)]
    return found


def patient(deliver: Callable[[bytes], None]) -> Callable[[bytes], None]:
    """A sender that sends again what it was asked to keep: compiling takes a machine's time."""

    def send_until_taken(body: bytes) -> None:
        for _ in range(60):
            try:
                return deliver(body)
            except AssertionError:
                time.sleep(1.0)
        raise TimeoutError

    return send_until_taken


def measured(shards: int, count: int) -> Spent:
    """What all messages took."""
    every = list(reports(WARM + count))
    with tempfile.TemporaryDirectory() as folder, served(Path(folder), shards) as (pid, http, api):
        senders = [patient(one) for one in by_http(http, {"content-type": "application/x-protobuf"})]
        send(senders, every[: WARM - 5])
        time.sleep(SETTLE)
        send(senders, every[WARM - 5 : WARM])  # by which streams and layouts become known
        time.sleep(2.0)  # shards have said what they spent
        before = spent(pid, api)
        send(senders, every[WARM:])
        wall = time.monotonic()
        time.sleep(2.0)
        after = spent(pid, api)
        return Spent(after.judge, after.shards, after.ray, wall).since(before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--reports", type=int, default=100)
    count = parser.parse_args().reports
    messages = count * SENDERS
    print(f"{messages:,} messages of {POINTS} points over HTTP; CPU time of a message in us")
    print("                    judge   shards      Ray      all   points/CPU second   points/s of wall time")
    found = {}
    for shards in (0, 1, 2):
        one = found[shards] = measured(shards, count)
        each = [1e6 * value / messages for value in (one.judge, one.shards, one.ray, one.total)]
        name = "one process" if not shards else f"{shards} shard{'s' * (shards > 1)}"
        print(
            f"  {name:14s} {each[0]:8,.0f} {each[1]:8,.0f} {each[2]:8,.0f} {each[3]:8,.0f} "
            f"{POINTS * messages / one.total:19,.0f} {POINTS * messages / one.wall:23,.0f}",
            flush=True,
        )
    print(f"  efficiency of a core from one shard to two: {found[1].total / found[2].total:.2f}")
    print(f"  shards that one judge's process can feed: {found[2].shards / found[2].judge:.1f}")
    print(f"  wall time of one shard by that of two: {found[1].wall / found[2].wall:.2f}")


if __name__ == "__main__":
    main()
