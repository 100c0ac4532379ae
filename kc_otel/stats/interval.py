"""Samples known through bins, and confidence intervals.

Every interval of this package has two sides with an error probability each: `lower` lies above the true value with
probability at most `alpha_lower`, `upper` below it with probability at most `alpha_upper`, for independent observations
and any distribution. From a `Binned` sample they are conservative: a bin counts with its lower edge in a lower bound,
with its upper edge in an upper bound, so the probabilities hold whatever the values inside the bins were.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Numbers = NDArray[np.int64]


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


def level(name: str, value: float) -> float:
    """Return an error probability if it lies strictly between 0 and 1."""
    if not 0.0 < value < 1.0:
        raise ValueError(f"{name}: {value!r} is not strictly between 0 and 1; write an error probability such as 0.01")
    return float(value)


@dataclass(frozen=True, slots=True)
class Holm:
    """Decision of Holm's procedure.

    Attributes:
        level: Level at which every cell was judged: a cell failed exactly if it fails at this level, so its lower bound
            at this level is the one to show.
        failed: Whether each cell failed, in the order given.
    """

    level: float
    failed: tuple[bool, ...]


def holm(p_values: Sequence[float], alpha: float) -> Holm:
    """Holm's step-down procedure over m cells by their p-values: the chance of any false FAIL is at most alpha.

    All cells are tested at alpha/m; with k of them failed, the rest are tested again at alpha/(m - k), until nothing
    more fails. No assumption on how cells depend on each other is needed. The cells that fail are those with p <=
    alpha/(m - K), K their number, which is why one level (`Holm.level`) describes all of them.

    Source: Holm 1979, A Simple Sequentially Rejective Multiple Test Procedure.

    Raises:
        ValueError: If alpha is not in (0, 1) or a p-value is not in [0, 1].
    """
    level("alpha", alpha)
    for index, value in enumerate(p_values):
        if not 0.0 <= value <= 1.0:
            raise ValueError(f"p_values[{index}]: {value!r} is not a p-value in [0, 1]")
    failures, left = 0, sorted(p_values)
    while failures < len(left) and left[failures] <= alpha / (len(left) - failures):
        failures += 1
    at = alpha / max(len(left) - failures, 1)
    return Holm(at, tuple(value <= at for value in p_values))
