"""What an acknowledgement costs: `python tests/benchmarks/bench_inbox.py` prints it on the disk and only judged.

Processes with `contracts/rl-rollouts-bf16-fp8.yaml` export what their Recorders made of 1,000 tokens and of 100,000.
They wait for each answer, one of them alone and 64 at a time, and everything is evaluated at every hundredth export, as
once a second where 1,024 processes export every ten. Both ways alternate in one run: with a state file what is
acknowledged is in the inbox, on the disk, and each evaluation takes it out again; the others are only judged.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from kc_otel.judge.otlp.requests import Limits
from kc_otel.serve.core import Core
from kc_otel.serve.durable_sink import DurableSink
from kc_otel.serve.store.state_file import open_state
from tests.tools.real_messages import INTERVAL, Case, Sender, contract, messages

PROCESSES, EXPORTS, ROUNDS = 64, 30, 3
EVALUATED_EVERY = 100


async def measured(file: Path | None, exports: Sequence[Sequence[bytes]]) -> tuple[float, float, list[float]]:
    """CPU and time of an export, seconds, and how long each waited, ascending; a list of exports for each sender."""
    waits, started = list[float](), itertools.count(1)
    with closing(open_state(file)) as state:
        core = Core([contract("rl-rollouts")], state, external_url="http://evaluator", now=time.time())
        sink, limits = DurableSink(core), Limits()

        async def send(bodies: Sequence[bytes]) -> None:
            for body in bodies:
                if next(started) % EVALUATED_EVERY == 0:
                    await core.evaluate()
                began = time.perf_counter()
                request = sink.read(body, limits)
                if file is None:
                    core.metrics(request)
                    await asyncio.sleep(0)
                else:
                    await sink.metrics(request)
                waits.append(time.perf_counter() - began)

        cpu, began = time.process_time(), time.perf_counter()
        await asyncio.gather(*map(send, exports))
        await core.evaluate()
        cpu, seconds = time.process_time() - cpu, time.perf_counter() - began
        await core.inbox.settle()
        assert not core.evaluator.counters.keys() - {"accepted", "ignored"}, core.evaluator.counters
    return cpu / len(waits), seconds / len(waits), sorted(waits)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path(), help="on the disk to measure")
    parent = parser.parse_args().folder
    print(f"load average {os.getloadavg()[0]:.1f}")
    for tokens in (1_000, 100_000):
        bodies = messages(Case("rl-rollouts", tokens), exports=EXPORTS)
        for processes in (PROCESSES, 1):
            count = EXPORTS * (1 if processes > 1 else 10)
            found: dict[bool, list[tuple[float, float, list[float]]]] = {True: [], False: []}
            for _ in range(ROUNDS):
                for kept in (True, False):
                    began = time.time() - count * INTERVAL
                    senders = [Sender(bodies, number, began) for number in range(processes)]
                    exports = [[sender.export() for _ in range(count)] for sender in senders]
                    with tempfile.TemporaryDirectory(dir=parent) as folder:
                        file = Path(folder) / "state" if kept else None
                        found[kept].append(asyncio.run(measured(file, exports)))
            print(f"{tokens:,} tokens, {len(bodies[-1]):,} bytes an export, {processes} at a time:")
            for kept, rounds in found.items():
                cpu, seconds, waits = min(rounds, key=lambda sums: sums[0])
                median, slow = (1e3 * waits[int(len(waits) * share)] for share in (0.5, 0.99))
                print(
                    f"  {'on the disk' if kept else 'not kept   '}: {1e6 * cpu:6,.0f} us of CPU, {1 / seconds:7,.0f} "
                    f"exports/s; median {median:.1f} ms, p99 {slow:.1f}"
                )


if __name__ == "__main__":
    main()
