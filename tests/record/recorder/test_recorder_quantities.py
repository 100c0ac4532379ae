"""What a recorder sends of rewards, of quantities by sequence, of routes, and of what a program observes itself."""

from __future__ import annotations

import numpy as np
import pytest

from kc_otel.stats import reward_sides

RANGE = {"reward_range": [0, 2]}


def sides_of(memory, **attributes):
    found = [memory.points(f"kc.drift.reward_{side}", **attributes) for side in ("above", "below")]
    return [(point.count, point.sum) for points in found for point in points]


def expected(train, inference, rewards):
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
    recorder = recorders(contract=contract(assumptions=RANGE))
    recorder.compare(*logprobs(4, 50), rewards=[1.0, 2.0])
    recorder.compare(*logprobs(4, 50), rewards=[[1.0, 2.0]] * 4)
    assert recorder.force_flush()
    assert sum(recorder.stats().dropped.values()) == 2


def test_what_is_scored_later_brings_its_rewards(recorders, contract, memory, logprobs):
    recorder = recorders(contract=contract(assumptions=RANGE))
    train, inference = logprobs(3, 20)
    ids = np.arange(60).reshape(3, 20)
    recorder.sampled(token_ids=ids, logprobs=inference)
    recorder.scored(token_ids=ids, logprobs=train, rewards=[0.0, 1.0, 2.0])
    assert recorder.force_flush()
    assert sides_of(memory, kc_slice="all") == expected(train, inference, [0.0, 1.0, 2.0])


CLAUSES = [
    {"id": "tv", "metric": "tv_token", "unit": "sequence", "limit": 0.01},
    {"id": "share", "metric": "clip_budget_share", "limit": 0.5},
]


def test_a_clause_by_sequence_makes_the_recorder_send_means(recorders, contract, memory, logprobs):
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


ROUTES = {"id": "routes", "metric": "route_disagreement", "operator": "router.1", "limit": 0.1}


def test_an_observation_is_recorded_on_its_slices(recorders, memory):
    recorder = recorders()
    recorder.observe("weights_mismatch", 0.25)
    recorder.observe("updates_rounded_away", [0.5, 0.75], attributes={"task": "code"})
    assert recorder.force_flush()
    (point,) = memory.points("kc.weights.mismatch")
    assert (point.attributes["kc.slice"], point.count, point.max) == ("all", 1, 0.25)
    rounded = {p.attributes["kc.slice"]: p.sum for p in memory.points("kc.weights.updates_rounded_away")}
    assert rounded == {"all": 1.25, "code": 1.25}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("metric", "value", "reason"),
    [
        ("tv_token", 0.1, "unknown-metric"),
        ("weight_mismatch", 0.1, "unknown-metric"),
        ("weights_mismatch", float("nan"), "measure-failed"),
        ("weights_mismatch", 1.5, "measure-failed"),
        ("score_norm", float("inf"), "measure-failed"),
        ("weights_mismatch", "many", "measure-failed"),
    ],
)
def test_nonsense_is_counted_and_raises_nothing(recorders, memory, metric, value, reason):
    recorder = recorders()
    recorder.observe(metric, value)
    assert recorder.force_flush()
    assert recorder.stats().dropped == {reason: 1}
    assert not memory.points("kc.weights.mismatch")


def test_routes_are_recorded_of_all_layers_and_of_each(recorders, contract, memory):
    """One observation for each token that counts, in its slice; the clause's layer has room before others."""
    recorder = recorders(contract=contract(numerical=[ROUTES]))
    train = np.tile(np.array([0, 1], np.int16), (2, 3, 2, 1))
    inference = train.copy()
    inference[0, :, 1] = [1, 7]
    mask = np.array([[1, 1, 0], [1, 1, 1]])
    attributes = [{"task": "code"}, {"task": "prose"}]
    recorder.compare_routes(train, inference, mask=mask, attributes=attributes)
    assert recorder.force_flush()
    found = {
        (p.attributes["kc.operator"], p.attributes["kc.slice"]): (p.count, p.sum)
        for p in memory.points("kc.drift.route_disagreement")
    }
    assert found["router", "all"] == (10, 1.0)
    assert found["router.1", "code"] == (2, 1.0)
    assert found["router.0", "all"] == (5, 0.0)
    recorder.compare_routes(train, inference[:1])
    assert recorder.force_flush()
    assert recorder.stats().dropped == {"measure-failed": 1}


def test_routes_that_nobody_recorded_or_of_another_layer_are_no_agreement(recorders):
    """A layer of -1 on one side is missing; routes of another layer differ as chance does, and are not measured."""
    ours = np.argsort(-np.random.default_rng(1).gumbel(size=(4, 100, 3, 16)), axis=-1)[..., :2]
    lacking = ours.copy()
    lacking[:, :, 1] = -1
    recorder = recorders()
    recorder.compare_routes(ours, lacking)
    recorder.force_flush()
    assert recorder.stats().invalid == {"no_routes": 4}
    recorder.compare_routes(ours, np.roll(ours, 1, axis=2))
    recorder.force_flush()
    assert recorder.stats().invalid == {"no_routes": 4, "unrelated_routes": 4}
