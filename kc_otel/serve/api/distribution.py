"""The distribution of a quantity on a logarithmic axis: fewer and even bins, ready to be drawn."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kc_otel.stats import Binned

__all__ = ["Distribution", "distribution_of"]

_PER_DECADE: Final = 8
_DECADES: Final = 12
"""Decades below the largest observation that are told apart; what is smaller goes into the lowest bin."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """Observations by size.

    Attributes:
        edges: Edges of the bins of |value|, ascending and positive, [k + 1]; empty where all are zero.
        above: Observations per bin that are positive, [k].
        below: Observations per bin that are negative, [k].
        zero: Observations that are zero, or too small to be told from it.
        total: Number of observations.
        mean: Their mean; None when unknown.
        minimum: The smallest; None when unknown.
        maximum: The largest; None when unknown.
    """

    edges: tuple[float, ...]
    above: tuple[int, ...]
    below: tuple[int, ...]
    zero: int
    total: int
    mean: float | None
    minimum: float | None
    maximum: float | None


def distribution_of(sample: Binned) -> Distribution:
    """A sample's distribution; each source bin goes where its geometric middle is.

    >>> import numpy as np
    >>> found = distribution_of(Binned.of_samples(np.array([0.0, 1.0, -1.0, 10.0])))
    >>> found.zero, sum(found.above), sum(found.below), len(found.edges)
    (1, 2, 1, 10)
    """
    size, sign = _middles(sample)
    used = sign != 0
    mean = sample.sum / sample.total if sample.total else math.nan
    common = (_finite(mean), _finite(sample.minimum), _finite(sample.maximum))
    if not used.any():
        return Distribution((), (), (), sample.total, sample.total, *common)
    index = np.floor(np.log10(size[used]) * _PER_DECADE + 1e-9).astype(np.int64)
    index = np.maximum(index, index.max() - _PER_DECADE * _DECADES)
    first, bins = int(index.min()), int(index.max() - index.min()) + 1
    count, positive = sample.count[used], sign[used] > 0
    return Distribution(
        edges=tuple(float(edge) for edge in 10.0 ** ((first + np.arange(bins + 1)) / _PER_DECADE)),
        above=_counts(index[positive] - first, count[positive], bins),
        below=_counts(index[~positive] - first, count[~positive], bins),
        zero=int(sample.count[~used].sum()),
        total=sample.total,
        mean=common[0],
        minimum=common[1],
        maximum=common[2],
    )


def _middles(sample: Binned) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """|middle| of every bin and its sign; the sign of a bin that reaches or crosses zero is 0."""
    lower, upper = sample.lower, sample.upper
    sign = np.where(lower > 0, 1.0, np.where(upper < 0, -1.0, 0.0))
    near = np.where(sign > 0, lower, -upper)
    far = np.where(sign > 0, upper, -lower)
    far = np.where(np.isfinite(far), far, near)  # an open end counts where it begins
    known = sign != 0
    size = np.zeros_like(lower)
    size[known] = np.sqrt(near[known]) * np.sqrt(far[known])
    return size, sign


def _counts(index: NDArray[np.int64], count: NDArray[np.int64], bins: int) -> tuple[int, ...]:
    found = np.zeros(bins, dtype=np.int64)
    np.add.at(found, index, count)
    return tuple(int(one) for one in found)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
