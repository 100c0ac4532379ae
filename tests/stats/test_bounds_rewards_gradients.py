"""Sections 3, 4 and 7: rewards, gradients, budgets."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.rl_bias import known_bounds
from kc_otel.stats import Bound, gradients, rewards, sequences, tokens

kernels = st.tuples(
    st.integers(0, 2**31), st.integers(2, 3), st.integers(1, 4), st.sampled_from([1e-3, 0.05, 0.5, 2.0, 6.0])
)


@settings(max_examples=50, deadline=None)
@given(kernels, st.floats(-5, 5), st.floats(0.01, 10))
def test_reward_bound_holds_and_is_attained(random_kernels, joint, divergences, kernel, low, width):
    """No reward in the range drifts more, and the reward that tells P from Q drifts exactly as much."""
    train, inference = random_kernels(*kernel)
    p, q = joint(train), joint(inference)
    tv = divergences(p, q)["tv"]
    bound = rewards.reward_drift_bound(tv, (low, low + width))
    random_reward = low + width * np.random.default_rng(kernel[0]).random(p.size)
    assert abs((p - q) @ random_reward) <= bound + 1e-9
    best = low + width * (p > q)
    assert abs((p - q) @ best) == pytest.approx(bound, rel=1e-6, abs=1e-9)


@settings(max_examples=50, deadline=None)
@given(kernels)
def test_gradient_bounds_hold(random_kernels, joint, divergences, log_token_ratios, kernel):
    """No enumerated gradient estimator is biased by more than the bounds, corrected or not."""
    train, inference = random_kernels(*kernel)
    horizon, rng = len(train), np.random.default_rng(kernel[0])
    p, q = joint(train), joint(inference)
    log_w = log_token_ratios(train, inference)
    w, big_w = np.exp(log_w), np.exp(log_w.sum(axis=1))
    score = rng.normal(size=(p.size, horizon, 3))
    score *= 2.0 / np.linalg.norm(score, axis=2, keepdims=True)
    advantage = rng.uniform(-5, 5, p.size)
    f = advantage[:, None] * score.sum(axis=1)
    norms = {"advantage_max": 5.0, "sequence_score_norm": 2.0 * horizon}
    slack = 1e-9

    bias = np.linalg.norm((q - p) @ f)
    facts = {
        "sequence_tv": divergences(p, q)["tv"],
        "log_ratio": float(np.abs(log_w).max()),
        "ratio_deviation": float(np.abs(w - 1).max()),
    }
    singles = [gradients.gradient_bias(horizon, **{name: fact}, **norms).value for name, fact in facts.items()]
    assert all(bias <= single + slack for single in singles)
    assert gradients.gradient_bias(horizon, **facts, **norms).value == pytest.approx(min(singles))

    for cut in (0.5, 1.0, 2.0):
        truncated = np.linalg.norm((q * np.minimum(big_w, cut)) @ f - p @ f)
        excess = q @ np.maximum(big_w - cut, 0.0)
        assert truncated <= known_bounds.gradient_bias_truncated(excess, **norms) + slack

    corrected = np.einsum("y,yt,y,ytd->d", q, w, advantage, score)
    tau = [(np.abs(a - b).sum(axis=1) / 2).max() for a, b in zip(train, inference, strict=True)]
    left = np.linalg.norm(corrected - p @ f)
    assert left <= known_bounds.gradient_bias_token_corrected(tau, advantage_max=5.0, score_norm=2.0) + slack


@settings(max_examples=30, deadline=None)
@given(kernels)
def test_gradient_bound_from_total_variation_is_attained(random_kernels, joint, divergences, kernel):
    """The estimator that is +v where P exceeds Q and -v elsewhere has exactly 2 A G TV."""
    train, inference = random_kernels(*kernel)
    p, q = joint(train), joint(inference)
    f = 3.0 * 2.0 * np.where(p > q, 1.0, -1.0)
    bound = gradients.gradient_bias_from_tv(divergences(p, q)["tv"], advantage_max=3.0, sequence_score_norm=2.0)
    assert abs((q - p) @ f) == pytest.approx(bound, rel=1e-6, abs=1e-12)


def test_truncation_bound_is_attained():
    """With a constant f of the largest norm, truncation loses exactly E[(W - C)+]."""
    q, w = np.array([0.9, 0.1]), np.array([0.5, 5.5])
    lost = abs(q @ (np.minimum(w, 2.0) * 12.0) - (q * w) @ np.full(2, 12.0))
    excess = float(q @ np.maximum(w - 2.0, 0))
    assert lost == pytest.approx(
        known_bounds.gradient_bias_truncated(excess, advantage_max=3.0, sequence_score_norm=4.0), rel=1e-12
    )


def test_token_correction_bound_is_attained_for_two_steps():
    """Scores that tell each half-corrected measure from P leave exactly 2 A G (tau_1 + tau_2)."""
    p1, q1, p2, q2 = np.array([0.3, 0.7]), np.array([0.4, 0.6]), np.array([0.2, 0.8]), np.array([0.5, 0.5])
    p = np.outer(p1, p2).ravel()
    corrected = [np.outer(p1, q2).ravel(), np.outer(q1, p2).ravel()]
    bias = sum(3.0 * 2.0 * (half - p) @ np.sign(half - p) for half in corrected)
    bound = known_bounds.gradient_bias_token_corrected([0.1, 0.3], advantage_max=3.0, score_norm=2.0)
    assert bias == pytest.approx(bound, rel=1e-12)
    norms = {"advantage_max": 1.0, "score_norm": 1.0}
    assert known_bounds.gradient_bias_token_corrected([0.1] * 5, **norms) == pytest.approx(2 * 5 * (1 - 0.9**4))
    assert known_bounds.gradient_bias_token_corrected([1e-9] * 5, **norms) == pytest.approx(2 * 5 * 4 * 1e-9)


def test_corrected_estimators_keep_the_bias_of_what_is_never_sampled():
    """A constant f loses exactly the support deficit, whichever ratio corrects it, and no weight brings it back."""
    p, q = np.array([0.9, 0.1]), np.array([1.0, 0.0])
    w = np.array([0.9, 0.0])
    lost = abs(q @ (w * 6.0) - p @ np.full(2, 6.0))
    whole = known_bounds.gradient_bias_truncated(0, advantage_max=3, sequence_score_norm=2, support_deficit=0.1)
    assert whole == pytest.approx(lost)
    one = known_bounds.gradient_bias_token_corrected([0.1], advantage_max=3, score_norm=2, support_deficit=0.1)
    assert one == pytest.approx(lost)
    assert known_bounds.gradient_bias_token_corrected([0.1], advantage_max=3, score_norm=2) == 0.0


def test_gradient_bias_names_the_winner():
    """Each fact wins where it is sharpest, and without a useful one the trivial bound does."""
    norms = {"advantage_max": 1.0, "sequence_score_norm": 1.0}
    assert gradients.gradient_bias(4, sequence_tv=0.001, log_ratio=0.1, **norms).name == "total variation"
    ratios = "worst case over steps, ratio range"
    one = gradients.gradient_bias(1, sequence_tv=0.5, log_ratio=0.1, **norms)
    assert one.name == "worst case over steps, log-ratio range"
    assert one.value == pytest.approx(2 * math.tanh(0.05))
    assert gradients.gradient_bias(1, ratio_deviation=0.05, log_ratio=0.1, **norms).name == ratios
    assert gradients.gradient_bias(1, ratio_range=(0.01, 9.0), ratio_deviation=0.5, **norms).name == ratios
    assert gradients.gradient_bias(4, coupling_mean=0.1, token_tv_mean=0.02, **norms) == Bound(0.16, "on policy")
    assert gradients.gradient_bias(4, coupling_mean=0.01, token_tv_mean=0.02, **norms) == Bound(0.02, "coupling")
    assert gradients.gradient_bias(4, sequence_chi2=0.01, token_chi2_worst=0.1, **norms).name == "chi-square"
    trivial = gradients.gradient_bias(4096, log_ratio=0.5, **norms)
    assert (trivial.value, trivial.name) == (2.0, "total variation is at most 1")


@given(st.integers(1, 5000), st.floats(0.0, 5.0))
def test_total_variation_is_never_worse_than_the_ratios_worst_case(horizon, lam):
    """From one log-ratio or ratio range, the bound through total variation is at most (exp(T lam) - 1) for every T."""
    norms = {"advantage_max": 3.0, "sequence_score_norm": 2.0}
    for facts in ({"log_ratio": lam}, {"ratio_deviation": lam}):
        worst = known_bounds.gradient_bias_from_ratio(horizon, **facts, **norms).value
        assert gradients.gradient_bias(horizon, **facts, **norms).value <= worst * (1 + 1e-9)


def test_ess_and_clip_share():
    """ESS is n/(1 + chi2); the clip share is E|log_w| over log(1 + clip)."""
    assert gradients.ess_share(0.25) == pytest.approx(0.8)
    assert gradients.clip_budget_share(math.log(1.1), 0.21) == pytest.approx(0.5)
    rho = np.array([0.1, 1.0])
    np.testing.assert_allclose(
        gradients.ess_share(tokens.chi2_from_half_range(rho)), tokens.ess_share_from_half_range(rho)
    )


@given(st.floats(0.0, 0.99), st.integers(1, 10_000))
def test_budgets_invert_the_chain(budget, horizon):
    """What a budget allows per token leads back to the budget, and never beyond it."""
    reward_range = (-1.0, 1.0)
    tv = rewards.tv_for_reward_budget(2 * budget, reward_range)
    assert tv == pytest.approx(budget)
    assert rewards.reward_drift_bound(tv, reward_range) == pytest.approx(2 * budget)
    tau = rewards.token_tv_for_sequence_tv(tv, horizon)
    assert sequences.tv_sequence_uniform(tau, horizon) == pytest.approx(tv, rel=1e-9, abs=1e-12)
    kl = rewards.token_kl_for_sequence_tv(tv, horizon)
    assert sequences.sequence_tv(horizon, token_kl_mean=kl.value).value == pytest.approx(tv, rel=1e-6, abs=1e-9)
    rho = rewards.half_range_for_sequence_tv(tv, horizon)
    assert rho.value >= tokens.half_range_for_tv(tau)
    assert sequences.sequence_tv(horizon, half_range=rho.value).value <= tv * (1 + 1e-9) + 1e-12
    lam = rewards.log_ratio_for_sequence_tv(tv, horizon)
    assert sequences.sequence_tv(horizon, log_ratio=lam.value).value <= tv * (1 + 1e-9) + 1e-12


def test_half_range_for_sequence_tv_names_the_way_and_wastes_nothing():
    """For one token the worst case decides and is exact; for long sequences KL allows about 2 TV / sqrt(T)."""
    one = rewards.half_range_for_sequence_tv(0.1, 1)
    assert one.name == "worst case over steps"
    assert one.value == pytest.approx(2 * math.atanh(0.1))
    many = rewards.half_range_for_sequence_tv(0.1, 4096)
    assert many.name == "KL over steps, Pinsker"
    assert many.value == pytest.approx(2 * 0.1 / math.sqrt(4096))
    assert sequences.sequence_tv(4096, half_range=many.value).value == pytest.approx(0.1, rel=1e-5)
    assert rewards.token_kl_for_sequence_tv(0.95, 10).name == "Bretagnolle-Huber"


def test_a_budget_as_wide_as_the_range_allows_everything():
    """With nothing to lose every drift is allowed."""
    assert rewards.tv_for_reward_budget(3.0, (0.0, 1.0)) == 1.0
    assert rewards.token_tv_for_sequence_tv(1.0, 100) == 1.0
    assert rewards.half_range_for_sequence_tv(1.0, 100).value == math.inf


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: rewards.reward_drift_bound(1.5, (0, 1)), r"sequence_tv: 1\.5"),
        (lambda: rewards.token_tv_for_sequence_tv(1.5, 8), r"sequence_tv: 1\.5"),
        (lambda: rewards.token_kl_for_sequence_tv(1.5, 8), r"sequence_tv: 1\.5"),
        (lambda: rewards.reward_drift_bound(0.5, (1, 1)), r"reward_range: \(1, 1\)"),
        (lambda: rewards.reward_drift_bound(0.5, (1, 0)), r"reward_range: \(1, 0\)"),
        (lambda: rewards.reward_drift_bound(0.5, (0, math.nan)), r"reward_range: \(0, nan\)"),
        (lambda: rewards.tv_for_reward_budget(-1, (0, 1)), r"budget: -1\.0"),
        (lambda: rewards.token_tv_for_sequence_tv(0.5, -3), "horizon: -3"),
        (lambda: gradients.clip_budget_share(0.1, 0.0), r"clip: 0\.0"),
        (lambda: gradients.clip_budget_share(-0.1, 0.2), r"mean_abs_log_ratio: -0\.1"),
        (
            lambda: gradients.gradient_bias_from_tv(0.1, advantage_max=-1, sequence_score_norm=1),
            r"advantage_max: -1\.0",
        ),
        (
            lambda: gradients.gradient_bias(3, advantage_max=1, sequence_score_norm=1),
            "sequence_tv, half_range, .*: all are None",
        ),
        (
            lambda: known_bounds.gradient_bias_truncated(math.nan, advantage_max=1, sequence_score_norm=1),
            "mean_excess: nan",
        ),
    ],
)
def test_bad_reward_and_gradient_input_is_refused_by_name(call, says):
    """A ValueError names the argument and shows its value."""
    with pytest.raises(ValueError, match=says):
        call()
