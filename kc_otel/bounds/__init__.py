"""Bounds, estimators and confidence intervals: the mathematics of kernel contracts, from NumPy and SciPy alone.

The chain from logits to rewards and gradients is in `tokens`, `sequences`, `rewards` and `gradients`; the calls that
return the smallest of several bounds and its name are here, next to the intervals that verdicts are made from.
"""

from kc_otel.bounds.binned import Binned
from kc_otel.bounds.bound import Bound
from kc_otel.bounds.fractions import fraction_interval
from kc_otel.bounds.gradients import clip_budget_share, gradient_bias
from kc_otel.bounds.histogram import Buckets, ExponentialHistogram
from kc_otel.bounds.interval import Interval, affine, maximum_interval
from kc_otel.bounds.means import capped_mean_interval, hoeffding_interval, mean_interval
from kc_otel.bounds.multiplicity import Holm, holm
from kc_otel.bounds.quantiles import dkw_interval, quantile_interval
from kc_otel.bounds.rewards import half_range_for_sequence_tv, reward_drift, tv_for_reward_budget
from kc_otel.bounds.sequences import sequence_tv
from kc_otel.bounds.tokens import half_range, token_tv

__all__ = [
    "Binned",
    "Bound",
    "Buckets",
    "ExponentialHistogram",
    "Holm",
    "Interval",
    "affine",
    "capped_mean_interval",
    "clip_budget_share",
    "dkw_interval",
    "fraction_interval",
    "gradient_bias",
    "half_range",
    "half_range_for_sequence_tv",
    "hoeffding_interval",
    "holm",
    "maximum_interval",
    "mean_interval",
    "quantile_interval",
    "reward_drift",
    "sequence_tv",
    "token_tv",
    "tv_for_reward_budget",
]
