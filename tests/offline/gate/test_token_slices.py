"""Slices of tokens at a gate: a fault that begins late in the responses or in a later turn, and that averages hide."""

from __future__ import annotations

import json

import numpy as np
import pytest

from kc_otel.judge.verdict import Status
from kc_otel.offline.gate.recorded_verdicts import by_contract, judge
from kc_otel.record.slice_table import Places
from kc_otel.recordings.recording import Recording
from kc_otel.recordings.recording_files import load_recording
from tests.tools.contracts import contract_of

CONTRACT = contract_of(
    slices={
        "early": {"where": {"position": "< 64"}},
        "late": {"where": {"position": ">= 64"}},
        "first": {"where": {"turn": 1}},
        "second": {"where": {"turn": 2}},
        "prefill": {"where": {"phase": "prefill"}},
    },
    statistical=[{"id": "tv", "metric": "tv_token", "limit": 0.01, "cap": 0.05}],
    runtime=[{"id": "lag", "metric": "weights_lag", "limit": 1}],
    observability={"min_sequences": 50},
)
PROMPTS, ROLLOUTS, WIDTH = 300, 4, 128


def sampled(seed, fault):
    """Both sides of responses of 20 to 110 tokens, a fifth of them in two turns, with a fault where `fault` says."""
    rng = np.random.default_rng(seed)
    sequences = PROMPTS * ROLLOUTS
    counts = np.arange(WIDTH) < np.minimum(20 + rng.exponential(20, sequences), 110).astype(int)[:, None]
    second = np.flatnonzero(rng.random(sequences) < 0.1)
    counts[second, 8:12] = False  # a tool's answer
    places = Places(counts)
    # Prompts differ, and their rollouts share that.
    size = 0.005 * np.repeat(rng.lognormal(0, 0.4, PROMPTS), ROLLOUTS)[:, None] * np.ones(WIDTH)
    size[fault(places) & counts] = 0.15
    inference = -rng.exponential(size=counts.shape) - 0.6
    return inference + size * rng.normal(size=counts.shape).clip(-3, 3), inference, places


def verdicts(recording):
    judged = judge(CONTRACT, by_contract(recording, CONTRACT), 0.0)
    return {verdict.cell.slice: verdict.status for verdict in judged.verdicts if verdict.cell.clause == "tv"}


def as_recording(train, inference, places):
    at = places.counts
    return Recording(
        train[at],
        inference[at],
        at.sum(1),
        tuple({"uid": row // ROLLOUTS} for row in range(at.shape[0])),
        positions=places.positions[at],
    )


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(
    ("name", "sound", "fault"),
    [
        ("late", ("early", "first"), lambda places: (places.positions >= 64) & (places.turns == 1)),
        ("second", ("first", "prefill"), lambda places: (places.turns == 2) & (places.positions < 20)),
    ],
)
def test_a_fault_that_the_average_hides_is_named_by_its_slice(name, sound, fault, seed):
    found = verdicts(as_recording(*sampled(seed, fault)))
    assert found[name] is Status.FAIL
    assert found["all"] is Status.PASS
    assert Status.FAIL not in {found[other] for other in sound}


def test_a_file_with_a_mask_says_the_same(tmp_path):
    train, inference, places = sampled(0, lambda places: places.turns == 2)
    rows = [
        {
            "train_logprobs": train[row, :100].tolist(),
            "rollout_logprobs": inference[row, :100].tolist(),
            "response_mask": places.counts[row, :100].astype(int).tolist(),
            "uid": row // ROLLOUTS,
        }
        for row in range(60)
    ]
    path = tmp_path / "recording.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    recording = load_recording(path)
    counts = places.counts[:60, :100]
    assert np.array_equal(recording.positions, places.positions[:60, :100][counts])
    parts = by_contract(recording, CONTRACT)
    turn = places.turns[:60, :100][counts]
    assert parts["second"].train.size == np.count_nonzero(turn == 2)
    assert parts["first"].train.size == np.count_nonzero(turn == 1)
    assert parts["prefill"].lengths.sum() == np.count_nonzero(Places(counts).begins)
    assert (
        parts["second"].lengths.size == np.unique(np.flatnonzero((places.turns[:60, :100] == 2) & counts) // 100).size
    )


def test_a_recording_without_gaps_needs_no_positions():
    rng = np.random.default_rng(0)
    inference = -rng.exponential(size=100) - 0.2
    recording = Recording(inference, inference, np.array([70, 30]), ({}, {}))
    parts = by_contract(recording, CONTRACT)
    assert parts["early"].train.size == 94
    assert parts["late"].train.size == 6
    assert parts["second"] is None
    assert parts["prefill"].train.size == 2
