"""Many cells, many tests: Holm's procedure bounds the chance of any false FAIL among all of them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
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


def holm(cells: Sequence[float | Callable[[float], bool]], alpha: float) -> Holm:
    """Holm's step-down procedure over a family of m cells: the chance of any false FAIL is at most alpha.

    A cell is its p-value, or a monotone function that says whether it fails at a level; for a lower confidence bound,
    `lambda a: lower_bound_at(a) > limit`. All cells are tested at alpha/m; with k of them failed, the rest are tested
    again at alpha/(m - k), until nothing more fails. No assumption on how cells depend on each other is needed. The
    cells that fail are those with p <= alpha/(m - K), K their number, which is why one level (`Holm.level`) describes
    all of them.

    A healthy family costs one call per cell: a cell that passes at alpha itself can never fail. A failing cell costs
    two, and one in between at most log2(m) more.

    Source: Holm 1979, A Simple Sequentially Rejective Multiple Test Procedure.

    Raises:
        ValueError: If alpha is not in (0, 1) or a p-value is not in [0, 1].
    """
    level("alpha", alpha)
    m = len(cells)
    tests = [_test(index, cell) for index, cell in enumerate(cells)]
    # A cell's step is the smallest k at whose level alpha/(m - k) it fails; m where it never does.
    steps = [_step(test, alpha, m) for test in tests]
    failures = 0
    for step in sorted(steps):
        if step > failures:
            break
        failures += 1
    last = min(failures, m - 1)
    return Holm(level=alpha / (m - last) if m else alpha, failed=tuple(step <= last for step in steps))


def _test(index: int, cell: float | Callable[[float], bool]) -> Callable[[float], bool]:
    if callable(cell):
        return cell
    if not 0.0 <= cell <= 1.0:
        raise ValueError(f"cells[{index}]: {cell!r} is not a p-value in [0, 1]")
    return lambda a: cell <= a


def _step(fails: Callable[[float], bool], alpha: float, m: int) -> int:
    if not fails(alpha):
        return m
    if m == 1 or fails(alpha / m):
        return 0
    return bisect_left(range(m - 1), True, lo=1, key=lambda k: fails(alpha / (m - k)))
