"""Rows in which one side is the other one rounded, while it has more digits in other rows: copied, and not computed.

A trainer that bypasses its own forward for some rows, and a log that keeps three decimals, write the sampler's numbers
into the other column. Where a whole column is coarse, its rounding is storage, which `storage_grid` names; where all of
it is the other column's rounding, `rounded_column` remarks it, because kernels that agree bit for bit look the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kc_otel.record.measure.arrays import Floats
from kc_otel.record.measure.packing import Block
from kc_otel.record.measure.pairing_faults import CHANCE, RUN, UNSURE, Found, Mask, placeholder_at

_PLACES: Final = 6
"""Tokens of each row that are looked at before all are."""
_COARSEST: Final = 0.006
"""Error of these roundings, at most, in shares of a number or of 1."""
_FEWEST_ROWS: Final = 4
"""Other rows, at least, with a side that has more digits."""
_FOLLOWS: Final = (256, 0.1)
"""Tokens from which a whole column follows the other one's rounding, and distance from that, of nine in ten of them, in
shares of the rounding: a kernel knows nothing of which way the other one's numbers are rounded."""
_ERROR: Final = 1e-6
"""Error of a decimal number in float32, in shares of it or of 1."""


def _to_bfloat16(values: Floats) -> NDArray[np.float32]:
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view(np.float32)


def _to_decimals(values: Floats, digits: int) -> Floats:
    return np.round(values, digits)


_ROUNDED: Final[Mapping[str, Callable[[Floats], Floats]]] = MappingProxyType(
    {
        "to bfloat16": _to_bfloat16,
        "to float16": lambda values: values.astype(np.float16).astype(np.float32),
        **{f"to {digits} decimals": partial(_to_decimals, digits=digits) for digits in (2, 3, 4)},
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


def rounded_rows(block: Block, known: Mask) -> Found:
    """Return the whole rows of which one side is the other one rounded; none where the side is coarse elsewhere too."""
    telling = (block.train < -UNSURE) & (block.inference < -UNSURE) & ~known
    tokens = np.add.reduceat(telling, block.starts, dtype=np.intp)
    for name, rounded in _ROUNDED.items():
        for one, other, side in block.sides:
            equal = _is(one, rounded(other))
            whole = np.logical_and.reduceat(equal, block.starts) & (tokens >= RUN)
            if not whole.any() or np.count_nonzero(~whole & (tokens > 0)) < _FEWEST_ROWS:
                continue
            rest = np.repeat(~whole, block.lengths) & telling
            if np.mean(_is(one[rest], rounded(one[rest]))) > 0.5:
                continue
            copies = whole & (-tokens * np.log(max(float(np.mean(equal[rest])), 0.1)) > CHANCE)
            if copies.any():
                said = f"the {side} side is the other one rounded {name} in every token, and has more digits in other "
                said += "sequences: it is a copy there"
                return [placeholder_at(block, np.repeat(copies, block.lengths), said)]
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
