"""Evidence of gates and of a promotion's steps: what it holds, and that nothing in it changes without being noticed."""

from __future__ import annotations

import copy
import dataclasses
import json
import math

import pytest

from kc_otel.contract.model import Contract
from kc_otel.judge.promotion.gate_evidence import EvidenceError, checksum_of, sealed, step_evidence, verdict_row
from kc_otel.judge.promotion.machine import advance, begin, ordered
from kc_otel.judge.promotion.stages import Decision, GateOutcome, Stage
from kc_otel.judge.verdict import Evaluation
from kc_otel.offline.gate.evidence import verify_evidence

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


def changed(record, *path_and_value):
    *path, last, value = path_and_value
    copied = copy.deepcopy(record)
    inner = copied
    for name in path:
        inner = inner[name]
    inner[last] = value
    del copied["checksum"]
    return copied | {"checksum": checksum_of(copied)}


def test_verdict_that_contradicts_its_numbers_is_found(record):
    verdicts = [record["verdicts"][0] | {"upper": 0.005}, record["verdicts"][1] | {"status": "FAIL"}]
    with pytest.raises(EvidenceError) as error:
        verify_evidence(changed(record, "verdicts", verdicts))
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
        (changed(record, "verdicts", [1]), "another shape"),
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
        verify_evidence(changed(records["advance"], "verdicts", []))
