"""Faults, which every input check returns, and functions that find runs and places among packed rows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from kc_otel.contract.input_reasons import InvalidReason
from kc_otel.record.measure.arrays import Floats
from kc_otel.record.measure.blocks import Block, Indices, Mask

Found = list["RowFault"]
Faults = Iterator["RowFault"]

DRIFT: Final = 0.03
"""Mean |l| from which faults of the pairing and of the sampler are looked for: below, both kernels agree or are sure of
everything, and such a fault is no larger than the rounding of bfloat16."""
RUN: Final = 8
"""Tokens in a row from which a constant is looked at."""
CHANCE: Final = math.log(1e8)
"""Minus log of the chance of what is called a fault, by the (generous) estimate of how often it comes by itself."""
_CHANCE_UNSURE: Final = math.log(1e6)
"""The same where no side is sure of the tokens, so that nothing but coarse numbers repeats itself."""
_MIN_OTHER_SHARE: Final = 0.01
"""Share of other tokens that a run of one value on both sides is compared with, at least."""
_NEIGHBOURS: Final = 8
"""Tokens on each side of a run that say how sure the text is there."""
UNSURE: Final = 0.1
"""Nats from which a side is not sure of a token whose other side is exactly 0: half precision rounds 0.06 to 0."""

FLOOR_NATS: Final = 0.25
"""Nats above a floor in which a tail that goes on would have as many tokens as at its end; two steps of bfloat16."""
NUCLEUS: Final = 1e-3
"""Nats that the other side's surest token of a nucleus costs, at least, where it is the only one."""


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
