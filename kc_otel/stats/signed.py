"""Advantage-signed drift: which way the kernels' mismatch pushes the policy, `E_Q[(w - 1) A]` split by the sign of A.

Trained without correction, a sample is pushed with `A grad log P`; the policy gradient asks for `w A grad log P`. What
is missing is `(w - 1) A grad log P`, so that `bias = E_Q[f] - E_P[f] = -E_Q[(w - 1) A grad log P]` where P << Q. KL
does not see A and can stay flat while this grows:

- A > 0, mean below zero: Q samples good actions more often than P would; they are pushed up more than P's gradient
  asks;
- A < 0, mean above zero: Q samples bad actions more often than P would; they are pushed down more than P's gradient
  asks, and an action that P finds unlikely already loses log-probability fastest: the direction in which training
  breaks;
- the opposite signs: the action is under-sampled and pushed too little.

`total = E_P[A] - E_Q[A]` is the reward drift in units of advantage, at most `2 A_max TV`; `magnitude = E_Q|(w - 1) A|`
bounds the gradient's bias, `||bias|| <= G magnitude <= 2 A_max G TV`, G the largest score norm. Where Q cannot sample
what P can, P's mass there (the support deficit d) is seen by none of them: add `A_max d` to |total| and `A_max G d` to
the bias.

Source: Xu and Wu 2026, arXiv:2606.07581, importance-ratio form of the policy-gradient bias; importance sampling
identity.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike

from kc_otel.stats._check import real
from kc_otel.stats._samples import Floats, lengths_of, per_sequence, ratios_of, same_length, vector
from kc_otel.stats.binned import Binned
from kc_otel.stats.interval import Interval
from kc_otel.stats.means import mean_interval

__all__ = ["SignedDrift", "signed_drift"]


@dataclass(frozen=True, slots=True)
class SignedDrift:
    """Advantage-signed drift; estimates are plain means over all samples, so that positive + negative = total.

    A side on which observations beyond the cap lie claims nothing (inf or -inf); without any, the open side is for the
    mean with w cut at the cap, as the notes say.

    Attributes:
        positive: E_Q[(w - 1) max(A, 0)]; its lower side holds whatever the tail of w.
        negative: E_Q[(w - 1) min(A, 0)]; its upper side holds whatever the tail of w.
        total: E_Q[(w - 1) A].
        magnitude: E_Q|(w - 1) A|; its lower side holds whatever the tail of w.
        cap: Where w was cut for the intervals.
        beyond: Share of samples with w above the cap.
    """

    positive: Interval
    negative: Interval
    total: Interval
    magnitude: Interval
    cap: float
    beyond: float


def signed_drift(
    log_ratio: ArrayLike,
    advantage: ArrayLike,
    *,
    advantage_max: float,
    alpha_lower: float,
    alpha_upper: float,
    lengths: ArrayLike | None = None,
    unit: str = "token",
    cap: float = 10.0,
) -> SignedDrift:
    """The signed drift of samples from Q, with an empirical-variance interval for each part.

    Tokens of one sequence are dependent and share A; with `unit="sequence"` the ratio is the product W = exp(sum l)
    and the intervals hold for independent sequences.

    Args:
        log_ratio: l [N], nats; of consecutive sequences where `lengths` is given.
        advantage: A [N], or [S] with `lengths`.
        advantage_max: A_max >= |A|.
        alpha_lower: Error probability of each lower side.
        alpha_upper: Error probability of each upper side.
        lengths: Tokens [S] of each sequence.
        unit: `token` or `sequence`; the latter needs `lengths` and one A per sequence.
        cap: Where w is cut for the intervals; above 1.

    Raises:
        ValueError: If an argument is NaN, out of its range, or of the wrong length.

    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> l = rng.normal(-0.005, 0.1, 20_000)
    >>> good = np.where(l < 0, 1.0, -1.0)              # Q over-samples the good actions
    >>> found = signed_drift(l, good, advantage_max=1.0, alpha_lower=0.005, alpha_upper=0.005)
    >>> found.positive.upper < 0.0 and found.negative.upper < 0.0
    True
    """
    if not (math.isfinite(cap) and cap > 1.0):
        msg = f"cap: {cap!r} is not a finite ratio above 1"
        raise ValueError(msg)
    if not (math.isfinite(advantage_max) and advantage_max > 0.0):
        msg = f"advantage_max: {advantage_max!r} is not a positive number"
        raise ValueError(msg)
    log_w, a = _samples(log_ratio, advantage, lengths, unit)
    real("advantage", a, low=-advantage_max, high=advantage_max, what="an advantage")
    w = ratios_of(log_w)
    beyond = w > cap
    up, down = np.maximum(a, 0.0), np.minimum(a, 0.0)
    cut = np.minimum(w, cap) - 1.0
    widest = (cap - 1.0) * advantage_max
    note = f"w cut at {cap:g} in the bounds"

    def part(weight: Floats, low: float, high: float, plain: Floats, *, opens: tuple[bool, bool]) -> Interval:
        """Interval of the cut values; a side that cutting moved inwards claims nothing once something was cut."""
        found = mean_interval(
            Binned.of_samples(weight), low=low, high=high, alpha_lower=alpha_lower, alpha_upper=alpha_upper
        )
        return replace(
            found,
            estimate=float(plain.mean()),
            lower=-math.inf if opens[0] else found.lower,
            upper=math.inf if opens[1] else found.upper,
            note="; ".join(filter(None, (found.note, note))),
        )

    raw = w - 1.0
    cut_up, cut_down = bool((beyond & (a > 0.0)).any()), bool((beyond & (a < 0.0)).any())
    lowest, reach = max(widest, advantage_max), max(widest, advantage_max)
    with np.errstate(invalid="ignore"):
        plain_up, plain_down = (np.where(side == 0.0, 0.0, raw * side) for side in (up, down))
        return SignedDrift(
            positive=part(cut * up, -advantage_max, widest, plain_up, opens=(False, cut_up)),
            negative=part(cut * down, -widest, advantage_max, plain_down, opens=(cut_down, False)),
            total=part(cut * a, -lowest, reach, plain_up + plain_down, opens=(cut_down, cut_up)),
            magnitude=part(
                np.abs(cut * a), 0.0, reach, np.abs(plain_up + plain_down), opens=(False, cut_up or cut_down)
            ),
            cap=cap,
            beyond=float(beyond.mean()),
        )


def _samples(log_ratio: ArrayLike, advantage: ArrayLike, lengths: ArrayLike | None, unit: str) -> tuple[Floats, Floats]:
    """Log ratio and advantage of each unit."""
    if unit not in {"token", "sequence"}:
        msg = f"unit: {unit!r} is neither 'token' nor 'sequence'"
        raise ValueError(msg)
    log_w, a = vector("log_ratio", log_ratio, infinite=True), vector("advantage", advantage)
    if np.isposinf(log_w).any():
        msg = "log_ratio: inf means a token that Q sampled with probability 0; check the inference log-probs"
        raise ValueError(msg)
    if lengths is None:
        if unit == "sequence":
            msg = "lengths: None, but unit='sequence' needs the tokens of each sequence"
            raise ValueError(msg)
        return log_w, same_length("advantage", a, log_w.size, "tokens")
    sizes = lengths_of(lengths, log_w.size)
    if unit == "sequence":
        return per_sequence(log_w, sizes), same_length("advantage", a, sizes.size, "sequences")
    if a.size == sizes.size != log_w.size:
        return log_w, np.repeat(a, sizes)
    return log_w, same_length("advantage", a, log_w.size, "tokens")
