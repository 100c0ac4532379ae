"""A side that was rounded in storage.

A number with few bits of significand is a multiple of a large power of two for its size. Numbers of full precision lie
on that grid by chance only: a float32 on bfloat16's once in 2^16, on float16's once in 2^13. A log-softmax in float32
loses bits where probabilities are near 1, so only numbers that are far enough from 0 are asked, and different ones
only: of answers that repeat, any few values lie on some grid. Drift that is the size of the grid's rounding is still
drift where both sides are rounded alike, so only a side that is coarser than the other is named.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from kc_otel.record.measure.arrays import Floats

_SIGNIFICAND: Final = {"bfloat16": 8, "float16": 11}
"""Bits of significand, the leading one included; the coarser format first."""
_LOOK_NUMBERS: Final = 1024
"""Numbers of each side that are looked at, from its first one."""
_FEWEST_NUMBERS: Final = 32
"""Different numbers from which a grid is no chance: float32 numbers of _MIN_ASKED_NATS or more are on float16's with at
most 2^-8 each even where they are differences of logits of 32, 2^-256 in all."""
_MIN_ASKED_NATS: Final = 0.5
"""Smallest |log-probability| that is asked, nats."""


@dataclass(frozen=True, slots=True)
class CoarseSide:
    """The side whose numbers lie on a coarser grid than the other's."""

    side: Literal["train", "inference"]
    grid: str  # the format whose grid it is, float16 or bfloat16
    rounding: float  # mean |error| that rounding to this grid makes, nats

    def __str__(self) -> str:
        return (
            f"log-probabilities of the {self.side} side all lie on {self.grid}'s grid, and the other side's do not: "
            f"about {self.rounding:.1g} nats of mean |log ratio| are the rounding of these numbers; compute and "
            "keep them in float32 on both sides"
        )


def coarse_side(train: Floats, inference: Floats) -> CoarseSide | None:
    """The side that was rounded to half precision where the other was not; None where none was, or both alike.

    Of the tokens that count, [tokens], a thousand are read.

    >>> rng = np.random.default_rng(0)
    >>> inference = -rng.exponential(2.0, 500)
    >>> str(coarse_side(inference.astype(np.float16).astype(np.float32), inference)).split(",")[0]
    "log-probabilities of the train side all lie on float16's grid"
    >>> coarse_side(inference.astype(np.float32), inference) is None
    True
    """
    asked = {"train": _asked(train), "inference": _asked(inference)}
    if any(np.unique(values).size < _FEWEST_NUMBERS for values in asked.values()):
        return None
    bits = {side: _bits(values) for side, values in asked.items()}
    side: Literal["train", "inference"] = "train" if bits["train"] <= bits["inference"] else "inference"
    grid = next((name for name, known in _SIGNIFICAND.items() if bits[side] <= known < max(bits.values())), None)
    if grid is None:
        return None
    given = train if side == "train" else inference
    return CoarseSide(side, grid, float(_spacing(given, asked[side], _SIGNIFICAND[grid]).mean()) / 4.0)


def _spacing(side: Floats, asked: NDArray[np.float64], significand: int) -> NDArray[np.float64]:
    """Distance of the grid's points around each number; the distance to the grid is a quarter of it on average.

    Numbers that were stored in a format have that format's spacing, which shrinks towards 0. Those that a log-softmax
    in it computed are differences of logits, and have the spacing of the largest logit everywhere.
    """
    some = np.abs(side[:_LOOK_NUMBERS][np.isfinite(side[:_LOOK_NUMBERS])], dtype=np.float64)
    step = float(np.ldexp(_lowest_bit(asked).astype(np.float64), np.frexp(asked)[1] - 53).min())
    stored = np.ldexp(1.0, np.frexp(some)[1] - significand)
    smallest = np.ldexp(1.0, int(np.frexp(asked.min())[1]) - significand)
    return np.full(some.size, step) if step > smallest else stored


def _lowest_bit(values: NDArray[np.float64]) -> NDArray[np.int64]:
    """The lowest bit of each number's significand, as an integer of 53 bits."""
    whole = np.ldexp(np.frexp(values)[0], 53).astype(np.int64)
    lowest: NDArray[np.int64] = whole & -whole
    return lowest


def _asked(side: Floats) -> NDArray[np.float64]:
    """Numbers far enough from 0 to tell a grid by, float64."""
    some = side[:_LOOK_NUMBERS]
    return np.abs(some[np.isfinite(some) & (some <= -_MIN_ASKED_NATS)], dtype=np.float64)


def _bits(values: NDArray[np.float64]) -> int:
    """Bits of significand that the finest of these positive numbers needs, 1 to 53."""
    return 54 - int(_lowest_bit(values).min()).bit_length()
