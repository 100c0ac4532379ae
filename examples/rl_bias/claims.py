"""What each bound says of a pair of kernels, in the unit of the true bias: A_max G_seq = 1.

A bound is given only what it asks for. Ratio and log-ratio ranges need P << Q, so a kernel with a dropped tail has
none; `paper` uses them all the same, because a recorder that does not look at E_Q[w] would.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from examples.rl_bias.exact import Pair
from examples.rl_bias.gradient_bounds import gradient_bias, gradient_bias_from_tv
from examples.rl_bias.known_bounds import (
    gradient_bias_from_ratio,
    gradient_bias_token_corrected,
    gradient_bias_truncated,
    tv_sequence_worst_case,
)
from examples.rl_bias.policy import Floats
from examples.rl_bias.sequence_bounds import tv_sequence_uniform
from examples.rl_bias.sharpest import Bound
from examples.rl_bias.token_bounds import tv_from_log_ratio_range
from kc_otel.stats import Binned, Interval, mean_interval

UNIT = {"advantage_max": 1.0, "sequence_score_norm": 1.0}
VACUOUS = 2.0
"""No bias is larger than 2 A_max G_seq, so a bound above says nothing."""


def covered(pair: Pair) -> bool:
    """Whether P << Q."""
    return pair.mean_weight > 1.0 - 1e-9


def from_sequences(pair: Pair) -> float:
    """`2 TV_seq`: what `E_Q[(1 - W)_+]` measures."""
    return gradient_bias_from_tv(pair.sequence_tv, **UNIT)


def from_rollouts(pair: Pair) -> dict[str, float]:
    """Each bound from another average over Q's rollouts."""
    facts = {
        "coupling": {"coupling_mean": pair.coupling_mean},
        "mean token TV": {"token_tv_mean": pair.token_tv_mean},
        "mean token KL": {"token_kl_mean": pair.token_kl_mean},
    }
    if covered(pair):
        facts["chi-square of W"] = {"sequence_chi2": pair.sequence_chi2}
    return {name: gradient_bias(pair.horizon, **known, **UNIT).value for name, known in facts.items()}


def worst_cases(pair: Pair) -> dict[str, float]:
    """Each bound from an extreme over every prefix: what offline tests can promise before any traffic."""
    facts: dict[str, Any] = {"token_tv_worst": float(pair.token_tv_of_steps.max())}
    if covered(pair):
        facts |= {"half_range": pair.half_range, "log_ratio": pair.log_ratio, "ratio_range": pair.ratio_range}
    return {name: gradient_bias(pair.horizon, **{name: value}, **UNIT).value for name, value in facts.items()}


def offline(pair: Pair) -> Bound:
    """The smallest of `worst_cases`, and its name."""
    facts: dict[str, Any] = {"token_tv_worst": float(pair.token_tv_of_steps.max())}
    if covered(pair):
        facts |= {"half_range": pair.half_range, "log_ratio": pair.log_ratio, "ratio_range": pair.ratio_range}
    return gradient_bias(pair.horizon, **facts, **UNIT)


def paper(pair: Pair) -> dict[str, float]:
    """`exp(T lam) - 1` and `(1 + eta)^T - 1` of the ratios that Q's samples show."""
    log_ratio = gradient_bias_from_ratio(pair.horizon, log_ratio=pair.log_ratio, **UNIT).value
    ratio = gradient_bias_from_ratio(pair.horizon, ratio_deviation=pair.ratio_deviation, **UNIT).value
    return {"exp(T lam) - 1": log_ratio, "(1 + eta)^T - 1": ratio}


def truncated(pair: Pair, cut: float, *, deficit: bool) -> float:
    """What weights min(W, C) leave; with or without the support deficit."""
    lost = max(0.0, 1.0 - pair.mean_weight) if deficit else 0.0
    return gradient_bias_truncated(pair.mean_excess(cut), support_deficit=lost, **UNIT)


def token_corrected(pair: Pair) -> float:
    """What token ratios leave, divided by G_seq as the true bias is."""
    norm = pair.train.score_norm / pair.train.sequence_score_norm
    return gradient_bias_token_corrected(
        pair.token_tv_of_steps, advantage_max=1.0, score_norm=norm, support_deficit=pair.token_deficits
    )


def tv_from_worst_steps(pair: Pair) -> float:
    """`1 - prod (1 - tau_t)`: no support assumption."""
    return tv_sequence_worst_case(pair.token_tv_of_steps)


def tv_from_seen_ratios(pair: Pair) -> float:
    """`1 - (1 - tanh(lam/2))^T` of the ratios that Q's samples show: needs P << Q."""
    return tv_sequence_uniform(float(tv_from_log_ratio_range(pair.log_ratio)), pair.horizon)


def norm_share(pair: Pair) -> float:
    """Mean ||score|| where P and Q differ, over the largest: the part of `2 TV_seq`'s slack that is not direction."""
    length = np.linalg.norm(pair.train.sequence_scores, axis=-1) / pair.train.sequence_score_norm
    difference = np.abs(pair.train.probability - pair.q)
    return float(difference @ length / difference.sum())


def sampled(pair: Pair, n: int, seed: int, alpha: float = 0.01) -> Interval:
    """The direct estimate of TV_seq from n sequences drawn from Q, (1 - alpha) in all: E_Q[(1 - W)_+]."""
    return interval_of(drawn(pair, n, seed), alpha)


def drawn(pair: Pair, n: int, seed: int) -> Floats:
    """(1 - W)_+ of n sequences drawn from Q."""
    cumulative = np.cumsum(pair.q)
    uniform = np.random.default_rng(seed).random(n) * cumulative[-1]
    at = np.minimum(np.searchsorted(cumulative, uniform, side="right"), pair.q.size - 1)
    return np.maximum(0.0, 1.0 - pair.weights[at])


def interval_of(values: Floats, alpha: float = 0.01) -> Interval:
    """Empirical Bernstein interval for a mean of values in [0, 1]."""
    return mean_interval(Binned.of_samples(values), low=0.0, high=1.0, alpha_lower=alpha / 2, alpha_upper=alpha / 2)


def is_vacuous(bound: float) -> bool:
    """Whether a bound is no smaller than what every bias obeys."""
    return not math.isfinite(bound) or bound >= VACUOUS
