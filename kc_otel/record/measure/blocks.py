"""Sampled log-probabilities in blocks that stay in cache, the table that every input check reads, and its faults.

They are measured in host memory, wherever they come from: two numbers a token are little to read back, and a trainer's
device has better to do. A block has its tokens as flat arrays, row after row, so that padding costs nothing and never
counts, and the columns that several checks ask for, each computed once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kc_otel.contract.input_reasons import InvalidReason
from kc_otel.record.measure.arrays import Floats, as_bool, floats
from kc_otel.record.measure.sampled import saturated

Mask = NDArray[np.bool_]
Indices = NDArray[np.intp]
Found = list["RowFault"]
Faults = Iterator["RowFault"]
_TOKENS: Final = 32_768
"""Tokens per block: enough to spread the cost of a NumPy call, few enough that a block's arrays stay in cache."""
DRIFT: Final = 0.03
"""Mean |l| from which faults of the pairing and of the sampler are looked for: below, both kernels agree or are sure of
everything, and such a fault is no larger than the rounding of bfloat16."""
RUN: Final = 8  # tokens in a row from which a constant is looked at
CHANCE: Final = math.log(1e8)
"""Minus log of the chance of what is called a fault, by the (generous) estimate of how often it comes by itself."""
_CHANCE_UNSURE: Final = math.log(1e6)
"""The same where no side is sure of the tokens, so that nothing but coarse numbers repeats itself."""
_MIN_OTHER_SHARE: Final = 0.01  # share of other tokens that a run of one value on both sides is compared with, at least
_NEIGHBOURS: Final = 8  # tokens on each side of a run that say how sure the text is there
UNSURE: Final = 0.1
"""Nats from which a side is not sure of a token whose other side is exactly 0: half precision rounds 0.06 to 0."""
FLOOR_NATS: Final = 0.25
"""Nats above a floor in which a tail that goes on would have as many tokens as at its end; two steps of bfloat16."""
NUCLEUS: Final = 1e-3  # nats that the other side's surest token of a nucleus costs, at least, where it is the only one


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
        """Take arrays of one shape [sequences, tokens]."""
        left, right = floats(train), floats(inference)
        kept = None if mask is None else as_bool(mask)
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


@dataclass(frozen=True, slots=True, eq=False)
class RowFault:
    """One fault of a block."""

    reason: InvalidReason
    rows: Indices  # of the block
    what: str = ""  # where it adds to the reason
    tokens: Mask | None = None  # that are no numbers, and tell nothing to other checks

    def of(self, sequences: int) -> str:
        """The fault as a sentence; `sequences` are those that were looked at."""
        return f"{self.rows.size:,} of {sequences:,} sequences: {self.what}"


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """Findings of earlier checks in a block."""

    tokens: Mask  # that are no numbers
    rows: Mask  # that have a fault


def eroded(mask: Mask, times: int) -> Mask:
    """Mask of positions where `times` neighbours in a row are set; shorter by times - 1, and empty if none is left."""
    width = 1
    while width < times and mask.any():
        step = min(width, times - width)
        mask, width = mask[step:] & mask[:-step], width + step
    return mask if width >= times else mask[:0]


def runs_of(same: Mask, *, opening: bool = True) -> tuple[Indices, Indices]:
    """First token and length of runs of `RUN` or more that are set, with the one before them (`opening`) or alone."""
    if not eroded(same, RUN - opening).any():
        return np.zeros(0, dtype=np.intp), np.zeros(0, dtype=np.intp)
    edges = np.flatnonzero(np.diff(np.concatenate([[False], same, [False]]).astype(np.int8)))
    begin, end = edges[::2] - opening, edges[1::2]
    long = end - begin >= RUN
    return begin[long], (end - begin)[long]


def spread(begin: Indices, length: Indices, size: int) -> Mask:
    """Tokens of runs, bool [size]."""
    steps = np.zeros(size + 1, dtype=np.int64)
    np.add.at(steps, begin, 1)
    np.add.at(steps, begin + length, -1)
    return np.asarray(np.cumsum(steps[:-1]) > 0)


def _next_to(block: Block, begin: Indices, length: Indices) -> Mask:
    """Tokens next to runs, in the same row."""
    row, end = block.row_of(begin), begin + length
    low = np.maximum(begin - _NEIGHBOURS, block.starts[row])
    high = np.minimum(end + _NEIGHBOURS, block.starts[row] + block.lengths[row])
    return spread(low, begin - low, block.train.size) | spread(end, high - end, block.train.size)


def fault_at(
    block: Block, tokens: Mask, said: str, reason: InvalidReason = InvalidReason.PLACEHOLDER, *, of_all: bool = False
) -> RowFault:
    """A fault at these tokens, of the rows that have them, which says where the first one has it.

    It is `of_all` rows where a program chooses tokens by their numbers: it leaves the others a biased choice.
    """
    places = np.flatnonzero(tokens)
    of = block.row_of(places)
    rows = np.unique(of)
    here = places[of == rows[0]] - block.starts[rows[0]]
    where = f"tokens {here[0]} to {here[-1]}" if here.size > 1 else f"token {here[0]}"
    return RowFault(reason, np.arange(block.rows.size) if of_all else rows, f"{said} ({where} of the first)", tokens)


def every_row(block: Block, reason: InvalidReason, said: str) -> Found:
    """A fault that all rows have, as the only one."""
    return [RowFault(reason, np.arange(block.rows.size), said)]


def surely_more(count: np.intp | int, of: np.intp | int, share: float) -> bool:
    """Return True if `count` of `of` is more than `share` allows (Chernoff)."""
    if of == 0 or count <= share * of or count < 3:
        return False
    part = count / of
    gain = part * math.log(part / share)
    if part < 1.0:
        gain += (1.0 - part) * math.log((1.0 - part) / (1.0 - share))
    return bool(of * gain > CHANCE)


def fine(side: Floats) -> Mask:
    """Numbers on no coarse grid: no multiples of 1e-4, and with more bits of significand than float16 has.

    A log-softmax in float32 has such numbers but one in thirty, and none of them twice.
    """
    decimals = np.maximum(side, -16.0).astype(np.float64) * 1e4
    off = np.abs(decimals - np.rint(decimals)) > 0.02
    found: Mask = off & (side > -16.0) & (side.astype(np.float32).view(np.uint32) & 0x1FFF != 0)
    return found


def improbable(block: Block, equal: Mask, begin: Indices, length: Indices, *, sure: bool) -> Mask | None:
    """Tokens of the runs that are too long for how often such tokens (`equal`) come elsewhere, and next to the runs.

    Of tokens that both kernels may be `sure` of, which come in stretches, that is taken to be far more than on average.
    """
    inside = spread(begin, length, equal.size)
    outside = ~inside
    # Where there is hardly anything else, it is what these kernels say of their tokens.
    if np.count_nonzero(outside) < max(RUN, _MIN_OTHER_SHARE * np.count_nonzero(inside)):
        return None
    open_ended = outside & ~trailing(block, equal)
    share = (np.count_nonzero(equal & open_ended) + 1) / (np.count_nonzero(open_ended) + 2)
    # Neighbours that lie in another run count as well: a sure text is interrupted, and goes on.
    close = _next_to(block, begin, length)
    alone = not (close & outside).any()
    local = share if alone else (np.count_nonzero(equal & close) + 1) / (np.count_nonzero(close) + 2)
    rate = math.sqrt(max(math.sqrt(share), local)) if sure else max(share, local)
    wrong = -length * math.log(rate) > (CHANCE if sure else _CHANCE_UNSURE)
    return spread(begin[wrong], length[wrong], equal.size) if wrong.any() else None


def trailing(block: Block, equal: Mask) -> Mask:
    """Tokens of `equal` after which nothing else comes in their row."""
    place = np.arange(equal.size)
    return place > block.by_token(np.maximum.reduceat(np.where(equal, -1, place), block.starts))
