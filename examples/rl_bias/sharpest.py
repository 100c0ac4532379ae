"""What is known, checked, and the sharpest of the bounds that follow from it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

_ROUNDING_ERROR: Final = 1e-12
"""Distance beyond the end of its range at which a number still counts as that end: more than sums of floats err by."""

Real = TypeVar("Real", float, NDArray[np.float64])
"""Type variable for a number or an array of numbers, preserved by the checks."""


@dataclass(frozen=True, slots=True)
class Bound:
    """A number that something does not exceed, by the statement of a name such as `Pinsker`."""

    value: float
    name: str


def horizon_of(value: int) -> int:
    """Return a number of steps, if it is a whole number of at least 1."""
    if isinstance(value, bool) or int(value) != value or value < 1:
        raise ValueError(f"horizon: {value!r} is not a number of steps; write a whole number of at least 1")
    return int(value)


def real(
    name: str, value: Real, *, low: float = 0.0, high: float = math.inf, infinite: bool = False, what: str = ""
) -> Real:
    """Return the value as float64 after checking that every element lies in [low, high]; rounding errors are clipped.

    Raises:
        ValueError: If it is empty, NaN, outside [low, high], or infinite where that means nothing.
    """
    array = np.asarray(value, dtype=np.float64)
    if array.size == 0:
        raise ValueError(f"{name}: is empty; pass at least one number")
    wrong = ~((array >= low - _ROUNDING_ERROR) & (array <= high + _ROUNDING_ERROR))
    if not infinite:
        wrong |= np.isinf(array)
    if wrong.any():
        within = f"of at least {low:g}" if high == math.inf and not infinite else f"in [{low:g}, {high:g}]"
        raise ValueError(f"{name}: {float(array[wrong].flat[0])!r} is not {what or 'a finite number'} {within}")
    array = np.clip(array, low, high)
    return cast("Real", array if array.ndim else float(array))


def smallest(*candidates: Bound) -> Bound:
    """The sharpest of several upper bounds; the first of those that are equal to within rounding."""
    least = min(bound.value for bound in candidates)
    return next(bound for bound in candidates if bound.value <= least + 1e-12 * abs(least))


def required(**given: object) -> None:
    """Refuses a call that gave none of several alternatives.

    Raises:
        ValueError: If every one of them is None.
    """
    if all(value is None for value in given.values()):
        raise ValueError(f"{', '.join(given)}: all are None; give at least one")
