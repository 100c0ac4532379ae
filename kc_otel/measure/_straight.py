"""The quantities of full logits without shortcuts: for tensors on a device, and for what the fast path cannot take.

Formulas as in `logits`, with every product and logarithm guarded, so that -inf and differences of any size come out as
they should: a token outside of both distributions counts for nothing, one outside of a single one makes the half range
and one of the divergences infinite.
"""

from __future__ import annotations

import math
from typing import Any

__all__ = ["straight"]


def straight(xp: Any, z_train: Any, z_inference: Any) -> Any:
    """Quantities of `logits.LOGITS` for logits [rows, vocab]: float64 [rows, 7], NaN in rows that are not valid.

    Args:
        xp: `numpy` or `torch`, whichever the logits are of; both name everything here alike.
        z_train: Logits of the training kernel, float32 or float64.
        z_inference: Logits of the inference kernel.
    """
    top_train, top_inference = xp.amax(z_train, -1)[:, None], xp.amax(z_inference, -1)[:, None]
    valid = xp.isfinite(top_train[:, 0]) & xp.isfinite(top_inference[:, 0])
    absent = (z_train == -math.inf) & (z_inference == -math.inf)
    gap = z_train - z_inference
    half_range = (xp.amax(xp.where(absent, -math.inf, gap), -1) - xp.amin(xp.where(absent, math.inf, gap), -1)) / 2
    log_p, log_q = z_train - top_train, z_inference - top_inference
    p, q = xp.exp(log_p), xp.exp(log_q)
    sum_train, sum_inference = p.sum(-1)[:, None], q.sum(-1)[:, None]
    p, q, log_q = p / sum_train, q / sum_inference, log_q - xp.log(sum_inference)
    d = xp.where(absent, 0.0, gap - ((top_train - top_inference) + xp.log(sum_train / sum_inference)))

    # q expm1(d) keeps its digits where p and q nearly agree, p - q where they do not.
    rises = d > 1.0
    u = xp.expm1(d.clip(max=1.0))
    change = xp.where(rises, p - q, q * u)
    mixture = xp.log1p(u / 2)  # log of ((p + q)/2) / q
    beyond = math.log(2.0) - xp.log1p(xp.exp(-d.clip(min=1.0)))  # log of p / ((p + q)/2), where d is large
    p_js = _product(xp, p, xp.where(rises, beyond, d - mixture))
    q_js = _product(xp, q, xp.where(rises, d - beyond, mixture))
    p_d, q_d = _product(xp, p, d), _product(xp, q, d)
    # H(P) - H(Q) = -sum(p d + (p - q) log q); where q is 0 that is -p log p.
    log_p = log_p - xp.log(sum_train)
    entropy = xp.where(q > 0, p_d + _product(xp, change, log_q), _product(xp, p, log_p))
    total = change.sum(-1)
    # The total is 0 but for rounding, which log q would weigh: take its share out again.
    rounding = total * _product(xp, q, log_q).sum(-1)
    values = xp.stack(
        [
            half_range,
            abs(change).sum(-1) / 2,
            p_d.sum(-1) - total,
            total - q_d.sum(-1),
            (p_js - q_js).sum(-1) / 2,
            xp.where(z_train.argmax(-1) != z_inference.argmax(-1), 1.0, 0.0),
            rounding - entropy.sum(-1),
        ],
        -1,
    )
    return xp.where(valid[:, None], values, math.nan)


def _product(xp: Any, weight: Any, value: Any) -> Any:
    # 0 times infinity is 0 here: what has no probability contributes nothing.
    return xp.where(weight == 0, 0.0, weight * value)
