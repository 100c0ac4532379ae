"""Remarks of a gate on numbers that it judges: columns that look swapped or copied, and drift like a setting."""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kc_otel.record.measure.blocks import Block
from kc_otel.record.measure.rounding import rounded_column
from kc_otel.record.measure.same_tokens import not_told
from kc_otel.record.measure.sampled import saturated

_SWAPPED: Final = (6.0, 3.0, math.log(1000.0))
"""Standard errors by which a mean P/Q is surely above 1, those within which that of Q/P is 1, and cut of both, nats.
Of real kernels from bfloat16 to int8 it is within 2.1; with the columns swapped 8.9 to 22 above."""
_EVEN: Final = (0.5, 1e-5, 0.1, 100, 0.3)
"""Nats from which both sides are unsure of a token, between which the median |l| of those lies, tokens that a side is
surer of than by that median, at least, and share of it that a fifth of them exceeds where something was added after the
kernels: what changes logits leaves next to nothing of a token that has all of the mass, 0.05 of it in real kernels."""
_LIKE_A_SETTING: Final = (512, 0.25, 0.85, 0.3)
"""Tokens from which drift is asked whether it looks like a temperature; share of its square that means over equally
likely tokens explain; share of the likely tokens of which one side is surer; and share of the unlikely ones of which
the same side is less sure. Of real kernels from bfloat16 to an fp8 cache at most 0.05 and 0.74; of simulated ones in
four bits 0.15 and 0.55; of log-probabilities on a grid of 1/16 0.19 and 0.57. Of a kernel that computes something else
at some positions 0.5 to 0.95, but both sides are equally sure there. With T = 0.8 and noise as of fp8 0.35 and 0.96."""
_LIKELY, _UNLIKELY = math.log(0.6), math.log(0.3)
_BIN_TOKENS: Final = 30


def remarks(block: Block) -> str:
    """Return what to look at before a verdict on these rows is believed; empty for nothing."""
    log_w = saturated(block.exact_log_w)
    copied = rounded_column(block) or _even(block, log_w)
    found = [swapped(log_w), copied, like_a_setting(block, log_w), not_told(block)]
    return "; ".join(said for said in found if said)


def swapped(log_w: NDArray[np.float64]) -> str:
    """Say that the tokens look like samples of P: the mean of P/Q is above 1, and that of Q/P is 1; else empty."""
    ratios = [np.exp(np.clip(side, -_SWAPPED[2], _SWAPPED[2])) for side in (log_w, -log_w)]
    mean, other = (float(ratio.mean()) for ratio in ratios)
    errors = [float(ratio.std()) / math.sqrt(log_w.size) for ratio in ratios]
    if mean - 1.0 <= _SWAPPED[0] * errors[0] or abs(other - 1.0) > _SWAPPED[1] * errors[1]:
        return ""
    return (
        f"the mean of P/Q over {log_w.size:,} tokens is {mean:.4f}, significantly above 1, and that of Q/P "
        f"{other:.4f}: the columns look swapped, or P sampled these tokens, or Q's numbers were computed "
        "anew after sampling"
    )


def like_a_setting(block: Block, log_w: NDArray[np.float64]) -> str:
    """Say that the drift depends on how likely a token is, and on little else; empty where it does not."""
    p, q = (np.minimum(side.astype(np.float64), 0.0) for side in (block.train, block.inference))
    larger, smaller = np.maximum(p, q), np.minimum(p, q)
    likely, unlikely = (larger > _LIKELY) & (larger < 0.0) & (smaller < -1e-4), larger < _UNLIKELY
    least = _LIKE_A_SETTING[0]
    if np.count_nonzero(likely) < least or np.count_nonzero(unlikely) < least:
        return ""
    surer, raised = float(np.mean(log_w[likely] > 0.0)), float(np.mean(log_w[unlikely] > 0.0))
    training = surer > 0.5
    if max(surer, 1.0 - surer) < _LIKE_A_SETTING[2] or (not training and raised < _LIKE_A_SETTING[3]):
        return ""
    capped = np.clip(log_w, -3.0, 3.0)
    by_likelihood = np.digitize((p + q) / 2.0, -np.geomspace(1e-3, 12.0, 25))
    count, total = np.bincount(by_likelihood), np.bincount(by_likelihood, capped)
    enough = count >= _BIN_TOKENS
    share = float((total[enough] ** 2 / count[enough]).sum() / np.square(capped).sum())
    if share < _LIKE_A_SETTING[1]:
        return ""
    side = "training" if training else "inference"
    return (
        f"{share:.0%} of the drift depends only on how likely a token is, and the {side} side is surer of "
        f"{max(surer, 1.0 - surer):.0%} of the likely tokens: compare the two sides' temperatures and weights before "
        "you blame a kernel"
    )


def _even(block: Block, log_w: NDArray[np.float64]) -> str:
    """Say that the sides differ as much where they are sure as where they are not; empty where they do not."""
    size = np.abs(log_w)
    open_tokens = size[np.maximum(block.train, block.inference) < -_EVEN[0]]
    if open_tokens.size < _EVEN[3] or not _EVEN[1] < (usual := float(np.median(open_tokens))) < _EVEN[2]:
        return ""
    sure = [size[side > -usual] for side in (block.train, block.inference)]
    there = max((float(np.quantile(sizes, 0.8)) for sizes in sure if sizes.size >= _EVEN[3]), default=0.0)
    if there < _EVEN[4] * usual:
        return ""
    return (
        f"the sides differ by {there:.1g} where they are sure of a token and by {usual:.1g} where they are not, which "
        "no logits do: one side may be a copy with noise, or its log-sum-exp is in half precision"
    )
