"""RL post-training: how far sampling from the inference kernel biases the policy gradient.

`f(y) = A(y) sum_t grad log P(y_t|y_<t)` with `|A| <= A_max` and a sequence score of norm at most G_seq (T G when each
token's is at most G). Sampling from Q instead of P without correction has the bias `E_Q[f] - E_P[f]`.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from kc_otel.bounds._check import Real, real, required
from kc_otel.bounds.bound import Bound, smallest
from kc_otel.bounds.sequences import ratio_deviation_sequence

__all__ = [
    "clip_budget_share",
    "ess_share",
    "gradient_bias",
    "gradient_bias_from_ratio",
    "gradient_bias_from_tv",
    "gradient_bias_token_corrected",
    "gradient_bias_truncated",
]


def gradient_bias_from_tv(sequence_tv: float, *, advantage_max: float, sequence_score_norm: float) -> float:
    """`||bias|| <= 2 A_max G_seq TV_seq`, whatever P's and Q's supports; attained when f is +v where P > Q, else -v.

    Source: ||sum_y (Q - P) f|| <= max ||f|| sum_y |Q - P| = 2 max ||f|| TV_seq.

    Args:
        sequence_tv: TV_seq, in [0, 1].
        advantage_max: A_max.
        sequence_score_norm: G_seq.

    Raises:
        ValueError: If a number is out of its range.
    """
    tv = real("sequence_tv", float(sequence_tv), high=1.0, what="a total variation")
    return 2.0 * _norm(advantage_max, sequence_score_norm) * tv


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

    A worst case that needs no samples, P << Q, and only useful for short sequences.

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


def gradient_bias(
    horizon: int,
    *,
    advantage_max: float,
    sequence_score_norm: float,
    sequence_tv: float | None = None,
    log_ratio: float | None = None,
    ratio_deviation: float | None = None,
) -> Bound:
    """The smallest bound on the norm of the uncorrected gradient's bias that follows from what is known, and its name.

    Args:
        horizon: T.
        advantage_max: A_max.
        sequence_score_norm: G_seq.
        sequence_tv: TV_seq, in [0, 1].
        log_ratio: Bound on |l_t| over all tokens and prefixes, P << Q, nats.
        ratio_deviation: Bound on |w_t - 1| over all tokens and prefixes, P << Q.

    Raises:
        ValueError: If nothing is given, or a number is out of its range.
    """
    required(sequence_tv=sequence_tv, log_ratio=log_ratio, ratio_deviation=ratio_deviation)
    norms = {"advantage_max": advantage_max, "sequence_score_norm": sequence_score_norm}
    known = [Bound(2.0 * _norm(advantage_max, sequence_score_norm), "total variation is at most 1")]
    if sequence_tv is not None:
        known.insert(0, Bound(gradient_bias_from_tv(sequence_tv, **norms), "total variation"))
    if log_ratio is not None or ratio_deviation is not None:
        known.append(gradient_bias_from_ratio(horizon, log_ratio=log_ratio, ratio_deviation=ratio_deviation, **norms))
    return smallest(*known)


def gradient_bias_truncated(mean_excess: float, *, advantage_max: float, sequence_score_norm: float) -> float:
    """Truncated importance weights min(W, C) leave `||bias|| <= A_max G_seq E_Q[(W - C)_+]`; P << Q.

    Source: E_Q[min(W, C) f] - E_P[f] = -E_Q[(W - C)_+ f].

    Args:
        mean_excess: E_Q[(W - C)_+], C the truncation.
        advantage_max: A_max.
        sequence_score_norm: G_seq.

    Raises:
        ValueError: If a number is negative or NaN.
    """
    return _norm(advantage_max, sequence_score_norm) * real("mean_excess", float(mean_excess))


def gradient_bias_token_corrected(token_tv: ArrayLike, *, advantage_max: float, score_norm: float) -> float:
    """Token ratios w_t instead of W leave `||bias|| <= 2 A_max G (T - 1) sum_s tau_s`, O(T^2) at worst.

    Each step t is corrected, every other step's mismatch remains: the sum over t of the other steps' tau_s.

    Source: weighting step t's score by w_t samples that step from P and the others from Q; add up over t.

    Args:
        token_tv: tau [T]: bound on each step's total variation at every prefix.
        advantage_max: A_max.
        score_norm: G, bound on one token's score.

    Raises:
        ValueError: If a number is out of its range.
    """
    tau = real("token_tv", np.atleast_1d(np.asarray(token_tv, dtype=np.float64)), high=1.0, what="a total variation")
    norm = real("advantage_max", float(advantage_max)) * real("score_norm", float(score_norm))
    return 2.0 * norm * (tau.size - 1) * float(tau.sum())


def ess_share(chi2: Real) -> Real:
    """Effective sample size of importance weighting: `ESS / n = 1 / (1 + chi2)`, chi2 = E_Q[W^2] - 1.

    Source: Kong 1992, A Note on Importance Sampling using Standardized Weights.

    Args:
        chi2: Chi-square divergence.

    Raises:
        ValueError: If it is negative or NaN.
    """
    return 1.0 / (1.0 + real("chi2", chi2, infinite=True))


def clip_budget_share(mean_abs_log_ratio: Real, clip: float) -> Real:
    """`E|l| / log(1 + clip)`: share of the PPO clip range that the kernels spend before the policy has moved.

    PPO clips r = (pi_new_train / pi_old_train) (pi_old_train / pi_old_inf); the second factor is the kernel pair alone.

    Source: Xu and Wu 2026, arXiv:2606.07581.

    Args:
        mean_abs_log_ratio: E|l|, nats.
        clip: epsilon, with ratios kept in [1 - epsilon, 1 + epsilon].

    Raises:
        ValueError: If the mean is negative or NaN, or the clip range is not positive.
    """
    if not (math.isfinite(clip) and clip > 0.0):
        msg = f"clip: {clip!r} is not a positive number"
        raise ValueError(msg)
    return real("mean_abs_log_ratio", mean_abs_log_ratio) / math.log1p(clip)


def _norm(advantage_max: float, sequence_score_norm: float) -> float:
    return real("advantage_max", float(advantage_max)) * real("sequence_score_norm", float(sequence_score_norm))
