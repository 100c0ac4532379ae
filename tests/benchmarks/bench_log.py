"""What an acknowledgement costs: `python tests/benchmarks/bench_log.py` prints it for both policies of `--sync`.

Exports of 20 kB go into the log, from one sender that waits for each acknowledgement and from 64 such senders. The
alternative is the same without forcing anything to the disk.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from pathlib import Path

from kc_otel.serve.config import Sync
from kc_otel.serve.store.write_ahead_log import WriteAheadLog

EXPORT = os.urandom(20_000)


async def measured(folder: Path, sync: Sync, senders: int, exports: int) -> tuple[float, list[float]]:
    """Exports per second, and how long each waited, seconds, ascending."""
    log = WriteAheadLog(folder, sync=sync)
    waits: list[float] = []

    async def send() -> None:
        for _ in range(exports // senders):
            began = time.perf_counter()
            await log.append(EXPORT, 0.0, lambda position: position)
            waits.append(time.perf_counter() - began)

    began = time.perf_counter()
    await asyncio.gather(*(send() for _ in range(senders)))
    seconds = time.perf_counter() - began
    log.close()
    return len(waits) / seconds, sorted(waits)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--exports", type=int, default=1_920)
    parser.add_argument("--folder", type=Path, default=Path(), help="on the disk to measure")
    arguments = parser.parse_args()
    for senders in (64, 1):
        for sync in Sync:
            with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
                rate, waits = asyncio.run(measured(Path(folder), sync, senders, arguments.exports))
            median, worst = (1e3 * waits[int(len(waits) * share)] for share in (0.5, 0.99))
            print(
                f"--sync {sync}, {senders:2} senders: {rate:6,.0f} exports/s; median {median:.1f} ms, p99 {worst:.1f}"
            )


if __name__ == "__main__":
    main()
