"""The sharpest of the bounds that follow from what is known."""

from __future__ import annotations

from kc_otel.stats import Bound


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
