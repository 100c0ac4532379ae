"""Arrays of samples as the diagnostics take them: one axis, the right length, sums over sequences."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kc_otel.stats._check import real

__all__ = ["per_sequence", "ratios_of", "vector"]

Floats = NDArray[np.float64]


def vector(name: str, values: ArrayLike, *, low: float = -math.inf, infinite: bool = False) -> Floats:
    """The values as float64 [N].

    Raises:
        ValueError: If there is more than one axis, none of them, or one is NaN, too small or, unless allowed, infinite.
    """
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1:
        msg = f"{name}: shape {array.shape} has not one axis; pass [N]"
        raise ValueError(msg)
    checked: Floats = real(name, array, low=low, infinite=infinite)
    return checked


def same_length(name: str, values: Floats, size: int, what: str) -> Floats:
    """The values, once there are `size` of them.

    Raises:
        ValueError: If there are not.
    """
    if values.size != size:
        msg = f"{name}: {values.size} values for {size} {what}"
        raise ValueError(msg)
    return values


def lengths_of(lengths: ArrayLike, total: int) -> NDArray[np.intp]:
    """Lengths [S] of consecutive sequences that make up `total` tokens.

    Raises:
        ValueError: If one is not a whole number of at least 1, or they do not add up to `total`.
    """
    array = np.asarray(lengths)
    if array.ndim != 1 or not array.size or not (np.equal(np.mod(array, 1), 0) & (array >= 1)).all():
        msg = f"lengths: {array.tolist()!r} are not whole numbers of at least 1; leave empty sequences out"
        raise ValueError(msg)
    if int(array.sum()) != total:
        msg = f"lengths: add up to {int(array.sum())}, but there are {total} tokens"
        raise ValueError(msg)
    return array.astype(np.intp)


def per_sequence(values: Floats, lengths: ArrayLike) -> Floats:
    """Sum of the tokens' values over each of consecutive sequences, [S] from [N].

    Raises:
        ValueError: If the lengths do not fit.
    """
    sizes = lengths_of(lengths, values.size)
    sums: Floats = np.add.reduceat(values, np.concatenate(([0], np.cumsum(sizes)[:-1])))
    return sums


def ratios_of(log_ratio: Floats) -> Floats:
    """`w = exp(l)`, inf where a double ends."""
    with np.errstate(over="ignore"):
        ratio: Floats = np.exp(log_ratio)
    return ratio
