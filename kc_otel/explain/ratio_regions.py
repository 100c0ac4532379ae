"""Which log ratios a limit on a token's or a sequence's quantity allows, and what another quantity is at most there.

Each of these quantities is a function of the log ratio that falls up to 0 and rises from there on (or is flat on one
side), so that "at most x" is an interval of log ratios, and the largest value of another one is at an end of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

__all__ = ["SEQUENCE", "TOKEN", "Region", "region", "top"]

Region = tuple[float, float]
"""Smallest and largest log ratio, nats; -inf and inf where there is none."""

TOKEN: Final = frozenset({"log_ratio", "abs_log_ratio", "ratio", "tv_token", "k3", "chi2_token"})
SEQUENCE: Final = frozenset({"tv_seq", "log_ratio_seq", "chi2_seq"})

_LIKE: Final = {"tv_seq": "tv_token", "log_ratio_seq": "log_ratio", "chi2_seq": "chi2_token"}
_STEPS: Final = 200
"""Halvings of an interval: more than a double has bits."""


def region(metric: str, limit: float) -> Region | None:  # noqa: PLR0911 - one per metric
    """Log ratios at which the metric is at most the limit; None where there are none, or the metric is no function.

    >>> low, high = region("chi2_token", 0.25)
    >>> round(math.exp(low), 6), round(math.exp(high), 6)
    (0.5, 1.5)
    """
    match _LIKE.get(metric, metric):
        case "log_ratio":
            return -math.inf, limit
        case "abs_log_ratio":
            return (-limit, limit) if limit >= 0.0 else None
        case "ratio":
            return (-math.inf, math.log(limit)) if limit > 0.0 else None
        case "tv_token":
            return (_log1m(limit), math.inf) if limit >= 0.0 else None
        case "k3":
            return _k3_region(limit) if limit >= 0.0 else None
        case "chi2_token":
            root = math.sqrt(limit) if limit >= 0.0 else math.nan
            return (_log1m(root), math.log1p(root)) if limit >= 0.0 else None
        case "logit_half_range":  # a sampled token's |l| is at most twice the half range
            return (-2.0 * limit, 2.0 * limit) if limit >= 0.0 else None
    return None


def top(metric: str, where: Region) -> float | None:  # noqa: PLR0911 - one per metric
    """Largest value of the metric on an interval of log ratios; None where the metric is no function of it."""
    low, high = where
    match _LIKE.get(metric, metric):
        case "log_ratio":
            return high
        case "abs_log_ratio":
            return max(abs(low), abs(high))
        case "ratio":
            return _exp(high)
        case "tv_token":
            return max(0.0, -math.expm1(low))
        case "k3":
            return max(_k3(low), _k3(high))
        case "chi2_token":
            return max((1.0 - _exp(low)) ** 2, _square(_exp(high) - 1.0))
    return None


def _log1m(value: float) -> float:
    return math.log1p(-value) if value < 1.0 else -math.inf


def _exp(value: float) -> float:
    return math.exp(value) if value < 709.0 else math.inf


def _square(value: float) -> float:
    return value * value if abs(value) < 1e150 else math.inf


def _k3(log_ratio: float) -> float:
    """exp(l) - 1 - l; by its series where the difference would lose its digits."""
    if math.isinf(log_ratio) or log_ratio > 709.0:
        return math.inf
    if abs(log_ratio) < 1e-4:
        return log_ratio * log_ratio * (0.5 + log_ratio * (1.0 / 6.0 + log_ratio / 24.0))
    return math.expm1(log_ratio) - log_ratio


def _k3_region(limit: float) -> Region:
    if math.isinf(limit):
        return -math.inf, math.inf
    return -_solve(lambda x: _k3(-x), limit, 1.0 + limit), _solve(_k3, limit, math.sqrt(2.0 * limit))


def _solve(rising: Callable[[float], float], value: float, high: float) -> float:
    """Largest x in [0, high] with rising(x) <= value; exp(-l) - 1 + l >= l - 1 and exp(l) - 1 - l >= l^2/2."""
    low = 0.0
    for _ in range(_STEPS):
        middle = 0.5 * (low + high)
        if middle in {low, high}:
            break
        low, high = (middle, high) if rising(middle) <= value else (low, middle)
    return high
