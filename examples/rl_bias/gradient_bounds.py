"""RL post-training: how far sampling from the inference kernel biases the policy gradient.

`f(y) = A(y) sum_t grad log P(y_t|y_<t)` with `|A| <= A_max` and a sequence score of norm at most G_seq (T G when each
token's is at most G). Sampling from Q instead of P without correction has the bias `E_Q[f] - E_P[f]`.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from examples.rl_bias.sequence_bounds import sequence_tv as tv_of_sequence
from examples.rl_bias.sharpest import Bound, Real, horizon_of, real, required, smallest


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
    return 2.0 * _norm(advantage_max, sequence_score_norm) * _tv(sequence_tv)


def gradient_bias_from_chi2(sequence_chi2: float, *, second_moment: float) -> float:
    """`||bias|| <= sqrt(lambda_max(F) chi2_seq)`, F = E_Q[f f'], P << Q: from what is measured, and no horizon.

    Source: for any direction u, `<u, b> = E_Q[(1 - W) <u, f>]` and Cauchy-Schwarz. lambda_max of F is that of the
    Gram matrix of the sequences' A times score, or of their sketches (`largest_second_moment`).

    Args:
        sequence_chi2: E_Q[W^2] - 1.
        second_moment: lambda_max(F), in the unit of (an advantage times a score's norm) squared.

    Raises:
        ValueError: If a number is negative or NaN.
    """
    chi2 = real("sequence_chi2", float(sequence_chi2), infinite=True)
    return math.sqrt(real("second_moment", float(second_moment)) * chi2)


def largest_second_moment(advantage: ArrayLike, scores: ArrayLike) -> float:
    """Estimate lambda_max(F), F = E_Q[f f'], from sequences' advantages [n] and scores or their sketches [n, k].

    Raises:
        ValueError: If shapes do not fit.
    """
    weight, of = np.asarray(advantage, dtype=np.float64).ravel(), np.asarray(scores, dtype=np.float64)
    if of.ndim != 2 or of.shape[0] != weight.size or not weight.size:
        raise ValueError(f"scores: shape {of.shape} with {weight.size} advantages; give one row for each")
    f = weight[:, None] * of
    gram = f.T @ f if f.shape[1] <= f.shape[0] else f @ f.T
    return max(float(np.linalg.eigvalsh(gram / weight.size)[-1]), 0.0)


def gradient_bias(
    horizon: int,
    *,
    advantage_max: float,
    sequence_score_norm: float,
    sequence_tv: float | None = None,
    half_range: float | None = None,
    log_ratio: float | None = None,
    ratio_deviation: float | None = None,
    ratio_range: tuple[float, float] | None = None,
    token_tv_worst: float | None = None,
    token_tv_mean: float | None = None,
    token_kl_mean: float | None = None,
    token_chi2_worst: float | None = None,
    coupling_mean: float | None = None,
    sequence_chi2: float | None = None,
) -> Bound:
    """The smallest bound on the norm of the uncorrected gradient's bias that follows from what is known, and its name.

    Whatever bounds TV_seq bounds the bias. From a (log-)ratio range, it is never worse than the paper's form, `A_max
    G_seq (exp(T lam) - 1)` or `A_max G_seq ((1 + eta)^T - 1)`, for any T: with x = exp(lam), 2 (1 - (2/(1+x))^T)
    <= 2 (x^T - 1)/(x^T + 1) <= x^T - 1, because ((1+x)/2)^T <= (1 + x^T)/2; and 2 (1 - (1 - eta/2)^T) <= T eta
    <= (1 + eta)^T - 1.

    Args:
        horizon: T.
        advantage_max: A_max.
        sequence_score_norm: G_seq.
        sequence_tv: TV_seq, in [0, 1].
        half_range: Bound on the half range of the logit difference at every prefix.
        log_ratio: Bound on |l_t| over all tokens and prefixes, P << Q, nats.
        ratio_deviation: Bound eta on |w_t - 1| over all tokens and prefixes, P << Q; the ratio range (eta, eta).
        ratio_range: (a, b) with 1 - a <= w_t <= 1 + b over all tokens and prefixes, P << Q.
        token_tv_worst: Bound on a step's total variation at every prefix.
        token_tv_mean: Mean total variation of a step over Q's rollouts.
        token_kl_mean: Mean KL(Q||P) of a step over Q's rollouts (or KL(P||Q) over P's), nats.
        token_chi2_worst: Bound on a step's chi-square at every prefix, P << Q.
        coupling_mean: E_Q[1 - prod_t min(1, w_t)].
        sequence_chi2: E_Q[W^2] - 1, P << Q.

    Raises:
        ValueError: If nothing is given, or a number is out of its range.
    """
    required(
        sequence_tv=sequence_tv,
        half_range=half_range,
        log_ratio=log_ratio,
        ratio_deviation=ratio_deviation,
        ratio_range=ratio_range,
        token_tv_worst=token_tv_worst,
        token_tv_mean=token_tv_mean,
        token_kl_mean=token_kl_mean,
        token_chi2_worst=token_chi2_worst,
        coupling_mean=coupling_mean,
        sequence_chi2=sequence_chi2,
    )
    steps, scale = horizon_of(horizon), 2.0 * _norm(advantage_max, sequence_score_norm)
    known = []
    if sequence_tv is not None:
        known.append(Bound(_tv(sequence_tv), "total variation"))
    ends = [] if ratio_range is None else [ratio_range]
    if ratio_deviation is not None:
        eta = real("ratio_deviation", float(ratio_deviation))
        ends.append((min(1.0, eta), eta))
    known.extend(tv_of_sequence(steps, ratio_range=pair) for pair in ends)
    known.append(
        tv_of_sequence(
            steps,
            half_range=half_range,
            log_ratio=log_ratio,
            token_tv_worst=token_tv_worst,
            token_tv_mean=token_tv_mean,
            token_kl_mean=token_kl_mean,
            token_chi2_worst=token_chi2_worst,
            coupling_mean=1.0 if coupling_mean is None else coupling_mean,
            sequence_chi2=sequence_chi2,
        )
    )
    best = smallest(*known)
    return Bound(scale * best.value, best.name if best.value < 1.0 else "total variation is at most 1")


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
        raise ValueError(f"clip: {clip!r} is not a positive number")
    return real("mean_abs_log_ratio", mean_abs_log_ratio) / math.log1p(clip)


def _tv(sequence_tv: float) -> float:
    return real("sequence_tv", float(sequence_tv), high=1.0, what="a total variation")


def _norm(advantage_max: float, sequence_score_norm: float) -> float:
    return real("advantage_max", float(advantage_max)) * real("sequence_score_norm", float(sequence_score_norm))
