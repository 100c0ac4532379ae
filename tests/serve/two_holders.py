"""Takes the state file as a standby does, acts for a moment, and lets go; its test runs several and kills some.

Usage: two_holders.py STATE TIMES
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from pathlib import Path

from kc_otel.serve.server import active
from kc_otel.serve.store.unit_of_work import unit_of_work


async def main(state: Path, times: int) -> None:
    print("ready", flush=True)
    for _ in range(times):
        connection = await active(state, asyncio.Event(), standby=True)
        assert connection is not None
        with unit_of_work(connection):
            connection.execute("CREATE TABLE IF NOT EXISTS acts (n INTEGER PRIMARY KEY, holders INTEGER)")
            connection.execute("INSERT INTO acts SELECT count(*) + 1, 0 FROM acts")
        (count,) = connection.execute("SELECT max(n) FROM acts").fetchone()
        print(f"holds {time.monotonic_ns()} {count}", flush=True)
        await asyncio.sleep(random.uniform(0.0, 0.02))
        print(f"lets go {time.monotonic_ns()} {count}", flush=True)
        connection.close()
        await asyncio.sleep(random.uniform(0.0, 0.02))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2])))
