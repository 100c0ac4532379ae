"""What a recorder sends of token quantities that its contract judges by sequence."""

from __future__ import annotations

import numpy as np
import pytest

from kc_otel.contract.registry.clause_metrics import OPERATORS, QUANTITIES, SAMPLING
from kc_otel.record.slice_table import SliceTable

CLAUSES = [
    {"id": "tv", "metric": "tv_token", "unit": "sequence", "limit": 0.01},
    {"id": "share", "metric": "clip_budget_share", "limit": 0.5},
]


def test_a_clause_by_sequence_makes_the_recorder_send_means(recorders, contract, memory, logprobs):
    """One observation per sequence and slice, of the clauses' quantities and of no others."""
    recorder = recorders(contract=contract(statistical=CLAUSES, assumptions={"clip": 0.2}))
    train, inference = logprobs(4, 50)
    mask = np.arange(50) < np.array([[50], [20], [1], [0]])
    recorder.compare(train, inference, mask=mask, attributes=[{"task": "code"}, {}, {}, {}])
    assert recorder.force_flush()
    log_ratio = (train - inference).astype(np.float32).astype(np.float64)
    for name, unit, of in (
        ("tv_token", "sequence", lambda x: np.maximum(-np.expm1(x), 0)),
        ("abs_log_ratio", "prompt", np.abs),
    ):
        means = [of(log_ratio[row][mask[row]]).mean() for row in range(3)]
        (point,) = memory.points(f"kc.drift.{name}_by_{unit}", kc_slice="all")
        assert (point.count, point.sum) == (3, pytest.approx(sum(means), abs=1e-6))
        (point,) = memory.points(f"kc.drift.{name}_by_{unit}", kc_slice="code")
        assert (point.count, point.sum) == (1, pytest.approx(means[0], abs=1e-6))
    assert not memory.points("kc.drift.ratio_by_prompt")
    assert memory.count() == 71


def test_streams_by_sequence_need_room_under_the_cap(contract):
    """Each takes a stream per slice, so that fewer slices fit under max_series."""
    for more, names in ((0, ("all", "code", "long")), (-1, ("all", "other"))):
        made = contract(
            statistical=CLAUSES,
            assumptions={"clip": 0.2},
            observability={"max_series": 4 * ((len(QUANTITIES) + len(SAMPLING) - len(OPERATORS)) + 2) + more},
        )
        assert SliceTable.of(made).judged == names


def test_sides_that_meet_are_compared_over_what_truncation_kept(recorders, memory, logprobs):
    """A side that says its kept mass is renormalised by it, one that says none is so already, whatever came with it."""
    train, _ = logprobs(2, 40)
    tokens, mass = np.arange(80).reshape(2, 40), np.full((2, 40), np.log(0.9))
    mask = np.ones((2, 40), dtype=bool)
    mask[1, 30:] = False
    recorder = recorders()
    recorder.sampled(["a", "b"], token_ids=tokens, logprobs=train - np.log(0.9), mask=mask)
    recorder.sampled("c", token_ids=tokens[0], logprobs=train[0])
    recorder.scored("c", token_ids=tokens[0], logprobs=train[0])
    recorder.scored(["a", "b"], token_ids=tokens, logprobs=train, kept=mass, mask=mask)
    recorder.sampled("d", token_ids=tokens[0], logprobs=train[0], kept=mass[0])
    recorder.sampled("e", token_ids=tokens[0], logprobs=train[0] - np.log(0.9))
    recorder.scored(["d", "e"], token_ids=tokens[[0, 0]], logprobs=train[[0, 0]] - np.log(0.9))
    assert recorder.force_flush()
    (outside,) = memory.points("kc.drift.outside_mass", kc_slice="all")
    (drift,) = memory.points("kc.drift.abs_log_ratio", kc_slice="all")
    assert (outside.count, drift.count) == (70, 190)
    assert outside.sum == pytest.approx(7.0)
    assert drift.sum == pytest.approx(0.0, abs=1e-4)
    assert not recorder.stats().invalid
