"""Advantage-signed drift."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kc_otel.stats.signed import signed_drift

SIDES = {"alpha_lower": 0.025, "alpha_upper": 0.025}


@given(st.integers(0, 2**32 - 1), st.integers(2, 8), st.floats(0.01, 2.0))
def test_expectation_is_the_reward_drift_and_bounds_the_bias(seed, vocabulary, drift):
    """Weighted by Q exactly, total is E_P[A] - E_Q[A], and the policy gradient's bias is within G times magnitude."""
    rng = np.random.default_rng(seed)
    z = rng.normal(0, 1, vocabulary)
    p, q = (np.exp(v) / np.exp(v).sum() for v in (z + drift * rng.uniform(-1, 1, vocabulary), z))
    a = rng.uniform(-2, 2, vocabulary)
    # One sample in proportion to q: repeat tokens, q rounded to counts.
    count = np.maximum((q * 4000).round().astype(int), 1)
    q = count / count.sum()
    found = signed_drift(
        np.repeat(np.log(p / q), count),
        np.repeat(a, count),
        advantage_max=2.0,
        cap=1e6,
        alpha_lower=0.5,
        alpha_upper=0.5,
    )
    assert found.total.estimate == pytest.approx((p - q) @ a, abs=1e-12)
    assert found.positive.estimate == pytest.approx((p - q) @ np.maximum(a, 0), abs=1e-12)
    assert found.negative.estimate == pytest.approx((p - q) @ np.minimum(a, 0), abs=1e-12)
    assert found.magnitude.estimate == pytest.approx(np.abs(p - q) @ np.abs(a), abs=1e-12)
    assert abs(found.total.estimate) <= 2 * 2.0 * np.abs(p - q).sum() / 2 + 1e-12
    score = np.eye(vocabulary) - p  # of softmax logits
    bias = np.linalg.norm((q - p) @ (a[:, None] * score))
    assert bias <= found.magnitude.estimate * np.linalg.norm(score, axis=1).max() + 1e-12


def test_signs_say_which_way_the_policy_is_pushed():
    """Over-sampled good actions make the positive part negative, over-sampled bad ones the negative part positive."""
    l = np.log([0.8, 1.2])  # noqa: E741
    l = np.tile(l, 2000)  # noqa: E741
    over, under = l < 0, l > 0
    good = signed_drift(l, np.where(over, 1.0, 0.0), advantage_max=1.0, **SIDES)
    assert good.positive.upper < 0.0
    assert good.negative.estimate == 0.0
    bad = signed_drift(l, np.where(over, -1.0, 0.0), advantage_max=1.0, **SIDES)
    assert bad.negative.lower > 0.0
    missed = signed_drift(l, np.where(under, 1.0, 0.0), advantage_max=1.0, **SIDES)
    assert missed.positive.lower > 0.0


def test_sequences_take_the_product_of_ratios():
    """With unit sequence each observation is (exp(sum of l) - 1) A; with unit token A is repeated over its tokens."""
    l, lengths, a = np.array([0.1, 0.2, -0.3, 0.4]), [2, 1, 1], np.array([1.0, -1.0, 2.0])  # noqa: E741
    per_sequence = signed_drift(l, a, lengths=lengths, unit="sequence", advantage_max=2.0, **SIDES)
    assert per_sequence.total.estimate == pytest.approx(np.mean(np.expm1([0.3, -0.3, 0.4]) * a))
    assert per_sequence.total.samples == 3
    per_token = signed_drift(l, a, lengths=lengths, advantage_max=2.0, **SIDES)
    assert per_token.total.estimate == pytest.approx(np.mean(np.expm1(l) * np.repeat(a, lengths)))
    assert per_token.total.samples == 4


def test_a_side_beyond_the_cap_claims_nothing():
    """A ratio above the cap opens the upper side for A > 0 and the lower side for A < 0, and no other."""
    l = np.concatenate([np.zeros(999), [math.log(11.0)]])  # noqa: E741
    up = signed_drift(l, np.ones(1000), advantage_max=1.0, cap=10.0, **SIDES)
    assert (up.positive.upper, up.total.upper, up.magnitude.upper) == (math.inf,) * 3
    assert up.beyond == 0.001
    assert math.isfinite(up.positive.lower)
    assert math.isfinite(up.total.lower)
    assert up.positive.estimate == pytest.approx(0.01)
    down = signed_drift(l, -np.ones(1000), advantage_max=1.0, cap=10.0, **SIDES)
    assert (down.negative.lower, down.total.lower) == (-math.inf, -math.inf)
    assert down.magnitude.upper == math.inf
    assert math.isfinite(down.negative.upper)
    below = signed_drift(l, np.ones(1000), advantage_max=1.0, cap=12.0, **SIDES)
    assert math.isfinite(below.total.upper)


def test_overflowing_sequence_ratios_are_infinite_and_not_an_error():
    """A product of ratios beyond a double makes the estimate inf; with A = 0 it counts as 0."""
    found = signed_drift([800.0, 0.0], [1.0, 1.0], advantage_max=1.0, **SIDES)
    assert found.total.estimate == math.inf
    assert signed_drift([800.0, 0.0], [0.0, 1.0], advantage_max=1.0, **SIDES).total.estimate == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("part", ["positive", "negative", "total", "magnitude"])
def test_intervals_cover(part, three_sigma):
    """Over 2000 samples each side misses the expectation at most as often as its alpha allows."""
    rng = np.random.default_rng(1)
    p, q = np.array([0.5, 0.3, 0.15, 0.05]), np.array([0.4, 0.35, 0.2, 0.05])
    a = np.array([1.0, -1.0, 0.5, -0.2])
    truth = {
        "positive": (p - q) @ np.maximum(a, 0),
        "negative": (p - q) @ np.minimum(a, 0),
        "total": (p - q) @ a,
        "magnitude": np.abs(p - q) @ np.abs(a),
    }[part]
    missed = np.zeros(2)
    for _ in range(2000):
        token = rng.choice(4, 300, p=q)
        found = getattr(
            signed_drift(np.log(p / q)[token], a[token], advantage_max=1.0, cap=2.0, alpha_lower=0.1, alpha_upper=0.1),
            part,
        )
        missed += (found.lower > truth, found.upper < truth)
        assert found.upper - found.lower < 1.0
    assert (missed / 2000 <= three_sigma(0.1, 2000)).all()


def test_cut_values_stay_in_their_range():
    """The extremes that (w - 1) A can reach are inside the range that the intervals were told."""
    l = np.log([1e-9, 10.0])  # noqa: E741
    for sign in (1.0, -1.0):
        found = signed_drift(np.tile(l, 5000), np.full(10_000, sign), advantage_max=1.0, cap=10.0, **SIDES)
        for part in (found.positive, found.negative, found.total, found.magnitude):
            assert "no upper bound" not in part.note
            assert "no lower bound" not in part.note
            assert part.lower <= part.estimate <= part.upper


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"advantage": [2.0, 0.0]}, "advantage: 2.0"),
        ({"advantage": [1.0]}, "advantage: 1 values"),
        ({"log_ratio": [math.nan, 0.0]}, "log_ratio: nan"),
        ({"log_ratio": [math.inf, 0.0]}, "log_ratio: inf"),
        ({"unit": "step"}, "unit: 'step'"),
        ({"unit": "sequence"}, "lengths: None"),
        ({"lengths": [1, 2]}, "lengths: add up to 3"),
        ({"lengths": [2, 0]}, "lengths"),
        ({"cap": 1.0}, "cap: 1.0"),
        ({"advantage_max": 0.0}, "advantage_max: 0.0"),
        ({"alpha_lower": 0.0}, "alpha_lower: 0.0"),
    ],
)
def test_bad_input_is_named(change, says):
    """Each refusal names the argument and the value."""
    good = {"log_ratio": [0.0, 0.1], "advantage": [1.0, 1.0], "advantage_max": 1.0, **SIDES}
    with pytest.raises(ValueError, match=says):
        signed_drift(**{**good, **change})
