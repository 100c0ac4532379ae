"""The bias of an uncorrected policy gradient itself, from sampled sequences, their scores and their advantages.

With f(y) = A(y) s(y), A the advantage and s the score `sum_t grad log P(y_t|y_<t)`, sampling from Q instead of P has
the bias `b = E_Q[f] - E_P[f] = E_Q[g]`, `g = (1 - W) f`, where Q can sample what P can (common support). The bounds of
`gradients` hold without that, and throw away all that sequences cancel.

Pairs of independent sequences have `E <g_i, g_j> = ||b||^2`, whatever the length of the scores:

    U = (||sum g||^2 - sum ||g||^2) / (n (n - 1))

Rollouts of one prompt are not independent of each other: they share its drift, and their pairs have the mean of a
prompt's squared bias, which is larger. Where prompts are known, g is averaged over each prompt's rollouts first, so
that only pairs of different prompts count, n is the number of prompts, and b is the mean over prompts.

Scores of a network are too long to keep: `<g_i, g_j>` is kept on average by a random projection, which changes
||b||^2 by a factor of about `1 +- sqrt(2 / k)`, k numbers to a sketch; no limit here counts that.

The limits rest on the central limit theorem: U's variance is `2 tr(S^2) / (n (n-1)) + 4 b'S b / n`, S the covariance of
g, with tr(S^2) estimated without the bias that few sequences have. Each limit is the ||b|| at which U is as far away as
its variance there allows, with S's largest eigenvalue for the direction of b: taken at U itself, the variance is small
where U is by chance, and an upper limit at 99.5 % was missed by 5 % of the samples. U leans upwards, as a chi-square
with `tr(S)^2 / tr(S^2)` degrees of freedom does; the lower limit counts that. W has a heavy tail where the kernels are
far apart; `examples/rl_bias/gradient_bounds.py` bounds the bias without looking at one.

Source: Hoeffding 1948, A Class of Statistics with Asymptotically Normal Distribution; Chen and Qin 2010, A Two-Sample
Test for High-Dimensional Data, for U and its variance; Wilson and Hilferty 1931 for the chi-square; Charikar, Chen and
Farach-Colton 2002 for the sketch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike

from kc_otel.stats.interval import Floats, level


@dataclass(frozen=True, slots=True)
class GradientBias:
    """The bias of a policy gradient, in the unit of an advantage times a score's norm, as `gradient_bias_bound` is.

    Attributes:
        norm: Estimate of ||b||, from pairs; 0 where their mean is below 0.
        lower: Lower limit on ||b||.
        upper: Upper limit on ||b||.
        sequences: Sequences that it rests on.
        prompts: Prompts that these answer; as many as sequences if the prompts are unknown.
    """

    norm: float
    lower: float
    upper: float
    sequences: int
    prompts: int


def estimated_gradient_bias(
    log_ratio: ArrayLike,
    advantage: ArrayLike,
    scores: ArrayLike,
    *,
    prompts: ArrayLike | None = None,
    confidence: float = 0.99,
) -> GradientBias:
    """The norm of the uncorrected gradient's bias, if Q can sample what P can.

    Args:
        log_ratio: L = log W of each sequence, nats, [sequences].
        advantage: A of each sequence, [sequences].
        scores: `grad log P` of each sequence, or its random projection, [sequences, numbers].
        prompts: Name of each sequence's prompt [sequences]: pairs of one prompt do not count. None where every sequence
            is independent of the others.
        confidence: Of each limit together with its opposite.

    Raises:
        ValueError: If shapes do not fit, a number is not finite, there are fewer than three prompts, or the confidence
            is not in (0, 1).

    >>> rng = np.random.default_rng(0)
    >>> s = rng.normal(size=(4000, 8))                        # scores, and kernels that differ along the first one
    >>> L = 0.1 * s[:, 0] - 0.005
    >>> found = estimated_gradient_bias(L, np.ones(4000), s)   # b = -0.1 e_1
    >>> round(found.norm, 1), found.lower < 0.1 < found.upper
    (0.1, True)
    """
    ratio, weight = (np.asarray(array, dtype=np.float64).ravel() for array in (log_ratio, advantage))
    of = np.asarray(scores, dtype=np.float64)
    n = ratio.size
    if of.ndim != 2 or weight.size != n or of.shape[0] != n:
        msg = f"scores: shape {of.shape} with {n} log ratios and {weight.size} advantages; give one row for each"
        raise ValueError(msg)
    if n < 3:
        raise ValueError(f"scores: {n} sequences say nothing of a bias; give thousands")
    g = (-np.expm1(ratio) * weight)[:, None] * of
    if not np.isfinite(g).all():
        msg = f"scores: {int((~np.isfinite(g)).any(axis=1).sum())} of {n} sequences have numbers that are not finite"
        raise ValueError(msg)
    sequences = n
    if prompts is not None:
        g = _by_prompt(g, prompts)
        n = g.shape[0]
        if n < 3:
            raise ValueError(f"prompts: {n} say nothing of a bias; give the rollouts of hundreds")
    beyond = NormalDist().inv_cdf(1.0 - (1.0 - level("confidence", confidence)) / 2.0)
    mean, square = g.mean(axis=0), float((g * g).sum())
    pairs = (n * n * float(mean @ mean) - square) / (n * (n - 1.0))
    alone, toward, freedom = _variances(g - mean, n)
    return GradientBias(
        norm=math.sqrt(max(pairs, 0.0)),
        lower=_limit(pairs, alone, toward, -_leaning(beyond, freedom)),
        upper=_limit(pairs, alone, toward, beyond),
        sequences=sequences,
        prompts=n,
    )


def _by_prompt(values: Floats, prompts: ArrayLike) -> Floats:
    """Means of the rows [sequences, k] over those of each prompt [prompts, k]."""
    names = np.asarray(prompts).ravel()
    if names.size != values.shape[0]:
        raise ValueError(f"prompts: {names.size} names for {values.shape[0]} sequences; name the prompt of each")
    _, of, count = np.unique(names, return_inverse=True, return_counts=True)
    totals = np.zeros((count.size, values.shape[1]))
    np.add.at(totals, of, values)
    return totals / count[:, None]


def _variances(centred: Floats, n: int) -> tuple[float, float, float]:
    """Return (a, c) of U's variance a + c ||b||^2 and the degrees of freedom, from g less its mean [n, k]."""
    # Either Gram matrix has the same trace, the same sum of squares and the same largest eigenvalue.
    gram = (centred.T @ centred if centred.shape[1] <= n else centred @ centred.T) / (n - 1.0)
    trace = float(np.trace(gram))
    squared = max(float((gram * gram).sum()) - trace * trace / n, 0.0)
    freedom = max(trace * trace / squared, 1.0) if squared > 0.0 else math.inf
    largest = max(float(np.linalg.eigvalsh(gram)[-1]), 0.0)
    return 2.0 * squared / (n * (n - 1.0)), 4.0 * largest / n, min(freedom, 1e6)


def _leaning(beyond: float, freedom: float) -> float:
    """The quantile of a chi-square, in its deviations from its mean, for that of a normal law (Wilson and Hilferty)."""
    step = 2.0 / (9.0 * freedom)
    return (freedom * (1.0 - step + beyond * math.sqrt(step)) ** 3 - freedom) / math.sqrt(2.0 * freedom)


def _limit(pairs: float, alone: float, toward: float, beyond: float) -> float:
    """The ||b|| whose square x has `x - pairs = beyond sqrt(alone + toward x)`; 0 where that is none."""
    middle = pairs + beyond * beyond * toward / 2.0
    rest = middle * middle - pairs * pairs + beyond * beyond * alone
    return math.sqrt(max(middle + math.copysign(math.sqrt(max(rest, 0.0)), beyond), 0.0))
