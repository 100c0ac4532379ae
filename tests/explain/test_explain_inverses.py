"""An inverse put into its bound gives the budget back; the forward ones hold and are attained."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kc_otel.stats.averages import tv_from_js, tv_from_mean_abs_log_ratio, tv_from_tail
from kc_otel.stats.divergences import tv_from_chi2
from kc_otel.stats.gradients import gradient_bias_from_tv
from kc_otel.stats.inverses import (
    chi2_for_tv,
    mean_abs_log_ratio_for_sequence_tv,
    mean_half_range_for_sequence_tv,
    mean_token_tv_for_sequence_tv,
    tv_for_gradient_budget,
)
from kc_otel.stats.sequences import sequence_tv
from kc_otel.stats.tokens import tv_from_half_range

budgets = st.floats(1e-6, 0.999)
horizons = st.integers(1, 20_000)


@given(budgets, horizons)
def test_means_of_tokens(tv, horizon):
    """Mean TV, mean |l| and mean half range, each through its bound over the horizon."""
    mean = mean_token_tv_for_sequence_tv(tv, horizon)
    assert sequence_tv(horizon, token_tv_mean=mean).value == pytest.approx(tv)
    mean = mean_abs_log_ratio_for_sequence_tv(tv, horizon)
    assert tv_from_mean_abs_log_ratio(horizon * mean) == pytest.approx(tv)
    rho = mean_half_range_for_sequence_tv(tv, horizon)
    assert horizon * tv_from_half_range(rho) == pytest.approx(tv)


@given(st.floats(0, 0.999))
def test_chi_square(tv):
    """On both sides of TV = 1/2, where the bound changes its form."""
    assert float(tv_from_chi2(chi2_for_tv(tv))) == pytest.approx(tv)


@given(st.floats(1e-9, 1e3), st.floats(0.1, 100), st.floats(0.1, 1e6))
def test_a_gradient_budget(budget, advantage, score):
    """Back to the budget, or to the whole of TV where the budget allows everything."""
    tv = tv_for_gradient_budget(budget, advantage_max=advantage, sequence_score_norm=score)
    bias = gradient_bias_from_tv(tv, advantage_max=advantage, sequence_score_norm=score)
    assert bias == pytest.approx(budget) if tv < 1 else bias <= budget * (1 + 1e-9)


@given(st.floats(1e-4, 0.9), st.floats(1e-9, 1e-6))
def test_the_mean_log_ratio_bound_is_attained(moved, rare):
    """P moves a share of each token's probability to a token that Q hardly ever samples."""
    q = np.array([1 - rare, rare])
    p = np.array([(1 - rare) * (1 - moved), 1 - (1 - rare) * (1 - moved)])
    tv = abs(p - q).sum() / 2
    mean = float(abs(np.log(p / q)) @ q)
    assert tv <= tv_from_mean_abs_log_ratio(mean)
    assert tv == pytest.approx(tv_from_mean_abs_log_ratio(mean), rel=2e-2, abs=2e-5)


@given(st.integers(0, 1000))
def test_the_jensen_shannon_bound_holds(seed):
    """For random pairs; sqrt(JS) alone would be broken by some of them."""
    rng = np.random.default_rng(seed)
    p, q = rng.dirichlet(np.ones(4) * 0.5, 2)
    p, q = p + 1e-12, q + 1e-12
    m = (p + q) / 2
    js = float(p @ np.log(p / m) + q @ np.log(q / m)) / 2
    assert abs(p - q).sum() / 2 <= tv_from_js(js) + 1e-9


def test_the_jensen_shannon_constant_is_sharp():
    """For a small difference TV is sqrt(2 JS), no less."""
    p, q = np.array([0.5 + 1e-3, 0.5 - 1e-3]), np.array([0.5 - 1e-3, 0.5 + 1e-3])
    m = (p + q) / 2
    js = float(p @ np.log(p / m) + q @ np.log(q / m)) / 2
    assert tv_from_js(js) == pytest.approx(2e-3, rel=1e-3)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: mean_token_tv_for_sequence_tv(1.5, 3), "sequence_tv: 1.5"),
        (lambda: mean_abs_log_ratio_for_sequence_tv(0.5, 0), "horizon: 0"),
        (lambda: chi2_for_tv(-0.1), "tv: -0.1"),
        (lambda: tv_for_gradient_budget(1, advantage_max=0, sequence_score_norm=1), "one is 0"),
        (lambda: tv_from_tail(0.1, 2.0), "share: 2.0"),
        (lambda: tv_from_js(math.nan), "js: nan"),
        (lambda: tv_from_mean_abs_log_ratio(-1.0), "mean: -1.0"),
    ],
)
def test_bad_numbers_are_named(call, named):
    """With the argument and the value."""
    with pytest.raises(ValueError, match=named.replace("(", r"\(")):
        call()
