"""NeMo-RL's mismatch metrics of `ClippedPGLossFn`.

Source: NVIDIA-NeMo/RL, nemo_rl/algorithms/loss/loss_functions.py at 006907a95707 (`ClippedPGLossFn.__call__`),
nemo_rl/algorithms/utils.py at 004395398158 (`calculate_kl`, `masked_mean`). NeMo-RL's `prev_logprobs` is log P of the
training kernel, `generation_logprobs` log Q. All are means over the tokens of the whole batch (its microbatches divide
by the batch's token count and are summed), but for `sampling_importance_ratio` at sequence level.
"""

from __future__ import annotations

from typing import Final, Literal

import numpy as np
from numpy.typing import ArrayLike

from kc_otel.offline.compare_log.definitions.packed import Floats, packed

__all__ = ["metrics"]

_OVERFLOW: Final = float(np.log(np.finfo(np.float32).max))
"""Log ratio beyond which exp is infinite in NeMo-RL's float32; it then counts the weight as 0."""


def metrics(
    train: ArrayLike,
    inference: ArrayLike,
    lengths: ArrayLike,
    *,
    kl_type: Literal["k1", "k2", "k3"] = "k3",
    sequence_level: bool = False,
) -> dict[str, float]:
    """Mismatch metrics of a training step.

    Args:
        train: log P(y) under the training kernel (`prev_logprobs`), nats, [N].
        inference: log Q(y) under the generating kernel (`generation_logprobs`), nats, [N].
        lengths: Tokens of each sequence, [S]; 0 is allowed and counts in the sequence-level ratio with weight 1.
        kl_type: `reference_policy_kl_type`: which estimate stands for both KL errors.
        sequence_level: `sequence_level_importance_ratios`: average exp(sum l) over sequences, not exp(l) over tokens.

    Returns:
        With l = log P - log Q: token_mult_prob_error = mean exp|l|; gen_kl_error estimates KL(Q||P), mean(exp(l) - 1 -
        l) for k3; policy_kl_error is the same with the sign of l turned, also averaged over tokens sampled from Q;
        js_divergence_error averages k3 of both sampled-token log-probabilities against the log of their mean
        probability; sampling_importance_ratio = mean exp(l), as without truncation.

    Raises:
        ValueError: If an argument is not as said, or NaN.

    >>> found = metrics([-1.0, -1.0], [-1.0, -1.5], [2])
    >>> round(found["token_mult_prob_error"], 6), round(found["sampling_importance_ratio"], 6)
    (1.324361, 1.324361)
    """
    of = packed(train, inference, lengths)
    l = of.log_ratio  # noqa: E741 - the name that the mathematics has
    with np.errstate(over="ignore", invalid="ignore"):
        mixture = np.logaddexp(of.train, of.inference) - np.log(2.0)
        to_mixture = _kl(of.train - mixture, "k3") + _kl(of.inference - mixture, "k3")
        weights = of.sums(l) if sequence_level else l
        found = {
            "token_mult_prob_error": np.exp(np.abs(l)).mean(),
            "gen_kl_error": _kl(l, kl_type).mean(),
            "policy_kl_error": _kl(-l, kl_type).mean(),
            "js_divergence_error": 0.5 * to_mixture.mean(),
            "sampling_importance_ratio": np.where(weights > _OVERFLOW, 0.0, np.exp(weights)).mean(),
        }
    return {name: float(value) for name, value in found.items()}


def _kl(log_ratio: Floats, kind: str) -> Floats:
    """`calculate_kl` of logr = log reference - log policy, without its clamps, which these metrics switch off."""
    match kind:
        case "k1":
            return -log_ratio
        case "k2":
            return log_ratio**2 / 2.0
        case "k3":
            return np.expm1(log_ratio) - log_ratio
    msg = f"kl_type: {kind!r} is none of k1, k2, k3"
    raise ValueError(msg)
