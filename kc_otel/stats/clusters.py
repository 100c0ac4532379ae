"""Means of token values by sequence, the independent unit where the tokens of a sequence depend on each other."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kc_otel.stats._check import real

__all__ = ["sequence_means"]


def sequence_means(
    values: ArrayLike, lengths: ArrayLike, *, per: Literal["mean", "sum"] = "mean"
) -> NDArray[np.float64]:
    """The mean, or the sum, of each sequence's token values [S], from all of them one after the other.

    A sequence without tokens has no mean: it is refused, so that leaving it out is the caller's own decision.

    >>> sequence_means([0.1, 0.3, 0.8], [2, 1])
    array([0.2, 0.8])

    Args:
        values: Token values [N], those of the first sequence first.
        lengths: Tokens per sequence [S], each at least 1, adding up to N.
        per: What to return for each sequence.

    Raises:
        ValueError: If a value is NaN or infinite, a length is not a whole number of at least 1, the lengths do not add
            up to N, or `per` is unknown.
    """
    x, sizes = _tokens(values, lengths)
    if per not in {"mean", "sum"}:
        msg = f"per: {per!r} is unknown; write mean or sum"
        raise ValueError(msg)
    sums = np.add.reduceat(x, _starts(sizes))
    return np.asarray(sums / sizes if per == "mean" else sums)


def _tokens(values: ArrayLike, lengths: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    x = np.asarray(values, dtype=np.float64)
    sizes = np.asarray(lengths)
    if x.ndim != 1 or sizes.ndim != 1:
        msg = f"values, lengths: have shapes {x.shape} and {sizes.shape}; pass [N] and [S]"
        raise ValueError(msg)
    real("values", x, low=-math.inf)
    real("lengths", sizes, low=1.0, what="a number of tokens")
    whole = sizes.astype(np.int64)
    if (whole != sizes).any():
        msg = f"lengths: {float(sizes[whole != sizes][0])!r} is not a whole number"
        raise ValueError(msg)
    if int(whole.sum()) != x.size:
        msg = f"lengths: add up to {int(whole.sum())}, but there are {x.size} values"
        raise ValueError(msg)
    return x, whole


def _starts(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(sizes)[:-1]))
