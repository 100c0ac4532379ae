"""Serve with an fp8 KV cache, send traffic, score it again in float32, and see which slice pays for the cache.

    make engines && .venv-engines/bin/python -m examples.rescore

Needs vLLM, whose fp8 cache needs a CPU with AVX-512 or AMX, and takes a minute or two on two idle cores. The server is
told by two variables to keep requests; scoring is another process, at another time, that could be on another machine.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from examples.tiny_model import tiny_model

ROOT = Path(__file__).resolve().parents[2]
CONTRACT = Path(__file__).with_name("contract.yaml")
SLICES = ("code", "prose", "tables")
OPTIONS = ("--kv-cache-dtype", "fp8", "--logprobs-mode", "processed_logprobs")
# Temperature and top-p are part of what is compared; where nothing is sampled there is nothing to compare.
TRAFFIC = ((48, {}), (12, {"temperature": 0.8, "top_p": 0.95}), (4, {"temperature": 0.0}))


def main() -> int:
    """Run the example; the exit status says whether there are verdicts."""
    if find_spec("vllm") is None:
        print("this needs vLLM: `make engines`, then .venv-engines/bin/python -m examples.rescore")
        return 2
    from examples.demo.terminal import Terminal  # noqa: PLC0415 - as everything below: not without vLLM
    from examples.rescore.judge import judge  # noqa: PLC0415
    from examples.vllm_server.server import serving  # noqa: PLC0415
    from examples.vllm_server.traffic import send  # noqa: PLC0415

    terminal, model = Terminal(), tiny_model(ROOT / ".cache")
    with tempfile.TemporaryDirectory(prefix="kc-otel-") as name:
        folder = Path(name)
        spool = folder / "requests.sqlite"
        variables = {"KC_OTEL_CONTRACT": str(CONTRACT), "KC_OTEL_SPOOL": str(spool)}
        terminal.say("$ KC_OTEL_CONTRACT=contract.yaml KC_OTEL_SPOOL=requests.sqlite \\", "bold")
        terminal.say(f"  python -m vllm.entrypoints.openai.api_server --model MODEL {' '.join(OPTIONS)}", "bold")
        with serving(model, variables, log=folder / "vllm.log", options=OPTIONS) as server:
            terminal.say(f"{sum(count for count, _ in TRAFFIC) * len(SLICES)} requests about {', '.join(SLICES)}")
            for count, options in TRAFFIC:
                asyncio.run(send(server.address, count, slices=SLICES, characters=600, options=options))
            terminal.say("answered; the server stops")
        return 0 if judge(terminal, spool, CONTRACT, model, folder) else 1


if __name__ == "__main__":
    sys.exit(main())
