"""What keeping requests costs: `python tests/benchmarks/bench_spool.py`.

Requests have 1,000 prompt and 500 sampled tokens. The alternative for writing is what one would write first: a JSON
line for each request, flushed each time.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path

import numpy as np

from kc_otel import Kernel
from kc_otel.recordings.request import SampledRequest
from kc_otel.recordings.spool import Spool

PROMPT, TOKENS = 1000, 500
KERNEL = Kernel("vllm", version="0.32", dtype="bfloat16")


def request(number: int) -> SampledRequest:
    rng = np.random.default_rng(number)
    prompt, tokens = (rng.integers(0, 32_000, size) for size in (PROMPT, TOKENS))
    logprobs = np.log(rng.uniform(0.01, 1.0, TOKENS)).astype(np.float32)
    attributes = {"task": "code", "prompt_tokens": PROMPT}
    return SampledRequest(f"cmpl-{number}", prompt, tokens, logprobs, KERNEL, attributes=attributes)


def writing(folder: Path, requests: int, rounds: int) -> None:
    made = [request(number) for number in range(256)]

    def spooled() -> None:
        spool = Spool(folder / f"{time.monotonic_ns()}.sqlite")
        for number in range(requests):
            spool.put(made[number % len(made)])
            if number % 1000 == 0:
                spool.flush()
        spool.close(60.0)
        assert spool.stats().written == requests, spool.stats()
        spool.path.unlink()

    def lines() -> None:
        path = folder / f"{time.monotonic_ns()}.jsonl"
        with path.open("w") as file:
            for number in range(requests):
                sample = made[number % len(made)]
                arrays = (sample.prompt_ids.tolist(), sample.token_ids.tolist(), sample.logprobs.tolist())
                file.write(
                    json.dumps([sample.request_id, *arrays, dict(sample.attributes), sample.kernel.to_plain()]) + "\n"
                )
                file.flush()
        path.unlink()

    wall = {"spool": [], "lines": []}
    for _ in range(rounds):
        for name, program in (("spool", spooled), ("lines", lines)):
            start = time.perf_counter()
            program()
            wall[name].append(time.perf_counter() - start)
    best = {name: requests / min(seconds) for name, seconds in wall.items()}
    ratio = sorted(b / a for a, b in zip(wall["spool"], wall["lines"], strict=True))
    print(f"spool, written to disk: {best['spool']:,.0f} requests/s; JSON lines {best['lines']:,.0f}")
    print(f"  {ratio[len(ratio) // 2]:.1f}x (from {ratio[0]:.1f}x to {ratio[-1]:.1f}x)")


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="kc-otel-") as folder:
        writing(Path(folder), requests=5000, rounds=5)


if __name__ == "__main__":
    main()
