"""Backwards: limits on what is measured that are each enough for a budget on the reward, the gradient, or TV_seq.

Each is the inverse of one bound: put into that bound it gives the budget back. Those of worst cases over prefixes and
of KL over steps are in `rewards`. `largest_limit` inverts any bound that rises with what it is computed from.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from kc_otel.stats._check import horizon_of, real
from kc_otel.stats.tokens import half_range_for_tv

__all__ = [
    "chi2_for_tv",
    "largest_limit",
    "mean_abs_log_ratio_for_sequence_tv",
    "mean_half_range_for_sequence_tv",
    "mean_token_tv_for_sequence_tv",
    "tv_for_gradient_budget",
]


_TV = "a total variation"


def tv_for_gradient_budget(budget: float, *, advantage_max: float, sequence_score_norm: float) -> float:
    """The TV_seq that is enough: `B / (2 A_max G_seq)`, at most 1. Inverse of `gradient_bias_from_tv`.

    Args:
        budget: B, largest norm of the bias.
        advantage_max: A_max.
        sequence_score_norm: G_seq; T G when each token's score has a norm of at most G.

    Raises:
        ValueError: If a number is negative or NaN, or a norm is zero.
    """
    norm = 2.0 * real("advantage_max", float(advantage_max)) * real("sequence_score_norm", float(sequence_score_norm))
    if norm == 0.0:
        msg = "advantage_max, sequence_score_norm: one is 0, so there is no gradient to bias; give positive norms"
        raise ValueError(msg)
    return min(1.0, real("budget", float(budget)) / norm)


def mean_token_tv_for_sequence_tv(sequence_tv: float, horizon: int) -> float:
    """The mean total variation of a token, over Q's rollouts, that is enough: `TV_seq / T`.

    Inverse of `TV_seq <= E_Q[sum_t TV_t]`. A mean over tokens of sequences with at most T of them.

    >>> mean_token_tv_for_sequence_tv(0.02, 4096)
    4.8828125e-06

    Args:
        sequence_tv: TV_seq, in [0, 1].
        horizon: T.

    Raises:
        ValueError: If TV_seq is not in [0, 1] or T is not a whole number of at least 1.
    """
    return real("sequence_tv", float(sequence_tv), high=1.0, what=_TV) / horizon_of(horizon)


def mean_abs_log_ratio_for_sequence_tv(sequence_tv: float, horizon: int) -> float:
    """The mean |l| of a token, over Q's rollouts, that is enough: `-log(1 - TV_seq) / T`, nats.

    Inverse of `tv_from_mean_abs_log_ratio` after adding up over steps.

    Args:
        sequence_tv: TV_seq, in [0, 1].
        horizon: T.

    Raises:
        ValueError: If TV_seq is not in [0, 1] or T is not a whole number of at least 1.
    """
    tv, steps = real("sequence_tv", float(sequence_tv), high=1.0, what=_TV), horizon_of(horizon)
    return math.inf if tv == 1.0 else -math.log1p(-tv) / steps


def mean_half_range_for_sequence_tv(sequence_tv: float, horizon: int) -> float:
    """The mean half range of the logit difference, over Q's rollouts, that is enough: `2 atanh(TV_seq / T)`.

    Inverse of `tv_from_half_range` (concave, so that it holds between means) and of `TV_seq <= E_Q[sum_t TV_t]`.

    Args:
        sequence_tv: TV_seq, in [0, 1].
        horizon: T.

    Raises:
        ValueError: If TV_seq is not in [0, 1] or T is not a whole number of at least 1.
    """
    return float(half_range_for_tv(mean_token_tv_for_sequence_tv(sequence_tv, horizon)))


def chi2_for_tv(tv: float) -> float:
    """The chi-square that is enough: `4 TV^2` up to TV = 1/2, `TV / (1 - TV)` from there on. Inverse of `tv_from_chi2`.

    Args:
        tv: Total variation of a token or of a sequence, in [0, 1].

    Raises:
        ValueError: If it is not in [0, 1].
    """
    given = real("tv", float(tv), high=1.0, what=_TV)
    if given <= 0.5:
        return 4.0 * given * given
    return math.inf if given == 1.0 else given / (1.0 - given)


def largest_limit(bound: Callable[[float], float], target: float, start: float) -> float | None:
    """Largest limit for which a rising function of it stays within a target; None when not even 0 does.

    Found by halving, from a starting point, to nine digits; inf when no limit up to 1e12 goes beyond the target.
    """
    slack = 1.0 + 1e-12
    if bound(0.0) > target * slack:
        return None
    low, high = 0.0, max(abs(start), 1e-12)
    while bound(high) <= target * slack:
        low, high = high, 2.0 * high
        if high > 1e12:
            return float("inf")
    for _ in range(200):
        middle = 0.5 * (low + high)
        if high - low <= 1e-10 * high:
            break
        low, high = (middle, high) if bound(middle) <= target * slack else (low, middle)
    return low
