"""The limit at which a bound that rises with it reaches a target."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["largest_limit"]


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
