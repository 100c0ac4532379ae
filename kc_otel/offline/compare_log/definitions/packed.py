"""The arguments that the definitions share, checked, and the two ways in which tools average over them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["Packed", "packed"]

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """Log-probabilities of S sequences with N tokens in all, one after the other.

    Attributes:
        train: log P(y), float64 [N].
        inference: log Q(y), float64 [N].
        lengths: Tokens of each sequence, int64 [S]; 0 for one that a mask leaves nothing of.
        log_ratio: l = log P(y) - log Q(y), float64 [N].
    """

    train: Floats
    inference: Floats
    lengths: NDArray[np.int64]
    log_ratio: Floats

    def sums(self, values: Floats) -> Floats:
        """Sum over each sequence's tokens, [S]; 0 for a sequence without tokens."""
        totals = np.zeros(self.lengths.size)
        used = self.lengths > 0
        if used.any():
            totals[used] = np.add.reduceat(values, (np.cumsum(self.lengths) - self.lengths)[used])
        return totals

    def means(self, values: Floats) -> Floats:
        """Mean over each sequence's tokens, [S]; 0 for a sequence without tokens."""
        return self.sums(values) / np.maximum(self.lengths, 1)


def packed(train: ArrayLike, inference: ArrayLike, lengths: ArrayLike, *, nan_inference: bool = False) -> Packed:
    """Checked arguments.

    Raises:
        ValueError: If the arrays are not one-dimensional and of one length, there is no token, the lengths do not add
            up to the number of tokens, or a log-probability is NaN (of the inference kernel: unless `nan_inference`).
    """
    left, right = np.asarray(train, dtype=np.float64), np.asarray(inference, dtype=np.float64)
    counts = np.asarray(lengths)
    if left.ndim != 1 or not left.size:
        msg = f"train: shape {left.shape} is not [N] with at least one token; pack the sequences one after the other"
        raise ValueError(msg)
    if right.shape != left.shape:
        msg = f"inference: shape {right.shape} is not train's {left.shape}"
        raise ValueError(msg)
    if counts.ndim != 1 or not np.issubdtype(counts.dtype, np.integer) or (counts < 0).any():
        msg = f"lengths: {counts!r} are not whole numbers of at least 0, one per sequence"
        raise ValueError(msg)
    if counts.sum() != left.size:
        msg = f"lengths: they add up to {counts.sum()}, but there are {left.size} tokens"
        raise ValueError(msg)
    for name, values in (("train", left), *(() if nan_inference else (("inference", right),))):
        wrong = np.isnan(values)
        if wrong.any():
            msg = f"{name}: {int(wrong.sum())} of {values.size} are nan, the first at {int(wrong.argmax())}; drop them"
            raise ValueError(msg)
    with np.errstate(invalid="ignore"):
        return Packed(left, right, counts.astype(np.int64), left - right)
