from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kc_otel.contract.model import Contract
from kc_otel.judge.promotion.stages import Decision, GateOutcome, GateSpec, Stage, Tally
from kc_otel.judge.promotion.stages import decide as decided
from kc_otel.judge.verdict import Evaluation

GATE = GateSpec(Stage.CANARY, 3, (("token-tv", "all"), ("token-tv", "code")), 300.0, 3600.0, needed={"token-tv": 2000})


def decide(gate, history, holds=()) -> Decision:
    return decided(gate, "inferB", Tally(), history, holds)[1]


@pytest.fixture(scope="session")
def rounds(round_of, contract):
    """Evaluations from (time, status of slice code[, changes])."""
    return lambda *items: [round_of(contract, at, status, **dict(*changes)) for at, status, *changes in items]


def test_gate_opens_after_enough_windows_that_share_no_data(rounds):
    history = rounds((0, "PASS"), (300, "PASS"), (600, "PASS"))
    decision = decide(GATE, history)
    assert (decision.outcome, decision.stage, decision.windows, decision.missing) == ("advance", "full", 3, ())
    close = decide(GATE, rounds((0, "PASS"), (10, "PASS"), (20, "PASS"), (300, "PASS")))
    assert (close.outcome, close.stage, close.windows) == ("wait", "canary", 2)
    assert close.missing == ("2 of 3 consecutive windows have passed",)


def test_a_failure_that_no_interval_shows_is_told_by_its_reason(rounds):
    """It rests on what was held against the limit; an interval below the limit would contradict it."""
    history = rounds((0, "FAIL", {"lower": 0.001, "upper": 0.003, "estimate": 0.002, "reason": "a part is above"}))
    assert decide(GATE, history).missing == ("token-tv on code: FAIL, a part is above",)


def test_verdicts_of_the_long_window_need_its_distance(rounds):
    """A PASS that rests on an hour of data shares it with every round of that hour."""
    history = rounds(*((300.0 * n, "PASS", {"window": "long"}) for n in range(25)))
    assert decide(GATE, history).windows == 3
    assert decide(GATE, history[:24]).windows == 2


def test_what_is_missing_is_counted_in_the_clause_s_own_unit(make_verdict, contract):
    content = contract.model_dump(by_alias=True)
    content["statistical"] = [*content["statistical"], {"id": "seq", "metric": "tv_seq", "limit": 0.004}]
    gate = replace(GateSpec.of(Contract.model_validate(content), Stage.CANARY), windows=1)
    verdicts = [make_verdict("INCONCLUSIVE", slice="all", clause=clause, samples=60) for clause in ("token-tv", "seq")]
    missing = decide(gate, [Evaluation(0, tuple(verdicts))]).missing
    for clause, samples in (("token-tv", "1,940"), ("seq", "40")):
        (said,) = (said for said in missing if said.startswith(f"{clause} on all: INCONCLUSIVE"))
        assert said.endswith(f", {samples} more samples are needed in one window of 1h before it can pass")


def test_last_stage_stays(rounds, contract):
    """A version in it waits for nothing, whatever its verdicts lack for a step that there is not."""
    gate = replace(GateSpec.of(contract, Stage.FULL), windows=1)
    assert gate.window == 300
    for status in ("PASS", "INCONCLUSIVE"):
        assert decide(gate, rounds((0, status))).missing == ()
    assert decide(gate, rounds((0, "FAIL"))).outcome is GateOutcome.ROLLBACK


def test_a_clock_that_was_set_back_starts_the_streak_again():
    """Nobody knows which data are new: what counts from there on is what comes after the new time."""
    tally = Tally().after_pass(1000, 300, 300).after_pass(1300, 300, 300)
    back = tally.after_pass(900, 300, 300)
    assert (back.passed, back.pass_from) == (0, 900)
    assert back.after_pass(1100, 300, 300).passed == 0
    assert back.after_pass(1100, 300, 300).after_pass(1200, 300, 300).passed == 1


@given(st.lists(st.tuples(st.integers(1, 90), st.integers(30, 120)), max_size=14), st.integers(0, 200))
def test_a_tally_counts_the_most_windows_that_share_no_data(looks, since):
    tally, at, ends = Tally(pass_from=since), 0, []
    for step, span in looks:
        at += step
        tally = tally.after_pass(at, span, 0)
        ends.append((at - span, at))

    def most(start, left):
        return max((1 + most(b, left[n + 1 :]) for n, (a, b) in enumerate(left) if a >= start), default=0)

    assert tally.passed == most(since, ends)
