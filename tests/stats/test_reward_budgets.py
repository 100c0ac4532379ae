"""Backwards from a budget for rewards, and that each of its limits leads to no more than the budget."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.rl_bias.gradient_bounds import gradient_bias
from examples.rl_bias.known_bounds import gradient_bias_from_ratio
from examples.rl_bias.sequence_bounds import sequence_tv
from kc_otel.stats import rewards


@given(st.floats(0.0, 0.99), st.integers(1, 10_000))
def test_budgets_invert_the_chain(budget, horizon):
    """What a budget allows per token leads back to the budget, and never beyond it."""
    tv = rewards.tv_for_reward_budget(2 * budget, (-1.0, 1.0))
    assert tv == pytest.approx(budget)
    mean = rewards.mean_token_tv_for_sequence_tv(tv, horizon)
    assert sequence_tv(horizon, token_tv_mean=mean).value == pytest.approx(tv)
    kl = rewards.token_kl_for_sequence_tv(tv, horizon)
    assert sequence_tv(horizon, token_kl_mean=kl.value).value == pytest.approx(tv, rel=1e-6, abs=1e-9)
    assert rewards.token_kl_for_sequence_tv(0.95, 10).name == "Bretagnolle-Huber"


@given(st.integers(1, 5000), st.floats(0.0, 5.0))
def test_total_variation_is_never_worse_than_the_ratios_worst_case(horizon, lam):
    """From one log-ratio or ratio range, the bound through total variation is at most (exp(T lam) - 1) for every T."""
    norms = {"advantage_max": 3.0, "sequence_score_norm": 2.0}
    for facts in ({"log_ratio": lam}, {"ratio_deviation": lam}):
        worst = gradient_bias_from_ratio(horizon, **facts, **norms).value
        assert gradient_bias(horizon, **facts, **norms).value <= worst * (1 + 1e-9)


def test_a_budget_as_wide_as_the_range_allows_everything():
    """With nothing to lose every drift is allowed."""
    assert rewards.tv_for_reward_budget(3.0, (0.0, 1.0)) == 1.0
    assert rewards.token_kl_for_sequence_tv(1.0, 100).value == math.inf
