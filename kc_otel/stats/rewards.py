"""The drift that a reward budget allows: of a sequence, and of the mean token."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kc_otel.stats._check import horizon_of, real, width_of


@dataclass(frozen=True, slots=True)
class Bound:
    """A number that something does not exceed, or that is enough to keep it so.

    Attributes:
        value: The number.
        name: The statement that gave it, such as `Pinsker`.
    """

    value: float
    name: str


def tv_for_reward_budget(budget: float, reward_range: tuple[float, float]) -> float:
    """The sequence total variation that suffices: `TV_seq <= B / (r_max - r_min)` keeps the reward drift within B.

    A budget of the range's width or more, in the reward's unit, allows everything.

    Raises:
        ValueError: If the budget is negative or NaN, or `reward_range` is not a range.
    """
    return min(1.0, real("budget", float(budget)) / width_of(reward_range))


def mean_token_tv_for_sequence_tv(sequence_tv: float, horizon: int) -> float:
    """The mean total variation of a token, over Q's rollouts, that is enough: `TV_seq / T`.

    Inverse of `TV_seq <= E_Q[sum_t TV_t]`. A mean over tokens of sequences with at most T of them.

    >>> mean_token_tv_for_sequence_tv(0.02, 4096)
    4.8828125e-06
    """
    return _tv(sequence_tv) / horizon_of(horizon)


def token_kl_for_sequence_tv(sequence_tv: float, horizon: int) -> Bound:
    """The mean per-token KL that is enough, nats: the larger of `2 TV^2 / T` and `-log(1 - TV^2) / T`.

    Inverses of Pinsker's and of Bretagnolle and Huber's bound after adding up over steps.
    """
    tv, steps = _tv(sequence_tv), horizon_of(horizon)
    pinsker, bretagnolle_huber = 2.0 * tv * tv, math.inf if tv == 1.0 else -math.log1p(-tv * tv)
    if pinsker >= bretagnolle_huber:
        return Bound(pinsker / steps, "Pinsker")
    return Bound(bretagnolle_huber / steps, "Bretagnolle-Huber")


def _tv(value: float) -> float:
    return real("sequence_tv", float(value), high=1.0, what="a total variation")
