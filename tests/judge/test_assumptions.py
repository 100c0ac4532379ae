"""Assumptions held against what arrives: which PASS is refused, with which words, live and at a gate."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kc_otel.judge.evaluator import Evaluator
from kc_otel.judge.verdict import Status, Verdict
from kc_otel.offline.gate.recorded_verdicts import by_contract, judge
from kc_otel.recordings.recording import Recording
from tests.judge.conftest import NOW, Sender, make_contract, merge
from tests.tools.verdicts import verdicts_of

GRADIENT = {"id": "gradient", "metric": "gradient_bias_bound", "limit": 500}
REWARD = {"id": "reward", "metric": "reward_drift_bound", "limit": 0.5}
ASSUMED = {"reward_range": [0, 1], "horizon": 64, "advantage_max": 2, "score_norm_max": 10}


def contract() -> Any:
    return make_contract(statistical=[GRADIENT, REWARD], assumptions=ASSUMED, slices={})


def judged(**observed: list[float]) -> dict[str, Verdict]:
    """The verdicts on two hundred prompts with hardly any drift, beside what else was observed."""
    evaluator = Evaluator([contract()])
    requests = [Sender("kc.drift.tv_seq_by_prompt").request(NOW, [0.001] * 2000)]
    requests += [Sender(f"kc.sampling.{name}").request(NOW, values) for name, values in observed.items()]
    evaluator.ingest_metrics(merge(*requests), NOW)
    return {verdict.cell.clause: verdict for verdict in verdicts_of(evaluator, NOW)}


def test_what_keeps_every_assumption_passes() -> None:
    """At the assumed values exactly, too, and where nothing is known of them."""
    for observed in ({}, {"tokens": [64.0], "advantage": [2.0], "score_norm": [10.0]}):
        assert {verdict.status for verdict in judged(**observed).values()} == {Status.PASS}


@pytest.mark.parametrize(
    ("observed", "said"),
    [
        ({"tokens": [20.0, 200.0]}, "assumptions.horizon is 64, but a sequence had 197 tokens or more"),
        ({"advantage": [0.5, 10.3]}, "assumptions.advantage_max is 2, but an advantage of 9.93 or more occurred"),
        ({"score_norm": [12.5]}, "assumptions.score_norm_max is 10, but a token's score had a norm of 12.5 or more"),
    ],
)
def test_a_pass_that_rests_on_a_broken_assumption_is_refused(observed: dict[str, list[float]], said: str) -> None:
    """It says which one and what came; a clause that does not rest on it passes."""
    found = judged(**observed)
    assert found["gradient"].status is Status.INCONCLUSIVE
    assert found["gradient"].reason.startswith(
        f"no PASS, because an assumption does not hold: {said}; otherwise upper bound"
    )
    assert found["reward"].status is Status.PASS


def recording(tokens: int = 20, advantage: float = 1.0, reward: float = 1.0) -> Recording:
    """Two thousand sequences of two kernels that are one."""
    lengths = np.full(2000, 20)
    lengths[0] = tokens
    train = np.full(lengths.sum(), -1.0)
    advantages = np.full(train.size, advantage)
    return Recording(train, train, lengths, ({"reward": reward},) * 2000, advantages=advantages)


@pytest.mark.parametrize(
    ("made", "clauses", "said"),
    [
        (recording(tokens=200), {"gradient"}, "assumptions.horizon is 64, but a sequence had 200 tokens or more"),
        (recording(advantage=-10.3), {"gradient"}, "assumptions.advantage_max is 2, but an advantage of 10.3 or more"),
        (recording(reward=3.0), {"reward"}, "assumptions.reward_range is [0, 1], but 2,000 rewards are outside of it"),
        (recording(), set(), ""),
    ],
)
def test_a_gate_refuses_it_too(made: Recording, clauses: set[str], said: str) -> None:
    """From the recording itself."""
    found = judge(contract(), by_contract(made, contract()), NOW)
    refused = {verdict.cell.clause: verdict.reason for verdict in found.verdicts if verdict.status is not Status.PASS}
    assert refused.keys() == clauses
    assert all(said in reason for reason in refused.values())


def test_a_recording_names_its_prompts() -> None:
    """By the first of the usual columns; its means are then over prompts, and over sequences where one has no name."""
    names = [{"uid": "a", "prompt_id": 1}, {"uid": "b"}, {"uid": "a"}]
    train = np.log([0.5, 0.4, 0.2])
    made = Recording(train, np.log([0.5, 0.5, 0.5]), np.ones(3, dtype=np.int64), tuple(names))
    assert made.prompts is not None
    assert made.prompts.tolist() == [0, 1, 0]
    found = judge(
        make_contract(statistical=[{"id": "tv", "metric": "tv_token", "limit": 0.5}], slices={}),
        by_contract(made, contract()),
        NOW,
    )
    assert [(verdict.samples, verdict.estimate) for verdict in found.verdicts] == [(2, pytest.approx((0.3 + 0.2) / 2))]
    assert Recording(train, train, np.ones(3, dtype=np.int64), ({"uid": "a"}, {}, {})).prompts is None
