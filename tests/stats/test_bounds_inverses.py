"""Backwards: values of the inverses at their edges, and constants of the gradient's bounds, by hand."""

from __future__ import annotations

import math

import pytest

from examples.rl_bias import known_bounds
from kc_otel.stats import averages, gradients, inverses

NORMS = {"advantage_max": 5.0, "sequence_score_norm": 8.0}


def test_a_budget_of_one_in_total_variation_asks_nothing_of_logs_and_squares():
    """TV = 1 is no limit, so that neither |l| nor chi-square needs one; just below it they do."""
    assert inverses.mean_abs_log_ratio_for_sequence_tv(1.0, 8) == math.inf
    assert inverses.chi2_for_tv(1.0) == math.inf
    assert inverses.mean_abs_log_ratio_for_sequence_tv(0.5, 8) == pytest.approx(math.log(2) / 8)
    assert inverses.chi2_for_tv(0.75) == pytest.approx(3.0)
    assert inverses.chi2_for_tv(0.25) == 0.25


@pytest.mark.parametrize(
    "call",
    [
        lambda: inverses.mean_abs_log_ratio_for_sequence_tv(1.5, 8),
        lambda: inverses.mean_token_tv_for_sequence_tv(1.5, 8),
        lambda: inverses.chi2_for_tv(1.5),
        lambda: gradients.gradient_bias_from_tv(1.5, **NORMS),
        lambda: known_bounds.gradient_bias_token_corrected([1.5], advantage_max=1.0, score_norm=1.0),
        lambda: averages.tv_from_tail(0.1, 1.5),
    ],
)
def test_more_than_one_is_no_total_variation(call):
    """The value is refused by name, not carried on."""
    with pytest.raises(ValueError, match=r"1\.5"):
        call()


def test_gradient_budget_is_spent_by_the_total_variation_that_it_allows():
    """B = 2 A G TV, at most all of it."""
    assert inverses.tv_for_gradient_budget(8.0, **NORMS) == pytest.approx(0.1)
    assert gradients.gradient_bias_from_tv(0.1, **NORMS) == pytest.approx(8.0)
    assert inverses.tv_for_gradient_budget(800.0, **NORMS) == 1.0


def test_token_correction_by_hand():
    """Three steps of 0.1, 0.2, 0.3 with 0.05 lost: 2 sum of what the others leave, and the loss of each step."""
    others = (1 - 0.8 * 0.7) + (1 - 0.9 * 0.7) + (1 - 0.9 * 0.8)
    bound = known_bounds.gradient_bias_token_corrected(
        [0.1, 0.2, 0.3], advantage_max=2.0, score_norm=3.0, support_deficit=0.05
    )
    assert bound == pytest.approx(6.0 * (2 * others + 3 * 0.05))


def test_jensen_shannon_of_disjoint_kernels_is_a_total_variation_of_one():
    """JS is at most log 2, at which Pinsker's inequality says more than 1."""
    assert averages.tv_from_js(math.log(2)) == 1.0
    assert averages.tv_from_js(0.02) == pytest.approx(0.2)
