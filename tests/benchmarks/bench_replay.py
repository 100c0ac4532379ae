"""What a replay costs: `python tests/benchmarks/bench_replay.py [--hours 24]`, a minute.

What one process exports every ten seconds with each of the contracts of `tests.tools.real_messages` after 100,000
tokens, written as `kc-otel serve --record` writes it, and judged every ten seconds. Times are CPU time of this process,
reading and parsing the file included.
"""

from __future__ import annotations

import os

# NumPy reads this when it is loaded, and `kc-otel` says it.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import argparse
import tempfile
import time
from pathlib import Path

from kc_otel.judge.otlp.traffic_entries import marked_frame
from kc_otel.offline.replay import read_recordings, replay
from tests.tools.real_messages import CONTRACTS, INTERVAL, Case, Sender, contract, messages

EXPORTS = 60
"""Different messages, after which the process starts anew."""
START = 1_800_000_000.0


def run(name: str, hours: float, folder: Path) -> None:
    path = folder / f"{name}.otlp"
    sender = Sender(messages(Case(name, 100_000), exports=EXPORTS), 0, START)
    with path.open("wb") as file:
        for number in range(round(hours * 3600 / INTERVAL)):
            file.write(marked_frame(sender.export(), START + number * INTERVAL))
    began = time.process_time()
    damage: list[str] = []
    course = replay(contract(name), read_recordings([path], damage), INTERVAL)
    spent = time.process_time() - began
    assert not damage
    print(
        f"  {name:14s} {course.cells:4d} cells, {course.evaluations:,} evaluations in {spent:6.1f} s, "
        f"{hours * 3600 / spent:8,.0f} times as fast as life; {path.stat().st_size / hours * 24 / 2**20:,.0f} MiB a day"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=24.0)
    hours = parser.parse_args().hours
    print(f"exports and evaluations every {INTERVAL:g} s, {hours:g} h")
    with tempfile.TemporaryDirectory() as folder:
        for name in CONTRACTS:
            run(name, hours, Path(folder))


if __name__ == "__main__":
    main()
