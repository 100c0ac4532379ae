"""The contract of the engine matrix, its engines, and each one's drift computed exactly, without kc-otel."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np

from examples.tiny_model import prompts
from tests.engines._cpu import FP8_CACHE, lacking

TASKS = ("code", "prose", "tables")
TOKENS = 64
LONG = 128
"""Prompt tokens from which a prompt is long."""
KEPT_EVERY = 2
"""Of so many sampled positions one is kept with the whole vocabulary."""
CLEAR = 1.35
"""A factor from the limit at which the samples that there are have to be enough."""

CONTRACT = f"""\
apiVersion: kernel-contract/v1
kind: KernelContract
metadata: {{name: matrix, version: 1, owner: tests}}
kernels: {{train: {{engine: torch, dtype: float32}}, inference: {{engine: vllm}}}}
slices:
  code: {{where: {{task: code}}}}
  prose: {{where: {{task: prose}}}}
  tables: {{where: {{task: tables}}}}
  short: {{where: {{prompt_tokens: "< {LONG}"}}}}
  long: {{where: {{prompt_tokens: ">= {LONG}"}}}}
statistical:
  - {{id: float32-in-another-order, metric: abs_log_ratio, statistic: fraction > 0.00003, limit: 0.04}}
  - {{id: rounding, metric: abs_log_ratio, statistic: p50, limit: 1.0}}
  - {{id: weights-and-activations, metric: abs_log_ratio, statistic: p90, limit: 1.0}}
  - {{id: cache, metric: abs_log_ratio, statistic: p90, limit: 1.0}}
observability: {{window: 20m, long_window: 1h, confidence: 0.99, min_samples: 300, sampling: 1.0}}
escalation: [{{on: fail, do: [notify]}}]
"""
"""The limits of the engines' own clauses are put in by `with_limits`."""

OWN_CLAUSE = {"bf16": "rounding", "int8 W8A8": "weights-and-activations", "fp8 KV cache": "cache"}

INVARIANT = f"""\
apiVersion: kernel-contract/v1
kind: KernelContract
metadata: {{name: invariant, version: 1, owner: tests}}
kernels: {{train: {{engine: vllm}}, inference: {{engine: vllm}}}}
slices: {{short: {{where: {{prompt_tokens: "< {LONG}"}}}}, long: {{where: {{prompt_tokens: ">= {LONG}"}}}}}}
statistical: [{{id: same-numbers, metric: abs_log_ratio, statistic: fraction > 0.000001, limit: 0.02}}]
observability: {{window: 20m, long_window: 1h, confidence: 0.99, min_samples: 300, sampling: 1.0}}
"""
"""One kernel against itself in another batch: nothing is rounded differently, unless the order of sums is another."""


@dataclass(frozen=True)
class EngineCase:
    """One engine: what it is given, and its clause, which the better engines keep."""

    dtype: str = "bfloat16"
    options: dict = field(default_factory=dict)
    environment: dict = field(default_factory=dict)
    int8: bool = False
    alone: bool = False


CASES = {
    "fp32": EngineCase("float32"),
    "bf16": EngineCase(alone=True, environment={"OMP_NUM_THREADS": "2"}),
    "fp8 KV cache": EngineCase(options={"kv_cache_dtype": "fp8"}),
    "int8 W8A8": EngineCase(int8=True),
    "bf16, one KV split": EngineCase(alone=True, environment={"OMP_NUM_THREADS": "2", "VLLM_CPU_ATTN_SPLIT_KV": "0"}),
}
"""More than one thread, or attention has nothing to split a request's keys and values among."""


def cases():
    """The engines that vLLM has on this processor."""
    return {name: case for name, case in CASES.items() if name != "fp8 KV cache" or lacking(FP8_CACHE) is None}


def with_limits(contract, drift):
    """The contract whose clause for each engine is clearly broken on its worst kind of text, and kept on the next.

    How far a format drifts depends on the processor: the model is trained on it, and its products are summed by it.
    Where the two kinds are close, the limit is close to the better one, or below it.

    Args:
        contract: As it was recorded under.
        drift: By engine, `exact`'s.
    """
    limits = {}
    for name, identity in OWN_CLAUSE.items():
        if name in drift:
            clause = next(candidate for candidate in contract.clauses if candidate.id == identity)
            *_, next_, worst = sorted(statistic(clause, *drift[name][task]) for task in TASKS)
            limits[identity] = min(math.sqrt(worst * next_), worst / CLEAR)
    clauses = tuple(item.model_copy(update={"limit": limits.get(item.id, item.limit)}) for item in contract.statistical)
    return contract.model_copy(update={"statistical": clauses})


@cache
def requests():
    """24 short and 24 long prompts of each kind of text, and the numbers of those that also run by themselves."""
    found = [
        {"text": text, "attributes": {"task": task}, "seed": 0, "long": characters > 500}
        for task in TASKS
        for characters in (60, 900)
        for text in prompts(task, 24, characters=characters)
    ]
    for seed, request in enumerate(found):
        request["seed"] = seed
    alone = [number for number in range(len(found)) if number % 48 >= 24 and number % 4 == 0][:12]
    return found, alone + [number for number in range(len(found)) if number % 48 < 24][:6]


def run(name, model, folder, contract):
    """Run an engine in a process of its own; returns its spool and what it kept for the exact drift."""
    case = CASES[name]
    work = folder / name.replace(" ", "-")
    work.mkdir()
    wanted, alone = requests()
    job = {
        "model": str(model),
        "options": {"dtype": case.dtype, **case.options},
        "requests": wanted,
        "tokens": TOKENS,
        "kept_every": KEPT_EVERY,
        "alone": alone if case.alone else [],
        "out": str(work / "exact.npz"),
    }
    (work / "job.json").write_text(json.dumps(job))
    recorded = {"KC_OTEL_CONTRACT": str(contract), "KC_OTEL_SPOOL": str(work / "spool.sqlite")}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("_matrix_engine.py")), str(work / "job.json")],
        env={**os.environ, **recorded, **case.environment},
        capture_output=True, text=True, check=False, timeout=1500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    with np.load(work / "exact.npz") as kept:
        return work / "spool.sqlite", dict(kept)


def exact(model, tokenizer, kept):
    """Per slice, every |l| that there could have been, ascending, and the probability of at most as much.

    At every position that was kept, l is computed for the whole vocabulary, weighted with the inference kernel's
    probabilities: what the sampled tokens estimate, without the noise of which token was sampled.
    """
    import torch

    drifts, weights, members = [], [], defaultdict(list)
    for number, request in enumerate(requests()[0]):
        prompt, tokens = tokenizer(request["text"])["input_ids"], kept[f"tokens-{number}"].tolist()
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1 : KEPT_EVERY]
        inference = kept[f"logprobs-{number}"]
        drifts.append(np.abs(logits.log_softmax(-1).numpy() - inference).ravel())
        weights.append(np.exp(inference).ravel())
        for name in ("all", request["attributes"]["task"], "long" if len(prompt) >= LONG else "short"):
            members[name].append(number)
    whose = np.repeat(np.arange(len(drifts)), [sample.size for sample in drifts])
    drift = np.concatenate(drifts)
    order = np.argsort(drift)  # once: a slice is in the same order
    drift, weight, whose = drift[order], np.concatenate(weights)[order], whose[order]
    found = {}
    for name, numbers in members.items():
        chosen = np.isin(np.arange(len(drifts)), numbers)[whose]
        found[name] = drift[chosen], cumulated(weight[chosen])
    return found


def distribution(drift, weight):
    """Values ascending, and the probability of at most as much."""
    order = np.argsort(drift)
    return drift[order], cumulated(weight[order])


def cumulated(weight):
    """The share of all weight up to each place."""
    below = np.cumsum(weight, dtype=np.float64)
    return below / below[-1]


def statistic(clause, drift, below):
    kind = clause.parsed_statistic
    if kind.kind == "fraction":
        rank = np.searchsorted(drift, kind.argument, "right")
        return 1.0 - (below[rank - 1] if rank else 0.0)
    return float(drift[np.searchsorted(below, kind.argument)])
