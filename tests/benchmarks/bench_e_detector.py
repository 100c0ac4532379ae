"""What verdicts over time are worth: `python tests/benchmarks/bench_e_detector.py`, some minutes.

Sequences drift by a gamma law around a mean, with a coefficient of variation (CV); panes have 20 of them, histograms
are of scale 4, the limit is 0.004. Printed are false alarms, and panes from a change until a cell's alarm, at 10,000
panes between false alarms of 20 cells together.
"""

from __future__ import annotations

import sys

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kc_otel.stats.e_detector import BETS, EDetector, alarm_level

LIMIT = 0.004
SEQUENCES = 20
FIRST, LAST = -320, 0
EDGES = np.exp2(np.arange(FIRST, LAST + 1) / 16)
"""Edges of the buckets of scale 4 from 2^-20 to 1; what is smaller is in the first, with the edge 0."""
LOWER, UPPER = np.r_[0.0, EDGES], np.r_[EDGES, np.inf]


def pane(rng: np.random.Generator, mean: float, cv: float, cells: int) -> NDArray[np.float64]:
    """Bucket counts [cells, buckets] of one pane."""
    drift = rng.gamma(cv**-2, mean * cv**2, (cells, SEQUENCES))
    with np.errstate(divide="ignore"):
        index = np.clip(np.ceil(np.log2(drift) * 16), FIRST, LAST + 1).astype(np.int64) - FIRST
    flat = (np.arange(cells)[:, None] * LOWER.size + index).ravel()
    return np.bincount(flat, minlength=cells * LOWER.size).reshape(cells, LOWER.size).astype(np.float64)


def after_pane(
    detector: EDetector, counts: ArrayLike, lower: NDArray[np.float64] = LOWER, limit: float = LIMIT
) -> EDetector:
    """The detector after a pane of counts [cells, buckets]; a cell without observations stays as it was."""
    held = np.asarray(counts, dtype=np.float64)
    return detector.opened(held.sum(axis=1) > 0).gained(held @ np.log1p(BETS * (lower[:, None] / limit - 1.0)))


def panes_until_alarm(
    rng: np.random.Generator, ratio: float, cv: float, *, runs: int, most: int, cells: int = 20, between: int = 10_000
) -> NDArray[np.int64]:
    """Panes until each of `runs` cells alarms at the level for `cells` of them; 0 where `most` panes raised none."""
    detector, alarm = EDetector.fresh(runs), np.zeros(runs, dtype=np.int64)
    level = alarm_level(max(1.0, between * cells / runs), runs)
    for count in range(1, most + 1):
        detector = after_pane(detector, pane(rng, LIMIT * ratio, cv, runs))
        alarm[(alarm == 0) & (detector.log_evidence >= level)] = count
        if alarm.all():
            break
    return alarm


def _median(times: NDArray[np.int64], most: int) -> str:
    return f"{np.median(np.where(times > 0, times, most + 1)):,.0f}" if (times > 0).mean() > 0.5 else f"> {most:,}"


def main(runs: int = 40, panes: int = 5000) -> None:
    rng = np.random.default_rng(0)
    print(f"{'CV':>5}  alarms in {runs} runs of 20 cells and {panes:,} panes   panes to FAIL (median) at truth / limit")
    print(" " * 12 + f"{'0.9':>8}{'1.0':>8}" + " " * 12 + "".join(f"{ratio:>8}" for ratio in (1.1, 1.2, 1.5, 2.0)))
    for cv in (0.45, 1.0, 2.6):
        false = [
            int((panes_until_alarm(rng, ratio, cv, runs=20 * runs, most=panes) > 0).reshape(runs, 20).any(axis=1).sum())
            for ratio in (0.9, 1.0)
        ]
        slow = [_median(panes_until_alarm(rng, r, cv, runs=40, most=panes), panes) for r in (1.1, 1.2, 1.5, 2.0)]
        print(f"{cv:5}  " + " " * 5 + "".join(f"{n:8}" for n in false) + " " * 12 + "".join(f"{t:>8}" for t in slow))


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:]))
