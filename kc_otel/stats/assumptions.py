"""Assumptions are measured, not trusted: score norms and advantages against the contract's G and A_max.

A bound on the gradient's bias holds as far as `||grad log P|| <= G` and `|A| <= A_max` do. A sample cannot prove
either, but it says how often they fail at most: with k of n observations beyond the limit, Clopper and Pearson's bound
on the share of all; with none, `1 - alpha^(1/n)`, about 4.6 / n at 99%.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kc_otel.stats._check import level, real, usable
from kc_otel.stats.binned import Binned
from kc_otel.stats.fractions import fraction_interval
from kc_otel.stats.interval import Interval
from kc_otel.stats.quantiles import quantile_interval

__all__ = ["AssumptionCheck", "check_assumption", "linear_head_score_norm"]


@dataclass(frozen=True, slots=True)
class AssumptionCheck:
    """What a sample says of an assumption `quantity <= limit`.

    Attributes:
        name: The quantity.
        limit: What the contract assumes.
        samples: Observations.
        maximum: Largest observation, or the upper edge of its bin.
        quantiles: (rank, estimate) pairs.
        beyond: Share of observations beyond the limit, with its Clopper-Pearson interval.
        held: Whether no observation was beyond the limit; False without observations.
        claim: What can be said about the rest, in one sentence.
    """

    name: str
    limit: float
    samples: int
    maximum: float
    quantiles: tuple[tuple[float, float], ...]
    beyond: Interval
    held: bool
    claim: str


def check_assumption(
    sample: Binned,
    limit: float,
    *,
    name: str,
    alpha: float,
    ranks: Sequence[float] = (0.5, 0.99, 0.999),
) -> AssumptionCheck:
    """Holds a sample of ||grad log P|| or |A| against the limit that the contract assumes.

    Source: Clopper and Pearson 1934. From bins the share is conservative and `held` needs the largest bin's upper
    edge, drawn in to the maximum, at or below the limit.

    Args:
        sample: Independent observations, at least 0; for A use `magnitudes(Binned.of_samples(A))`.
        limit: G or A_max.
        name: The quantity, for the claim.
        alpha: Error probability of each side of the share.
        ranks: Ranks of the quantiles to report, each in (0, 1).

    Raises:
        ValueError: If alpha or a rank is not in (0, 1), the limit is negative or NaN, an edge is NaN, or an observation
            is negative.

    >>> import numpy as np
    >>> found = check_assumption(Binned.of_samples(np.linspace(0, 4, 1000)), 5.0, name="|A|", alpha=0.01)
    >>> found.claim
    '|A| <= 5 held in all 1000 observations; at 99% confidence at most 0.459% of all are beyond it'
    """
    level("alpha", alpha)
    real("limit", limit)
    usable(sample)
    if sample.total and sample.upper[0] < 0.0:
        msg = f"sample: {float(sample.upper[0])!r} is negative; pass magnitudes"
        raise ValueError(msg)
    beyond = fraction_interval(sample, limit, alpha_lower=alpha, alpha_upper=alpha)
    quantiles = tuple(
        (rank, quantile_interval(sample, rank, alpha_lower=0.5, alpha_upper=0.5).estimate) for rank in ranks
    )
    maximum = float(sample.upper[-1]) if sample.total else math.nan
    return AssumptionCheck(
        name=name,
        limit=limit,
        samples=sample.total,
        maximum=maximum,
        quantiles=quantiles,
        beyond=beyond,
        held=maximum <= limit,
        claim=_claim(name, limit, sample, beyond, maximum, 1.0 - alpha),
    )


def _claim(name: str, limit: float, sample: Binned, beyond: Interval, maximum: float, confidence: float) -> str:
    if not sample.total:
        return f"{name} <= {limit:g} was not checked: no observations"
    rest = f"at {confidence * 100:g}% confidence at most {beyond.upper * 100:.3g}% of all are beyond it"
    if maximum <= limit:
        return f"{name} <= {limit:g} held in all {sample.total} observations; {rest}"
    return f"{name} <= {limit:g} was broken, by {beyond.estimate * 100:.3g}% of {sample.total} observations; {rest}"


def linear_head_score_norm(
    logits: ArrayLike,
    tokens: ArrayLike,
    hidden: ArrayLike,
    *,
    temperature: float = 1.0,
    bias: bool = False,
) -> NDArray[np.float64]:
    """Norm of a sampled token's score with respect to a linear head: `||e_y - p|| ||h|| / temperature`, exactly.

    With logits W h and p = softmax(W h / temperature) the gradient of log p(y) by W is the outer product `(e_y - p)
    h^T / temperature`, whose Frobenius norm is the product of the two; a bias adds one more column. It is the head's
    part of the whole score, so the norm over all parameters is at least this, and at most `sqrt(2) ||h|| /
    temperature` comes from the head.

    Args:
        logits: Logits before the temperature [..., V].
        tokens: Sampled tokens [...].
        hidden: The head's inputs h [..., H].
        temperature: Divides the logits.
        bias: Whether the head has a trained bias.

    Returns:
        Norms [...].

    Raises:
        ValueError: If a number is NaN or infinite (a logit may be -inf), the shapes do not fit, a token is not in the
            vocabulary, or the temperature is not positive.
    """
    z, y, h = np.asarray(logits, dtype=np.float64), np.asarray(tokens), np.asarray(hidden, dtype=np.float64)
    if z.ndim == 0 or h.ndim == 0 or not z.shape[:-1] == y.shape == h.shape[:-1]:
        msg = f"tokens: shape {y.shape} for logits {z.shape} and hidden {h.shape}; pass [...], [..., V] and [..., H]"
        raise ValueError(msg)
    if y.dtype.kind not in "iu" or not ((y >= 0) & (y < z.shape[-1])).all():
        msg = f"tokens: not all are whole numbers from 0 to {z.shape[-1] - 1}"
        raise ValueError(msg)
    if not (math.isfinite(temperature) and temperature > 0.0):
        msg = f"temperature: {temperature!r} is not a positive number"
        raise ValueError(msg)
    real("hidden", h, low=-math.inf)
    highest = z.max(axis=-1, keepdims=True)
    if not np.isfinite(highest).all() or np.isnan(z).any():
        msg = "logits: nan, inf, or a row of -inf only"
        raise ValueError(msg)
    weight = np.exp((z - highest) / temperature)
    p = weight / weight.sum(axis=-1, keepdims=True)
    missing = np.zeros_like(p)
    np.put_along_axis(missing, y[..., None].astype(np.intp), 1.0, axis=-1)
    squares = np.square(h).sum(axis=-1) + (1.0 if bias else 0.0)
    norm: NDArray[np.float64] = np.sqrt(np.square(missing - p).sum(axis=-1) * squares) / temperature
    return norm
