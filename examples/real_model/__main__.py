"""Measure how far apart kernels are on SmolLM2-135M-Instruct, and write the tables and pictures: `make study`.

Each job is a process: a pair of kernels over all prompts, a run of GRPO, a fault to locate, a gradient. Measurements
stay in --folder, so that an interrupted study continues there. Two jobs run at a time, each on one core: engines that
share two cores wait for each other most of the time.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

from examples.real_model import gradients, located, measure, page
from examples.real_model.checkpoint import MissingModelError
from examples.real_model.kernels import PAIRS, same_inference
from examples.real_model.prompts import prompts

ROOT = Path(__file__).resolve().parents[2]
RUNS = ("stale", "rope", "fp8", "uncorrected", "corrected")


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(prog="python -m examples.real_model", description=__doc__)
    parser.add_argument("--folder", type=Path, default=measure.MODEL / "study", help="where measurements are kept")
    parser.add_argument("--pairs", nargs="+", choices=PAIRS, default=list(PAIRS), metavar="PAIR", help=", ".join(PAIRS))
    parser.add_argument("--prompts", type=int, default=len(prompts()), help="the first so many")
    parser.add_argument("--rollouts", type=int, default=measure.ROLLOUTS, help="answers to each prompt")
    parser.add_argument("--tokens", type=int, help="most tokens of an answer, instead of the prompt's own")
    parser.add_argument("--workers", type=int, default=2, help="jobs that run at a time")
    parser.add_argument(
        "--no-training", dest="training", action="store_false", help="neither GRPO, gradients nor locate"
    )
    parser.add_argument("--job", help="run this one here, and write no tables")
    parser.add_argument("--write", action="store_true", help="replace the handbook's page, its pictures and the data")
    options = parser.parse_args(arguments)
    wanted = jobs(options)
    if options.job and options.job not in wanted:
        parser.error(f"--job: {options.job} is not one of {', '.join(wanted)}")
    try:
        measure.model_here()
    except MissingModelError as error:
        print(error, file=sys.stderr)
        return 2
    if options.job:
        os.environ.update(measure.ENVIRONMENT | os.environ)
        result, written = wanted[options.job](), options.folder / f"{options.job}.json"
        if result is not None:
            written.write_text(json.dumps(result, indent=1))
        return 0
    if not measure.fp8_cache_in_vllm():
        print("vLLM has an fp8 KV cache with AVX-512 or AMX only: Hugging Face rounds keys and values to e4m3 instead")
    for pair in options.pairs:
        measure.held_here(pair)  # before two processes write one folder
    options.folder.mkdir(parents=True, exist_ok=True)
    left = [name for name in wanted if not (options.folder / f"{name}.json").exists()]
    with ThreadPoolExecutor(options.workers) as workers:
        ended = list(workers.map(partial(_run, arguments), left))
    failed = [name for name, well in zip(left, ended, strict=True) if not well]
    for name in failed:
        print(f"{name}: did not finish; its messages are above", file=sys.stderr)
    return int(bool(failed)) | page.report(options.folder, write=options.write)


def jobs(options: argparse.Namespace) -> dict[str, Callable[[], object]]:
    """The study's jobs by name, in the order in which they start; all but pairs return what JSON holds."""
    folder = options.folder
    asked = [replace(prompt, tokens=options.tokens or prompt.tokens) for prompt in prompts()[: options.prompts]]
    first = [name for name in options.pairs if name == same_inference(name, options.pairs)[0]]
    wanted: dict[str, Callable[[], object]] = {
        name: partial(measure.measure, same_inference(name, options.pairs), folder, asked, options.rollouts)
        for name in first
    }
    if options.training:
        wanted |= {f"located-{fault}": partial(located.located, fault, folder) for fault in located.FAULTS}
        wanted |= {f"rl-{run}": partial(_train, run) for run in RUNS}
        wanted |= {f"gradient-{pair}": partial(gradients.gradient, pair, folder) for pair in gradients.PAIRS}
    return wanted


def _train(run: str) -> object:
    from examples.real_model import rl  # noqa: PLC0415 - imports torch and TRL

    return rl.train(run)


def _run(arguments: list[str], job: str) -> bool:
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | measure.ENVIRONMENT
    command = [sys.executable, "-m", "examples.real_model", *arguments, "--job", job]
    began = time.monotonic()
    done = subprocess.run(command, env=environment, cwd=ROOT, check=False)  # noqa: S603 - our own command
    print(f"{job}: {(time.monotonic() - began) / 60:.0f} min", flush=True)
    return done.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
