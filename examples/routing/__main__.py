"""Two vLLM engines behind a proxy; a contract's verdict moves one slice of the traffic while the rest stays.

    make engines && .venv-engines/bin/python -m examples.routing

The engine in use keeps its keys and values in fp8, for which vLLM needs a CPU with AVX-512 or AMX, the other one in
bf16. Served requests are rescored by the checkpoint in float32 as they come; where the drift breaks the contract the
evaluator publishes a route, and the proxy follows it.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from examples.tiny_model import prompts, tiny_model

ROOT = Path(__file__).resolve().parents[2]
CONTRACT = Path(__file__).with_name("contract.yaml")
SLICES = ("code", "prose", "tables")
FP8, BF16 = "inference-kernel", "train-kernel"
NAMES = {FP8: "vLLM, fp8 KV cache", BF16: "vLLM, bf16 KV cache"}
BATCH = 12
"""Requests of each slice that are sent at a time."""
PATIENCE = 240.0
"""Seconds after which no route is expected any more."""


def main() -> int:
    """Run the example; the exit status says whether one slice was moved and the rest stayed."""
    if find_spec("vllm") is None:
        print("this needs vLLM: `make engines`, then .venv-engines/bin/python -m examples.routing")
        return 2
    from examples.demo.terminal import Terminal  # noqa: PLC0415 - not without vLLM

    before, after, _ = run(Terminal())
    moved = {name for name in SLICES if after[name, BF16]}
    return 0 if moved == {"tables"} and not any(before[name, BF16] for name in SLICES) else 1


def run(terminal: Any) -> tuple[Counter[tuple[str, str]], ...]:
    """Everything that happens; requests by (slice, kernel) before the route, with it, and without an evaluator."""
    from examples.demo.evaluator import evaluating  # noqa: PLC0415 - as everything below: not without vLLM
    from examples.routing.proxy import Proxy, proxying  # noqa: PLC0415
    from examples.vllm_server.server import serving  # noqa: PLC0415
    from kc_otel.client.router import Router  # noqa: PLC0415
    from kc_otel.client.webhooks import new_secret  # noqa: PLC0415
    from kc_otel.contract.load import load  # noqa: PLC0415

    model = tiny_model(ROOT / ".cache")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kc-otel-")))
        spool = folder / "requests.sqlite"
        recorded = {"KC_OTEL_CONTRACT": str(CONTRACT), "KC_OTEL_SPOOL": str(spool)}
        terminal.say("two engines start: the same checkpoint with an fp8 and with a bf16 KV cache")
        fp8 = serving(model, recorded, log=folder / "fp8.log", options=("--kv-cache-dtype", "fp8"))
        bf16 = serving(model, {}, log=folder / "bf16.log")
        with ThreadPoolExecutor(2) as starting:
            began = [starting.submit(stack.enter_context, server) for server in (fp8, bf16)]
            servers = [server.result() for server in began]
        watching = stack.enter_context(ExitStack())
        evaluator = watching.enter_context(evaluating(CONTRACT, folder, "http://127.0.0.1:9/", new_secret()))
        router = stack.enter_context(Router(evaluator.api, contracts=[load(CONTRACT)], refresh=0.2))
        router.wait_for_table(10.0)  # without one nothing is served that was not promoted
        engines = {FP8: servers[0].address, BF16: servers[1].address}
        proxy = Proxy(router, "tiny-routed", engines)
        address = stack.enter_context(proxying(proxy))
        terminal.say(f"the proxy listens at {address}; requests about {', '.join(SLICES)} follow one another")

        asyncio.run(send(address))
        log = folder / "rescore.log"
        rescorer = watching.enter_context(rescoring(spool, model, evaluator.otlp, log))
        deadline = time.monotonic() + PATIENCE

        def expect(what: str) -> None:
            if rescorer.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"no {what}: {evaluator.verdicts()}\n{log.read_text(errors='replace')[-2000:]}")

        before = send_until_routed(address, proxy, router, expect)
        while any(verdict["status"] == "NO_DATA" for verdict in evaluator.verdicts()):  # some slice is not rescored yet
            expect("verdict")
            time.sleep(0.5)
        for route in router.table.routes:
            terminal.say(f"{route.slice} -> {NAMES[route.kernel]}: {route.clause}: {route.reason}", "bold")
        terminal.verdicts(evaluator.verdicts(), {route.avoid: "fp8 KV" for route in router.table.routes})
        # The requests among which the route came are in neither count.
        at = proxy.served.copy()
        for _ in range(2):
            asyncio.run(send(address))
        after = proxy.served - at

        watching.close()
        terminal.say("the evaluator and the rescorer have stopped; requests go on")
        at = proxy.served.copy()
        asyncio.run(send(address))
        alone = proxy.served - at
        table(terminal, "Before", before)
        table(terminal, "With the evaluator's route", after)
        table(terminal, "With the evaluator gone", alone)
        return before, after, alone


def send_until_routed(address: str, proxy: Any, router: Any, expect: Callable[[str], None]) -> Counter[tuple[str, str]]:
    """Send until the evaluator has published a route; requests by (slice, kernel) before the last batch."""
    before = proxy.served.copy()
    while not router.table.routes:
        expect("route")
        before = proxy.served.copy()
        asyncio.run(send(address))
    return before


async def send(address: str) -> None:
    """A batch of each slice, through the proxy."""
    import httpx  # noqa: PLC0415

    from examples.vllm_server.server import NAME  # noqa: PLC0415

    limits = httpx.Limits(max_connections=8)
    async with httpx.AsyncClient(base_url=address, limits=limits, timeout=120.0, trust_env=False) as client:
        asked = (
            client.post(
                "/v1/completions",
                json={"model": NAME, "prompt": text, "max_tokens": 48, "vllm_xargs": {"task": task}},
                headers={"x-user": f"user-{number}"},
            )
            for task in SLICES
            for number, text in enumerate(prompts(task, BATCH, characters=600))
        )
        for answer in await asyncio.gather(*asked):
            answer.raise_for_status()


@contextmanager
def rescoring(spool: Path, model: Path, otlp: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`kc-otel rescore --follow` as a process of its own, until the block ends."""
    command = [sys.executable, "-m", "kc_otel", "rescore", spool, "--model", model, "--contract", CONTRACT]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    environment |= {
        "OTEL_EXPORTER_OTLP_ENDPOINT": otlp, "OTEL_METRIC_EXPORT_INTERVAL": "2000",
        "OTEL_TRACES_EXPORTER": "none", "NO_PROXY": "127.0.0.1", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    with log.open("wb") as output:
        process = subprocess.Popen(  # noqa: S603 - our own command
            [*command, "--follow"], env=environment, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def table(terminal: Any, title: str, served: Counter[tuple[str, str]]) -> None:
    """Requests by slice and engine."""
    terminal.heading(f"{title}: requests by slice and engine")
    terminal.rows(
        ("slice", *NAMES.values()), ((name, *(str(served[name, kernel]) for kernel in NAMES)) for name in SLICES)
    )


if __name__ == "__main__":
    sys.exit(main())
