"""Tail index: how heavy the upper tail of importance ratios, or of |log ratios|, is.

Beyond a high threshold u, excesses x - u of almost every distribution follow a generalised Pareto distribution (GPD),
`P(X - u > x) = (1 + k x / sigma)^(-1/k)` (Pickands 1975). Its shape k is the tail index: moments of order 1/k and
higher do not exist. Tail length M and threshold are those of Pareto-smoothed importance sampling: the
`M = ceil(min(n / 5, 3 sqrt(n)))` largest, u the next smaller one.

What to expect of kernels: tokens come from Q and `E_Q[w] <= 1`, so `Q(l > x) <= exp(-x)`. The tail of l upwards is at
most exponential (k of l at most 0 in the limit) and k of w at most 1. A clearly larger k means that the log-probs are
not of the tokens that Q sampled, or not after the same sampling processing. Downwards l can have any tail.

Source: Zhang and Stephens 2009, A New and Efficient Estimation Method for the Generalized Pareto Distribution; Vehtari,
Simpson, Gelman, Yao and Gabry 2024, Pareto Smoothed Importance Sampling, JMLR 25(72); Hill 1975.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from kc_otel.stats._samples import Floats, vector

__all__ = [
    "TailIndex",
    "hill",
    "pareto_k",
    "tail_length",
    "tail_reading",
]

FEWEST = 5
"""Observations in the tail below which no index is given, as in PSIS."""


@dataclass(frozen=True, slots=True)
class TailIndex:
    """A tail index and what it rests on.

    Attributes:
        k: The index; nan where fewer than five observations lie beyond the threshold, or one bin holds them all.
        scale: sigma of the GPD; for Hill's estimator k times the threshold.
        threshold: u.
        tail: Observations beyond the threshold.
        samples: All observations.
        error: Asymptotic standard error of k: (1 + k) / sqrt(tail) for the GPD (Smith 1987), k / sqrt(tail) for Hill.
        method: Name of the estimator.
    """

    k: float
    scale: float
    threshold: float
    tail: int
    samples: int
    error: float
    method: str


def tail_length(samples: int) -> int:
    """`M = ceil(min(n / 5, 3 sqrt(n)))`, the number of largest observations that count as the tail.

    Source: Vehtari et al. 2024.

    Raises:
        ValueError: If the number is negative.
    """
    if samples < 0:
        msg = f"samples: {samples!r} is not a number of observations"
        raise ValueError(msg)
    return math.ceil(min(samples / 5.0, 3.0 * math.sqrt(samples)))


def pareto_k(values: ArrayLike, *, log: bool = False, tail: int | None = None) -> TailIndex:
    """Pareto k of the largest values: the GPD's shape by Zhang and Stephens, drawn towards 1/2 as PSIS does.

    The estimate is a posterior mean over the profile likelihood, without iteration; then
    `k = (M k + 10 * 0.5) / (M + 10)`, a prior worth ten observations that steadies short tails.

    Args:
        values: Weights or magnitudes [N].
        log: Whether `values` are logarithms of the weights: no product overflows, and threshold and scale are then
            those of weights divided by the largest.
        tail: M; `tail_length(N)` by default.

    Raises:
        ValueError: If a value is NaN or infinite, there are none, or the tail is not between 1 and N - 1.

    >>> import numpy as np
    >>> weights = np.random.default_rng(0).pareto(2.0, 100_000)     # P(X > x) ~ x^-2, so k = 1/2
    >>> found = pareto_k(weights)
    >>> abs(found.k - 0.5) < 2 * found.error
    True
    """
    x = vector("values", values, infinite=log)
    if log:
        if np.isposinf(x).any():
            msg = "values: inf is no logarithm of a weight"
            raise ValueError(msg)
        x = np.exp(x - (x.max() if np.isfinite(x.max()) else 0.0))
    threshold, beyond = _largest(x, tail)
    method = "generalised Pareto (Zhang-Stephens)"
    if beyond.size < FEWEST:
        return unknown(threshold, beyond.size, x.size, method)
    k, sigma = _zhang_stephens(beyond - threshold)
    k = towards_half(k, beyond.size)
    return TailIndex(k, sigma, threshold, beyond.size, x.size, (1.0 + k) / math.sqrt(beyond.size), method)


def hill(values: ArrayLike, *, tail: int | None = None) -> TailIndex:
    """Hill's estimator: the mean of log(x / u) over the M largest; for tails that are a power law with k > 0.

    It cannot be negative, is sharper than the GPD's where the tail is a pure power law, and biased where it is not.

    Source: Hill 1975, A Simple General Approach to Inference About the Tail of a Distribution.

    Args:
        values: Weights or magnitudes [N].
        tail: M; `tail_length(N)` by default.

    Raises:
        ValueError: If a value is NaN or infinite, there are none, the threshold is not positive, or the tail is not
            between 1 and N - 1.
    """
    x = vector("values", values)
    threshold, beyond = _largest(x, tail)
    if beyond.size < FEWEST:
        return unknown(threshold, beyond.size, x.size, "Hill")
    k = float(np.log(beyond / positive_threshold(threshold)).mean())
    return TailIndex(k, k * threshold, threshold, beyond.size, x.size, k / math.sqrt(beyond.size), "Hill")


def tail_reading(k: float) -> str:
    """What a Pareto k of importance ratios says, in one sentence.

    Source: Vehtari et al. 2024: the thresholds 0.5 (variance), 0.7 (practical use) and 1 (mean).

    >>> tail_reading(0.6)
    'k = 0.60: infinite variance, but estimates are usable and converge slowly'
    """
    if math.isnan(k):
        return "k is unknown: fewer than five observations beyond the threshold, or all of them in one bin"
    if k < 0.0:
        said = "a tail that ends; every moment is finite"
    elif k < 0.5:
        said = "finite variance; means and their intervals can be trusted"
    elif k < 0.7:
        said = "infinite variance, but estimates are usable and converge slowly"
    elif k < 1.0:
        said = "the mean exists, but no practical number of samples estimates it; cap the ratio or bound it through TV"
    else:
        said = "no finite mean; an average of these ratios estimates nothing"
    return f"k = {k:.2f}: {said}"


def tail_or_default(tail: int | None, samples: int) -> int:
    """M, where it is given and possible, or PSIS's."""
    if tail is None:
        return min(tail_length(samples), samples - 1)
    if not 1 <= tail < samples:
        msg = f"tail: {tail!r} is not between 1 and {samples - 1}, one less than the number of observations"
        raise ValueError(msg)
    return tail


def _largest(x: Floats, tail: int | None) -> tuple[float, Floats]:
    """The M + 1st largest and what is larger; fewer than M where values are equal."""
    at = x.size - 1 - tail_or_default(tail, x.size)
    parted = np.partition(x, at)
    threshold = float(parted[at])
    beyond = parted[at + 1 :]
    return threshold, np.sort(beyond[beyond > threshold])


def _zhang_stephens(excess: Floats) -> tuple[float, float]:
    """Shape and scale of a GPD from ascending positive excesses [M]."""
    n = excess.size
    unit = float(excess[-1])
    x = excess / unit
    grid = 30 + math.isqrt(n)
    # The floor matters only where most of the tail coincides with the threshold to a dozen digits.
    quartile = max(float(x[int(n / 4 + 0.5) - 1]), 1e-12)
    place = np.arange(1, grid + 1) - 0.5
    theta = 1.0 + (1.0 - np.sqrt(grid / place)) / (3.0 * quartile)
    theta = theta[theta != 0.0]
    shape = np.log1p(-theta[:, None] * x).mean(axis=1)
    profile = n * (np.log(-theta / shape) - shape - 1.0)
    weight = np.exp(profile - profile.max())
    chosen = float(weight @ theta / weight.sum())
    if chosen == 0.0:
        return 0.0, unit * float(x.mean())
    k = float(np.log1p(-chosen * x).mean())
    return k, -k / chosen * unit


def towards_half(k: float, tail: int) -> float:
    """PSIS's prior: ten observations of k = 1/2."""
    return (tail * k + 10.0 * 0.5) / (tail + 10.0)


def positive_threshold(threshold: float) -> float:
    """The threshold, once it has a logarithm."""
    if threshold <= 0.0:
        msg = f"values: the threshold {threshold!r} is not positive; Hill's estimator needs positive values in the tail"
        raise ValueError(msg)
    return threshold


def unknown(threshold: float, tail: int, samples: int, method: str) -> TailIndex:
    """No index."""
    return TailIndex(math.nan, math.nan, threshold, tail, samples, math.nan, method)
