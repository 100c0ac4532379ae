"""What keeping and rescoring requests costs: room, requests per second, and what a budget leaves of the speed.

    python tests/benchmarks/bench_spool.py [--requests 5000] [--rounds 5]

Requests have 1,000 prompt and 500 sampled tokens. The alternative for writing is what one would write first: a JSON
line for each request, flushed each time. Memory is what this process grows by while queues that nobody empties are
filled to their bounds; rescoring runs on a Hugging Face model where transformers is installed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]
os.environ["OTEL_METRICS_EXPORTER"] = "none"

from _timing import interleaved, spread  # noqa: E402

from kc_otel import Kernel, Recorder  # noqa: E402
from kc_otel.contract.model import Contract  # noqa: E402
from kc_otel.record.worker import BoundedWorker  # noqa: E402
from kc_otel.recordings.request import SampledRequest  # noqa: E402
from kc_otel.recordings.rescorer import Rescorer, TokenBudget  # noqa: E402
from kc_otel.recordings.spool import Spool, SpoolReader  # noqa: E402

CONTRACT = {
    "apiVersion": "kernel-contract/v1",
    "kind": "KernelContract",
    "metadata": {"name": "bench", "version": 1, "owner": "bench"},
    "kernels": {"train": {"engine": "torch"}, "inference": {"engine": "vllm"}},
}
PROMPT, TOKENS = 1000, 500
QUEUE = 64 << 20


def request(number: int, prompt: int = PROMPT, tokens: int = TOKENS, vocabulary: int = 32_000) -> SampledRequest:
    """A request of random tokens."""
    rng = np.random.default_rng(number)
    return SampledRequest(
        f"cmpl-{number}",
        rng.integers(0, vocabulary, prompt),
        rng.integers(0, vocabulary, tokens),
        np.log(rng.uniform(0.01, 1.0, tokens)).astype(np.float32),
        Kernel("vllm", version="0.32", dtype="bfloat16"),
        attributes={"task": "code", "prompt_tokens": prompt},
    )


def resident() -> int:
    """Bytes of memory that this process has."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def memory(folder: Path) -> None:
    """Fill both queues while nothing empties them."""
    with mock.patch.object(BoundedWorker, "_run", return_value=None):
        spool, before, handed = Spool(folder / "full.sqlite"), resident(), 0
        while not spool.stats().dropped:
            spool.put(request(handed))
            handed += 1
        grown = resident() - before
    print(f"spool, queue of {QUEUE >> 20} MiB full: {handed - 1:,} requests wait, {grown / 2**20:.0f} MiB more memory")
    spool.close(0.0)
    with mock.patch.object(BoundedWorker, "_run", return_value=None):
        recorder, before, handed = Recorder(Contract.model_validate(CONTRACT), queue_bytes=QUEUE), resident(), 0
        batch = np.full((256, 2048), -1.0, np.float32)
        while not recorder.stats().dropped:
            recorder.compare(batch, batch)
            handed += 1
        grown = resident() - before - batch.nbytes
    print(f"recorder, queue of {QUEUE >> 20} MiB full: {handed - 1} batches wait, {grown / 2**20:.0f} MiB more memory")
    recorder.shutdown(0.0)


def writing(folder: Path, requests: int, rounds: int) -> None:
    """The spool against a JSON line per request."""
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


def handing_over(folder: Path, requests: int, rounds: int) -> None:
    """What a serving thread itself spends; another one writes."""
    made, kept = [request(number) for number in range(256)], []

    def put() -> None:
        with mock.patch("kc_otel.recordings.spool._QUEUE_BYTES", 1 << 40):
            spool = Spool(folder / f"{time.monotonic_ns()}.sqlite")
        for number in range(requests):
            spool.put(made[number % len(made)])
        kept.append(spool)

    _, median, worst = spread(interleaved({"put": put}, rounds)["put"], requests)
    for spool in kept:
        spool.close(120.0)
    print(f"  a serving thread is held up by {1e6 / median:.1f} us of CPU per request (at worst {1e6 / worst:.1f})")


def rescoring(folder: Path, rounds: int) -> None:
    """Prefill tokens per second, with and without a budget."""
    if find_spec("transformers") is None:
        print("rescoring: transformers is not installed here; .venv-engines has it")
        return
    import torch
    from transformers import AutoModelForCausalLM

    from examples.tiny_model import VOCABULARY, tiny_model
    from kc_otel.recordings.scoring import hf_scorer

    torch.set_num_threads(1)
    score = hf_scorer(AutoModelForCausalLM.from_pretrained(tiny_model(ROOT / ".cache"), dtype=torch.float32))
    rates: dict[str, list[float]] = {"alone": [], "rescored": [], "budget": []}
    made = [request(number, 400, 100, VOCABULARY) for number in range(32)]
    tokens = 500 * len(made)
    for round_ in range(rounds):
        start = time.perf_counter()
        for first in range(0, len(made), 32):
            batch = made[first : first + 32]
            score([sample.prompt_ids for sample in batch], [sample.token_ids for sample in batch])
        rates["alone"].append(tokens / (time.perf_counter() - start))
        half = rates["alone"][0] / 2
        for name in ("rescored", "budget"):
            spool = Spool(folder / f"{name}-{round_}.sqlite")
            for sample in made:
                spool.put(sample)
            spool.close()
            budget = TokenBudget(half, time.monotonic) if name == "budget" else None
            recorder = Recorder(Contract.model_validate(CONTRACT), sampling=1.0)
            with SpoolReader(spool.path) as reader, recorder:
                start = time.perf_counter()
                totals = Rescorer(reader, recorder, score, batch_tokens=4096, budget=budget).run(threading.Event())
                rates[name].append(totals.prefilled / (time.perf_counter() - start))
    share = sorted(a / b for a, b in zip(rates["rescored"], rates["alone"], strict=True))
    kept = sorted(rate / half for rate in rates["budget"])
    print(f"rescoring, the model by itself: {max(rates['alone']):,.0f} tokens/s, one core")
    print(
        f"  from spool to histograms: {max(rates['rescored']):,.0f} tokens/s, "
        f"{share[len(share) // 2]:.2f} of it (from {share[0]:.2f} to {share[-1]:.2f})"
    )
    print(
        f"  with a budget of {half:,.0f} tokens/s: {kept[len(kept) // 2]:.2f} of the budget "
        f"(from {kept[0]:.2f} to {kept[-1]:.2f})"
    )


def main() -> None:
    """Run the measurements and print them."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--requests", type=int, default=5000)
    arguments.add_argument("--rounds", type=int, default=5)
    options = arguments.parse_args()
    with tempfile.TemporaryDirectory(prefix="kc-otel-") as folder:
        memory(Path(folder))
        writing(Path(folder), options.requests, options.rounds)
        handing_over(Path(folder), options.requests, options.rounds)
        rescoring(Path(folder), options.rounds)


if __name__ == "__main__":
    main()
