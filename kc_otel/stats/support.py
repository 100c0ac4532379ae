"""Support deficit: the share of the training kernel's probability on what the inference kernel cannot sample.

`E_Q[w] = P(support of Q)`, so `1 - E_Q[w]` is the mass that top-k, top-p or underflow removed. Importance weights
cannot bring it back. `TV(P, Q) >= 1 - E_Q[w]`, with equality where Q is P cut to its support and renormalised.

Source: importance sampling identity; `TV = E_Q[(1 - w)_+] >= E_Q[1 - w]`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kc_otel.stats._check import Real, real
from kc_otel.stats.binned import Binned
from kc_otel.stats.interval import Interval, affine
from kc_otel.stats.means import capped_mean_interval

__all__ = ["RemovedMass", "kept_by_top_k", "kept_by_top_p", "removed_mass", "support_deficit", "tv_from_deficit"]

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]


def support_deficit(ratio: Binned, *, cap: float = 10.0, alpha_lower: float, alpha_upper: float) -> Interval:
    """Interval for `1 - E_Q[w]` from importance ratios of sampled tokens, w cut at the cap.

    Cutting makes E_Q[w] smaller and the deficit larger, so the upper side holds for the deficit itself whatever the
    tail of w. The lower side is for `1 - E_Q[min(w, cap)]`, the deficit itself while w stays below the cap; once an
    observation is beyond it, only the trivial 0 is claimed. The estimate is the plain `1 - mean w`, negative by chance
    where the deficit is small.

    Args:
        ratio: w of sampled tokens, or W of sequences; samples (`Binned.of_samples(np.exp(l))`) or a histogram.
        cap: Where w is cut, above 1; it is in the note.
        alpha_lower: Error probability of the lower side.
        alpha_upper: Error probability of the upper side.

    Raises:
        ValueError: If an alpha is not in (0, 1), the cap is not above 1, or an edge is NaN.

    >>> import numpy as np
    >>> w = np.full(10_000, 0.95)                # top-p 0.95 and nothing else
    >>> found = support_deficit(Binned.of_samples(w), alpha_lower=0.005, alpha_upper=0.005)
    >>> round(found.estimate, 3), found.lower > 0.03, found.upper < 0.07
    (0.05, True, True)
    """
    if not (math.isfinite(cap) and cap > 1.0):
        msg = f"cap: {cap!r} is not a finite ratio above 1"
        raise ValueError(msg)
    mean = capped_mean_interval(
        ratio, low=0.0, high=math.inf, cap=cap, alpha_lower=alpha_upper, alpha_upper=alpha_lower
    )
    if not mean.samples:
        return replace(mean, lower=0.0, upper=1.0)
    deficit = affine(mean, -1.0, 1.0)
    said = "" if deficit.lower > -math.inf else f"; w above the cap {cap:g} was seen: only 0 is claimed below"
    return replace(
        deficit,
        lower=min(max(deficit.lower, 0.0), 1.0),
        upper=min(max(deficit.upper, 0.0), 1.0),
        note=f"w cut at {cap:g}: the upper bound holds for any tail of w, the lower one for w below the cap{said}",
    )


def tv_from_deficit(deficit: Real) -> Real:
    """`TV(P, Q) >= max(0, deficit)`: a total variation reported below a lower bound of the deficit cannot be.

    Args:
        deficit: Support deficit, or a lower bound of it; at most 1. A negative estimate says nothing.

    Raises:
        ValueError: If it is NaN or above 1.
    """
    bound: Real = np.maximum(real("deficit", deficit, low=-math.inf, high=1.0), 0.0)
    return bound


@dataclass(frozen=True, slots=True, eq=False)
class RemovedMass:
    """Exact probability of the training kernel on tokens that the sampler removed, by what removed them.

    Attributes:
        top_k: Outside the k most probable tokens of the inference kernel [...].
        top_p: Inside those, but outside the nucleus [...].
        underflow: Kept by both, yet of probability 0 under the inference kernel [...].
    """

    top_k: Floats
    top_p: Floats
    underflow: Floats

    @property
    def total(self) -> Floats:
        """The support deficit `1 - E_Q[w]` of each row."""
        return self.top_k + self.top_p + self.underflow


def removed_mass(
    train: ArrayLike, inference: ArrayLike, *, top_k: int | None = None, top_p: float | None = None
) -> RemovedMass:
    """Mass of P that each of Q's truncations removed: the exact support deficit of full rows, attributed.

    The sampler takes the k most probable tokens first and the nucleus of what is left after renormalising, as vLLM and
    transformers do.

    Args:
        train: P [..., V], probabilities.
        inference: Q [..., V], probabilities before truncation (after temperature).
        top_k: k; None for all tokens.
        top_p: p; None for all tokens.

    Raises:
        ValueError: If a row is not a distribution, the shapes differ, or k or p is out of range.

    >>> found = removed_mass([0.5, 0.3, 0.15, 0.05], [0.5, 0.3, 0.15, 0.05], top_k=3, top_p=0.8)
    >>> [round(float(part), 2) for part in (found.top_k, found.top_p, found.underflow)]
    [0.05, 0.15, 0.0]
    """
    p, q = _rows("train", train), _rows("inference", inference)
    if p.shape != q.shape:
        msg = f"inference: shape {q.shape} is not that of train, {p.shape}"
        raise ValueError(msg)
    first = np.ones(q.shape, dtype=np.bool_) if top_k is None else kept_by_top_k(q, top_k)
    kept = np.where(first, q, 0.0)
    kept /= kept.sum(axis=-1, keepdims=True)
    second = first if top_p is None else first & kept_by_top_p(kept, top_p)
    return RemovedMass(
        top_k=np.where(first, 0.0, p).sum(axis=-1),
        top_p=np.where(first & ~second, p, 0.0).sum(axis=-1),
        underflow=np.where(second & (q == 0.0), p, 0.0).sum(axis=-1),
    )


def kept_by_top_k(probabilities: ArrayLike, k: int) -> Mask:
    """Whether a token is among the k most probable of its row [..., V]; ties with the k-th stay, as in vLLM.

    Raises:
        ValueError: If k is not a whole number of at least 1.
    """
    if isinstance(k, bool) or int(k) != k or k < 1:
        msg = f"top_k: {k!r} is not a whole number of at least 1; leave it out for all tokens"
        raise ValueError(msg)
    p = np.asarray(probabilities, dtype=np.float64)
    if k >= p.shape[-1]:
        return np.ones(p.shape, dtype=np.bool_)
    least = np.partition(p, p.shape[-1] - k, axis=-1)[..., [p.shape[-1] - k]]
    return np.asarray(p >= least)


def kept_by_top_p(probabilities: ArrayLike, p: float) -> Mask:
    """Whether a token is in the nucleus of its row [..., V]: the fewest most probable ones with a mass of at least p.

    Source: Holtzman, Buys, Du, Forbes and Choi 2020, The Curious Case of Neural Text Degeneration.

    Raises:
        ValueError: If p is not in (0, 1].
    """
    if not 0.0 < p <= 1.0:
        msg = f"top_p: {p!r} is not in (0, 1]"
        raise ValueError(msg)
    probability = np.asarray(probabilities, dtype=np.float64)
    order = np.argsort(-probability, axis=-1, kind="stable")
    ranked = np.take_along_axis(probability, order, -1)
    before = np.cumsum(ranked, axis=-1) - ranked
    kept = np.empty(probability.shape, dtype=np.bool_)
    # A rounding error of the sum must not keep a token that the nucleus does without.
    np.put_along_axis(kept, order, (before < p - 1e-12) if p < 1.0 else np.ones_like(before, dtype=np.bool_), -1)
    return kept


def _rows(name: str, values: ArrayLike) -> Floats:
    rows = np.asarray(values, dtype=np.float64)
    if rows.ndim == 0:
        msg = f"{name}: {values!r} is a number; pass rows of probabilities [..., V]"
        raise ValueError(msg)
    real(name, rows, high=1.0 + 1e-6, what="a probability")
    off = np.abs(rows.sum(axis=-1) - 1.0)
    if (off > 1e-3).any():
        msg = f"{name}: a row adds up to {float(rows.sum(axis=-1).flat[int(off.argmax())])!r}, not 1"
        raise ValueError(msg)
    return rows
