"""Means of token values where the tokens of a sequence depend on each other: the sequence is the independent unit.

An interval that takes n tokens for n independent observations is too narrow by about the root of the design effect.
Here sequences are independent, and what happens inside one is left open. The mean is that over sequences of the
per-sequence mean, E[sum_t x_t / T]: every sequence counts alike, however long it is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kc_otel.stats._check import real
from kc_otel.stats.binned import Binned
from kc_otel.stats.interval import Interval
from kc_otel.stats.means import mean_interval
from kc_otel.stats.placement import finite_range

__all__ = ["DesignEffect", "design_effect", "sequence_mean_interval", "sequence_means"]


def sequence_means(
    values: ArrayLike, lengths: ArrayLike, *, per: Literal["mean", "sum"] = "mean"
) -> NDArray[np.float64]:
    """The mean, or the sum, of each sequence's token values [S], from all of them one after the other.

    A sequence without tokens has no mean: it is refused, so that leaving it out is the caller's own decision.

    >>> sequence_means([0.1, 0.3, 0.8], [2, 1])
    array([0.2, 0.8])

    Args:
        values: Token values [N], those of the first sequence first.
        lengths: Tokens per sequence [S], each at least 1, adding up to N.
        per: What to return for each sequence.

    Raises:
        ValueError: If a value is NaN or infinite, a length is not a whole number of at least 1, the lengths do not add
            up to N, or `per` is unknown.
    """
    x, sizes = _tokens(values, lengths)
    if per not in {"mean", "sum"}:
        msg = f"per: {per!r} is unknown; write mean or sum"
        raise ValueError(msg)
    sums = np.add.reduceat(x, _starts(sizes))
    return np.asarray(sums / sizes if per == "mean" else sums)


def sequence_mean_interval(
    values: ArrayLike, lengths: ArrayLike, *, low: float, high: float, alpha_lower: float, alpha_upper: float
) -> Interval:
    """Interval for the mean over sequences of the per-sequence mean, E[sum_t x_t / T], each sequence counting alike.

    `mean_interval` of `sequence_means`: valid for independent sequences, whatever the dependence inside them. Its
    `samples` is the number of sequences.

    Args:
        values: Token values [N], those of the first sequence first.
        lengths: Tokens per sequence [S], each at least 1, adding up to N.
        low: Smallest value that a token can have.
        high: Largest value that a token can have.
        alpha_lower: Error probability of the lower side.
        alpha_upper: Error probability of the upper side.

    Raises:
        ValueError: If a value is NaN or outside [low, high], lengths and values do not fit, an alpha is not in (0, 1),
            or [low, high] is not a finite range.
    """
    finite_range(low, high)
    real("values", np.asarray(values, dtype=np.float64), low=low, high=high)
    # A mean of equal values may be off by its rounding.
    means = np.clip(sequence_means(values, lengths), low, high)
    return mean_interval(Binned.of_samples(means), low=low, high=high, alpha_lower=alpha_lower, alpha_upper=alpha_upper)


@dataclass(frozen=True, slots=True)
class DesignEffect:
    """How much less tokens say because they come in sequences.

    Attributes:
        effect: Variance of the mean over sequences, over what it would be with independent tokens; 1 when sequences do
            not matter, about the mean length when all tokens of a sequence are alike. nan where all values are equal.
        effective_samples: Independent tokens that would give the mean as precisely; inf where sequences have equal
            means. sequences: Number of sequences. tokens: Number of tokens.
    """

    effect: float
    effective_samples: float
    sequences: int
    tokens: int


def design_effect(values: ArrayLike, lengths: ArrayLike) -> DesignEffect:
    """Estimate of the design effect of the mean over sequences of the per-sequence mean.

    With B the sample variance of the sequence means and V the variance of a token (of a sequence drawn at random),
    `effect = B / (V mean(1/T))` and `effective_samples = S V / B`. An estimate, without an error probability.

    Source: Kish 1965, Survey Sampling, section 5.4 and 8.2.

    Args:
        values: Token values [N], those of the first sequence first.
        lengths: Tokens per sequence [S], at least two of them, each at least 1, adding up to N.

    Raises:
        ValueError: If a value is NaN or infinite, lengths and values do not fit, or there are fewer than two sequences.
    """
    x, sizes = _tokens(values, lengths)
    if sizes.size < 2:
        msg = "lengths: has 1 sequence; a design effect needs at least 2"
        raise ValueError(msg)
    starts = _starts(sizes)
    means = np.add.reduceat(x, starts) / sizes
    between = float(means.var(ddof=1))
    token = float((np.add.reduceat((x - means.mean()) ** 2, starts) / sizes).mean())
    with np.errstate(divide="ignore", invalid="ignore"):
        effect = float(np.float64(between) / (token * np.mean(1.0 / sizes)))
        effective = float(sizes.size * np.float64(token) / between)
    return DesignEffect(effect, effective, int(sizes.size), int(x.size))


def _tokens(values: ArrayLike, lengths: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    x = np.asarray(values, dtype=np.float64)
    sizes = np.asarray(lengths)
    if x.ndim != 1 or sizes.ndim != 1:
        msg = f"values, lengths: have shapes {x.shape} and {sizes.shape}; pass [N] and [S]"
        raise ValueError(msg)
    real("values", x, low=-math.inf)
    real("lengths", sizes, low=1.0, what="a number of tokens")
    whole = sizes.astype(np.int64)
    if (whole != sizes).any():
        msg = f"lengths: {float(sizes[whole != sizes][0])!r} is not a whole number"
        raise ValueError(msg)
    if int(whole.sum()) != x.size:
        msg = f"lengths: add up to {int(whole.sum())}, but there are {x.size} values"
        raise ValueError(msg)
    return x, whole


def _starts(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(sizes)[:-1]))
