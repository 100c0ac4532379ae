"""Bounds, estimators and confidence intervals: the mathematics of kernel contracts, from NumPy and SciPy alone.

| what                                                                  | where                                   |
| --------------------------------------------------------------------- | --------------------------------------- |
| one token: half range, ratios, KL, chi-square to total variation      | `tokens`, `divergences`, `averages`     |
| a sequence, a reward, a policy gradient                               | `sequences`, `rewards`, `gradients`     |
| backwards from a budget                                               | `rewards`, `inverses`                   |
| intervals for means, quantiles, fractions, at one sample size         | `means`, `quantiles`, `fractions`       |
| the same at every sample size at once; e-values                       | `sequential`, `streams`                 |
| many cells: Holm, e-BH; dependent tokens: sequences as the unit       | `multiplicity`, `clusters`              |
| top-k log-probabilities; support; tails                               | `topk`, `support`, `tails`              |
| assumptions against measurements; estimators against each other       | `assumptions`, `sanity`                 |
| drift by the sign of the advantage; mismatch apart from stale weights | `signed`, `staleness`                   |
| when a mean has risen: CUSUM, Page-Hinkley, e-detector                | `change`, `edetector`                   |

The calls that return the smallest of several bounds with its name are `token_tv`, `sequence_tv` and `gradient_bias`.
Samples come as a `Binned`, exact from values or conservative from a histogram.
"""

from kc_otel.stats.assumptions import AssumptionCheck, check_assumption
from kc_otel.stats.binned import Binned
from kc_otel.stats.binned_tails import pareto_k_binned
from kc_otel.stats.bound import Bound
from kc_otel.stats.change import cusum, page_hinkley
from kc_otel.stats.clusters import (
    DesignEffect,
    design_effect,
    sequence_mean_interval,
    sequence_means,
    token_mean_interval,
)
from kc_otel.stats.edetector import e_detector
from kc_otel.stats.fractions import fraction_interval
from kc_otel.stats.gradients import clip_budget_share, gradient_bias
from kc_otel.stats.histogram import Buckets, ExponentialHistogram
from kc_otel.stats.interval import Interval, affine, maximum_interval
from kc_otel.stats.inverses import tv_for_gradient_budget
from kc_otel.stats.means import (
    bernstein_interval,
    betting_interval,
    capped_mean_interval,
    chernoff_interval,
    hoeffding_interval,
    mean_interval,
)
from kc_otel.stats.multiplicity import EBH, Holm, e_bh, holm
from kc_otel.stats.quantiles import dkw_interval, quantile_interval
from kc_otel.stats.rewards import half_range_for_sequence_tv, reward_drift, tv_for_reward_budget
from kc_otel.stats.sanity import Consistency, consistency
from kc_otel.stats.sequences import sequence_tv
from kc_otel.stats.sequential import anytime_bernstein_interval, anytime_mean_interval, e_value
from kc_otel.stats.signed import SignedDrift, signed_drift
from kc_otel.stats.staleness import mismatch_at_no_lag, split_drift
from kc_otel.stats.streams import BernsteinSequence, BettingSequence, running_bounds
from kc_otel.stats.support import support_deficit
from kc_otel.stats.tails import TailIndex, hill, pareto_k, tail_reading
from kc_otel.stats.tokens import half_range, token_tv
from kc_otel.stats.topk import TopKBounds, topk_bounds

__all__ = [
    "EBH",
    "AssumptionCheck",
    "BernsteinSequence",
    "BettingSequence",
    "Binned",
    "Bound",
    "Buckets",
    "Consistency",
    "DesignEffect",
    "ExponentialHistogram",
    "Holm",
    "Interval",
    "SignedDrift",
    "TailIndex",
    "TopKBounds",
    "affine",
    "anytime_bernstein_interval",
    "anytime_mean_interval",
    "bernstein_interval",
    "betting_interval",
    "capped_mean_interval",
    "check_assumption",
    "chernoff_interval",
    "clip_budget_share",
    "consistency",
    "cusum",
    "design_effect",
    "dkw_interval",
    "e_bh",
    "e_detector",
    "e_value",
    "fraction_interval",
    "gradient_bias",
    "half_range",
    "half_range_for_sequence_tv",
    "hill",
    "hoeffding_interval",
    "holm",
    "maximum_interval",
    "mean_interval",
    "mismatch_at_no_lag",
    "page_hinkley",
    "pareto_k",
    "pareto_k_binned",
    "quantile_interval",
    "reward_drift",
    "running_bounds",
    "sequence_mean_interval",
    "sequence_means",
    "sequence_tv",
    "signed_drift",
    "split_drift",
    "support_deficit",
    "tail_reading",
    "token_mean_interval",
    "token_tv",
    "topk_bounds",
    "tv_for_gradient_budget",
    "tv_for_reward_budget",
]
