"""Gates that stop early, and evidence by training step."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math

import numpy as np
import pytest

from kc_otel.contract.load import load_text
from kc_otel.contract.model import Contract
from kc_otel.judge.promotion.gate_evidence import EvidenceError, sealed, step_evidence, verdict_row
from kc_otel.judge.promotion.machine import advance, begin, ordered
from kc_otel.judge.promotion.stages import Decision, GateOutcome, Stage
from kc_otel.judge.sample_sizes import typical_size
from kc_otel.judge.statistics import clause_interval
from kc_otel.judge.verdict import Evaluation
from kc_otel.offline.gate.evidence import verify_evidence
from kc_otel.offline.gate.recorded_gate import GatedRecording, GateTerms, decides, gate_recordings, looks
from kc_otel.record.kernel import Kernel
from kc_otel.recordings.recording import Recording
from kc_otel.stats import Binned
from tests.offline.gate.conftest import changed, resealed

ADVANCE = Decision(GateOutcome.ADVANCE, Stage.FULL, 3)


def made(contract, decision, *verdicts, at=0.0):
    """The record of a canary's gate."""
    return sealed(contract, Stage.CANARY, "inferB", decision, [verdict_row(contract, one) for one in verdicts], at)


@pytest.fixture(scope="session")
def record(contract, make_verdict):
    return made(contract, ADVANCE, make_verdict(slice="all"), make_verdict(), at=1_700_000_000.0)


def test_record_says_what_was_promised_and_measured(record, contract):
    assert record["contract"] == {"name": "policy-7b", "version": 3, "hash": contract.hash}
    assert (record["kernel"], record["stage"], record["time"]) == ("inferB", "canary", "2023-11-14T22:13:20.000Z")
    assert record["tool"]["name"] == "kc-otel"
    assert record["decision"] == {"outcome": "advance", "stage": "full", "windows": 3, "missing": []}
    assert [verdict["slice"] for verdict in record["verdicts"]] == ["all", "code"]
    verdict = record["verdicts"][0]
    assert (verdict["lower"], verdict["upper"], verdict["limit"], verdict["samples"]) == (0.001, 0.003, 0.004, 5000)
    assert verdict["kernels"] == {"train": "trainA", "inference": "inferB"}


def test_verdict_that_contradicts_its_numbers_is_found(record):
    verdicts = [record["verdicts"][0] | {"upper": 0.005}, record["verdicts"][1] | {"status": "FAIL"}]
    with pytest.raises(EvidenceError) as error:
        verify_evidence(resealed(changed(record, ("verdicts",), verdicts)))
    assert "token-tv on all is PASS, but its upper bound" in str(error.value)
    assert "token-tv on code is FAIL, but its lower bound" in str(error.value)


def test_a_fail_that_was_followed_over_time_needs_no_bound_of_one_window(contract, make_verdict):
    decision = Decision(GateOutcome.ROLLBACK, Stage.SHADOW, 0)
    alarmed = dataclasses.replace(make_verdict("FAIL"), lower=0.0, evidence=0.9)
    verify_evidence(made(contract, decision, alarmed))
    judged_once = dataclasses.replace(alarmed, evidence=math.nan)
    with pytest.raises(EvidenceError, match="is FAIL, but its lower bound"):
        verify_evidence(made(contract, decision, judged_once))


def test_a_pass_of_what_none_may_be_needs_none_and_no_bound(contract, make_verdict):
    """0 of N differ, and at most x do: that keeps a limit of 0; one that differs does not."""
    decision = Decision(GateOutcome.ADVANCE, Stage.SHADOW, 0)
    none = dataclasses.replace(make_verdict("PASS"), limit=0.0, estimate=0.0, lower=0.0, upper=0.001)
    verify_evidence(made(contract, decision, none))
    some = dataclasses.replace(none, estimate=0.0001)
    with pytest.raises(EvidenceError, match="is PASS, but its upper bound"):
        verify_evidence(made(contract, decision, some))


@pytest.mark.parametrize("outcome", ["advance", "rollback"])
def test_decision_that_contradicts_the_verdicts_is_found(contract, make_verdict, outcome):
    decision = Decision(GateOutcome(outcome), Stage.OFFLINE_CI, 0)
    record = made(contract, decision, make_verdict("INCONCLUSIVE"))
    with pytest.raises(EvidenceError, match="the decision is to"):
        verify_evidence(record)


def test_what_is_no_record_is_refused_and_missing_and_foreign_fields_are_named(record):
    broken = {name: value for name, value in record.items() if name != "kernel"} | {"approved": True}
    for other, said in (
        (broken, "kernel is missing; approved is not a field"),
        (resealed(changed(record, ("verdicts",), [1])), "another shape"),
        *((other, "not a record") for other in ({}, {"format": "x"}, [], None)),
    ):
        with pytest.raises(EvidenceError, match=said):
            verify_evidence(other)


def test_silence_is_recorded_as_null(contract, make_verdict):
    """Numbers that do not exist are null, so that any JSON reader can read the record."""
    decision = Decision(GateOutcome.WAIT, Stage.CANARY, 0, ("no samples",))
    record = made(contract, decision, make_verdict("NO_DATA"))
    json.dumps(record, allow_nan=False)
    assert record["verdicts"][0]["upper"] is None
    verify_evidence(record)


V = "inferB"


@pytest.fixture(scope="session")
def terms(contract):
    plain = contract.model_dump(by_alias=True)
    return Contract.model_validate({**plain, "promotion": {"windows": 1, "steps": ["5%"], "skip": ["offline-ci"]}})


@pytest.fixture(scope="session")
def round_of(make_verdict, terms):
    def make(now, status="PASS"):
        return [
            make_verdict(own, slice=slice, at=now, contract_hash=terms.hash)
            for slice, own in (("all", "PASS"), ("code", status))
        ]

    return make


@pytest.fixture(scope="session")
def records(terms, round_of, make_verdict):
    """Of an advance, a force, a rollback by a failure, and one by a person."""
    started, _ = begin(terms, V, "ada", 0.0)
    beside = [make_verdict("FAIL", at=300.0, version="other"), make_verdict("NO_DATA", slice="other", at=300.0)]
    onward, step = advance(started, terms, Evaluation(300.0, (*round_of(300.0), *beside)), ())
    found = {"advance": step_evidence(terms, started, step, [*round_of(300.0), *beside], 300.0)}
    _, forced = ordered(started, terms, "force", "ada", "the launch", Evaluation(5.0), 5.0, Stage.CANARY)
    found["force"] = step_evidence(terms, started, forced, (), 5.0)
    _, back = advance(onward, terms, Evaluation(301.0, tuple(round_of(301.0, "FAIL"))), ())
    found["rollback"] = step_evidence(terms, onward, back, round_of(301.0, "FAIL"), 301.0)
    _, taken = ordered(onward, terms, "rollback", "ada", "wrong weights", Evaluation(302.0), 302.0)
    found["by a person"] = step_evidence(terms, onward, taken, round_of(302.0), 302.0)
    return found


def test_every_step_leaves_evidence_that_verifies(records):
    """Also after a file, in another order."""
    for record in records.values():
        written = json.dumps(dict(reversed(record.items())), indent=3, allow_nan=False)
        verify_evidence(json.loads(written))


def test_it_says_from_where_to_where_and_who_decided(records, terms):
    step = records["advance"]["step"]
    assert (step["kind"], step["from"], step["to"]) == (
        "advance", {"stage": "shadow", "share": 0.0}, {"stage": "canary", "share": 0.05},
    )  # fmt: skip
    assert [(row["slice"], row["status"]) for row in records["advance"]["verdicts"]] == [
        ("all", "PASS"),
        ("code", "PASS"),
    ]
    assert records["advance"]["contract"]["hash"] == terms.hash
    assert (records["force"]["step"]["by"], records["force"]["step"]["why"]) == ("ada", "the launch")
    assert records["force"]["verdicts"] == []
    assert records["rollback"]["step"]["failed_windows"] == 1
    assert records["rollback"]["stage"] == "canary"


def test_a_step_whose_verdicts_do_not_pass_is_found(records):
    with pytest.raises(EvidenceError, match="not every verdict is PASS"):
        verify_evidence(resealed(changed(records["advance"], ("verdicts",), [])))


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
    first = GatedRecording("a.npz", "0" * 64, 1, recording(drift[:after]))
    gate = gate_recordings(contract(MEAN), [first], KERNELS, GateTerms(sequential=True), 1.0)
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
