"""Bounds, estimators and confidence intervals: the mathematics of kernel contracts.

| what                                                              | where                                     |
| ----------------------------------------------------------------- | ----------------------------------------- |
| one token: half range, ratios, KL, chi-square to total variation  | `tokens`, `divergences`, `averages`       |
| a sequence, a reward, a policy gradient                           | `sequences`, `rewards`, `gradients`       |
| a reward's drift and a gradient's bias themselves                 | `reward_intervals`, `gradient_estimates`  |
| backwards from a budget                                           | `rewards`, `inverses`                     |
| intervals at one sample size, or with `anytime` at all at once    | `means`, `quantiles`, `fractions`         |
| when a mean has risen above a limit                               | `e_detector`                              |
| many cells                                                        | `multiplicity`                            |
| the mass that a kernel can never sample                           | `support`                                 |

The calls that return the smallest of several bounds with its name are `token_tv`, `sequence_tv` and `gradient_bias`.
Samples come as a `Binned`, exact from values or conservative from a histogram.

Names are imported when they are first used: a recorder needs the histograms, and with them nothing but NumPy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from kc_otel.stats.binned import Binned
    from kc_otel.stats.bound import Bound
    from kc_otel.stats.e_detector import EDetector
    from kc_otel.stats.fractions import fraction_interval, two_valued_mean_interval
    from kc_otel.stats.gradient_estimates import GradientBias, estimated_gradient_bias, score_sketch
    from kc_otel.stats.gradients import clip_budget_share, gradient_bias
    from kc_otel.stats.histogram import Buckets, ExponentialHistogram
    from kc_otel.stats.interval import Interval, affine, maximum_interval
    from kc_otel.stats.inverses import tv_for_gradient_budget
    from kc_otel.stats.means import capped_mean_interval, mean_interval
    from kc_otel.stats.multiplicity import Holm, holm
    from kc_otel.stats.quantiles import quantile_interval
    from kc_otel.stats.reward_intervals import reward_drift_interval, reward_sides
    from kc_otel.stats.rewards import half_range_for_sequence_tv, reward_drift_bound, tv_for_reward_budget
    from kc_otel.stats.sequences import sequence_tv
    from kc_otel.stats.support import support_deficit
    from kc_otel.stats.tokens import half_range, token_tv

__all__ = [
    "Binned",
    "Bound",
    "Buckets",
    "EDetector",
    "ExponentialHistogram",
    "GradientBias",
    "Holm",
    "Interval",
    "affine",
    "capped_mean_interval",
    "clip_budget_share",
    "estimated_gradient_bias",
    "fraction_interval",
    "gradient_bias",
    "half_range",
    "half_range_for_sequence_tv",
    "holm",
    "maximum_interval",
    "mean_interval",
    "quantile_interval",
    "reward_drift_bound",
    "reward_drift_interval",
    "reward_sides",
    "score_sketch",
    "sequence_tv",
    "support_deficit",
    "token_tv",
    "tv_for_gradient_budget",
    "tv_for_reward_budget",
    "two_valued_mean_interval",
]

_HOMES: Final = {
    "binned": ("Binned",),
    "bound": ("Bound",),
    "e_detector": ("EDetector",),
    "fractions": ("fraction_interval", "two_valued_mean_interval"),
    "gradient_estimates": ("GradientBias", "estimated_gradient_bias", "score_sketch"),
    "gradients": ("clip_budget_share", "gradient_bias"),
    "histogram": ("Buckets", "ExponentialHistogram"),
    "interval": ("Interval", "affine", "maximum_interval"),
    "inverses": ("tv_for_gradient_budget",),
    "means": ("capped_mean_interval", "mean_interval"),
    "multiplicity": ("Holm", "holm"),
    "quantiles": ("quantile_interval",),
    "reward_intervals": ("reward_drift_interval", "reward_sides"),
    "rewards": ("half_range_for_sequence_tv", "reward_drift_bound", "tv_for_reward_budget"),
    "sequences": ("sequence_tv",),
    "support": ("support_deficit",),
    "tokens": ("half_range", "token_tv"),
}
_HOME_OF: Final = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
