"""A spool to verdicts: `kc-otel rescore` as a process, into a `kc-otel serve` of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from examples.demo.evaluator import Evaluator, evaluating
from examples.demo.terminal import Terminal
from kc_otel.client.webhooks import new_secret

JUDGED_SECONDS = 15.0


def judge(terminal: Terminal, spool: Path, contract: Path, model: Path, folder: Path) -> list[dict[str, Any]]:
    """Score the spool's requests with a checkpoint in float32, and print the verdicts; returns them.

    Raises:
        RuntimeError: If the rescorer fails; the message ends with what it said.
    """
    with evaluating(contract, folder, "http://127.0.0.1:9/", new_secret()) as evaluator:
        command = ["rescore", spool.name, "--model", "MODEL", "--contract", contract.name]
        terminal.say(f"$ OTEL_EXPORTER_OTLP_ENDPOINT={evaluator.otlp} kc-otel {' '.join(command)}", "bold")
        environment = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
        done = subprocess.run(  # noqa: S603 - our own command
            [sys.executable, "-m", "kc_otel", "rescore", spool, "--model", model, "--contract", contract],
            env=environment | {"OTEL_EXPORTER_OTLP_ENDPOINT": evaluator.otlp, "NO_PROXY": "127.0.0.1"},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"kc-otel rescore failed:\n{done.stderr[-2000:]}")
        for line in done.stdout.splitlines():
            terminal.say(line)
        cells = _judged(evaluator)
    kernels = {cell["kernel_inference"]: "vLLM" for cell in cells}
    terminal.verdicts(cells, kernels)
    return cells


def _judged(evaluator: Evaluator) -> list[dict[str, Any]]:
    """Verdicts once the last export is in all of them: two looks in a row with the same samples."""
    deadline, before = time.monotonic() + JUDGED_SECONDS, -1
    while time.monotonic() < deadline:
        cells = [cell for cell in evaluator.verdicts() if cell["kernel_inference"]]
        samples = sum(cell["samples"] for cell in cells)
        if samples and samples == before:
            break
        before = samples
        time.sleep(1.5)
    return cells
