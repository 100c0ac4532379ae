"""Many cells, many tests: Holm's procedure bounds the chance of any false FAIL among all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kc_otel.stats.interval import level


@dataclass(frozen=True, slots=True)
class Holm:
    """Decision of Holm's procedure.

    Attributes:
        level: Level at which every cell was judged: a cell failed exactly if it fails at this level, so its lower bound
            at this level is the one to show.
        failed: Whether each cell failed, in the order given.
    """

    level: float
    failed: tuple[bool, ...]


def holm(p_values: Sequence[float], alpha: float) -> Holm:
    """Holm's step-down procedure over m cells by their p-values: the chance of any false FAIL is at most alpha.

    All cells are tested at alpha/m; with k of them failed, the rest are tested again at alpha/(m - k), until nothing
    more fails. No assumption on how cells depend on each other is needed. The cells that fail are those with p <=
    alpha/(m - K), K their number, which is why one level (`Holm.level`) describes all of them.

    Source: Holm 1979, A Simple Sequentially Rejective Multiple Test Procedure.

    Raises:
        ValueError: If alpha is not in (0, 1) or a p-value is not in [0, 1].
    """
    level("alpha", alpha)
    for index, value in enumerate(p_values):
        if not 0.0 <= value <= 1.0:
            raise ValueError(f"p_values[{index}]: {value!r} is not a p-value in [0, 1]")
    failures, left = 0, sorted(p_values)
    while failures < len(left) and left[failures] <= alpha / (len(left) - failures):
        failures += 1
    at = alpha / max(len(left) - failures, 1)
    return Holm(at, tuple(value <= at for value in p_values))
