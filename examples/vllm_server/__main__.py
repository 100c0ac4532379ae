"""Serve, send traffic of two slices, look at what was recorded, and have it judged."""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections import defaultdict
from importlib.util import find_spec
from pathlib import Path

from examples.tiny_model import tiny_model

ROOT = Path(__file__).resolve().parents[2]
CONTRACT = Path(__file__).with_name("contract.yaml")
REQUESTS = 40


def main() -> int:
    """Run the example; the exit status says whether there are verdicts."""
    if find_spec("vllm") is None:
        print("this needs vLLM: `make engines`, then .venv-engines/bin/python -m examples.vllm_server")
        return 2
    with tempfile.TemporaryDirectory(prefix="kc-otel-") as folder:
        spool = Path(folder) / "requests.sqlite"
        model = tiny_model(ROOT / ".cache")
        serve_and_send(model, spool, Path(folder) / "vllm.log")
        show(spool)
        from examples.demo.terminal import Terminal  # noqa: PLC0415
        from examples.rescore.judge import judge  # noqa: PLC0415 - not without vLLM

        print("\nscored by the same checkpoint in float32:")
        return 0 if judge(Terminal(), spool, CONTRACT, model, Path(folder)) else 1


def serve_and_send(model: Path, spool: Path, log: Path) -> None:
    """The server as it is always started, but for two variables, and its clients."""
    from examples.vllm_server.server import serving  # noqa: PLC0415
    from examples.vllm_server.traffic import send  # noqa: PLC0415

    variables = {"KC_OTEL_CONTRACT": str(CONTRACT), "KC_OTEL_SPOOL": str(spool)}
    print("starting python -m vllm.entrypoints.openai.api_server as ever, with these in its environment:")
    print("\n".join(f"  {name}={value}" for name, value in variables.items()))
    with serving(model, variables, log=log) as server:
        print(f"serving at {server.address}; {2 * REQUESTS} requests ...")
        start = time.monotonic()
        tokens = asyncio.run(send(server.address, REQUESTS))
        print(f"{tokens} tokens came back in {time.monotonic() - start:.1f} s; stopping the server ...")


def show(spool: Path) -> None:
    """Print what was recorded, by slice."""
    from kc_otel import load_contract  # noqa: PLC0415
    from kc_otel.recordings.spool import SpoolReader  # noqa: PLC0415

    contract = load_contract(CONTRACT)
    reader = SpoolReader(spool)
    try:
        requests = [request for _, request in reader.take(10 * REQUESTS)]
    finally:
        reader.close()
    by_slice = defaultdict(list)
    for request in requests:
        for name in contract.slices_of(request.attributes):
            by_slice[name].append(request)
    share = contract.observability.sampling
    print(f"\nrecorded: {len(requests)} of {2 * REQUESTS} requests, at a share of {share:g}")
    print(f"{'slice':8}{'requests':>10}{'tokens':>10}{'mean log Q':>12}")
    for name, kept in sorted(by_slice.items()):
        tokens = sum(request.token_ids.size for request in kept)
        mean = sum(float(request.logprobs.sum()) for request in kept) / tokens
        print(f"{name:8}{len(kept):>10}{tokens:>10}{mean:>12.2f}")
    for kernel in {request.kernel for request in requests}:
        print(f"\nkernel {kernel.fingerprint}")
        for name, value in kernel.attributes().items():
            print(f"  {name:28}{value}")
    for request in requests[:1]:
        print(f"\none of them: {request.request_id}")
        print(f"  attributes   {dict(request.attributes)}")
        print(f"  processing   {dict(request.processing) or 'none'}, log-probabilities are {request.logprobs_mode}")
        log_q = request.logprobs[:6].astype(float).round(2)
        print(f"  first tokens {request.token_ids[:6].tolist()}, log Q {log_q.tolist()}")


if __name__ == "__main__":
    sys.exit(main())
