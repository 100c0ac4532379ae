"""What a recorder sends of the rewards of sequences."""

from __future__ import annotations

import numpy as np
import pytest

from kc_otel.stats import reward_sides

RANGE = {"reward_range": [0, 2]}


def sides_of(memory, **attributes):
    """Count and sum of both histograms."""
    found = [memory.points(f"kc.drift.reward_{side}", **attributes) for side in ("above", "below")]
    return [(point.count, point.sum) for points in found for point in points]


def expected(train, inference, rewards):
    """The same, from the definition."""
    log_ratio = (train - inference).astype(np.float32).astype(np.float64).sum(1)
    sides = reward_sides(log_ratio, np.asarray(rewards, dtype=np.float64), (0.0, 2.0))
    return [(len(rewards), pytest.approx(side.sum(), abs=1e-6)) for side in sides]


@pytest.mark.parametrize("form", ["array", "list", "ragged", "one"])
def test_rewards_become_two_histograms_of_sequences(recorders, contract, memory, logprobs, form):
    """In whatever form they come, by slice."""
    recorder = recorders(contract=contract(assumptions=RANGE))
    train, inference = logprobs(4, 50)
    rewards = [0.0, 2.0, 0.5, 1.0]
    given = np.array(rewards) if form == "array" else rewards
    sides = [list(train), list(inference)] if form == "ragged" else [train, inference]
    if form == "one":
        train, inference, rewards = train[:1], inference[:1], rewards[:1]
        recorder.compare(train[0], inference[0], rewards=rewards[0], attributes={"task": "code"})
    else:
        recorder.compare(*sides, rewards=given, attributes=[{"task": "code"}, {}, {}, {}])
    assert recorder.force_flush()
    assert sides_of(memory, kc_slice="all") == expected(train, inference, rewards)
    assert sides_of(memory, kc_slice="code") == expected(train[:1], inference[:1], rewards[:1])


def test_without_a_range_rewards_are_not_looked_at(recorders, contract, memory, logprobs):
    """Nothing bounds them then; everything else is measured."""
    recorder = recorders(contract=contract())
    recorder.compare(*logprobs(4, 50), rewards=[0, 1, 2, 3])
    assert recorder.force_flush()
    assert not sides_of(memory)
    assert memory.count() == 200


def test_a_reward_outside_of_its_range_counts_as_unknown(recorders, contract, memory, logprobs):
    """It is counted, its sequence is measured; None and NaN are simply not known."""
    recorder = recorders(contract=contract(assumptions=RANGE))
    train, inference = logprobs(4, 50)
    recorder.compare(train, inference, rewards=[0.5, 7.0, None, float("nan")])
    assert recorder.force_flush()
    assert sides_of(memory, kc_slice="all") == expected(train, inference, [0.5, np.nan, np.nan, np.nan])
    (point,) = memory.points("kc.input.invalid", kc_reason="reward_out_of_range")
    assert point.value == 1
    assert memory.count() == 200


def test_rewards_of_another_number_of_sequences_are_dropped(recorders, contract, logprobs):
    """The batch is not measured, and says so; nothing is raised."""
    recorder = recorders(contract=contract(assumptions=RANGE))
    recorder.compare(*logprobs(4, 50), rewards=[1.0, 2.0])
    recorder.compare(*logprobs(4, 50), rewards=[[1.0, 2.0]] * 4)
    assert recorder.force_flush()
    assert sum(recorder.stats().dropped.values()) == 2


def test_what_is_scored_later_brings_its_rewards(recorders, contract, memory, logprobs):
    """With `sampled` and `scored` as with `compare`."""
    recorder = recorders(contract=contract(assumptions=RANGE))
    train, inference = logprobs(3, 20)
    ids = np.arange(60).reshape(3, 20)
    recorder.sampled(token_ids=ids, logprobs=inference)
    recorder.scored(token_ids=ids, logprobs=train, rewards=[0.0, 1.0, 2.0])
    assert recorder.force_flush()
    assert sides_of(memory, kc_slice="all") == expected(train, inference, [0.0, 1.0, 2.0])
