"""Clauses on token metrics that are judged by sequence: minima, reasons, silence, and false alarms that do not come."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kc_otel.judge.evaluator import Evaluator
from kc_otel.judge.statistics import samples_needed
from kc_otel.judge.verdict import Cell, Status
from kc_otel.judge.verdicts import Evidence, decide
from kc_otel.record.telemetry.accumulate import Accumulator
from kc_otel.stats import Binned
from tests.tools.verdicts import verdicts_of

NOW = 1_800_000_000.0
BY_TOKEN = {"id": "by-token", "metric": "tv_token", "unit": "token", "limit": 0.02}
BY_SEQ = {"id": "by-sequence", "metric": "tv_token", "unit": "sequence", "limit": 0.02}
OF_SEQ = {"id": "of-sequences", "metric": "tv_seq", "limit": 0.02}


def evidence(contract: Any, clause: int, sample: Binned) -> Evidence:
    item = contract.clauses[clause]
    return Evidence(Cell(contract.name, item.id, "all", "a", "b"), item, lambda _window: sample)


def test_each_unit_has_its_own_minimum(contract: Any) -> None:
    made = contract(
        statistical=[BY_TOKEN, BY_SEQ, OF_SEQ],
        runtime=[
            {"id": "lag", "metric": "weights_lag", "limit": 1},
            {"id": "ttft", "metric": "gen_ai.server.time_to_first_token", "limit": 1},
        ],
        observability={"min_samples": 1000, "min_sequences": 50},
    )
    needed = [samples_needed(clause, made.observability) for clause in made.clauses]
    assert needed == [1000, 50, 50, 1, 1000]


def test_reasons_count_sequences(contract: Any) -> None:
    made = contract(statistical=[BY_SEQ, OF_SEQ], observability={"min_sequences": 40})
    far, near = Binned.of_samples(np.full(60, 0.9)), Binned.of_samples(np.full(20, 0.9))
    for clause, what in enumerate(("sequences", "prompts")):
        (verdict,) = decide(made, [evidence(made, clause, far)], NOW)
        assert verdict.status is Status.FAIL
        assert f"with 60 {what} in 5m" in verdict.reason
        (verdict,) = decide(made, [evidence(made, clause, near)], NOW)
        assert verdict.status is Status.INCONCLUSIVE
        assert f"with 20 of 40 {what} in 1h: 20 more needed" in verdict.reason


def test_a_verdict_says_what_it_is_about(contract: Any) -> None:
    """Of the slice where sequences were judged, of the window's traffic where tokens were; without data too."""
    made = contract(statistical=[BY_TOKEN, BY_SEQ, OF_SEQ])
    sample = Binned.of_samples(np.full(60, 0.9))
    said = [decide(made, [evidence(made, clause, sample)], NOW)[0].about for clause in range(3)]
    assert said == ["traffic", "population", "population"]
    silent = [replace(evidence(made, clause, sample), absence="silent") for clause in range(3)]
    assert [verdict.about for verdict in decide(made, silent, NOW)] == said


def test_the_two_units_are_judged_on_streams_of_their_own(contract: Any, sender: Any, now: float) -> None:
    evaluator = Evaluator([contract(slices={}, statistical=[BY_TOKEN, BY_SEQ], observability={"min_sequences": 10})])
    evaluator.ingest_metrics(sender().request(now, [0.001] * 20_000), now)
    evaluator.ingest_metrics(sender("kc.drift.tv_token_by_sequence").request(now, [0.5] * 100), now)
    found = {verdict.cell.clause: (verdict.status, verdict.samples) for verdict in verdicts_of(evaluator, now)}
    assert found == {"by-token": (Status.PASS, 20_000), "by-sequence": (Status.FAIL, 100)}


def test_a_recorder_with_an_older_contract_is_named_as_the_cause(contract: Any, sender: Any, now: float) -> None:
    """Tokens arrive, means by sequence do not: the reason says what to update, and not to look at the endpoint."""
    evaluator = Evaluator([contract(slices={}, statistical=[BY_SEQ])])
    (verdict,) = verdicts_of(evaluator, now)
    assert "does the recorder's OTLP endpoint point here?" in verdict.reason
    evaluator.ingest_metrics(sender().request(now, [0.001] * 100), now)
    (verdict,) = verdicts_of(evaluator, now)
    assert verdict.status is Status.NO_DATA
    assert verdict.reason == (
        "tokens arrive, but nothing for kc.drift.tv_token_by_sequence; give the recorder this version of the contract, "
        "or write `unit: token` if it is given single tokens"
    )


@pytest.mark.slow
def test_dependent_tokens_raise_false_alarms_by_token_and_not_by_sequence(contract: Any) -> None:
    """On the limit exactly, with every token of a sequence alike, FAILs by token are many times alpha; by sequence not.

    Each sequence draws its drift once: 0.2 with chance 0.1, else 0, so that the mean by token and by sequence is 0.02,
    the limit. Both clauses are judged on what one recorder accumulated of the same sequences.
    """
    made = contract(
        slices={},
        statistical=[BY_TOKEN, BY_SEQ],
        observability={"confidence": 0.9, "min_samples": 2000, "min_sequences": 100},
    )
    sequences, tokens, runs, alpha = 400, 128, 300, 0.1
    rng = np.random.default_rng(5)
    wrong = {"by-token": 0, "by-sequence": 0}
    inference = np.full((sequences, tokens), -1.0)
    for _ in range(runs):
        drift = np.where(rng.random((sequences, 1)) < 0.1, 0.2, 0.0)
        accumulator = Accumulator(("all",), averaged=made.averaged)
        accumulator.add_sampled(inference + np.log1p(-drift), inference)
        snapshot = accumulator.snapshot()
        for clause in (0, 1):
            key = made.clauses[clause].quantity.key
            (verdict,) = decide(made, [evidence(made, clause, snapshot[key, "all"].binned())], NOW)
            wrong[verdict.cell.clause] += verdict.status is Status.FAIL
    assert wrong["by-token"] / runs > 2.5 * alpha, wrong
    assert wrong["by-sequence"] / runs <= alpha, wrong
