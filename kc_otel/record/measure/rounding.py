"""Sides that were rounded: a whole one in storage, or some rows that are the other side's numbers, copied and rounded.

A number with few bits of significand is a multiple of a large power of two for its size. Numbers of full precision lie
on that grid by chance only: a float32 on bfloat16's once in 2^16, on float16's once in 2^13. A log-softmax in float32
loses bits where probabilities are near 1, so only numbers that are far enough from 0 are asked, and different ones
only: of answers that repeat, any few values lie on some grid. Drift that is the size of the grid's rounding is still
drift where both sides are rounded alike, so only a side that is coarser than the other is named (`coarse_side`).

A trainer that bypasses its own forward for some rows, and a log that keeps three decimals, write the sampler's numbers
into the other column. Where one side has more digits in other rows, those are copies (`rounded_rows`); where all of it
is the other column's rounding it is a remark (`rounded_column`): kernels that agree bit for bit look the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import methodcaller
from types import MappingProxyType
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kc_otel.record.measure.arrays import Floats
from kc_otel.record.measure.blocks import CHANCE, RUN, UNSURE, Block, Found, Mask, Seen, fault_at

_LOOK_NUMBERS: Final = 1024  # numbers of each side that are looked at, from its first one
_FEWEST_NUMBERS: Final = 32
"""Different numbers from which a grid is no chance: float32 numbers of _MIN_ASKED_NATS or more are on float16's with at
most 2^-8 each even where they are differences of logits of 32, 2^-256 in all."""
_MIN_ASKED_NATS: Final = 0.5  # smallest |log-probability| that is asked, nats
_FINEST: Final = 2.0**-13  # numbers of _MIN_ASKED_NATS or more that are on a grid are multiples of it
_LARGEST: Final = 2.0**15  # a larger number, which is no log-probability, counts as this one, which is on every grid
_PLACES: Final = 6  # tokens of each row that are looked at before all are
_COARSEST: Final = 0.006  # error of these roundings, at most, in shares of a number or of 1
_FEWEST_ROWS: Final = 4  # other rows, at least, with a side that has more digits
_FOLLOWS: Final = (256, 0.1)
"""Tokens from which a whole column follows the other one's rounding, and distance from that, of nine in ten of them, in
shares of the rounding: a kernel knows nothing of which way the other one's numbers are rounded."""
_ERROR: Final = 1e-6  # error of a decimal number in float32, in shares of it or of 1
EQUAL_SIDES: Final = (
    "both sides have the same number at every token; unless the kernels agree bit for bit, one side is a copy of the "
    "other"
)

NOT_TWO_FORMATS: Final = (
    "both sides have the same number at every token, but two number formats are declared: an engine lacks an option, "
    "or one side is a copy of the other"
)


def equal_sides(train: Floats, inference: Floats) -> str:
    """Say that all tokens that count have the same number on both sides; empty where few numbers are no evidence."""
    return EQUAL_SIDES if np.array_equal(train, inference) and np.unique(train).size >= _FEWEST_NUMBERS else ""


def coarse_side(train: Floats, inference: Floats) -> str:
    """Say which side was rounded to half precision where the other was not; empty where none was, or both alike.

    Of the tokens that count, [tokens], a thousand are read.

    >>> rng = np.random.default_rng(0)
    >>> inference = -rng.exponential(2.0, 500).astype(np.float32)
    >>> coarse_side(inference.astype(np.float16).astype(np.float32), inference).split(",")[0]
    "log-probabilities of the train side all lie on float16's grid"
    >>> coarse_side(inference, inference)
    ''
    """
    asked = _asked(train), _asked(inference)
    if any(np.unique(values).size < _FEWEST_NUMBERS for values in asked):
        return ""
    for grid, rounded in _HALF.items():
        on_grid = [bool((rounded(values) == values).all()) for values in asked]
        if on_grid[0] != on_grid[1]:
            side = "train" if on_grid[0] else "inference"
            error = _rounding_error(train if on_grid[0] else inference, asked[on_grid.index(True)], grid)
            return (
                f"log-probabilities of the {side} side all lie on {grid}'s grid, and the other side's do not: about "
                f"{error:.1g} nats of mean |log ratio| are the rounding of these numbers; compute and keep them in "
                "float32 on both sides"
            )
    return ""


def _rounding_error(side: Floats, asked: NDArray[np.float64], grid: str) -> float:
    """Return the mean |error| that rounding to a grid makes, nats: a quarter of the distance of its points.

    Numbers that were stored in a format have that format's spacing, which shrinks towards 0. Those that a log-softmax
    in it computed are differences of logits, and have the spacing of the largest logit everywhere.
    """
    some = np.abs(side[:_LOOK_NUMBERS][np.isfinite(side[:_LOOK_NUMBERS])], dtype=np.float64)
    divisor = int(np.gcd.reduce((asked / _FINEST).astype(np.int64)))
    step = (divisor & -divisor) * _FINEST
    stored, smallest = (np.ldexp(1.0, np.frexp(values)[1] - _SIGNIFICAND[grid]) for values in (some, asked.min()))
    return (step if step > smallest else float(stored.mean())) / 4.0


def _asked(side: Floats) -> NDArray[np.float64]:
    """Numbers far enough from 0 to tell a grid by, float64."""
    some = side[:_LOOK_NUMBERS]
    return np.abs(some[np.isfinite(some) & (some <= -_MIN_ASKED_NATS)], dtype=np.float64).clip(max=_LARGEST)


def _to_bfloat16(values: Floats) -> NDArray[np.float32]:
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view(np.float32)


_HALF: Final[Mapping[str, Callable[[Floats], Floats]]] = MappingProxyType(
    {"bfloat16": _to_bfloat16, "float16": lambda values: values.astype(np.float16).astype(np.float32)}
)
"""Formats and the rounding to them; the coarser format first."""
_SIGNIFICAND: Final = {"bfloat16": 8, "float16": 11}  # bits of significand, the leading one included
_ROUNDED: Final[Mapping[str, Callable[[Floats], Floats]]] = MappingProxyType(
    {
        **{f"to {name}": rounded for name, rounded in _HALF.items()},
        **{f"to {digits} decimals": methodcaller("round", digits) for digits in (2, 3, 4)},
    }
)


def looks_rounded(block: Block) -> bool:
    """Return True if a few tokens of some row are the other side's rounded numbers."""
    at = block.starts[:, None] + block.lengths[:, None] * np.arange(_PLACES) // _PLACES
    train, inference = block.train[at], block.inference[at]
    near = (np.abs(train - inference) <= _COARSEST * np.maximum(1.0, np.abs(train))).all(axis=1)
    near &= np.count_nonzero(train < -UNSURE, axis=1) >= _PLACES // 2
    if not near.any():
        return False
    train, inference = train[near], inference[near]
    for rounded in _ROUNDED.values():
        for one, other in ((train, inference), (inference, train)):
            if _is(one, rounded(other)).all(axis=1).any():
                return True
    return False


def rounded_rows(block: Block, seen: Seen) -> Found:
    """Return the whole rows of which one side is the other one rounded; none where the side is coarse elsewhere too."""
    telling = (block.train < -UNSURE) & (block.inference < -UNSURE) & ~seen.tokens
    tokens = block.count(telling)
    for name, rounded in _ROUNDED.items():
        for one, other, side in block.sides:
            equal = _is(one, rounded(other))
            whole = block.whole(equal) & (tokens >= RUN)
            if not whole.any() or np.count_nonzero(~whole & (tokens > 0)) < _FEWEST_ROWS:
                continue
            rest = block.by_token(~whole) & telling
            if np.mean(_is(one[rest], rounded(one[rest]))) > 0.5:
                continue
            copies = whole & (-tokens * np.log(max(float(np.mean(equal[rest])), 0.1)) > CHANCE)
            if copies.any():
                said = f"the {side} side is the other one rounded {name} in every token, and has more digits in other "
                said += "sequences: it is a copy there"
                return [fault_at(block, block.by_token(copies), said)]
    return []


def rounded_column(block: Block) -> str:
    """Say that one side is the other one rounded throughout, up to less than the rounding; empty where it is not."""
    telling = (block.train < -UNSURE) & (block.inference < -UNSURE)
    if np.count_nonzero(telling) < _FOLLOWS[0]:
        return ""
    train, inference = block.train[telling], block.inference[telling]
    for name, rounded in _ROUNDED.items():
        for one, other, side in ((train, inference, "training"), (inference, train, "inference")):
            left = float(np.quantile(np.abs(one - rounded(other)), 0.9))
            if left < _FOLLOWS[1] * float(np.median(np.abs(other - rounded(other)))):
                return (
                    f"the {side} side is the other one rounded {name}, up to {left:.1g}: unless the kernels agree as "
                    "closely, one side is a copy of the other"
                )
    return ""


def _is(one: Floats, other: Floats) -> Mask:
    equal: Mask = np.abs(one - other) <= _ERROR * np.maximum(1.0, np.abs(one))
    return equal
