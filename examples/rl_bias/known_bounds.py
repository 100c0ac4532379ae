"""Bounds that only a comparison with the truth asks for: a policy known to its last prefix, weights cut or by token.

They are held beside the bounds of `token_bounds` to `gradient_bounds`, which never need more than a recorder measures.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from examples.rl_bias.sharpest import Bound, horizon_of, real, required, smallest

__all__ = [
    "gradient_bias_from_ratio",
    "gradient_bias_token_corrected",
    "gradient_bias_truncated",
    "ratio_deviation_sequence",
    "sequence_coupling",
    "tv_sequence_worst_case",
]


def tv_sequence_worst_case(token_tv: ArrayLike) -> float:
    """`TV_seq <= 1 - prod_t (1 - tau_t) <= sum_t tau_t`, tau_t a bound on step t's total variation at every prefix.

    Attained when at each step P puts tau_t on a token that Q never samples.

    Source: the maximal coupling of each step keeps the two sequences equal with probability at least 1 - tau_t.

    Args:
        token_tv: tau [T], each in [0, 1].

    Raises:
        ValueError: If an element is not in [0, 1] or there is none.
    """
    tau = real("token_tv", np.atleast_1d(np.asarray(token_tv, dtype=np.float64)), high=1.0, what="a total variation")
    with np.errstate(divide="ignore"):
        return -math.expm1(float(np.log1p(-tau).sum()))


def sequence_coupling(log_ratio: ArrayLike) -> NDArray[np.float64]:
    """`1 - prod_t min(1, w_t)` for each sequence; its mean over Q bounds TV_seq: `TV_seq <= E_Q[1 - prod min(1, w_t)]`.

    Each value lies in [0, 1], so that `mean_interval` applies. The direct estimate E_Q[(1 - W)_+] is never larger; this
    one tells in which sequences the kernels part at all, and bounds the divergence of every prefix too.

    Source: prod_t min(1, w_t) <= min(1, W), and TV_seq = 1 - E_Q[min(1, W)].

    Args:
        log_ratio: l_t = log P(y_t) - log Q(y_t) of tokens sampled from Q [..., T], nats; 0 where there is no token.

    Returns:
        Values [...].

    Raises:
        ValueError: If an element is NaN or inf, or there is none.
    """
    given = np.atleast_1d(np.asarray(log_ratio, dtype=np.float64))
    if not given.size or np.isnan(given).any() or np.isposinf(given).any():
        bad = given[np.isnan(given) | np.isposinf(given)]
        msg = f"log_ratio: {float(bad[0])!r} is not a log ratio" if bad.size else "log_ratio: is empty"
        raise ValueError(msg)
    return np.asarray(-np.expm1(np.minimum(given, 0.0).sum(axis=-1)))


def ratio_deviation_sequence(
    horizon: int, *, log_ratio: float | None = None, ratio_deviation: float | None = None
) -> Bound:
    """The smallest bound on `|W - 1|`: `exp(T lam) - 1` from |l_t| <= lam, `(1 + eta)^T - 1` from |w_t - 1| <= eta.

    Source: W = exp(sum l_t) lies in [exp(-T lam), exp(T lam)]; in the second form in [(1 - eta)^T, (1 + eta)^T]. The
    upper end is farther from 1 in both. Attained when every step has the largest ratio.

    Args:
        horizon: T.
        log_ratio: lam, nats.
        ratio_deviation: eta.

    Raises:
        ValueError: If nothing is given, or a number is out of its range.
    """
    required(log_ratio=log_ratio, ratio_deviation=ratio_deviation)
    steps = horizon_of(horizon)
    known = []
    if log_ratio is not None:
        known.append(Bound(_expm1(steps * real("log_ratio", float(log_ratio))), "log-ratio range"))
    if ratio_deviation is not None:
        eta = real("ratio_deviation", float(ratio_deviation))
        known.append(Bound(_expm1(steps * math.log1p(eta)), "ratio range"))
    return smallest(*known)


def gradient_bias_from_ratio(
    horizon: int,
    *,
    advantage_max: float,
    sequence_score_norm: float,
    log_ratio: float | None = None,
    ratio_deviation: float | None = None,
) -> Bound:
    """`||bias|| <= A_max G_seq (exp(T lam) - 1)`, or `A_max G_seq ((1 + eta)^T - 1)`, whichever is smaller.

    The first needs |l_t| <= lam, the second |w_t - 1| <= eta, both at every prefix.

    A worst case that needs no samples, P << Q, and only useful for short sequences: from `T log(1 + eta)` or T lam =
    log 3 on it is above 2 A_max G_seq, which every bias obeys. `gradient_bias` is never larger.

    Source: Xu and Wu 2026, arXiv:2606.07581; bias = E_Q[(1 - W) f].

    Args:
        horizon: T.
        advantage_max: A_max.
        sequence_score_norm: G_seq.
        log_ratio: lam, nats, at every prefix.
        ratio_deviation: eta, at every prefix.

    Raises:
        ValueError: If neither is given, or a number is out of its range.
    """
    deviation = ratio_deviation_sequence(horizon, log_ratio=log_ratio, ratio_deviation=ratio_deviation)
    return Bound(_norm(advantage_max, sequence_score_norm) * deviation.value, deviation.name)


def gradient_bias_truncated(
    mean_excess: float, *, advantage_max: float, sequence_score_norm: float, support_deficit: float = 0.0
) -> float:
    """Truncated importance weights min(W, C) leave `||bias|| <= A_max G_seq (E_Q[(W - C)_+] + D)`.

    D = 1 - E_Q[W] is what P puts on sequences that Q never samples: 0 where P << Q, and a bias that no weight corrects
    where a truncated sampler breaks it.

    Source: E_Q[min(W, C) f] - E_P[f] = -E_Q[(W - C)_+ f] - E_P[f; outside Q's support].

    Args:
        mean_excess: E_Q[(W - C)_+], C the truncation.
        advantage_max: A_max.
        sequence_score_norm: G_seq.
        support_deficit: D of whole sequences, in [0, 1].

    Raises:
        ValueError: If a number is negative or NaN, or the deficit is above 1.
    """
    lost = real("support_deficit", float(support_deficit), high=1.0, what="a probability")
    return _norm(advantage_max, sequence_score_norm) * (real("mean_excess", float(mean_excess)) + lost)


def gradient_bias_token_corrected(
    token_tv: ArrayLike, *, advantage_max: float, score_norm: float, support_deficit: ArrayLike = 0.0
) -> float:
    """Token ratios w_t instead of W leave `||bias|| <= A_max G sum_t (2 (1 - prod_{s != t} (1 - tau_s)) + d_t)`.

    Each step t is corrected, every other step's mismatch remains; `1 - prod_{s != t} (1 - tau_s) <= sum_{s != t} tau_s`
    makes it O(T^2) at worst. d_t is what P puts on tokens that Q never samples: 0 where P << Q. Attained for T = 2.

    Source: weighting step t's score by w_t samples that step from P, as far as Q can, and the others from Q: the
    maximal coupling with P on the other steps, then add up over t.

    Args:
        token_tv: tau [T]: bound on each step's total variation at every prefix.
        advantage_max: A_max.
        score_norm: G, bound on one token's score.
        support_deficit: d [T], or one number for every step: bound on `1 - E_Q[w_t | prefix]` at every prefix.

    Raises:
        ValueError: If a number is out of its range, or the shapes differ.
    """
    tau = real("token_tv", np.atleast_1d(np.asarray(token_tv, dtype=np.float64)), high=1.0, what="a total variation")
    lost = real("support_deficit", np.asarray(support_deficit, dtype=np.float64), high=1.0, what="a probability")
    if np.shape(lost) not in {(), tau.shape}:
        msg = f"support_deficit: shape {np.shape(lost)} is not that of token_tv, {tau.shape}; or give one number"
        raise ValueError(msg)
    norm = real("advantage_max", float(advantage_max)) * real("score_norm", float(score_norm))
    others = np.where(np.eye(tau.size, dtype=bool), 0.0, tau)
    with np.errstate(divide="ignore"):
        parted = -np.expm1(np.log1p(-others).sum(axis=1))
    return norm * float((2.0 * parted + lost).sum())


def _norm(advantage_max: float, sequence_score_norm: float) -> float:
    return real("advantage_max", float(advantage_max)) * real("sequence_score_norm", float(sequence_score_norm))


def _expm1(exponent: float) -> float:
    return math.expm1(exponent) if exponent < 709.0 else math.inf
