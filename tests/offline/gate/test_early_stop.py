"""A gate that stops as soon as it is decided: how often it errs, how much it saves, and what the plan says of it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from kc_otel.contract.load import load_text
from kc_otel.judge.promotion.stages import GateOutcome
from kc_otel.judge.sample_sizes import typical_size
from kc_otel.judge.statistics import clause_interval
from kc_otel.offline.gate.recorded_gate import GatedRecording, GateTerms, decides, gate_recordings, looks
from kc_otel.record.kernel import Kernel
from kc_otel.recordings.recording import Recording
from kc_otel.stats import Binned

LIMIT = 0.004
TEXT = """apiVersion: kernel-contract/v1
kind: KernelContract
metadata: {{name: policy, version: 1, owner: rl}}
kernels: {{train: {{engine: torch}}, inference: {{engine: vllm}}}}
slices: {{code: {{where: {{task: code}}}}}}
statistical:
{clauses}
observability: {{min_samples: 20, min_sequences: 20}}
"""
MEAN = "  - {id: tv, metric: tv_token, limit: 0.004}"
CAPPED = "  - {id: tv, metric: tv_token, limit: 0.004, cap: 0.02}"
TAIL = "  - {id: tail, metric: tv_token, statistic: fraction > 0.02, unit: sequence, limit: 2%}"
KERNELS = (Kernel("torch"), Kernel("vllm", version="1"))
TERMS = GateTerms()


def contract(*clauses, slices=True):
    made = load_text(TEXT.format(clauses="\n".join(clauses)))
    return made if slices else made.model_copy(update={"slices": {}})


def recording(drift):
    """Sequences of one token each, whose (1-w)+ is what is given, and of which every second is code."""
    drift = np.asarray(drift)
    q = np.full(drift.size, -1.0)
    tasks = tuple({"task": "code" if i % 2 else "prose"} for i in range(drift.size))
    return Recording(q + np.log1p(-np.minimum(drift, 0.999)), q, np.ones(drift.size, dtype=np.int64), tasks)


def stops_after(made, found):
    """Sequences after which a gate would have stopped; None for no such place."""
    whole = found.lengths.size
    parts = ((size, found.only(np.arange(whole) < size)) for size in sizes_up_to(whole))
    return next((size for size, part in parts if decides(made, part, KERNELS, TERMS)), None)


def sizes_up_to(whole):
    return [*itertools.takewhile(lambda size: size < whole, looks()), whole]


def gammas(rng, ratio, cv, count):
    return rng.gamma(1.0 / cv**2, LIMIT * ratio * cv**2, count)


@pytest.mark.slow
@pytest.mark.parametrize("cv", [0.45, 1.0])
def test_a_capped_claim_passes_in_a_tenth_of_the_sequences_of_a_fixed_uncapped_sample(cv):
    rng = np.random.default_rng(1)
    capped, tail, uncapped = contract(CAPPED, slices=False), contract(CAPPED, TAIL, slices=False), contract(MEAN)
    alpha, (clause,) = 0.005, uncapped.clauses

    def stopped(made):
        drifts = [gammas(rng, 0.25, cv, 2000) for _ in range(7)]
        return np.median([stops_after(made, recording(drift)) for drift in drifts])

    def passes(count):
        sample = Binned.of_samples(np.minimum(gammas(rng, 0.25, cv, count), 1.0))
        bounds = clause_interval(clause, uncapped.assumptions, sample, alpha_lower=alpha, alpha_upper=alpha)
        return bounds.upper <= LIMIT

    fixed = next(count for count in range(500, 20_000, 100) if sum(passes(count) for _ in range(5)) >= 3)
    assert stopped(capped) <= fixed / 10
    assert stopped(tail) <= fixed / 5


@pytest.mark.slow
@pytest.mark.parametrize("clause", [MEAN, TAIL])
def test_looking_again_and_again_costs_no_confidence(clause):
    """At the limit, where each decision is an error, it is made no more often than at 90 % over all looks together."""
    made = contract(clause, slices=False)
    made = made.model_copy(update={"observability": made.observability.model_copy(update={"confidence": 0.9})})
    rng, wrong = np.random.default_rng(2), 0
    for _ in range(60):
        drift = gammas(rng, 1.0, 1.0, 800) if clause is MEAN else np.where(rng.random(800) < 0.02, 0.03, 0.001)
        wrong += stops_after(made, recording(drift)) is not None
    assert wrong <= 60 * 0.1


def test_a_fault_stops_the_gate_too():
    rng = np.random.default_rng(3)
    drift = gammas(rng, 0.25, 0.45, 4000)
    drift[1::2] *= 12.0
    after = stops_after(contract(MEAN), recording(drift))
    assert after is not None
    assert after <= 200
    first = recording(drift[:after])
    about = GatedRecording("a.npz", "0" * 64, 1, after, after, False)
    gate = gate_recordings(contract(MEAN), [(about, first)], KERNELS, GateTerms(sequential=True), 1.0)
    assert gate.decision.outcome is GateOutcome.ROLLBACK
    assert {v.method for v in gate.judged[0].verdicts} == {"anytime mixture betting"}


def test_a_clause_that_no_recording_can_tell_does_not_hold_it_up():
    """Its absence is said at the end, and no further sequence would change it."""
    made = load_text(TEXT.format(clauses=CAPPED) + "runtime: [{id: lag, metric: weights_lag, limit: 1}]\n")
    quiet = recording(np.zeros(400))
    assert decides(made, quiet, KERNELS, TERMS)
    assert stops_after(made, quiet) < 200


@pytest.mark.slow
@pytest.mark.parametrize(
    ("clause", "truth"), [(CAPPED, 0.5), (CAPPED, 0.8), (CAPPED, 2.0), (TAIL, 0.5), (TAIL, 2.0), (MEAN, 0.5)]
)
def test_the_plan_says_what_it_typically_takes(clause, truth):
    made = contract(clause)
    (typical,) = made.clauses
    planned, rng = typical_size(made, typical, "all", truth), np.random.default_rng(4)
    taken = []
    for _ in range(15):
        if typical.parsed_statistic.kind == "fraction":
            drift = np.where(rng.random(8 * planned) < truth * 0.02, 0.03, 0.001)
        else:
            drift = np.minimum(gammas(rng, truth, 1.0, 8 * planned), 0.99)
        taken.append(_first_decided(made, typical, drift, passes=truth < 1.0))
    assert planned / 1.5 <= np.median(taken) <= 1.5 * planned


def _first_decided(made, clause, drift, *, passes):
    count = 20
    while count < drift.size:
        sample = Binned.of_samples(drift[:count])
        bounds = clause_interval(
            clause, made.assumptions, sample, alpha_lower=0.005 / 2, alpha_upper=0.005, anytime=True
        )
        if bounds.upper <= clause.limit_for("all") if passes else bounds.lower > clause.limit_for("all"):
            return count
        count += max(1, count // 20)
    return drift.size
