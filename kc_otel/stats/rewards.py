"""From a sequence to a reward, and back: what drift a reward budget allows."""

from __future__ import annotations

import math

from kc_otel.stats._check import horizon_of, real
from kc_otel.stats.bound import Bound, largest
from kc_otel.stats.tokens import half_range_for_tv

__all__ = [
    "half_range_for_sequence_tv",
    "log_ratio_for_sequence_tv",
    "reward_drift_bound",
    "token_kl_for_sequence_tv",
    "token_tv_for_sequence_tv",
    "tv_for_reward_budget",
]


def reward_drift_bound(sequence_tv: float, reward_range: tuple[float, float]) -> float:
    """`|E_P r - E_Q r| <= (r_max - r_min) TV_seq` for every reward in the range; attained by a 0/1 reward.

    Source: Xu and Wu 2026, arXiv:2606.07581; the dual form of total variation.

    Args:
        sequence_tv: TV_seq, in [0, 1].
        reward_range: Smallest and largest reward of a sequence.

    Raises:
        ValueError: If TV_seq is not in [0, 1] or the range is not one.
    """
    return _width(reward_range) * real("sequence_tv", float(sequence_tv), high=1.0, what="a total variation")


def tv_for_reward_budget(budget: float, reward_range: tuple[float, float]) -> float:
    """The sequence total variation that is enough: `TV_seq <= B / (r_max - r_min)` keeps the reward drift within B.

    Args:
        budget: B, in the reward's unit; from the range's width on, everything is allowed.
        reward_range: Smallest and largest reward of a sequence.

    Raises:
        ValueError: If the budget is negative or NaN, or the range is not one.
    """
    return min(1.0, real("budget", float(budget)) / _width(reward_range))


def token_tv_for_sequence_tv(sequence_tv: float, horizon: int) -> float:
    """The per-token total variation that is enough: `tau = 1 - (1 - TV_seq)^(1/T)` at every prefix.

    Inverse of `tv_sequence_uniform`.

    Args:
        sequence_tv: TV_seq, in [0, 1].
        horizon: T.

    Raises:
        ValueError: If TV_seq is not in [0, 1] or T is not a whole number of at least 1.
    """
    tv = real("sequence_tv", float(sequence_tv), high=1.0, what="a total variation")
    steps = horizon_of(horizon)
    return 1.0 if tv == 1.0 else -math.expm1(math.log1p(-tv) / steps)


def token_kl_for_sequence_tv(sequence_tv: float, horizon: int) -> Bound:
    """The mean per-token KL that is enough, nats: the larger of `2 TV^2 / T` and `-log(1 - TV^2) / T`.

    Inverses of Pinsker's and of Bretagnolle and Huber's bound after adding up over steps.

    Args:
        sequence_tv: TV_seq, in [0, 1].
        horizon: T.

    Raises:
        ValueError: If TV_seq is not in [0, 1] or T is not a whole number of at least 1.
    """
    tv = real("sequence_tv", float(sequence_tv), high=1.0, what="a total variation")
    steps = horizon_of(horizon)
    return largest(
        Bound(2.0 * tv * tv / steps, "Pinsker"),
        Bound(math.inf if tv == 1.0 else -math.log1p(-tv * tv) / steps, "Bretagnolle-Huber"),
    )


def half_range_for_sequence_tv(sequence_tv: float, horizon: int) -> Bound:
    """The half range at every prefix that is enough, by the more generous of two ways, and its name.

    Worst case over steps: `2 atanh(1 - (1 - TV)^(1/T))`, about 2 TV / T. KL over steps: `sqrt(2 KL)` with KL from
    `token_kl_for_sequence_tv`, about 2 TV / sqrt(T), because KL <= rho^2 / 2.

    Args:
        sequence_tv: TV_seq, in [0, 1].
        horizon: T.

    Raises:
        ValueError: If TV_seq is not in [0, 1] or T is not a whole number of at least 1.
    """
    kl = token_kl_for_sequence_tv(sequence_tv, horizon)
    return largest(
        Bound(float(half_range_for_tv(token_tv_for_sequence_tv(sequence_tv, horizon))), "worst case over steps"),
        Bound(math.sqrt(2.0 * kl.value), f"KL over steps, {kl.name}"),
    )


def log_ratio_for_sequence_tv(sequence_tv: float, horizon: int) -> Bound:
    """The |log ratio| of every token at every prefix that is enough, P << Q, and the name of the way.

    The two ways of `half_range_for_sequence_tv` hold for it with the same numbers, because `TV <= tanh(lam / 2)` and
    `KL <= lam^2 / 2` do. A half range rho, in turn, keeps every |log ratio| within 2 rho.

    Args:
        sequence_tv: TV_seq, in [0, 1].
        horizon: T.

    Raises:
        ValueError: If TV_seq is not in [0, 1] or T is not a whole number of at least 1.
    """
    return half_range_for_sequence_tv(sequence_tv, horizon)


def _width(reward_range: tuple[float, float]) -> float:
    low, high = reward_range
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        msg = f"reward_range: {reward_range!r} is not a range; write the smallest reward first, such as (0, 1)"
        raise ValueError(msg)
    return float(high) - float(low)
