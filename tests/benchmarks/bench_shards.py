"""What shards cost and bring: `python tests/benchmarks/bench_shards.py` prints CPU time of judge, shards and Ray.

Real recorders' messages (the contract of twenty slices after 100,000 tokens) over HTTP from 32 processes into one
process, and into a judge before one and two shards of a Ray cluster that begins and ends with it. What is divided is
CPU time, so that other programs count for little: a message costs the judge's process so much, a shard so much, and
Ray's own processes so much. How many shards one judge's process can feed is the ratio of the first two; efficiency from
one core to two is what a message costs all of them with one shard, by what it costs with two. Three minutes.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import yaml

from tests.benchmarks.bench_fleet import over_http as connection
from tests.benchmarks.bench_fleet import use
from tests.tools.real_messages import Case, Sender, contract, messages
from tests.tools.servers import free_address, running

CASE = Case("twenty-slices", 100_000)
PROCESSES, EXPORTS = 32, 40
WARM = 4
"""Exports of each process before anything is measured: streams become known."""


@dataclass(frozen=True)
class Spent:
    """CPU seconds."""

    judge: float
    shards: float
    ray: float

    def since(self, before: Spent) -> Spent:
        return Spent(*(getattr(self, name) - getattr(before, name) for name in ("judge", "shards", "ray")))

    @property
    def total(self) -> float:
        return self.judge + self.shards + self.ray


@contextmanager
def served(folder: Path, shards: int) -> Iterator[tuple[int, str, str]]:
    """Process id, address of OTLP/HTTP, and of the API."""
    said = contract(CASE.contract).model_dump(mode="json", by_alias=True, exclude_unset=True)
    (folder / "contract.yaml").write_text(yaml.safe_dump(said))
    http, grpc, api = (free_address() for _ in range(3))
    command = [sys.executable, "-m", "kc_otel", "serve", folder / "contract.yaml", "--state", folder / "state"]
    command += ["--no-webhooks"]
    for name, address in (("http", http), ("grpc", grpc), ("api", api)):
        command += [f"--{name}-port", address.split(":")[1]]
    if shards:
        command += ["--engine", "ray", "--ray-address", "local", "--shards", shards]
        command += ["--shard-folder", folder / "shards"]
    with running(command, folder / "log", f"http://{api}/healthz") as process:
        yield process.pid, f"http://{http}/v1/metrics", f"http://{api}"


def spent(pid: int, api: str) -> Spent:
    shards = httpx.get(f"{api}/api/v1/health").json()["shards"]
    own = {pid, *(shard["pid"] for shard in shards)}
    others = sum(use(child).cpu for child in below(pid) if child not in own)
    return Spent(use(pid).cpu, sum(shard["cpu_seconds"] for shard in shards), others)


def below(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            found += [child, *below(child)]
    return found


async def send(url: str, senders: list[Sender], exports: int) -> None:
    """Each sender's next exports, one after the other, all senders at once; what is not taken is sent again."""

    async def send_exports(sender: Sender) -> None:
        async with AsyncExitStack() as stack:
            export = await stack.enter_async_context(connection(url))
            for _ in range(exports):
                body = sender.export()
                while await export(body) != "200":  # noqa: ASYNC110 - it is sent again as it was told
                    await asyncio.sleep(1.0)

    await asyncio.gather(*map(send_exports, senders))


def measured(shards: int, bodies: list[bytes]) -> Spent:
    with tempfile.TemporaryDirectory() as folder, served(Path(folder), shards) as (pid, http, api):
        began = time.time() - 10.0 * (WARM + EXPORTS)
        senders = [Sender(bodies, number, began) for number in range(PROCESSES)]
        asyncio.run(send(http, senders, WARM))
        time.sleep(2.0)  # shards have said what they spent
        before = spent(pid, api)
        asyncio.run(send(http, senders, EXPORTS))
        time.sleep(2.0)
        return spent(pid, api).since(before)


def main() -> None:
    bodies = messages(CASE, exports=WARM + EXPORTS)
    count = EXPORTS * PROCESSES
    print(
        f"{count:,} messages of {sum(map(len, bodies)) // len(bodies):,} bytes over HTTP; CPU time of a message in us"
    )
    print("                    judge   shards      Ray      all   messages/CPU second")
    found = {}
    for shards in (0, 1, 2):
        cost = found[shards] = measured(shards, bodies)
        parts = [1e6 * value / count for value in (cost.judge, cost.shards, cost.ray, cost.total)]
        name = "one process" if not shards else f"{shards} shard{'s' * (shards > 1)}"
        print(
            f"  {name:14s} {parts[0]:8,.0f} {parts[1]:8,.0f} {parts[2]:8,.0f} {parts[3]:8,.0f} "
            f"{count / cost.total:21,.0f}",
            flush=True,
        )
    print(f"  efficiency of a core from one shard to two: {found[1].total / found[2].total:.2f}")
    print(f"  shards that one judge's process can feed: {found[2].shards / found[2].judge:.1f}")


if __name__ == "__main__":
    main()
