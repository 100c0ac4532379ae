"""What the intervals for a mean are worth and cost: `python tests/benchmarks/bench_intervals.py`.

Distance of the upper bound from the mean, over Hoeffding's, and the time of one two-sided interval from a histogram of
scale 4. The quantity is (1 - w)+ of a Gaussian log ratio, as drift is, or a coin that seldom falls on 1, which is the
worst case for its mean. Confidence is 0.99, half of alpha on each side. Times are of the thread's own CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np
from _timing import interleaved
from numpy.typing import NDArray

from kc_otel.stats import (
    Binned,
    Buckets,
    ExponentialHistogram,
    Interval,
    mean_interval,
)
from tests.tools.bernstein import bernstein_interval

PROGRAMS: dict[str, Callable[..., Interval]] = {
    "Bernstein": bernstein_interval,
    "betting": mean_interval,
    "anytime": partial(mean_interval, anytime=True),
}
ROUNDS = 50
SCALE = 4
LEVELS = {"low": 0.0, "high": 1.0, "alpha_lower": 0.005, "alpha_upper": 0.005}


def drift(rng: np.random.Generator, mean: float, n: int) -> NDArray[np.float64]:
    deviation = mean * math.sqrt(2.0 * math.pi)
    return np.maximum(-np.expm1(rng.normal(0.0, deviation, n)), 0.0)


def coin(rng: np.random.Generator, mean: float, n: int) -> NDArray[np.float64]:
    return (rng.random(n) < mean).astype(float)


def histogram(x: NDArray[np.float64]) -> Binned:
    positive = x[x > 0.0]
    index = np.ceil(np.log2(positive) * 2.0**SCALE).astype(np.int64) - 1
    first = int(index.min()) if index.size else 0
    buckets = Buckets(first, np.bincount(index - first).astype(np.int64)) if index.size else Buckets.empty()
    zeros = int((x == 0.0).sum())
    return ExponentialHistogram(
        SCALE, x.size, float(x.sum()), zeros, buckets, Buckets.empty(), float(x.min()), float(x.max())
    ).binned()


def main() -> None:
    rng = np.random.default_rng(0)
    print(f"{'law':6} {'mean':>7} {'n':>9} {'bins':>5}  upper distance / Hoeffding's" + " " * 14 + "microseconds")
    names = list(PROGRAMS)
    print(" " * 31 + " ".join(f"{name:>9}" for name in names) + "  " + " ".join(f"{name:>9}" for name in names))
    for law in (drift, coin):
        for mean in (1e-4, 1e-3, 1e-2, 1e-1):
            for n in (100, 2000, 20_000, 1_000_000):
                sample = histogram(law(rng, mean, n))
                calls = {name: partial(program, sample, **LEVELS) for name, program in PROGRAMS.items()}
                seconds = interleaved(calls, ROUNDS)
                got = {name: call() for name, call in calls.items()}
                away = {name: interval.upper - interval.estimate for name, interval in got.items()}
                hoeffding = math.sqrt(math.log(1.0 / LEVELS["alpha_upper"]) / (2.0 * n))
                ratios = " ".join(f"{away[name] / hoeffding:9.3f}" for name in names)
                times = " ".join(f"{seconds[name][ROUNDS // 2] * 1e6:9.0f}" for name in names)
                print(f"{law.__name__:6} {mean:7g} {n:9,} {sample.count.size:5}  {ratios}  {times}")


if __name__ == "__main__":
    main()
