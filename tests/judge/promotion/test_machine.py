"""The way through the stages: what moves a version on, what holds it, what takes it back, what survives a restart."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kc_otel.contract.model import Contract
from kc_otel.judge.plain_json import read_json, to_json
from kc_otel.judge.promotion.gate_evidence import step_evidence
from kc_otel.judge.promotion.machine import advance, begin, ordered, replaced, share_of
from kc_otel.judge.promotion.stages import MoveKind, OrderError, Position, Promotion, PromotionStatus, Stage, path_of
from kc_otel.judge.verdict import Evaluation
from kc_otel.offline.gate.evidence import verify_evidence

V = "inferB"


def with_terms(contract, **terms):
    plain = contract.model_dump(by_alias=True)
    return Contract.model_validate({**plain, "promotion": terms})


@pytest.fixture(scope="session")
def terms(contract):
    """Two windows of five minutes at each step, and no offline stage."""
    return with_terms(contract, windows=2, steps=["1%", "10%"], skip=["offline-ci"])


def tell(promotion, terms, order, why="", now=0.0, latest=None, **more):
    """The promotion after an order of ada's, and its move."""
    return ordered(promotion, terms, order, "ada", why, latest or Evaluation(now), now, **more)


def run(promotion, contract, round_of, script, holds=()):
    """The promotion after [(time, status)], and the moves on the way."""
    moves = []
    for now, status in script:
        promotion, moved = advance(promotion, contract, round_of(contract, now, status), holds)
        moves += [moved] if moved is not None else []
    return promotion, moves


def passes(start, count, step=300):
    return [(start + step * n, "PASS") for n in range(1, count + 1)]


def test_a_sound_version_goes_all_the_way(terms, round_of):
    promotion, _ = begin(terms, V, "ada", 0.0)
    promotion, moves = run(promotion, terms, round_of, passes(0, 6))
    assert [(str(move.before), str(move.after), move.at) for move in moves] == [
        ("shadow", "canary at 1%", 600),
        ("canary at 1%", "canary at 10%", 1200),
        ("canary at 10%", "full", 1800),
    ]
    assert (promotion.position, promotion.status, share_of(promotion)) == (Position(Stage.FULL, 1.0), "running", None)
    assert promotion.reason == f"{V} goes on from canary at 10% to full: 2 consecutive windows have passed"


def test_data_from_before_a_step_do_not_count_after_it(terms, round_of):
    """A second after a step the window is full of the step before; it opens nothing."""
    promotion, moves = run(begin(terms, V, "ada", 0.0)[0], terms, round_of, passes(0, 2))
    assert [str(move.after) for move in moves] == ["canary at 1%"]
    promotion, moves = run(promotion, terms, round_of, [(now, "PASS") for now in range(601, 1200, 100)])
    assert (moves, promotion.tally.passed) == ([], 1)


def test_the_failure_limit_counts_windows_that_share_no_data(contract, round_of):
    terms = with_terms(contract, failure_limit=2, skip=["offline-ci"])
    promotion, _ = begin(terms, V, "ada", 0.0)
    promotion, moves = run(promotion, terms, round_of, [(n, "FAIL") for n in range(1, 300)])
    assert (moves, promotion.tally.failed) == ([], 1)
    assert any("token-tv on code: FAIL" in said for said in promotion.missing)
    _, moves = run(promotion, terms, round_of, [(301, "FAIL")])
    assert [move.kind for move in moves] == [MoveKind.ROLLBACK]


def test_a_clause_on_latency_waits_only_where_servers_say_which_version_it_is_of(contract, make_verdict):
    """The version goes on without it, and the step says so; where another version has one, this one has to."""
    latency = {"id": "ttft", "metric": "gen_ai.server.time_to_first_token", "statistic": "p99", "limit": 2.0}
    plain = contract.model_dump(by_alias=True) | {"runtime": [latency], "slices": {}}
    terms = with_terms(Contract.model_validate(plain), windows=1, skip=["offline-ci"])
    own = make_verdict(slice="all", at=300.0, contract_hash=terms.hash)

    def after(train, inference):
        pair = {"kernel_train": train, "kernel_inference": inference}
        of = replace(own, cell=own.cell._replace(clause="ttft", **pair))
        return advance(begin(terms, V, "ada", 0.0)[0], terms, Evaluation(300.0, (own, of)), ())

    promotion, move = after("", "")
    assert promotion.position.stage is Stage.CANARY
    assert move.message.endswith("; nothing says which version ttft is of")
    promotion, move = after("trainA", "another")
    assert (promotion.missing[0], move) == ("ttft on all: no verdict", None)


def test_a_replaced_version_that_still_serves_is_rolled_back_as_any_other(terms):
    promotion, _ = replaced(begin(terms, V, "ada", 0.0)[0], "newer", 1.0)
    promotion, move = tell(promotion, terms, "rollback", "broken on code", 2.0)
    assert (promotion.status, move.kind, share_of(promotion)) == (PromotionStatus.ROLLED_BACK, MoveKind.ROLLBACK, 0.0)


def test_a_person_is_asked_where_the_contract_says(contract, round_of):
    terms = with_terms(contract, windows=1, steps=["1%"], approve=["canary"], skip=["offline-ci"])
    promotion, _ = begin(terms, V, "ada", 0.0)
    promotion, moves = run(promotion, terms, round_of, passes(0, 3))
    assert moves == []
    assert promotion.missing == (
        f"the gate is open; a person has to let it into canary: `kc-otel promote policy-7b {V} --approve canary`",
    )
    with pytest.raises(OrderError, match="requires no approval for full; it requires approval for canary"):
        tell(promotion, terms, "approve", stage=Stage.FULL)[0]
    promotion = tell(promotion, terms, "approve", stage=Stage.CANARY)[0]
    promotion, moves = run(promotion, terms, round_of, passes(900, 1))
    assert [str(move.after) for move in moves] == ["canary at 1%"]
    with pytest.raises(OrderError, match="is in canary at 1% already"):
        tell(promotion, terms, "approve", stage=Stage.CANARY)[0]


def test_force_needs_a_reason_and_a_place_ahead(terms):
    promotion, _ = begin(terms, V, "ada", 0.0)
    with pytest.raises(OrderError, match="say why"):
        tell(promotion, terms, "force", " ", 5.0, stage=Stage.CANARY)
    forced, move = tell(promotion, terms, "force", "the launch", 5.0, stage=Stage.CANARY)
    assert (str(forced.position), move.kind, move.by, move.why) == ("canary at 1%", "force", "ada", "the launch")
    further, _ = tell(forced, terms, "force", "more", 6.0, stage=Stage.CANARY)
    assert str(further.position) == "canary at 10%"
    with pytest.raises(OrderError, match="cannot be forced into shadow: it is in canary at 10%"):
        tell(further, terms, "force", "back", 7.0, stage=Stage.SHADOW)
    with pytest.raises(OrderError, match="cannot be forced into canary"):
        tell(further, terms, "force", "more", 7.0, stage=Stage.CANARY)


def test_what_a_person_knew_when_they_forced_does_not_take_it_back_at_once_and_a_new_failure_does(terms, round_of):
    """A FAIL from before is forgiven for as long as its data are in the window; new data that fail are not."""
    promotion, _ = begin(terms, V, "ada", 0.0)
    forced, _ = tell(promotion, terms, "force", "hurry", 5.0, round_of(terms, 5.0), stage=Stage.CANARY)
    _, moves = run(forced, terms, round_of, [(6, "FAIL")])
    assert [move.kind for move in moves] == [MoveKind.ROLLBACK]
    failing = round_of(terms, 100.0, "FAIL")
    promotion, _ = advance(promotion, terms, failing, ())
    forced, _ = tell(promotion, terms, "force", "we know", 101.0, failing, stage=Stage.CANARY)
    forced, moves = run(forced, terms, round_of, [(n, "FAIL") for n in range(102, 401)])
    assert (moves, forced.status) == ([], PromotionStatus.RUNNING)
    forced, moves = run(forced, terms, round_of, [(401, "FAIL")])
    assert [move.kind for move in moves] == [MoveKind.ROLLBACK]


def test_started_again_it_has_to_show_everything_again(terms, round_of):
    """Nor is it rolled back by what an alarm that is not cleared yet says of data from before."""
    promotion, _ = begin(terms, V, "ada", 0.0)
    with pytest.raises(OrderError, match="already in promotion, in shadow"):
        begin(terms, V, "ada", 1.0, previous=promotion)
    back, _ = tell(promotion, terms, "rollback", "wrong weights", 10.0)
    with pytest.raises(OrderError, match="is rolled back; start it again first"):
        tell(back, terms, "hold", "x", 11.0)
    with pytest.raises(OrderError, match=r"is rolled back already$"):
        tell(back, terms, "rollback", "as the page says", 12.0)
    again, move = begin(terms, V, "ada", 20.0, previous=back)
    assert (again.attempt, again.position.stage, move.message) == (
        2, Stage.SHADOW, f"ada starts the promotion of {V} in shadow, attempt 2",
    )  # fmt: skip
    again, moves = run(again, terms, round_of, [(21, "FAIL"), (319, "FAIL")])
    assert (moves, again.status) == ([], PromotionStatus.RUNNING)
    _, moves = run(again, terms, round_of, [(320, "FAIL")])
    assert [move.kind for move in moves] == [MoveKind.ROLLBACK]


def test_a_changed_contract_starts_the_count_again(terms, contract, round_of):
    promotion, _ = begin(terms, V, "ada", 0.0)
    promotion, _ = run(promotion, terms, round_of, passes(0, 1))
    other = with_terms(contract, windows=2, steps=["2%", "10%"], skip=["offline-ci"])
    promotion, moves = run(promotion, other, round_of, passes(300, 2))
    assert (moves, promotion.tally.passed, promotion.contract_hash) == ([], 1, other.hash)
    promotion, moves = run(promotion, other, round_of, passes(900, 1))
    assert [str(move.after) for move in moves] == ["canary at 2%"]


STATUS = st.sampled_from(["PASS", "PASS", "PASS", "PASS", "PASS", "INCONCLUSIVE", "NO_DATA", "FAIL"])


@settings(deadline=None)
@given(
    script=st.lists(
        st.tuples(st.integers(-400, 700), STATUS, st.sampled_from(["", "", "", "hold", "resume"])), max_size=40
    ),
    crashes=st.sets(st.integers(0, 39), max_size=6),
    windows=st.integers(1, 3),
    limit=st.integers(1, 2),
)
def test_nothing_moves_on_without_proof_whatever_the_clock_does(contract, round_of, script, crashes, windows, limit):
    terms = with_terms(contract, windows=windows, failure_limit=limit, skip=["offline-ci"])
    promotion, _ = begin(terms, V, "ada", 0.0)
    now, since = 0.0, 0
    statuses: list[str] = []
    for turn, (step, status, order) in enumerate(script):
        now += step
        if order == "hold" and promotion.status is PromotionStatus.RUNNING:
            promotion = tell(promotion, terms, "hold", "wait", now)[0]
        elif order == "resume" and promotion.hold:
            promotion = tell(promotion, terms, "resume")[0]
        if turn in crashes:
            promotion = read_json(Promotion, to_json(promotion))
        before, evaluation = promotion, round_of(terms, now, status)
        promotion, move = advance(promotion, terms, evaluation, ())
        statuses.append(status)
        if before.status is PromotionStatus.ROLLED_BACK:
            assert promotion == before
        if move is not None:
            verify_evidence(json.loads(json.dumps(step_evidence(terms, before, move, evaluation.verdicts, abs(now)))))
            if move.kind is MoveKind.ADVANCE:
                path = path_of(terms.promotion)
                assert path.index(move.after) == path.index(move.before) + 1, "no place is left out"
                assert statuses[since:][-windows:] == ["PASS"] * windows
                assert before.hold is None
            else:
                assert (status, statuses[since:].count("FAIL") >= limit) == ("FAIL", True)
            since = len(statuses)
        if limit == 1 and status == "FAIL":
            assert promotion.status is PromotionStatus.ROLLED_BACK
        assert share_of(promotion) in {None, 0.0, *terms.promotion.steps}
