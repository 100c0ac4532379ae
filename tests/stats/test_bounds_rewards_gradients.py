"""Sections 3, 4 and 7: rewards, gradients, budgets."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.rl_bias import known_bounds
from kc_otel.stats import Bound, gradients, rewards, sequences


def test_corrected_estimators_keep_the_bias_of_what_is_never_sampled():
    """A constant f loses exactly the support deficit, whichever ratio corrects it, and no weight brings it back."""
    p, q = np.array([0.9, 0.1]), np.array([1.0, 0.0])
    w = np.array([0.9, 0.0])
    lost = abs(q @ (w * 6.0) - p @ np.full(2, 6.0))
    whole = known_bounds.gradient_bias_truncated(0, advantage_max=3, sequence_score_norm=2, support_deficit=0.1)
    assert whole == pytest.approx(lost)
    bound = known_bounds.gradient_bias_token_corrected([0.1], advantage_max=3, score_norm=2, support_deficit=0.1)
    assert bound == pytest.approx(lost)
    assert known_bounds.gradient_bias_token_corrected([0.1], advantage_max=3, score_norm=2) == 0.0


def test_gradient_bias_names_the_winner():
    """Each fact wins where it is sharpest, and without a useful one the trivial bound does."""
    norms = {"advantage_max": 1.0, "sequence_score_norm": 1.0}
    assert gradients.gradient_bias(4, sequence_tv=0.001, log_ratio=0.1, **norms).name == "total variation"
    ratios = "worst case over steps, ratio range"
    bound = gradients.gradient_bias(1, sequence_tv=0.5, log_ratio=0.1, **norms)
    assert bound.name == "worst case over steps, log-ratio range"
    assert bound.value == pytest.approx(2 * math.tanh(0.05))
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


@given(st.floats(0.0, 0.99), st.integers(1, 10_000))
def test_budgets_invert_the_chain(budget, horizon):
    """What a budget allows per token leads back to the budget, and never beyond it."""
    reward_range = (-1.0, 1.0)
    tv = rewards.tv_for_reward_budget(2 * budget, reward_range)
    assert tv == pytest.approx(budget)
    assert rewards.reward_drift_bound(tv, reward_range) == pytest.approx(2 * budget)
    mean = rewards.mean_token_tv_for_sequence_tv(tv, horizon)
    assert sequences.sequence_tv(horizon, token_tv_mean=mean).value == pytest.approx(tv)
    kl = rewards.token_kl_for_sequence_tv(tv, horizon)
    assert sequences.sequence_tv(horizon, token_kl_mean=kl.value).value == pytest.approx(tv, rel=1e-6, abs=1e-9)
    assert rewards.token_kl_for_sequence_tv(0.95, 10).name == "Bretagnolle-Huber"


def test_a_budget_as_wide_as_the_range_allows_everything():
    """With nothing to lose every drift is allowed."""
    assert rewards.tv_for_reward_budget(3.0, (0.0, 1.0)) == 1.0
    assert rewards.token_kl_for_sequence_tv(1.0, 100).value == math.inf


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: rewards.reward_drift_bound(1.5, (0, 1)), r"sequence_tv: 1\.5"),
        (lambda: rewards.mean_token_tv_for_sequence_tv(1.5, 8), r"sequence_tv: 1\.5"),
        (lambda: rewards.token_kl_for_sequence_tv(1.5, 8), r"sequence_tv: 1\.5"),
        (lambda: rewards.reward_drift_bound(0.5, (1, 1)), r"reward_range: \(1, 1\)"),
        (lambda: rewards.reward_drift_bound(0.5, (1, 0)), r"reward_range: \(1, 0\)"),
        (lambda: rewards.reward_drift_bound(0.5, (0, math.nan)), r"reward_range: \(0, nan\)"),
        (lambda: rewards.tv_for_reward_budget(-1, (0, 1)), r"budget: -1\.0"),
        (lambda: rewards.mean_token_tv_for_sequence_tv(0.5, -3), "horizon: -3"),
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


@pytest.mark.parametrize("shape", [(50, 4), (5, 40)])
def test_the_second_moment_is_that_of_either_gram_matrix(shape: tuple[int, int]) -> None:
    """lambda_max of the mean of f f', whichever of sequences and parameters are fewer."""
    rng = np.random.default_rng(0)
    advantage, scores = rng.normal(size=shape[0]), rng.normal(size=shape)
    f = advantage[:, None] * scores
    assert gradients.largest_second_moment(advantage, scores) == pytest.approx(
        np.linalg.eigvalsh(f.T @ f / shape[0])[-1]
    )
    with pytest.raises(ValueError, match="give one row for each"):
        gradients.largest_second_moment(advantage[1:], scores)
