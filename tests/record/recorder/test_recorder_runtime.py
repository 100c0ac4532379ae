"""What a program observes itself, and routes: on the slices that it names, and refused where they are nonsense."""

from __future__ import annotations

import numpy as np
import pytest

ROUTES = {"id": "routes", "metric": "route_disagreement", "operator": "router.1", "limit": 0.1}


def test_an_observation_is_recorded_on_its_slices(recorders, memory):
    """Of all, and of the slice that its attributes name."""
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
    """A quantity that a program does not observe itself, and a number that it cannot be."""
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
