"""Batches of sampled log-probabilities, in blocks that stay in cache: the table that every input check reads.

They are measured in host memory, wherever they come from: two numbers a token are little to read back, and a trainer's
device has better to do. A block has its tokens as flat arrays, row after row, so that padding costs nothing and never
counts, and the columns that several checks ask for, each computed once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kc_otel.record.measure.arrays import Floats, as_bool, floats
from kc_otel.record.measure.sampled import saturated

Mask = NDArray[np.bool_]
Indices = NDArray[np.intp]
_TOKENS: Final = 32_768
"""Tokens per block: enough to spread the cost of a NumPy call, few enough that a block's arrays stay in cache."""


@dataclass(frozen=True, eq=False)
class Block:
    """Some rows of a batch, their unmasked tokens packed one row after the other."""

    rows: Indices  # index of each row in the batch, [n]; none of them is empty
    starts: Indices  # where each row begins in the packed arrays, [n]
    lengths: Indices  # tokens of each row, [n]
    train: Floats  # log P(y), float32 or float64 [tokens]
    inference: Floats  # log Q(y)

    @property
    def sides(self) -> tuple[tuple[Floats, Floats, str], ...]:
        """Each side, the other one, and its name."""
        return (self.train, self.inference, "training"), (self.inference, self.train, "inference")

    @cached_property
    def log_w(self) -> Floats:
        """Log P(y) - log Q(y) of each token, not saturated; NaN where both are infinite."""
        with np.errstate(invalid="ignore", over="ignore"):
            return np.subtract(self.train, self.inference)

    @cached_property
    def exact_log_w(self) -> NDArray[np.float64]:
        """The same of the two numbers in float64, without rounding the difference to float32."""
        return self.train.astype(np.float64) - self.inference

    @cached_property
    def drift(self) -> NDArray[np.float64]:
        """Mean |l| of each row, [rows]."""
        with np.errstate(invalid="ignore", over="ignore"):
            return np.add.reduceat(np.abs(saturated(self.log_w)), self.starts, dtype=np.float64) / self.lengths

    @cached_property
    def highest(self) -> tuple[Floats, Floats]:
        """Largest log P and log Q of each row, [rows] each."""
        return np.maximum.reduceat(self.train, self.starts), np.maximum.reduceat(self.inference, self.starts)

    @cached_property
    def lowest(self) -> tuple[Floats, Floats]:
        """Smallest log P and log Q of each row, [rows] each."""
        return np.minimum.reduceat(self.train, self.starts), np.minimum.reduceat(self.inference, self.starts)

    @cached_property
    def same(self) -> Mask:
        """Tokens in which both sides are the same number, as float32: either may have been kept as that."""
        same: Mask = self.train.astype(np.float32, copy=False) == self.inference.astype(np.float32, copy=False)
        return same

    @cached_property
    def agree(self) -> Mask:
        """Tokens in which both sides are the same number, and not 0, of which both kernels may be sure."""
        agree: Mask = self.same & (self.inference != 0.0)
        return agree

    @cached_property
    def repeats(self) -> tuple[Mask, Mask]:
        """Tokens of each side whose number equals the one before it in the row."""
        found = []
        for side in (self.train, self.inference):
            again = np.zeros(side.size, dtype=np.bool_)
            np.equal(side[1:], side[:-1], out=again[1:])
            again[self.starts] = False
            found.append(again)
        return found[0], found[1]

    @property
    def last(self) -> Indices:
        """Last token of each row, [rows]."""
        return self.starts + self.lengths - 1

    @cached_property
    def place(self) -> Indices:
        """Place of each token in its row, [tokens]."""
        place: Indices = np.arange(self.train.size) - self.by_token(self.starts)
        return place

    def count(self, tokens: Mask) -> Indices:
        """Number of these tokens in each row, [rows]."""
        return np.add.reduceat(tokens, self.starts, dtype=np.intp)

    def whole(self, tokens: Mask) -> Mask:
        """Rows of which every token is one of these, [rows]."""
        return np.logical_and.reduceat(tokens, self.starts)

    def by_token(self, values: NDArray[Any]) -> NDArray[Any]:
        """The value of its row for each token, [tokens]."""
        return np.repeat(values, self.lengths)

    def row_of(self, tokens: Indices) -> Indices:
        """Row of each of these tokens."""
        return np.searchsorted(self.starts, tokens, side="right") - 1

    def span(self, row: int) -> slice:
        """Tokens of a row, as a slice of the block's."""
        return slice(int(self.starts[row]), int(self.starts[row] + self.lengths[row]))

    def only(self, rows: Mask) -> Block:
        """These rows, [n]."""
        if rows.all():
            return self
        tokens, lengths = self.by_token(rows), self.lengths[rows]
        return Block(self.rows[rows], _starts(lengths), lengths, self.train[tokens], self.inference[tokens])

    def without(self, tokens: Mask) -> Block:
        """The other tokens, without rows that are left empty; `rows` number those of this block."""
        if not tokens.any():
            return replace(self, rows=np.arange(self.rows.size))
        kept = ~tokens
        lengths = self.count(kept)
        rows = np.flatnonzero(lengths)
        lengths = lengths[rows]
        return Block(rows, _starts(lengths), lengths, self.train[kept], self.inference[kept])


@dataclass(frozen=True, slots=True, eq=False)
class SampledBatch:
    """Log-probabilities of sampled tokens from both kernels, [sequences, tokens], in host memory."""

    train: Floats
    inference: Floats
    mask: Mask | None  # which tokens count; None when all do
    lengths: Indices  # tokens of each sequence that count

    @classmethod
    def of(cls, train: Any, inference: Any, mask: Any = None) -> SampledBatch:
        """Pack arrays of one shape [sequences, tokens]."""
        left, right = floats(train), floats(inference)
        kept = None if mask is None else as_bool(mask)
        for name, shape in (("inference", right.shape), ("mask", left.shape if kept is None else kept.shape)):
            if shape != left.shape:
                raise ValueError(f"{name}: shape {shape} differs from train's {left.shape}")
        if len(left.shape) != 2:
            raise ValueError(f"train: shape {left.shape} is not [sequences, tokens]")
        sequences, width = left.shape
        if kept is not None and not kept.all():
            return cls(left, right, kept, np.count_nonzero(kept, axis=1).astype(np.intp))
        return cls(left, right, None, np.full(sequences, width, dtype=np.intp))

    def blocks(self, order: Indices) -> Iterator[Block]:
        """The rows in this order, empty ones left out."""
        order = order[self.lengths[order] > 0]
        step = max(1, _TOKENS // max(1, self.train.shape[1]))
        for first in range(0, order.size, step):
            rows = order[first : first + step]
            yield self.block(rows)

    def block(self, rows: Indices) -> Block:
        """Some rows, none of them empty."""
        lengths = self.lengths[rows]
        # Neighbouring rows are read through a view; others are gathered.
        where = slice(int(rows[0]), int(rows[-1]) + 1) if (np.diff(rows) == 1).all() else rows
        train, inference = self.train[where], self.inference[where]
        if self.mask is None:
            return Block(rows, _starts(lengths), lengths, train.reshape(-1), inference.reshape(-1))
        mask = self.mask[where]
        return Block(rows, _starts(lengths), lengths, train[mask], inference[mask])

    def packed(self, values: NDArray[Any], rows: Indices) -> NDArray[Any]:
        """Other numbers, [sequences] or [sequences, tokens], one per packed token of these rows."""
        part = values[rows]
        if part.ndim == 1:
            return np.repeat(part, self.lengths[rows])
        return part.reshape(-1) if self.mask is None else part[self.mask[rows]]

    def position(self, row: int, index: int) -> int:
        """Return the position in its row of the token with number `index` among the row's packed tokens."""
        return index if self.mask is None else int(np.flatnonzero(self.mask[row])[index])


def _starts(lengths: Indices) -> NDArray[np.intp]:
    starts = np.zeros_like(lengths)
    np.cumsum(lengths[:-1], out=starts[1:])
    return starts
