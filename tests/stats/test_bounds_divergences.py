"""From one divergence to another: arrays, extremes, refusals, and where each form of a bound takes over."""

from __future__ import annotations

import math

import numpy as np
import pytest

from examples.rl_bias import known_bounds
from kc_otel.stats import Bound, sequences, tokens


def test_chi_square_forms_meet_at_one():
    """sqrt(chi2)/2 and chi2/(1 + chi2) give one half at chi2 = 1, and the smaller of them is used on both sides."""
    assert tokens.tv_from_chi2(1.0) == 0.5
    assert tokens.tv_from_chi2(0.04) == pytest.approx(0.1)
    assert tokens.tv_from_chi2(3.0) == pytest.approx(0.75)
    chi2 = np.array([[0.0, 0.5], [2.0, math.inf]])
    np.testing.assert_allclose(tokens.tv_from_chi2(chi2), [[0.0, math.sqrt(0.5) / 2], [2 / 3, 1.0]])


def test_kl_from_a_ratio_range_has_no_gaps():
    """Next to nothing, next to the series' end and at a ratio of zero it is a number, or infinite as it has to be."""
    for reverse in (False, True):
        assert tokens.kl_from_ratio_range(0.0, 0.0, reverse=reverse) == 0.0
        assert tokens.kl_from_ratio_range(1.0, 0.0, reverse=reverse) == 0.0
        assert tokens.kl_from_ratio_range(1e-9, 1e-9, reverse=reverse) == pytest.approx(5e-19)
        near = [tokens.kl_from_ratio_range(x, x, reverse=reverse) for x in (0.9999e-4, 1.0001e-4)]
        assert near[1] / near[0] == pytest.approx((1.0001 / 0.9999) ** 2, rel=1e-6)
        both = tokens.kl_from_ratio_range(np.array([0.1, 0.2]), np.array([0.3, 0.1]), reverse=reverse)
        np.testing.assert_allclose(both[0], tokens.kl_from_ratio_range(0.1, 0.3, reverse=reverse))
    assert tokens.kl_from_ratio_range(1.0, 3.0) == pytest.approx(math.log(4.0))
    assert tokens.kl_from_ratio_range(1.0, 3.0, reverse=True) == math.inf


def test_log_ratio_range_is_a_ratio_range():
    """Lam and (1 - exp(-lam), exp(lam) - 1) say the same of chi-square and of KL."""
    for lam in (0.01, 0.5, 3.0):
        ends = -math.expm1(-lam), math.expm1(lam)
        assert tokens.chi2_from_log_ratio_range(lam) == pytest.approx(tokens.chi2_from_ratio_range(*ends))
        assert tokens.kl_from_log_ratio_range(lam) == pytest.approx(tokens.kl_from_ratio_range(*ends), rel=1e-9)
    assert tokens.chi2_from_log_ratio_range(np.array([0.0, 2000.0])).tolist() == [0.0, math.inf]


def test_chi_square_wins_where_ratios_reach_far_down_and_hardly_up():
    """A lopsided ratio range is named after the way that is sharpest for it; one fact more is never worse."""
    won = sequences.sequence_tv(20, ratio_range=(0.76, 0.0252))
    assert won.name == "chi-square over steps, ratio range"
    assert won.value < sequences.tv_sequence_uniform(tokens.tv_from_ratio_range(0.76, 0.0252), 20) * 0.9
    assert sequences.sequence_tv(20, ratio_range=(0.76, 0.0252), coupling_mean=0.1) == Bound(0.1, "coupling")
    assert sequences.sequence_tv(5, sequence_chi2=0.01, token_chi2_worst=0.1) == Bound(0.05, "chi-square")
    assert sequences.sequence_tv(1, token_chi2_worst=0.04).value == pytest.approx(0.1)
    assert tokens.token_tv(chi2=0.04, kl=0.1) == Bound(0.1, "chi-square")


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: tokens.tv_from_chi2(-0.1), r"chi2: -0\.1"),
        (lambda: tokens.kl_from_ratio_range(1.5, 0.1), r"below: 1\.5"),
        (lambda: tokens.kl_from_ratio_range(0.5, -0.1), r"above: -0\.1"),
        (lambda: tokens.chi2_from_log_ratio_range(-1.0), r"log_ratio: -1\.0"),
        (lambda: sequences.sequence_tv(3, coupling_mean=1.5), r"coupling_mean: 1\.5"),
        (lambda: sequences.sequence_tv(3, token_chi2_worst=-1.0), r"token_chi2_worst: -1\.0"),
        (
            lambda: known_bounds.gradient_bias_truncated(
                0, advantage_max=1, sequence_score_norm=1, support_deficit=1.5
            ),
            r"support_deficit: 1\.5",
        ),
        (
            lambda: known_bounds.gradient_bias_token_corrected(
                [0.1, 0.1], advantage_max=1, score_norm=1, support_deficit=[0.1, 0.1, 0.1]
            ),
            r"support_deficit: shape \(3,\) is not that of token_tv, \(2,\)",
        ),
    ],
)
def test_bad_divergence_is_refused_by_name(call, says):
    """A ValueError names the argument and shows its value."""
    with pytest.raises(ValueError, match=says):
        call()
