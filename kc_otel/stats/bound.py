"""A bound and the name of the statement it comes from, so that a report can say which of several was the sharpest."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Bound:
    """A number that a quantity does not exceed, or that suffices to bound it.

    Attributes:
        value: The number.
        name: The statement that gave it, such as `Pinsker`.
    """

    value: float
    name: str


def smallest(*candidates: Bound) -> Bound:
    """The sharpest of several upper bounds; the first of those that are equal to within rounding."""
    least = min(bound.value for bound in candidates)
    return next(bound for bound in candidates if bound.value <= least + 1e-12 * abs(least))


def largest(*candidates: Bound) -> Bound:
    """The most generous of several limits that are each enough; the first of equals."""
    return max(candidates, key=lambda bound: bound.value)
