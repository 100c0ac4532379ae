"""prime-rl's `mismatch_kl` and what its trust region masks.

Source: PrimeIntellect-ai/prime-rl, src/prime_rl/trainer/rl/train.py at 004274ec964f (`mismatch_kl/all`: tokens of all
sequences together); the same repository's loss.py at 008468c12f3f (`mismatch_kl`, the mean over sequences of a mean
over tokens that earlier versions log); src/prime_rl/trainer/rl/loss.py in the fork joanvelja/prime-rl at 07a2c4f446c6
(`default_loss_fn`, `compute_loss`: the masked_* companions, one number per sequence). prime-rl's `trainer_logprobs` is
log P under the weights being trained, `inference_logprobs` log Q. Its statistics use torch's std (n - 1) and median
(the lower of two).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kc_otel.offline.compare_log.definitions.packed import Floats, packed

__all__ = ["masking", "mismatch_kl"]


def mismatch_kl(train: ArrayLike, inference: ArrayLike, lengths: ArrayLike) -> dict[str, float]:
    """`mismatch_kl`: k3 = exp(l) - l - 1 with l = log P - log Q.

    Args:
        train: log P(y) (`trainer_logprobs`), nats, [N].
        inference: log Q(y) (`inference_logprobs`), nats, [N].
        lengths: Tokens of each sequence, [S]; 0 is allowed and counts as 0 in the mean over sequences.

    Returns:
        `mismatch_kl/all/{mean,median,std,min,max}` over tokens, and `mismatch_kl/mean` over sequences.

    Raises:
        ValueError: If an argument is not as said, or NaN.

    >>> found = mismatch_kl([-1.0, -1.0, -1.0], [-1.0, -1.0, -1.5], [2, 1])
    >>> round(found["mismatch_kl/all/mean"], 6), round(found["mismatch_kl/mean"], 6)
    (0.049574, 0.074361)
    """
    of = packed(train, inference, lengths)
    with np.errstate(over="ignore", invalid="ignore"):
        k3 = np.expm1(of.log_ratio) - of.log_ratio
        return _statistics("mismatch_kl/all", k3) | {"mismatch_kl/mean": float(of.means(k3).mean())}


def masking(
    train: ArrayLike,
    inference: ArrayLike,
    lengths: ArrayLike,
    advantages: ArrayLike,
    *,
    mask_low: float = 0.2,
    mask_high: float = 0.2,
) -> dict[str, float]:
    """What the trust region of prime-rl's default loss drops, and the mismatch in and outside of it.

    A token is masked when P(y) - Q(y) > mask_high and its advantage is positive, or P(y) - Q(y) < -mask_low and it is
    not. Each number is a mean over sequences of a mean over their tokens, 0 for a sequence without such tokens.

    Args:
        train: As in `mismatch_kl`.
        inference: As in `mismatch_kl`.
        lengths: As in `mismatch_kl`.
        advantages: Advantage of each token, [N].
        mask_low: `dppo_mask_low`, a difference of probabilities.
        mask_high: `dppo_mask_high`.

    Raises:
        ValueError: If an argument is not as said, or NaN.
    """
    of = packed(train, inference, lengths)
    advantage = np.asarray(advantages, dtype=np.float64)
    if advantage.shape != of.train.shape or np.isnan(advantage).any():
        msg = f"advantages: shape {advantage.shape} is not train's {of.train.shape}, or one of them is nan"
        raise ValueError(msg)
    gap = np.exp(of.train) - np.exp(of.inference)
    positive, negative = advantage > 0.0, advantage < 0.0
    high, low = gap > mask_high, gap < -mask_low
    masked = np.where(positive, high, low)
    with np.errstate(over="ignore", invalid="ignore"):
        k3 = np.expm1(of.log_ratio) - of.log_ratio
    every = np.ones(masked.shape, dtype=np.bool_)
    parts: Mapping[str, tuple[NDArray[Any], NDArray[np.bool_]]] = {
        "masked_mismatch_kl": (k3, masked),
        "unmasked_mismatch_kl": (k3, ~masked),
        "is_masked": (masked, every),
        "is_masked_low": (negative & low, every),
        "is_masked_high": (positive & high, every),
        "masked_advantage_positive": (positive, masked),
        "masked_advantage_negative": (negative, masked),
    }
    return {
        f"{name}/mean": float(
            (of.sums(np.where(where, values, 0.0)) / np.maximum(of.sums(where.astype(np.float64)), 1.0)).mean()
        )
        for name, (values, where) in parts.items()
    }


def _statistics(name: str, values: Floats) -> dict[str, float]:
    middle = np.partition(values, (values.size - 1) // 2)[(values.size - 1) // 2]
    found = {
        "mean": values.mean(),
        "median": middle,
        "std": values.std(ddof=1) if values.size > 1 else np.nan,
        "min": values.min(),
        "max": values.max(),
    }
    return {f"{name}/{statistic}": float(value) for statistic, value in found.items()}
