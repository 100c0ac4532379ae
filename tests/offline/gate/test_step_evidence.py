"""Evidence of a promotion's steps: what it holds, and that nothing in it can be changed without being noticed."""

from __future__ import annotations

import copy
import json

import pytest

from kc_otel.contract.model import Contract
from kc_otel.judge.promotion import machine
from kc_otel.judge.promotion.gate_evidence import EvidenceError, checksum_of, step_evidence
from kc_otel.judge.promotion.machine import advance, begin
from kc_otel.judge.promotion.stages import Stage
from kc_otel.judge.verdict import Evaluation
from kc_otel.offline.gate.evidence import verify_evidence

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
    onward, (step,) = advance(started, terms, Evaluation(300.0, (*round_of(300.0), *beside)), ())
    found = {"advance": step_evidence(terms, started, step, [*round_of(300.0), *beside], 300.0)}
    _, (forced,) = machine.force(started, terms, Stage.CANARY, "ada", "the launch", Evaluation(5.0), 5.0)
    found["force"] = step_evidence(terms, started, forced, (), 5.0)
    _, (back,) = advance(onward, terms, Evaluation(301.0, tuple(round_of(301.0, "FAIL"))), ())
    found["rollback"] = step_evidence(terms, onward, back, round_of(301.0, "FAIL"), 301.0)
    _, (taken,) = machine.roll_back(onward, "ada", "wrong weights", 302.0)
    found["by a person"] = step_evidence(terms, onward, taken, round_of(302.0), 302.0)
    return found


def test_every_step_leaves_evidence_that_verifies(records):
    """Also after it went through a file."""
    for record in records.values():
        verify_evidence(json.loads(json.dumps(record, allow_nan=False)))


def test_it_says_from_where_to_where_and_who_decided(records, terms):
    """An advance rests on the version's own verdicts; a force says who and why, and may rest on nothing."""
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


def changed(record, *path_and_value):
    *path, last, value = path_and_value
    copied = copy.deepcopy(record)
    inner = copied
    for name in path:
        inner = inner[name]
    inner[last] = value
    del copied["checksum"]
    return copied | {"checksum": checksum_of(copied)}


@pytest.mark.parametrize(
    ("which", "change", "said"),
    [
        ("advance", ("step", "terms", "windows", 2), "after 1 windows; its terms ask for more"),
        ("advance", ("step", "to", "stage", "full"), "the step advances, but the decision does not"),
        ("advance", ("step", "to", {"stage": "offline-ci", "share": 0.0}), "which is not forward"),
        ("advance", ("step", "from", {"stage": "offline-ci", "share": 0.0}), "and the record is of stage shadow"),
        ("advance", ("step", "by", "ada"), "does not say who and why"),
        ("advance", ("decision", "outcome", "wait"), "the step advances, but the decision does not"),
        ("advance", ("verdicts", []), "not every verdict is PASS"),
        ("advance", ("step", "kind", "start"), "start is not a step that evidence is written of"),
        ("advance", ("step", "note", "x"), "another shape"),
        ("force", ("step", "why", None), "does not say who and why"),
        ("force", ("step", "by", None), "does not say who and why"),
        ("rollback", ("step", "terms", "failure_limit", 2), "after fewer failing windows than its terms say"),
        ("rollback", ("step", "to", {"stage": "shadow", "share": 0.0}), "the step rolls back to shadow"),
        ("rollback", ("decision", "outcome", "wait"), "neither the decision nor a person does"),
        ("by a person", ("step", "by", None), "neither the decision nor a person does"),
    ],
)
def test_a_step_that_does_not_follow_is_found(records, which, change, said):
    """Even with a fresh checksum."""
    with pytest.raises(EvidenceError, match=said):
        verify_evidence(changed(records[which], *change))
