"""Checks of arguments; each raises a ValueError with the argument, its value and what would be right."""

from __future__ import annotations

import math
from typing import Final

_ROUNDING_ERROR: Final = 1e-12
"""Distance beyond the end of its range at which a number still counts as that end: more than sums of floats err by."""


def real(name: str, value: float, *, low: float = 0.0, high: float = math.inf, what: str = "a finite number") -> float:
    """Return the number if it lies in [low, high]; a rounding error beyond an end is that end."""
    if not (math.isfinite(value) and low - _ROUNDING_ERROR <= value <= high + _ROUNDING_ERROR):
        within = f"of at least {low:g}" if high == math.inf else f"in [{low:g}, {high:g}]"
        raise ValueError(f"{name}: {value!r} is not {what} {within}")
    return min(max(value, low), high)


def level(name: str, value: float) -> float:
    """Return an error probability if it lies strictly between 0 and 1."""
    if not 0.0 < value < 1.0:
        raise ValueError(f"{name}: {value!r} is not strictly between 0 and 1; write an error probability such as 0.01")
    return float(value)


def horizon_of(value: int) -> int:
    """Return a number of steps, if it is a whole number of at least 1."""
    if isinstance(value, bool) or int(value) != value or value < 1:
        raise ValueError(f"horizon: {value!r} is not a number of steps; write a whole number of at least 1")
    return int(value)


def width_of(reward_range: tuple[float, float]) -> float:
    """Return the width of a range of rewards."""
    low, high = reward_range
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        msg = f"reward_range: {reward_range!r} is not a range; write the smallest reward first, such as (0, 1)"
        raise ValueError(msg)
    return float(high) - float(low)
