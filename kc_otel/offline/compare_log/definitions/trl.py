"""TRL's `sampling/*` metrics of `GRPOTrainer`.

Source: huggingface/trl 1.16.0, trl/trainer/grpo_trainer.py (`_generate_and_score_completions`) and grpo_config.py
(`vllm_importance_sampling_*`). TRL's `old_per_token_logps` is log P of the training kernel, `sampling_per_token_logps`
log Q from vLLM. What TRL logs as `importance_sampling_ratio` is the ratio after clipping; `before_clipping` is what it
was clipped from. On several processes TRL averages each process's mean; this is the number of one process.
"""

from __future__ import annotations

from typing import Final, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike

from kc_otel.offline.compare_log.definitions.packed import Floats, Packed, packed

__all__ = ["Mode", "before_clipping", "metrics"]

Mode = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
"""`vllm_importance_sampling_mode`; TRL's default is sequence_mask."""

_RATIO: Final = "sampling/importance_sampling_ratio/"


def metrics(
    train: ArrayLike,
    inference: ArrayLike,
    lengths: ArrayLike,
    *,
    mode: Mode = "sequence_mask",
    clip_min: float | None = None,
    clip_max: float | None = 3.0,
) -> dict[str, float]:
    """What TRL logs.

    The difference is |log P - log Q| over tokens. The ratio is exp(l) of a token, or exp(sum l) of a sequence, then
    either cut to [clip_min, clip_max] (`*_truncate`) or set to 0 outside of it (`*_mask`), and only then averaged: over
    tokens in the token modes, over sequences in the others.

    Args:
        train: log P(y) under the training kernel (`old_per_token_logps`), nats, [N].
        inference: log Q(y) from vLLM (`sampling_per_token_logps`), nats, [N]. A NaN, as vLLM returns for a token that
            it could not score, is left out of the difference and makes a ratio of 1.
        lengths: Tokens of each sequence, [S]; 0 is allowed and has sequence ratio 1.
        mode: `vllm_importance_sampling_mode`.
        clip_min: `vllm_importance_sampling_clip_min`; None for no lower bound.
        clip_max: `vllm_importance_sampling_clip_max`; None for no upper bound.

    Raises:
        ValueError: If an argument is not as said.

    >>> found = metrics([-1.0, -1.0, -0.1], [-1.0, -3.0, -0.1], [2, 1])
    >>> found["sampling/sampling_logp_difference/max"], found["sampling/importance_sampling_ratio/mean"]
    (2.0, 0.5)
    """
    if mode not in get_args(Mode):
        msg = f"mode: {mode!r} is none of {', '.join(get_args(Mode))}"
        raise ValueError(msg)
    low = -np.inf if clip_min is None else clip_min
    high = np.inf if clip_max is None else clip_max
    if not low <= high:
        msg = f"clip_min: {clip_min!r} is not at or below clip_max {clip_max!r}"
        raise ValueError(msg)
    of = packed(train, inference, lengths, nan_inference=True)
    ratio = _ratio(of, sequence=mode.startswith("sequence"))
    if mode.endswith("truncate"):
        ratio = np.clip(ratio, low, high)
    else:
        ratio = np.where((ratio < low) | (ratio > high), 0.0, ratio)
    difference = np.abs(of.log_ratio[~np.isnan(of.inference)])
    found = {
        "sampling/sampling_logp_difference/mean": float(difference.mean()) if difference.size else 0.0,
        "sampling/sampling_logp_difference/max": float(difference.max()) if difference.size else 0.0,
    }
    return found | _summary(ratio)


def before_clipping(
    train: ArrayLike, inference: ArrayLike, lengths: ArrayLike, *, level: Literal["token", "sequence"] = "sequence"
) -> dict[str, float]:
    """min, mean and max of the ratio before TRL clips it: what its own log cannot show.

    Args:
        train: As in `metrics`.
        inference: As in `metrics`.
        lengths: As in `metrics`.
        level: Whether a ratio belongs to a token or to a sequence.

    Raises:
        ValueError: If an argument is not as said.
    """
    if level not in {"token", "sequence"}:
        msg = f"level: {level!r} is neither 'token' nor 'sequence'"
        raise ValueError(msg)
    of = packed(train, inference, lengths, nan_inference=True)
    return _summary(_ratio(of, sequence=level == "sequence"))


def _ratio(of: Packed, *, sequence: bool) -> Floats:
    log_ratio = np.where(np.isnan(of.inference), 0.0, of.log_ratio)
    with np.errstate(over="ignore"):
        return np.exp(of.sums(log_ratio) if sequence else log_ratio)


def _summary(ratio: Floats) -> dict[str, float]:
    return {
        _RATIO + name: float(value)
        for name, value in (("min", ratio.min()), ("mean", ratio.mean()), ("max", ratio.max()))
    }
