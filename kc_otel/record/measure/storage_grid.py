"""Log-probabilities that one side alone kept in half precision: a difference that is storage and not the kernel's.

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

__all__ = ["CoarseSide", "coarse_side"]

_SIGNIFICAND: Final = {"bfloat16": 8, "float16": 11}
"""Bits of significand, the leading one included; the coarser format first."""
_LOOK: Final = 1024
"""Numbers of each side that are looked at, from its first one."""
_FEWEST: Final = 32
"""Different numbers from which a grid is no chance: float32 numbers of _FAR or more are on float16's with at most 2^-8
each even where they are differences of logits of 32, 2^-256 in all."""
_FAR: Final = 0.5
"""Smallest |log-probability| that is asked, nats."""


@dataclass(frozen=True, slots=True)
class CoarseSide:
    """The side whose numbers lie on a coarser grid than the other's.

    Attributes:
        side: train or inference.
        grid: The format whose grid it is, float16 or bfloat16.
        rounding: Mean |error| that rounding to this grid makes, nats.
    """

    side: Literal["train", "inference"]
    grid: str
    rounding: float

    def __str__(self) -> str:
        return (
            f"log-probabilities of the {self.side} side all lie on {self.grid}'s grid, and the other side's do not: "
            f"about {self.rounding:.1g} nats of mean |log ratio| are the rounding of these numbers; compute and "
            "keep them in float32 on both sides"
        )


def coarse_side(train: Floats, inference: Floats) -> CoarseSide | None:
    """The side that was rounded to half precision where the other was not; None where none was, or both alike.

    Args:
        train: log P(y), nats, float32 or float64 [tokens], those that count; a thousand of them are read.
        inference: log Q(y) of the same tokens.

    >>> rng = np.random.default_rng(0)
    >>> inference = -rng.exponential(2.0, 500)
    >>> str(coarse_side(inference.astype(np.float16).astype(np.float32), inference)).split(",")[0]
    "log-probabilities of the train side all lie on float16's grid"
    >>> coarse_side(inference.astype(np.float32), inference) is None
    True
    """
    sides: tuple[tuple[Literal["train", "inference"], NDArray[np.float64]], ...] = (
        ("train", _asked(train)),
        ("inference", _asked(inference)),
    )
    if any(np.unique(values).size < _FEWEST for _, values in sides):
        return None
    bits = {side: _bits(values) for side, values in sides}
    (side, values), (other, _) = sorted(sides, key=lambda one: bits[one[0]])
    grid = next((name for name, known in _SIGNIFICAND.items() if bits[side] <= known < bits[other]), None)
    if grid is None:
        return None
    # The distance to the grid is uniform up to half of its spacing: a quarter of it on average.
    spacing = np.ldexp(1.0, np.frexp(values)[1] - _SIGNIFICAND[grid])
    return CoarseSide(side, grid, float(spacing.mean()) / 4.0)


def _asked(side: Floats) -> NDArray[np.float64]:
    """Numbers far enough from 0 to tell a grid by, float64."""
    some = side[:_LOOK]
    return np.abs(some[np.isfinite(some) & (some <= -_FAR)], dtype=np.float64)


def _bits(values: NDArray[np.float64]) -> int:
    """Bits of significand that the finest of these positive numbers needs, 1 to 53."""
    whole = np.ldexp(np.frexp(values)[0], 53).astype(np.int64)
    lowest = whole & -whole
    return 54 - int(np.frexp(lowest.min().astype(np.float64))[1])
