"""Intervals from two bounds for a mean, with notes on observations outside the promised range."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from kc_otel.stats._check import level
from kc_otel.stats.binned import Binned
from kc_otel.stats.interval import Interval, nothing
from kc_otel.stats.placement import Placement, finite_range

Side = Callable[[Placement, float, float, float], float]


@dataclass(frozen=True, slots=True)
class Sides:
    """Two bounds on the mean of a sample cut to [low, high], as functions of (placement, low, high, alpha).

    What they return may lie outside of [low, high].
    """

    lower: Side
    upper: Side


def bounded_interval(
    sample: Binned,
    low: float,
    high: float,
    alpha_lower: float,
    alpha_upper: float,
    sides: Sides,
    method: str,
) -> Interval:
    """`interval_of` for a quantity with a finite range.

    Raises:
        ValueError: If an alpha is not in (0, 1), [low, high] is not a finite range, or an edge is NaN.
    """
    finite_range(low, high)
    return interval_of(sample, low, high, max(abs(low), abs(high)), alpha_lower, alpha_upper, sides, method)


def interval_of(
    sample: Binned,
    low: float,
    high: float,
    cap: float,
    alpha_lower: float,
    alpha_upper: float,
    sides: Sides,
    method: str,
    *,
    cut: bool = False,
) -> Interval:
    """Two sides as an interval, with what `capped_mean_interval` says of observations beyond the range or the cap.

    Raises:
        ValueError: If an alpha is not in (0, 1), the range is empty or has no finite cap, or an edge is NaN.
    """
    level("alpha_lower", alpha_lower)
    level("alpha_upper", alpha_upper)
    floor, ceiling = max(low, -cap), min(high, cap)
    finite_range(floor, ceiling)
    if not sample.total:
        return nothing(method)
    known = Placement.of(sample, floor, ceiling)
    below = above = 0
    if sample.lower[0] < floor or sample.upper[-1] > ceiling:
        # A promised end is broken only by a bin that lies wholly outside; a cap already by one that may.
        if floor == low or not cut:
            below = int(sample.count[(sample.upper if floor == low else sample.lower) < floor].sum())
        if ceiling == high or not cut:
            above = int(sample.count[(sample.lower if ceiling == high else sample.upper) > ceiling].sum())
    # Every side holds the sample's own mean, and may miss it only by rounding.
    lower = -math.inf if below else max(floor, min(known.least, sides.lower(known, floor, ceiling, alpha_lower)))
    upper = math.inf if above else min(ceiling, max(known.most, sides.upper(known, floor, ceiling, alpha_upper)))
    return Interval(
        estimate=(known.least + known.most) / 2.0 if cut else known.estimate,
        lower=lower,
        upper=upper,
        samples=sample.total,
        method=method,
        note=note_of(low, high, floor, ceiling, below, above, cut=cut),
    )


def note_of(low: float, high: float, floor: float, ceiling: float, below: int = 0, above: int = 0, *, cut: bool) -> str:
    """Return the note on an interval's range, and on the number of observations outside of it."""
    said = []
    if cut and ceiling < high:
        cut_to = f"min(value, {ceiling:g})" if floor == low else f"values cut to [{floor:g}, {ceiling:g}]"
        said.append(f"for the mean of {cut_to}")
    elif floor > low and ceiling < high:
        said.append(f"bounds are for the mean of values cut to [{floor:g}, {ceiling:g}]")
    elif ceiling < high:
        said.append(f"the upper bound is for the mean of min(value, {ceiling:g})")
    elif floor > low:
        said.append(f"the lower bound is for the mean of max(value, {floor:g})")
    if above:
        said.append(f"{above} observation{'s' * (above != 1)} above {ceiling:g}: no upper bound is claimed")
    if below:
        said.append(f"{below} observation{'s' * (below != 1)} below {floor:g}: no lower bound is claimed")
    return "; ".join(said)
