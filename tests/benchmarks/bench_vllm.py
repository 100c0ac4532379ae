"""What recording costs vLLM: the same requests with and without instrumentation, interleaved, in one process.

    .venv-engines/bin/python tests/benchmarks/bench_vllm.py

The model is tiny, which makes it the worst case: what a token costs vLLM itself is as small as it gets. Requests ask
for log-probabilities, as RL does, or do not, as most serving does; in the latter case instrumentation has the engine
compute them, for its share of requests. Seconds are CPU time of the whole process, hand-over and spool included, so
that other programs on this machine count less. Prints the median of the paired ratios and their middle half.
"""

from __future__ import annotations

import logging
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SHARES = (0.05, 1.0)
ROUNDS, REQUESTS, TOKENS = 60, 64, 64


def main() -> None:
    if find_spec("vllm") is None:
        print("vLLM is not installed here; `make bench` runs this with .venv-engines where that is made")
        return
    sys.path.insert(0, str(ROOT))
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    logging.disable(logging.WARNING)
    from vllm import LLM, SamplingParams

    from examples.tiny_model import prompts, tiny_model

    llm = LLM(
        str(tiny_model(ROOT / ".cache")),
        dtype="bfloat16",
        max_model_len=1024,
        gpu_memory_utilization=0.3,
        enforce_eager=True,
        disable_log_stats=True,
        enable_prefix_caching=False,
    )
    texts = prompts("code", REQUESTS)
    params = {
        asked: [
            SamplingParams(max_tokens=TOKENS, ignore_eos=True, seed=i, logprobs=asked, extra_args={"task": f"t{i % 8}"})
            for i in range(REQUESTS)
        ]
        for asked in (0, None)
    }

    begin = SamplingParams(max_tokens=2, ignore_eos=True, logprobs=0)

    def run(asked: int | None, settle: Callable[[], object]) -> float:
        # What is done once per instrumentation (the fingerprint, the spool's file) is no part of a server's day.
        llm.generate(texts, begin, use_tqdm=False)
        settle()
        start = time.process_time()
        llm.generate(texts, params[asked], use_tqdm=False)
        return time.process_time() - start

    with tempfile.TemporaryDirectory() as folder:
        _compare(run, Path(folder))


def _compare(run, folder: Path) -> None:
    from kc_otel.integrations.vllm import KernelContractInstrumentor
    from tests.tools.contracts import contract_of

    contract = contract_of("bench", slices={f"task-{i}": {"where": {"task": f"t{i}"}} for i in range(8)})
    instrumentor = KernelContractInstrumentor()
    programs = [(asked, share) for asked in (0, None) for share in (None, *SHARES)]
    seconds: dict[tuple[int | None, float | None], list[float]] = {program: [] for program in programs}
    recorded = 0
    for round_ in range(ROUNDS + 1):
        # Whoever comes first after a pause pays for it: everyone in turn.
        turn = round_ % len(programs)
        for asked, share in programs[turn:] + programs[:turn]:
            if share is not None:
                instrumentor.instrument(contract=contract, spool=folder / "spool.sqlite", sampling=share)
            took = run(asked, instrumentor.flush if share is not None else lambda: None)
            if share is not None:
                start = time.process_time()
                instrumentor.flush()
                took += time.process_time() - start
                recorded += instrumentor.stats().recorded
                instrumentor.uninstrument()
            if round_:
                seconds[asked, share].append(took)
    print(f"{REQUESTS} requests of {TOKENS} tokens, {ROUNDS} rounds; {recorded} recorded")
    for asked in (0, None):
        base = seconds[asked, None]
        name = "log-probabilities requested" if asked == 0 else "log-probabilities not requested"
        print(f"{name}: {REQUESTS * TOKENS / statistics.median(base):,.0f} tokens/s uninstrumented")
        for share in SHARES:
            ratios = sorted(mine / other for mine, other in zip(seconds[asked, share], base, strict=True))
            low, median, high = statistics.quantiles(ratios, n=4)
            print(f"  instrumented at {share:.0%}: {median:.3f} of its time (middle half {low:.3f} to {high:.3f})")
    paired = sorted(a / b for a, b in zip(seconds[0, None], seconds[None, None], strict=True))
    print(f"  asking vLLM itself for log-probabilities: {statistics.median(paired):.3f} of the time without")


if __name__ == "__main__":
    main()
