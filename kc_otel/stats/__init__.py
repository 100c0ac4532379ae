"""Estimators and confidence intervals: the mathematics of kernel contracts.

| what                                                              | where                                     |
| ----------------------------------------------------------------- | ----------------------------------------- |
| a reward's drift, and what a budget for it allows                 | `rewards`                                 |
| a gradient's bias itself                                          | `gradient_estimates`                      |
| intervals at one sample size, or at all sizes at once (`anytime`) | `means`, `quantiles`                      |
| when a mean has risen above a limit                               | `e_detector`                              |
| many cells                                                        | `interval`                                |
| the mass that a kernel can never sample                           | `means`                                   |

An interval takes independent observations as a `Binned`, exact from values or conservative from a histogram, and an
error probability of either side, `alpha_lower` and `alpha_upper`. Bad arguments raise a ValueError that names them: an
alpha outside of (0, 1), a range that is empty or has no finite cap, an edge that is NaN.

SciPy is loaded where an exact interval first needs it; a recorder, which needs the histograms, does without.
"""

from __future__ import annotations

from kc_otel.stats.e_detector import EDetector
from kc_otel.stats.gradient_estimates import GradientBias, estimated_gradient_bias
from kc_otel.stats.histogram import Buckets, Histogram
from kc_otel.stats.interval import Binned, Holm, Interval, holm
from kc_otel.stats.means import capped_mean_interval, mean_interval, support_deficit
from kc_otel.stats.quantiles import fraction_interval, maximum_interval, quantile_interval, two_valued_mean_interval
from kc_otel.stats.rewards import (
    RewardDriftEstimate,
    estimated_reward_drift,
    reward_drift_interval,
    reward_sides,
    tv_for_reward_budget,
)

__all__ = [
    "Binned", "Buckets", "EDetector", "GradientBias", "Histogram", "Holm", "Interval", "RewardDriftEstimate",
    "capped_mean_interval", "estimated_gradient_bias", "estimated_reward_drift", "fraction_interval", "holm",
    "maximum_interval", "mean_interval", "quantile_interval", "reward_drift_interval", "reward_sides",
    "support_deficit", "tv_for_reward_budget", "two_valued_mean_interval",
]  # fmt: skip
