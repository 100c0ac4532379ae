"""What a recorder sends of rewards, quantities by sequence, operators, routes, and what a program observes itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kc_otel.contract.registry.clause_metrics import OPERATORS, QUANTITIES, SAMPLING
from kc_otel.contract.slices import PLACES
from kc_otel.record.operator_drift import compare_outputs
from kc_otel.record.slice_table import SliceTable
from kc_otel.stats import reward_sides

RANGE = {"reward_range": [0, 2]}


def sides_of(memory, **attributes):
    found = [memory.points(f"kc.drift.reward_{side}", **attributes) for side in ("above", "below")]
    return [(point.count, point.sum) for points in found for point in points]


def expected(train, inference, rewards):
    log_ratio = (train - inference).astype(np.float32).astype(np.float64).sum(1)
    sides = reward_sides(log_ratio, np.asarray(rewards, dtype=np.float64), (0.0, 2.0))
    return [(len(rewards), pytest.approx(side.sum(), abs=1e-6)) for side in sides]


@pytest.mark.parametrize("form", ["array", "list", "ragged", "one", "later"])
def test_rewards_become_two_histograms_of_sequences(recorders, contract, memory, logprobs, form):
    """In whatever form they come, by slice; also with the training side alone, where it comes later."""
    recorder = recorders(contract=contract(assumptions=RANGE))
    train, inference = logprobs(4, 50)
    rewards, attributes = [0.0, 2.0, 0.5, 1.0], [{"task": "code"}, {}, {}, {}]
    given = np.array(rewards) if form == "array" else rewards
    sides = [list(train), list(inference)] if form == "ragged" else [train, inference]
    if form == "one":
        train, inference, rewards = train[:1], inference[:1], rewards[:1]
        recorder.compare(train[0], inference[0], rewards=rewards[0], attributes={"task": "code"})
    elif form == "later":
        ids = np.arange(200).reshape(4, 50)
        recorder.sampled(token_ids=ids, logprobs=inference, attributes=attributes)
        recorder.scored(token_ids=ids, logprobs=train, rewards=rewards)
    else:
        recorder.compare(*sides, rewards=given, attributes=attributes)
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


@pytest.mark.slow
def test_evidence_of_tokens_sampled_elsewhere_adds_up_over_batches(recorders):
    """No small batch shows by itself that the mean of P/Q is above 1; many do, and the first honest one is measured."""
    rng = np.random.default_rng(0)
    recorder = recorders()
    for _ in range(200):
        inference = np.log(rng.uniform(0.3, 0.9, (2, 40)))
        recorder.compare(inference + rng.normal(0.1, 0.3, inference.shape).clip(max=-inference), inference)
    recorder.force_flush()
    assert 0 < recorder.stats().invalid["not_sampled"] < 400
    before = recorder.stats().sequences
    for _ in range(10):
        inference = np.log(rng.uniform(0.3, 0.9, (2, 40)))
        recorder.compare(inference - 0.01, inference)
    recorder.force_flush()
    assert recorder.stats().sequences > before + 10


@pytest.mark.parametrize("empty", [np.zeros((8, 0)), [[]] * 8, [np.zeros(0)] * 8, [], np.zeros(0)])
def test_a_batch_without_a_token_is_no_dropped_batch(recorders, empty):
    """A step with nothing to train on: the same as a mask that leaves nothing."""
    recorder = recorders()
    recorder.compare(empty, empty, groups="prompt", group_size=np.int64(8))
    recorder.force_flush()
    assert recorder.stats().dropped == {}
    assert set(recorder.stats().invalid) == {"no_tokens"}


ULP = {"id": "u", "metric": "operator_ulp", "operator": "attention", "limit": 4}


@pytest.fixture
def outputs():
    torch.manual_seed(0)
    train = torch.randn(3, 5, 16)
    return train, train.bfloat16()


def test_every_row_is_an_observation_on_its_sequences_slices(recorders, memory, outputs):
    train, inference = outputs
    recorder = recorders()
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0]])
    recorder.compare_operator(
        "attention", train, inference, mask=mask, attributes=[{"task": "code"}, {"prompt_tokens": 200}, {}]
    )
    assert recorder.force_flush()
    expected = compare_outputs(train, inference, mask=mask)
    for key in ("max_abs", "relative", "ulp", "cosine"):
        values = getattr(expected, key)
        name = f"kc.drift.operator_{key}"
        (point,) = memory.points(name, kc_slice="all", kc_operator="attention")
        assert (point.count, point.sum) == (7, pytest.approx(values.sum()))
        assert (point.min, point.max) == (values.min(), values.max())
        (point,) = memory.points(name, kc_slice="code")
        assert (point.count, point.sum) == (5, pytest.approx(values[:5].sum()))
        (point,) = memory.points(name, kc_slice="long")
        assert (point.count, point.sum) == (2, pytest.approx(values[5:].sum()))
    assert not memory.points("kc.drift.operator_batch_dependence")
    assert not memory.points("kc.drift.tv_token")
    assert recorder.stats().batches == 1
    assert recorder.stats().tokens == 0


def test_one_kernel_alone_and_in_a_batch_is_another_metric(recorders, memory):
    recorder = recorders()
    alone = np.ones((4, 8), np.float32)
    recorder.compare_operator("norm", alone, alone * np.float32(1.5), of_batches=True)
    assert recorder.force_flush()
    (point,) = memory.points("kc.drift.operator_batch_dependence", kc_slice="all")
    assert (point.count, point.max, point.attributes["kc.operator"]) == (4, 0.5, "norm")
    assert not memory.points("kc.drift.operator_ulp")


def test_numpy_against_torch_and_single_rows_are_compared(recorders, memory):
    recorder = recorders()
    recorder.compare_operator("a", np.ones(8, np.float32), torch.ones(8, dtype=torch.bfloat16))
    assert recorder.force_flush()
    (point,) = memory.points("kc.drift.operator_max_abs", kc_slice="all")
    assert (point.count, point.max) == (1, 0.0)


def test_an_error_without_end_is_the_largest_float32(recorders, memory):
    """Of a row that is zero in the first output alone; a sum must stay a number, and a norm beyond float64 is none."""
    recorder = recorders()
    recorder.compare_operator("a", np.full(8, 1e300), np.full(8, -1e300))
    recorder.compare_operator("a", np.zeros(8, np.float32), np.ones(8, np.float32))
    assert recorder.force_flush()
    (point,) = memory.points("kc.drift.operator_relative", kc_slice="all")
    assert (point.count, point.sum) == (1, np.finfo(np.float32).max)
    assert recorder.stats().dropped == {"measure-failed": 1}


def test_nothing_is_raised_and_everything_is_counted(recorders, memory):
    recorder = recorders()
    good = np.ones((2, 4), np.float32)
    recorder.compare_operator("a", good, np.ones((2, 5), np.float32))
    recorder.compare_operator("a b", good, good)
    recorder.compare_operator(None, good, good)
    recorder.compare_operator("a", good.astype(int), good)
    recorder.compare_operator("a", good, good, mask=np.ones((3,)))
    recorder.compare_operator("a", good, good, attributes=[{}])
    recorder.compare_operator("a", good, object())
    broken = good.copy()
    broken[1, 2] = np.nan
    recorder.compare_operator("a", good, broken)
    assert recorder.force_flush()
    stats = recorder.stats()
    assert stats.invalid == {"shape_mismatch": 2, "operator_not_finite": 1}
    assert stats.dropped["operator-name"] == 2
    assert sum(stats.dropped.values()) == 5
    (point,) = memory.points("kc.drift.operator_ulp", kc_slice="all")
    assert point.count == 1


def test_operators_that_no_clause_names_are_recorded_while_there_is_room(recorders, contract, memory):
    plain = len(QUANTITIES) + len(SAMPLING) - len(OPERATORS)
    made = contract(numerical=[ULP], observability={"max_series": 8 * plain + 14 * len(OPERATORS) + len(PLACES)})
    assert SliceTable.of(made).more_operators == 2
    recorder = recorders(contract=made)
    ones = np.ones((2, 4))
    for name in ("a", "b", "c", "attention", "a"):
        recorder.compare_operator(name, ones, ones)
    assert recorder.force_flush()
    counts = {p.attributes["kc.operator"]: p.count for p in memory.points("kc.drift.operator_ulp", kc_slice="all")}
    assert counts == {"a": 4, "b": 2, "attention": 2}
    assert recorder.stats().dropped == {"too-many-operators": 1}
    assert SliceTable.of(contract()).more_operators == 64


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_outputs_on_a_gpu_are_compared_there(recorders, memory, outputs):
    """The same numbers as on the host, without the caller waiting for the device."""
    train, inference = outputs
    recorder = recorders()
    mask = torch.ones(3, 5, device="cuda")
    recorder.compare_operator("a", train.cuda(), inference.cuda(), mask=mask)
    recorder.compare_operator("b", train, inference)
    assert recorder.force_flush()
    for name in ("ulp", "relative"):
        points = memory.points(f"kc.drift.operator_{name}", kc_slice="all")
        ours, theirs = sorted(points, key=lambda point: point.attributes["kc.operator"])
        assert (ours.count, ours.sum) == (theirs.count, pytest.approx(theirs.sum, rel=1e-9))
