"""Rules between estimators: what has to agree with what, and what it means when it does not.

- `k1 - k3 = 1 - E_Q[w]`, for any log ratios over the same tokens; a gap means that the numbers come from different
  tokens, or that one of them was taken after clipping or masking.
- For nearly Gaussian l of deviation s, `TV ~ 0.4 s`, `KL ~ s^2 / 2`, `chi2 ~ s^2`. Exactly, for l ~ N(-s^2/2, s^2)
  under Q, which is the only Gaussian with E_Q[w] = 1: `TV = 2 Phi(s/2) - 1`, `KL = s^2/2`, `chi2 = exp(s^2) - 1`.
  Where they disagree a few tokens carry the drift, and the tail index says how far.

Source: l Gaussian is the log-normal ratio of two Gaussians at distance s; Schulman 2020, Approximating KL Divergence,
for k1 and k3.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from kc_otel.stats._samples import Floats, ratios_of, vector
from kc_otel.stats.tails import TailIndex, pareto_k, tail_reading

__all__ = ["Consistency", "consistency", "gaussian_chi2", "gaussian_kl", "gaussian_tv", "identity_gap"]


@dataclass(frozen=True, slots=True)
class Consistency:
    """Estimates from one sample of log ratios, against what a Gaussian of the same deviation would give.

    Attributes:
        samples: Log ratios.
        deviation: s, their standard deviation, nats.
        tv: Mean (1 - w)_+.
        k1: Mean -l, nats.
        k3: Mean w - 1 - l, nats.
        chi2: Mean (w - 1)^2.
        support_deficit: 1 - mean w, equal to k1 - k3.
        tv_ratio: tv over the Gaussian's; nan for s = 0, as the next two.
        kl_ratio: k3 over the Gaussian's KL.
        chi2_ratio: chi2 over the Gaussian's.
        tail: Pareto k of |l|.
        weight_tail: Pareto k of w.
        agrees: Whether the three ratios are within the tolerance of 1.
        finding: One sentence: agreement, or what disagrees and what that means.
    """

    samples: int
    deviation: float
    tv: float
    k1: float
    k3: float
    chi2: float
    support_deficit: float
    tv_ratio: float
    kl_ratio: float
    chi2_ratio: float
    tail: TailIndex
    weight_tail: TailIndex
    agrees: bool
    finding: str


def identity_gap(k1: float, k3: float, mean_ratio: float) -> float:
    """`k1 - k3 - (1 - E_Q[w])`: 0 up to rounding where the three were taken over the same tokens, unclipped.

    Args:
        k1: Mean -l, nats.
        k3: Mean w - 1 - l, nats.
        mean_ratio: Mean w.

    >>> abs(identity_gap(k1=0.010, k3=0.008, mean_ratio=0.998)) < 1e-12
    True
    """
    return k1 - k3 - (1.0 - mean_ratio)


def gaussian_tv(deviation: float) -> float:
    """`2 Phi(s/2) - 1 = erf(s / sqrt(8))`, about 0.4 s: TV where l ~ N(-s^2/2, s^2) under Q."""
    return math.erf(deviation / math.sqrt(8.0))


def gaussian_kl(deviation: float) -> float:
    """`s^2 / 2`, nats, both ways: KL where l ~ N(-s^2/2, s^2) under Q."""
    return deviation * deviation / 2.0


def gaussian_chi2(deviation: float) -> float:
    """`exp(s^2) - 1`, about s^2: chi2 where l ~ N(-s^2/2, s^2) under Q."""
    square = deviation * deviation
    return math.inf if square > 700.0 else math.expm1(square)


def consistency(log_ratio: ArrayLike, *, tolerance: float = 0.25) -> Consistency:
    """Compares TV, KL and chi2 of a sample with those of a Gaussian of its deviation, and says what a difference means.

    Args:
        log_ratio: l [N] of tokens sampled by the inference kernel, nats; at least two, all finite.
        tolerance: How far a ratio may be from 1. Sampling alone moves them by about 2 / sqrt(N) for s up to 0.5.

    Raises:
        ValueError: If a log ratio is NaN or infinite, there are fewer than two, or the tolerance is not positive.

    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> consistency(rng.normal(-0.005, 0.1, 20_000)).finding
    'TV, KL and chi2 agree with a Gaussian log ratio of deviation 0.0996'
    >>> found = consistency(np.clip(0.01 * rng.standard_t(2, 20_000), -5, 0.5))
    >>> found.agrees, found.tail.k > 0.3
    (False, True)
    """
    if not (math.isfinite(tolerance) and tolerance > 0.0):
        msg = f"tolerance: {tolerance!r} is not a positive number"
        raise ValueError(msg)
    l = vector("log_ratio", log_ratio)  # noqa: E741 - the name of the mathematics
    if l.size < 2:
        msg = f"log_ratio: {l.size} values have no deviation; pass at least two"
        raise ValueError(msg)
    w = ratios_of(l)
    with np.errstate(over="ignore"):
        excess = np.expm1(l)
        chi2 = float(np.square(excess).mean())
    s = float(l.std())
    k1, k3, tv = float(-l.mean()), float((excess - l).mean()), float(np.maximum(-excess, 0.0).mean())
    expected = (gaussian_tv(s), gaussian_kl(s), gaussian_chi2(s))
    measured = (tv, k3, chi2)
    compared = [have / want if want > 0.0 else math.nan for have, want in zip(measured, expected, strict=True)]
    agrees = s == 0.0 or all(abs(ratio - 1.0) <= tolerance for ratio in compared)
    tail, weight_tail = pareto_k(np.abs(l)), pareto_k(l, log=True)
    deficit = 1.0 - float(w.mean())
    return Consistency(
        samples=l.size,
        deviation=s,
        tv=tv,
        k1=k1,
        k3=k3,
        chi2=chi2,
        support_deficit=deficit,
        tv_ratio=compared[0],
        kl_ratio=compared[1],
        chi2_ratio=compared[2],
        tail=tail,
        weight_tail=weight_tail,
        agrees=agrees,
        finding=_finding(l, s, compared, agrees, tail, weight_tail, tolerance),
    )


def _finding(
    l: Floats,  # noqa: E741 - the name of the mathematics
    s: float,
    compared: list[float],
    agrees: bool,
    tail: TailIndex,
    weight_tail: TailIndex,
    tolerance: float,
) -> str:
    if s == 0.0:
        return f"every log ratio is {l[0]:g}: there is nothing to compare"
    if agrees:
        return f"TV, KL and chi2 agree with a Gaussian log ratio of deviation {s:.3g}"
    ratios = ", ".join(f"{name} {ratio:.2g}" for name, ratio in zip(("TV", "KL", "chi2"), compared, strict=True))
    said = f"against a Gaussian log ratio of deviation {s:.3g} the ratios are {ratios}"
    shift = float(l.mean()) + s * s / 2.0
    if abs(shift) > 0.5 * s:
        return f"{said}: the mean of l is off by {shift:+.3g} nats, as where mass was removed or a constant was added"
    if compared[0] < 1.0 - tolerance:
        return f"{said}: a few tokens carry the drift (k of |l| {tail.k:.2f}; of w, {tail_reading(weight_tail.k)})"
    return f"{said}: l is not Gaussian (k of |l| {tail.k:.2f}; of w, {tail_reading(weight_tail.k)})"
