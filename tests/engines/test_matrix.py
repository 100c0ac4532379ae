"""One contract, five real engines: each breaks it exactly where its arithmetic really is worse, and nowhere else."""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from examples.quantised import in_int8
from kc_otel import Kernel, Recorder, load_contract
from kc_otel.contract.load import load_text
from kc_otel.recordings.rescorer import Rescorer
from kc_otel.recordings.scoring import hf_scorer
from kc_otel.recordings.spool import SpoolReader
from tests.engines._cpu import avx512_arithmetic, needs_fp8_cache
from tests.engines._matrix import (
    CASES,
    CLEAR,
    CONTRACT,
    INVARIANT,
    TASKS,
    TOKENS,
    cases,
    distribution,
    exact,
    requests,
    run,
    statistic,
    with_limits,
)
from tests.tools.judge import Judge

pytestmark = pytest.mark.slow


class Matrix:
    def __init__(self, folder, checkpoint):
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        path = folder / "contract.yaml"
        path.write_text(CONTRACT)
        int8 = in_int8(checkpoint, folder / "int8")
        requests()  # parses Python source, which CPython 3.11 cannot do in two threads at a time
        with ThreadPoolExecutor(2) as pool:
            models = [int8 if case.int8 else checkpoint for case in cases().values()]
            ran = list(pool.map(lambda name, model: run(name, model, folder, path), cases(), models))
        self.spools = {name: spool for name, (spool, _) in zip(cases(), ran, strict=True)}
        self.kept = {name: kept for name, (_, kept) in zip(cases(), ran, strict=True)}
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        self.model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
        tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        self.exact = {name: exact(self.model, tokenizer, self.kept[name]) for name in self.kept}
        self.contract = with_limits(load_contract(path), self.exact)
        self.verdicts = {name: self.rescored(name) for name in self.kept}
        torch.set_num_threads(threads)

    def rescored(self, name):
        """Verdicts by clause and slice, from the spool by way of the rescorer."""

        def record(recorder):
            with SpoolReader(self.spools[name]) as reader:
                totals = Rescorer(reader, recorder, hf_scorer(self.model)).run(threading.Event())
            assert totals.requests == len(requests()[0])
            assert totals.tokens == len(requests()[0]) * TOKENS

        return judged(self.contract, Kernel("torch", dtype="float32"), record)


def judged(contract, train, record):
    """Verdicts on what a function gives to a recorder."""
    judge = Judge(contract)
    judge.verdicts()
    with Recorder(contract, train=train, metric_exporter=judge, sampling=1.0) as recorder:
        record(recorder)
        assert recorder.force_flush()
    return {cell: verdict for cell, verdict in judge.verdicts().items() if verdict.samples}


@pytest.fixture(scope="module")
def matrix(tmp_path_factory, tiny_model):
    return Matrix(tmp_path_factory.mktemp("matrix"), tiny_model)


def failed(verdicts, clause):
    return {cell[1] for cell, verdict in verdicts.items() if cell[0] == clause and verdict.status == "FAIL"}


def passed(verdicts, clause):
    return {cell[1] for cell, verdict in verdicts.items() if cell[0] == clause and verdict.status == "PASS"}


def test_float32_keeps_every_clause_on_every_slice(matrix):
    assert {verdict.status for verdict in matrix.verdicts["fp32"].values()} == {"PASS"}
    assert len(matrix.verdicts["fp32"]) == 4 * 6


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=needs_fp8_cache if name == "fp8 KV cache" else ()) for name in CASES]
)
def test_no_verdict_contradicts_the_exact_drift(matrix, name):
    for clause in matrix.contract.clauses:
        for slice_, drift in matrix.exact[name].items():
            true, verdict = statistic(clause, *drift), matrix.verdicts[name][clause.id, slice_]
            allowed = {"INCONCLUSIVE", "FAIL" if true > clause.limit else "PASS"}
            if true == 0.0 or abs(math.log(true / clause.limit)) > math.log(CLEAR):
                allowed.discard("INCONCLUSIVE")
            assert verdict.status in allowed, (name, true, verdict)


@pytest.mark.parametrize(
    ("name", "clause"),
    [
        ("bf16", "rounding"),
        pytest.param("int8 W8A8", "weights-and-activations", marks=avx512_arithmetic),
        pytest.param("fp8 KV cache", "cache", marks=needs_fp8_cache),
    ],
)
def test_each_engine_is_caught_on_the_slice_where_it_is_worst(matrix, name, clause):
    """Its clause fails on the kind of text with the largest exact drift, and passes where it is clearly kept."""
    limit = next(candidate for candidate in matrix.contract.clauses if candidate.id == clause)
    drift = {task: statistic(limit, *matrix.exact[name][task]) for task in TASKS}
    failed_on, passed_on = (found(matrix.verdicts[name], clause) & set(TASKS) for found in (failed, passed))
    assert max(drift, key=drift.get) in failed_on, drift
    assert failed_on <= {task for task in TASKS if drift[task] > limit.limit}, drift
    assert passed_on >= {task for task in TASKS if drift[task] * CLEAR < limit.limit}, drift


@needs_fp8_cache
def test_a_quantised_cache_is_worse_on_long_prompts(matrix):
    clause = next(candidate for candidate in matrix.contract.clauses if candidate.id == "cache")
    true = {name: statistic(clause, *matrix.exact["fp8 KV cache"][name]) for name in ("short", "long")}
    assert true["long"] > true["short"]
    verdicts = matrix.verdicts["fp8 KV cache"]
    assert verdicts["cache", "long"].estimate > verdicts["cache", "short"].estimate


@pytest.mark.parametrize(
    ("name", "broken"), [("bf16", {"long"}), pytest.param("bf16, one KV split", set(), marks=avx512_arithmetic)]
)
def test_splitting_keys_and_values_makes_a_kernel_depend_on_its_batch(matrix, name, broken):
    kept = matrix.kept[name]
    sides = defaultdict(list)
    for number in (int(key.rpartition("-")[2]) for key in kept if key.startswith("alone-tokens-")):
        alone, batch = kept[f"alone-tokens-{number}"], kept[f"tokens-{number}"]
        same = np.cumprod(alone == batch).astype(bool)
        sides["alone"].append(kept[f"alone-logprobs-{number}"][same])
        sides["batch"].append(kept[f"sampled-{number}"][same])
        request = requests()[0][number]
        sides["attributes"].append({**request["attributes"], "prompt_tokens": 999 if request["long"] else 1})

    def record(recorder):
        recorder.rollout(inference=Kernel("vllm", dtype="bfloat16", extra={"batch": "many"}))
        recorder.compare(sides["alone"], sides["batch"], attributes=sides["attributes"])

    contract = load_text(INVARIANT, "invariant.yaml")
    verdicts = judged(contract, Kernel("vllm", dtype="bfloat16", extra={"batch": "one"}), record)
    (clause,) = contract.clauses
    for size, is_long in (("short", False), ("long", True)):
        drift = np.concatenate(
            [
                np.abs(a - b)
                for a, b, about in zip(*sides.values(), strict=True)
                if (about["prompt_tokens"] > 1) == is_long
            ]
        )
        true = statistic(clause, *distribution(drift, np.ones_like(drift)))
        assert (true > clause.limit) == (size in broken), true
    assert failed(verdicts, "same-numbers") & {"short", "long"} == broken
    assert passed(verdicts, "same-numbers") & {"short", "long"} == {"short", "long"} - broken
