"""Batches of sampled log-probabilities, cut into blocks that stay in cache, without their padding.

Every later step reads a block's tokens as one flat array, row after row, so that padding costs nothing after this and
whatever is stored there can never count.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kc_otel.record.measure.arrays import Floats, HostRows, as_bool, host_rows

BLOCK: Final = 32_768
"""Tokens per block: enough to spread the cost of a NumPy call, few enough that a block's arrays stay in cache."""


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Some rows of a batch, their unmasked tokens packed one row after the other.

    Attributes:
        rows: Index of each row in the batch, [n]; none of them is empty.
        starts: Where each row begins in the packed arrays, [n].
        lengths: Tokens of each row, [n].
        train: log P(y), float32 or float64 [tokens].
        inference: log Q(y), float32 or float64 [tokens].
    """

    rows: NDArray[np.intp]
    starts: NDArray[np.intp]
    lengths: NDArray[np.intp]
    train: Floats
    inference: Floats

    @property
    def sides(self) -> tuple[tuple[Floats, Floats, str], ...]:
        """Each side, the other one, and its name."""
        return (self.train, self.inference, "training"), (self.inference, self.train, "inference")

    def only(self, kept: NDArray[np.bool_]) -> Block:
        """The rows that are kept, [n]."""
        tokens = np.repeat(kept, self.lengths)
        lengths = self.lengths[kept]
        return Block(self.rows[kept], _starts(lengths), lengths, self.train[tokens], self.inference[tokens])


@dataclass(frozen=True, slots=True, eq=False)
class SampledBatch:
    """Log-probabilities of sampled tokens from both kernels, in host memory.

    Attributes:
        train: log P(y), [sequences, tokens].
        inference: log Q(y), [sequences, tokens].
        mask: Which tokens count; None when all do.
        lengths: Tokens of each sequence that count, [sequences].
    """

    train: HostRows
    inference: HostRows
    mask: NDArray[np.bool_] | None
    lengths: NDArray[np.intp]

    @classmethod
    def of(cls, train: Any, inference: Any, mask: Any = None) -> SampledBatch:
        """Pack arrays of one shape [sequences, tokens].

        Raises:
            ValueError: If the shapes differ or are not two-dimensional, or the numbers are not real.
        """
        left, right = host_rows(train), host_rows(inference)
        kept = None if mask is None else as_bool(mask)
        for name, shape in (("inference", right.shape), ("mask", left.shape if kept is None else kept.shape)):
            if shape != left.shape:
                msg = f"{name}: shape {shape} differs from train's {left.shape}"
                raise ValueError(msg)
        if len(left.shape) != 2:
            msg = f"train: shape {left.shape} is not [sequences, tokens]"
            raise ValueError(msg)
        sequences, width = left.shape
        if kept is not None and not kept.all():
            return cls(left, right, kept, np.count_nonzero(kept, axis=1).astype(np.intp))
        return cls(left, right, None, np.full(sequences, width, dtype=np.intp))

    def blocks(self, order: NDArray[np.intp]) -> Iterator[Block]:
        """The rows in this order, empty ones left out."""
        order = order[self.lengths[order] > 0]
        step = max(1, BLOCK // max(1, self.train.shape[1]))
        for first in range(0, order.size, step):
            rows = order[first : first + step]
            yield self.block(rows)

    def block(self, rows: NDArray[np.intp]) -> Block:
        """Some rows, none of them empty."""
        lengths = self.lengths[rows]
        # Neighbouring rows are read through a view; others are gathered.
        where = slice(int(rows[0]), int(rows[-1]) + 1) if (np.diff(rows) == 1).all() else rows
        train, inference = self.train.read(where), self.inference.read(where)
        if self.mask is None:
            return Block(rows, _starts(lengths), lengths, train.reshape(-1), inference.reshape(-1))
        mask = self.mask[where]
        return Block(rows, _starts(lengths), lengths, train[mask], inference[mask])

    def packed(self, values: HostRows, rows: NDArray[np.intp]) -> Floats:
        """Other numbers, [sequences] or [sequences, tokens], one per packed token of these rows."""
        part = values.read(rows)
        if part.ndim == 1:
            return np.repeat(part, self.lengths[rows])
        return part.reshape(-1) if self.mask is None else part[self.mask[rows]]

    def position(self, row: int, index: int) -> int:
        """Return the position in its row of the token with number `index` among the row's packed tokens."""
        return index if self.mask is None else int(np.flatnonzero(self.mask[row])[index])


def _starts(lengths: NDArray[np.intp]) -> NDArray[np.intp]:
    starts = np.zeros_like(lengths)
    np.cumsum(lengths[:-1], out=starts[1:])
    return starts
