"""verl's `rollout_corr/*`: training policy against rollout policy.

Source: verl-project/verl, verl/trainer/ppo/rollout_corr_helper.py at 20c30bf8b70e (`compute_offpolicy_metrics`,
`compute_rollout_correction_weights`, `compute_is_metrics`), verl/utils/torch_functional.py at 0db13434d046
(`masked_mean`). verl's `old_log_prob` is log P of the training kernel, `rollout_log_prob` log Q; kl and k3_kl are means
over all tokens, the perplexities means over sequences of a mean over tokens. A sequence that the mask leaves no token
of has mean log-probability 0 there, hence perplexity 1, and counts.
"""

from __future__ import annotations

from typing import Final, Literal

import numpy as np
from numpy.typing import ArrayLike

from kc_otel.offline.compare_log.definitions.packed import Floats, Packed, packed

__all__ = ["SAFETY_BOUND", "importance_weights", "offpolicy_metrics"]

SAFETY_BOUND: Final = 20.0
"""verl exponentiates log ratios within +-20 only, except in k3_kl and the perplexities."""

_PREFIX: Final = "rollout_corr/"


def offpolicy_metrics(train: ArrayLike, inference: ArrayLike, lengths: ArrayLike) -> dict[str, float]:
    """`compute_offpolicy_metrics`: KL, perplexities and chi-square, which need no threshold.

    Args:
        train: log P(y) under the training kernel (`old_log_probs`), nats, [N].
        inference: log Q(y) under the rollout kernel (`rollout_log_probs`), nats, [N].
        lengths: Tokens of each sequence, [S]; 0 is allowed.

    Returns:
        By verl's name. With l = log P - log Q, means over tokens: kl = mean(-l), k3_kl = mean(exp(l) - l - 1),
        chi2_token = mean(exp(2 l)) - 1. With m each sequence's mean log-probability, means over sequences: training_ppl
        and rollout_ppl = mean(exp(-m)), *_log_ppl = mean(-m), log_ppl_diff = mean(m_Q - m_P), ppl_ratio =
        mean(exp(m_Q - m_P)), chi2_seq = mean(exp(2 sum l)) - 1.

    Raises:
        ValueError: If an argument is not as said, or NaN.

    >>> found = offpolicy_metrics([-1.0, -2.0, -0.5], [-1.0, -1.5, -0.5], [2, 1])
    >>> round(found["rollout_corr/kl"], 6), round(found["rollout_corr/log_ppl_diff"], 6)
    (0.166667, 0.125)
    """
    of = packed(train, inference, lengths)
    with np.errstate(over="ignore", invalid="ignore"):
        mean_train, mean_inference = of.means(of.train), of.means(of.inference)
        difference = mean_inference - mean_train
        squared = np.exp(_safe(of.log_ratio)) ** 2
        squared_seq = np.exp(2.0 * _safe(of.sums(of.log_ratio)))
        found = {
            "kl": (-of.log_ratio).mean(),
            "k3_kl": (np.expm1(of.log_ratio) - of.log_ratio).mean(),
            "training_ppl": np.exp(-mean_train).mean(),
            "training_log_ppl": (-mean_train).mean(),
            "rollout_ppl": np.exp(-mean_inference).mean(),
            "rollout_log_ppl": (-mean_inference).mean(),
            "log_ppl_diff": difference.mean(),
            "log_ppl_abs_diff": np.abs(difference).mean(),
            "log_ppl_diff_max": difference.max(),
            "log_ppl_diff_min": difference.min(),
            "ppl_ratio": np.exp(difference).mean(),
            "chi2_token": squared.mean() - 1.0,
            "chi2_seq": squared_seq.mean() - 1.0,
        }
    return {_PREFIX + name: float(value) for name, value in found.items()}


def importance_weights(
    train: ArrayLike,
    inference: ArrayLike,
    lengths: ArrayLike,
    *,
    level: Literal["token", "sequence"] = "token",
    threshold: float = 2.0,
) -> dict[str, float]:
    """`rollout_is_*`: statistics of the importance weights that verl applies, truncated from above at a threshold.

    Weights are exp(l) of a token or exp(sum l) of a sequence, l within +-20, cut at `threshold`; every token of a
    sequence then carries its sequence's weight, so that means weigh sequences by their length. Only max, min and the
    fractions look at weights before they are cut, and max and min do so for level `sequence` alone.

    Args:
        train: log P(y), nats, [N].
        inference: log Q(y), nats, [N].
        lengths: Tokens of each sequence, [S]; 0 is allowed, such a sequence has mean weight 0.
        level: `rollout_is`: whether a weight belongs to a token or to a sequence.
        threshold: `rollout_is_threshold`, above 0; verl's default is 2.

    Raises:
        ValueError: If an argument is not as said, or NaN.
    """
    if level not in {"token", "sequence"}:
        msg = f"level: {level!r} is neither 'token' nor 'sequence'"
        raise ValueError(msg)
    if not 0.0 < threshold < np.inf:
        msg = f"threshold: {threshold!r} is not a finite number above 0"
        raise ValueError(msg)
    of = packed(train, inference, lengths)
    log_weight = of.log_ratio if level == "token" else of.sums(of.log_ratio)
    with np.errstate(over="ignore"):
        raw = np.exp(_safe(log_weight if level == "token" else np.repeat(log_weight, of.lengths)))
    weights = np.minimum(raw, threshold)
    if level == "token":
        largest, smallest = weights.max(), weights.min()
        high, low = (raw > threshold).mean(), (raw < 1.0 / threshold).mean()
    else:
        largest, smallest = np.exp(min(log_weight.max(), SAFETY_BOUND)), np.exp(log_weight.min())
        high, low = (log_weight > np.log(threshold)).mean(), (log_weight < -np.log(threshold)).mean()
    found = {
        "mean": weights.mean(),
        "max": largest,
        "min": smallest,
        "std": weights.std() if weights.size > 1 else 0.0,
        "ratio_fraction_high": high,
        "ratio_fraction_low": low,
        "eff_sample_size": _effective(weights),
        **_by_sequence(of, raw, weights, threshold),
    }
    return {f"{_PREFIX}rollout_is_{name}": float(value) for name, value in found.items()}


def _effective(weights: Floats) -> float:
    """Effective sample size as a share: 1 / mean((w / mean w)^2)."""
    normalised = weights / (weights.mean() + 1e-8)
    return float(1.0 / (normalised**2).mean())


def _by_sequence(of: Packed, raw: Floats, weights: Floats, threshold: float) -> dict[str, float]:
    means, raw_means = of.means(weights), of.means(raw)
    return {
        "seq_mean": means.mean(),
        "seq_std": means.std(ddof=1) if means.size > 1 else 0.0,
        "seq_max": means.max(),
        "seq_min": means.min(),
        "seq_max_deviation": np.abs(means - 1.0).max(),
        "seq_fraction_high": (raw_means > threshold).mean(),
        "seq_fraction_low": (raw_means < 1.0 / threshold).mean(),
    }


def _safe(log_ratio: Floats) -> Floats:
    return np.clip(log_ratio, -SAFETY_BOUND, SAFETY_BOUND)
