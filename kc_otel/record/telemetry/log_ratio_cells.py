"""One partition of the log ratio's line for every quantity of a sampled token at once.

l, |l|, w, (1-w)+, w - 1 - l and (w-1)^2 are all functions of l that rise or fall throughout on either side of zero.
Cut the line of l wherever any of them enters another bucket, and finding a token's cell, once, is as good as finding
its bucket in six histograms: counts per cell become counts per bucket only when somebody asks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kc_otel.record.measure.sampled import HIGHEST, LOWEST, TOKEN
from kc_otel.record.telemetry.buckets import Partition, Slots, magnitudes, slots

__all__ = ["LogRatioCells", "cells"]


class LogRatioCells:
    """The joint partition at one scale, and the bucket that each cell means for each quantity of a sampled token."""

    def __init__(self, scale: int) -> None:
        self.slots: Final[Slots] = slots(scale)
        self.partition: Final = Partition(self._cuts(1.0, HIGHEST), self._cuts(-1.0, -LOWEST))
        self.size: Final = self.partition.size
        within = self.partition.representatives()
        self._slot: Final = {key: self.slots.of_exact(quantity(within)) for key, quantity in TOKEN.items()}

    def per_slot(self, quantity: str, counts: NDArray[np.int64]) -> tuple[int, NDArray[np.int64]]:
        """Counts per bucket of a quantity, from counts per cell [size]: the first slot, and counts from there on."""
        slot = self._slot[quantity]
        first = int(slot.min())
        per_slot = np.zeros(int(slot.max()) - first + 1, dtype=np.int64)
        np.add.at(per_slot, slot - first, counts)
        return first, per_slot

    def _cuts(self, sign: float, largest: float) -> NDArray[np.uint32]:
        bounds = self.slots.bounds
        found = []
        for quantity in TOKEN.values():
            # Along growing magnitudes of l a quantity's own magnitude leaves bounds behind, upwards or downwards; its
            # sign never changes on the way.
            at_zero = abs(quantity(np.float64(0.0))) > bounds
            found.append(magnitudes(partial(_differs, quantity, sign, bounds, at_zero), bounds.size, largest))
        return np.unique(np.concatenate(found))


@cache
def cells(scale: int) -> LogRatioCells:
    """The joint partition of a scale."""
    return LogRatioCells(scale)


def _differs(
    quantity: Callable[[Any], Any],
    sign: float,
    bounds: NDArray[np.float64],
    at_zero: NDArray[np.bool_],
    magnitude: NDArray[np.float64],
) -> NDArray[np.bool_]:
    differs: NDArray[np.bool_] = (abs(quantity(sign * magnitude)) > bounds) != at_zero
    return differs
