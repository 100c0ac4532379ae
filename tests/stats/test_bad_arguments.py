"""What no statistic can be computed from is refused by name: a ValueError says which argument, and shows its value."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kc_otel.stats import (
    Binned,
    Histogram,
    capped_mean_interval,
    estimated_gradient_bias,
    estimated_reward_drift,
    fraction_interval,
    holm,
    maximum_interval,
    mean_interval,
    quantile_interval,
    reward_sides,
    rewards,
    support_deficit,
)
from kc_otel.stats.e_detector import alarm_level
from kc_otel.stats.interval_rows import HistogramRows
from kc_otel.stats.means import support_deficits

LEVELS = {"alpha_lower": 0.01, "alpha_upper": 0.05}
UNIT = {"low": 0.0, "high": 1.0}
SOME = Binned.of_samples(np.array([0.1, 0.2]))
NAN = Binned(np.array([0.1, math.nan]), np.array([0.2, 0.3]), np.array([1, 1]), 2, 0.4, math.nan, math.nan)
TURNED = Binned(np.array([0.3]), np.array([0.2]), np.array([1]), 1, 0.4, math.nan, math.nan)


def bias(size=5, **change):
    given = {"log_ratio": np.zeros(size), "advantage": np.ones(size), "scores": np.ones((size, 2)), **change}
    return estimated_gradient_bias(**given)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: mean_interval(SOME, **UNIT, alpha_lower=0.0, alpha_upper=0.1), r"alpha_lower: 0\.0"),
        (lambda: mean_interval(SOME, **UNIT, alpha_lower=0.1, alpha_upper=1.0), r"alpha_upper: 1\.0"),
        (lambda: mean_interval(SOME, low=1, high=1, **LEVELS), r"\[1, 1\] is empty"),
        (lambda: mean_interval(SOME, low=2, high=1, **LEVELS), r"\[2, 1\] is empty"),
        (lambda: mean_interval(SOME, low=0, high=math.inf, **LEVELS), r"\[0, inf\] is not a finite range"),
        (lambda: capped_mean_interval(SOME, low=0, high=9, cap=-1, **LEVELS), "cap: -1"),
        (lambda: capped_mean_interval(SOME, low=0, high=math.inf, cap=math.inf, **LEVELS), "not a finite range"),
        (lambda: mean_interval(NAN, **UNIT, **LEVELS), r"sample: bin 1 is \[.*nan.*, .*0\.3"),
        (lambda: quantile_interval(SOME, 1.0, **LEVELS), r"rank: 1\.0"),
        (lambda: quantile_interval(SOME, math.nan, **LEVELS), "rank: nan"),
        (lambda: quantile_interval(SOME, 0.5, alpha_lower=0.1, alpha_upper=0), "alpha_upper: 0"),
        (lambda: quantile_interval(SOME, 0.5, alpha_lower=-0.1, alpha_upper=0.1), r"alpha_lower: -0\.1"),
        (lambda: fraction_interval(SOME, math.nan, **LEVELS), "above: nan"),
        (lambda: fraction_interval(SOME, 0.1, alpha_lower=2, alpha_upper=0.1), "alpha_lower: 2"),
        (lambda: quantile_interval(TURNED, 0.5, **LEVELS), "sample: bin 0"),
        (lambda: fraction_interval(TURNED, 0.5, **LEVELS), "sample: bin 0"),
        (lambda: maximum_interval(TURNED), "sample: bin 0"),
        (lambda: capped_mean_interval(SOME, low=0, high=9, cap=9, scale=0.0, **LEVELS), r"scale: 0\.0"),
        (lambda: capped_mean_interval(SOME, low=0, high=9, cap=9, scale=math.inf, **LEVELS), "scale: inf"),
        (lambda: support_deficit(SOME, cap=1.0, **LEVELS), "cap: 1.0"),
        (lambda: support_deficits(HistogramRows.of(SOME), cap=1.0, highest=None, **LEVELS), "cap: 1.0"),
        (lambda: support_deficit(SOME, highest=0.5, **LEVELS), "highest: 0.5"),
        (lambda: support_deficit(SOME, alpha_lower=2.0, alpha_upper=0.1), "alpha"),
        (lambda: holm([0.5], 0.0), r"alpha: 0\.0"),
        (lambda: holm([0.5, 1.5], 0.05), r"p_values\[1\]: 1\.5"),
        (lambda: holm([math.nan], 0.05), r"p_values\[0\]: nan"),
        (lambda: Binned.of_samples(np.array([1.0, math.nan, math.nan])), "values: 2 of 3 are nan"),
        (lambda: Histogram.empty(4).downscaled(6), "scale: 6 is finer than this histogram's 4"),
        (lambda: rewards.tv_for_reward_budget(0.5, (1, 1)), r"reward_range: \(1, 1\)"),
        (lambda: rewards.tv_for_reward_budget(0.5, (0, math.nan)), r"reward_range: \(0, nan\)"),
        (lambda: rewards.tv_for_reward_budget(-1, (0, 1)), r"budget: -1\.0"),
        (lambda: alarm_level(100, 0), r"cells: 0\.0"),
        (lambda: alarm_level(0.5, 1), r"panes: 0\.5"),
        (lambda: reward_sides([0.0], [0.0], (1, 0)), r"reward_range: \(1, 0\) is not a range"),
        (lambda: reward_sides([0.0], [0.0, 1.0], (0, 1)), "reward: shape"),
        (lambda: estimated_reward_drift([0.0, 0.0], [1.0], [1, 1]), "1 rewards and 2 prompts for 2"),
        (lambda: estimated_reward_drift([0.0, 0.0], [1.0, 0.0], [1, 2]), "0 have two rollouts"),
        (lambda: bias(scores=np.ones((4, 2))), "scores: shape"),
        (lambda: bias(log_ratio=np.full(5, np.nan)), "5 of 5 sequences have numbers that are not finite"),
        (lambda: bias(confidence=1.5), "confidence"),
        (lambda: bias(2), "2 sequences say nothing"),
        (lambda: bias(4, prompts=[1, 2]), "2 names for 4"),
        (lambda: bias(4, prompts=[1, 1, 2, 2]), "2 say nothing of a bias"),
    ],
)
def test_bad_arguments_are_refused_by_name(call, says):
    with pytest.raises(ValueError, match=says):
        call()
