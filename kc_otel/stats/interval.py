"""Samples known through bins, and confidence intervals.

Every interval of this package has two sides with an error probability each: `lower` lies above the true value with
probability at most `alpha_lower`, `upper` below it with probability at most `alpha_upper`, for independent observations
and any distribution. From a `Binned` sample they are conservative: a bin counts with its lower edge in a lower bound,
with its upper edge in an upper bound, so the probabilities hold whatever the values inside the bins were.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

_ROUNDING_ERROR: Final = 1e-12
"""Distance beyond the end of its range at which a number still counts as that end: more than sums of floats err by."""
_OPPOSITE: Final = {"upper": "lower", "lower": "upper", "min": "max", "max": "min", "above": "below", "below": "above"}

_Either = TypeVar("_Either")
"""An `Interval`, or many of them in columns."""


@dataclass(frozen=True, slots=True, eq=False)
class Binned:
    """A sample known through bins: each of `count[i]` observations lies in [lower[i], upper[i]], ascending.

    Attributes:
        lower: Lower edges, float64 [k], ascending.
        upper: Upper edges, float64 [k], ascending, clipped to the extremes.
        count: Observations per bin, int64 [k], all positive.
        total: Number of observations.
        sum: Exact sum of the observations; nan when unknown.
        minimum: No observation is smaller; nan when unknown or empty.
        maximum: No observation is larger; nan when unknown or empty.
        maximum_observed: Whether `maximum` is itself an observation, and not only a bound on them.
        opposite: The sample of the quantity that bounds the same thing from the other side, where both are needed.
    """

    lower: NDArray[np.float64]
    upper: NDArray[np.float64]
    count: NDArray[np.int64]
    total: int
    sum: float
    minimum: float
    maximum: float
    maximum_observed: bool = True
    opposite: Binned | None = None

    def times(self, many: int) -> Binned:
        """The same sample with each observation repeated that many times."""
        opposite = None if self.opposite is None else self.opposite.times(many)
        return replace(self, count=self.count * many, total=self.total * many, sum=self.sum * many, opposite=opposite)

    @classmethod
    def of_samples(cls, values: NDArray[np.floating]) -> Binned:
        """The exact view of a sample of any shape: one bin of no width per distinct value.

        Raises:
            ValueError: If a value is NaN.
        """
        flat = np.asarray(values, dtype=np.float64).ravel()
        distinct, count = np.unique(flat, return_counts=True)
        if distinct.size and math.isnan(distinct[-1]):
            raise ValueError(f"values: {int(np.isnan(flat).sum())} of {flat.size} are nan; drop them or find out why")
        return replace(cls.of_counts(distinct, count), sum=float(flat.sum()))

    @classmethod
    def of_counts(cls, values: NDArray[np.float64], count: NDArray[np.int64]) -> Binned:
        """The exact view of values [k], ascending, of which there are so many each [k]."""
        there = count > 0
        values, count = values[there], count[there].astype(np.int64)
        least, most = (float(values[0]), float(values[-1])) if values.size else (math.nan, math.nan)
        return cls(values, values, count, int(count.sum()), float(values @ count), least, most)

    def merged(self, bins: int) -> Binned:
        """The same observations in at most that many bins, neighbours together: the sum stays exact, edges widen."""
        if self.count.size <= bins:
            return self
        first = np.linspace(0, self.count.size, bins + 1).astype(np.intp)[:-1]
        last = np.append(first[1:], self.count.size) - 1
        count = np.add.reduceat(self.count, first)
        return replace(self, lower=self.lower[first], upper=self.upper[last], count=count)


def clipped(
    lower: NDArray[np.float64],
    upper: NDArray[np.float64],
    count: NDArray[np.int64],
    sum: float,
    minimum: float,
    maximum: float,
    maximum_observed: bool,
) -> Binned:
    """The non-empty bins, their edges drawn in to the extremes where those are known."""
    used = count > 0
    if not used.all():
        lower, upper, count = lower[used], upper[used], count[used]
    if count.size:
        # Extremes that contradict the buckets, as rounding or a careless sender may make them, move no edge past them.
        if minimum > lower[0]:
            lower = np.maximum(lower, min(minimum, float(upper[0])))
        if maximum < upper[-1]:
            upper = np.minimum(upper, max(maximum, float(lower[-1])))
        upper = np.maximum(upper, lower)
    return Binned(lower, upper, count, int(count.sum()), float(sum), minimum, maximum, maximum_observed)


def usable(sample: Binned) -> Binned:
    """Return a sample if its bins have numbers for edges, lower ones first."""
    fine = sample.lower <= sample.upper
    if not fine.all():
        at = int(np.flatnonzero(~fine)[0])
        msg = f"sample: bin {at} is [{sample.lower[at]!r}, {sample.upper[at]!r}]; edges are numbers, lower before upper"
        raise ValueError(msg)
    return sample


def finite_range(low: float, high: float) -> None:
    """Refuse a range that is not finite or holds nothing."""
    if not (math.isfinite(low) and math.isfinite(high)):
        raise ValueError(f"low, high: [{low!r}, {high!r}] is not a finite range; give a finite cap")
    if not low < high:
        raise ValueError(f"low, high: [{low!r}, {high!r}] is empty; low has to be smaller than high")


@dataclass(frozen=True, slots=True)
class Interval:
    """A statistic of a sample and what it says about the distribution behind it.

    Attributes:
        estimate: Value of the statistic on the sample; nan without observations.
        lower: Lower confidence bound; -inf when none is claimed.
        upper: Upper confidence bound; inf when none is claimed.
        samples: Observations that it rests on.
        method: Name of the interval, such as `empirical Bernstein`.
        note: Note for the reader beside the numbers; empty for none.
    """

    estimate: float
    lower: float
    upper: float
    samples: int
    method: str
    note: str = ""


def nothing(method: str) -> Interval:
    """The interval of an empty sample: it claims nothing, so that it neither passes nor fails any limit."""
    return Interval(math.nan, -math.inf, math.inf, 0, method, "no observations")


def affine(interval: _Either, scale: float, offset: float = 0.0) -> _Either:
    """Interval of `scale * statistic + offset`; a negative scale swaps the sides.

    Each side keeps its error probability and what the note says of it, in the statistic's unit. For a negative scale
    the new lower side has that of the old upper side.

    Raises:
        ValueError: If the scale is zero or either number is not finite.
    """
    if not math.isfinite(scale) or scale == 0.0:
        raise ValueError(f"scale: {scale!r} is not a finite number other than 0")
    if not math.isfinite(offset):
        raise ValueError(f"offset: {offset!r} is not a finite number")
    known: Any = interval
    estimate, *ends = (side * scale + offset for side in (known.estimate, known.lower, known.upper))
    lower, upper = ends if scale > 0 else ends[::-1]
    one = isinstance(known.note, str)
    notes = {said: _in_unit(said, scale, offset) for said in ({known.note} if one else set(known.note))}
    note = notes[known.note] if one else [notes[said] for said in known.note]
    return cast("_Either", replace(known, estimate=estimate, lower=lower, upper=upper, note=note))


def _in_unit(note: str, scale: float, offset: float) -> str:
    """Return a note on values as one on `scale * value + offset`; a negative scale swaps the sides."""

    def word(said: str) -> str:
        return said if scale > 0 else _OPPOSITE[said]

    def end(said: str) -> str:
        return f"{float(said) * scale + offset:.4g}"

    def ends(said: re.Match[str]) -> str:
        low, high = (said[1], said[2]) if scale > 0 else (said[2], said[1])
        return f"cut to [{end(low)}, {end(high)}]"

    note = re.sub(r"\b(upper|lower)(?= bounds?\b)", lambda said: word(said[1]), note)
    note = re.sub(r"\b(min|max)\(value, (\S+)\)", lambda said: f"{word(said[1])}(value, {end(said[2])})", note)
    note = re.sub(r"\b(above|below) (\S+)(?=: no )", lambda said: f"{word(said[1])} {end(said[2])}", note)
    return re.sub(r"\bcut to \[(\S+), (\S+)\]", ends, note)


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
