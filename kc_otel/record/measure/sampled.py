"""Drift from the log-probabilities of sampled tokens: every quantity as a function of the log ratio.

P is the training kernel, Q the inference kernel that the tokens were sampled from; l = log P(y) - log Q(y) and
w = exp(l). The difference is taken in float32 at least and rounded to float32 once; everything else follows from that
number in float64, before any clipping that a trainer does.

A log ratio is kept within [LOWEST, HIGHEST]. Below, because P(y) = 0 is a real disagreement and has to stay a finite
number. Above, because it cannot happen to a token that Q sampled: E_Q[w] <= 1, so Q(l > 16) <= exp(-16) by Markov's
inequality; such a value is a fault of the input, and its square would dominate a cumulative sum for good.

Where Q was cut to a set K of tokens (top-p, top-k, min-p) before it was sampled, tokens come from q(y)/q(K), and no
trainer has that number: its log P(y) is of the whole vocabulary. Over the same set both are distributions again,
P(y)/P(K) and Q(y)/Q(K), of which w is the ratio, and TV = E_Q[(1-w)+] holds as ever. What P has outside of K is an
observation of its own, `outside_mass`: TV(P, Q/Q(K)) <= TV(P/P(K), Q/Q(K)) + 1 - P(K), since TV(P, P/P(K)) = 1 - P(K).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kc_otel.record.measure.arrays import as_bool, floats

LOWEST: Final = -64.0  # smallest log ratio that is told apart from smaller ones, nats
HIGHEST: Final = 16.0  # largest log ratio that is told apart from larger ones, nats
REWARD: Final = ("reward_above", "reward_below")
"""Registry keys of what `kc_otel.stats.reward_sides` makes of a sequence's L and its reward, in its order."""
TOLERANCE: Final = 1e-3
"""How far above 0 a log-probability may be, nats: by a log-softmax in half precision, or a sum in another order."""


def log_ratio(train: Any, inference: Any) -> Any:
    """Log P(y) - log Q(y), rounded to float32, as float64 within [LOWEST, HIGHEST].

    NaN where there is no difference.
    """
    train, inference = np.asarray(train), np.asarray(inference)
    wide = np.float64 if np.float64 in (train.dtype, inference.dtype) else np.float32
    with np.errstate(invalid="ignore", over="ignore"):
        difference = train.astype(wide) - inference.astype(wide)
        return saturated(difference.astype(np.float32).astype(np.float64))


def saturated(log_w: Any) -> Any:
    """Log ratios within [LOWEST, HIGHEST]."""
    return log_w.clip(LOWEST, HIGHEST)


def _tv(log_w: Any) -> Any:
    # + 0.0 turns -0.0, from l = 0, into 0.0
    return (-np.expm1(log_w)).clip(min=0.0) + 0.0


def _k3(log_w: Any) -> Any:
    # w - 1 - l with expm1: for small l the two terms of w - 1 would cancel before l is even subtracted
    return np.expm1(log_w) - log_w


def _chi2(log_w: Any) -> Any:
    return np.expm1(log_w) ** 2


TOKEN: Final[Mapping[str, Callable[[Any], Any]]] = MappingProxyType(
    {
        "log_ratio": lambda log_w: log_w,
        "abs_log_ratio": abs,
        "ratio": np.exp,
        "tv_token": _tv,
        "k3": _k3,
        "chi2_token": _chi2,
    }
)
"""Registry key -> function of a token's log ratio l (float64): l, |l|, w, (1-w)+, w - 1 - l, (w-1)^2.

Each rises or falls on either side of l = 0 throughout, which the histograms rely on. Means over tokens sampled from Q
are TV(P,Q) for (1-w)+, an estimate of KL(Q||P) for w - 1 - l (k3), and chi2(P,Q) for (w-1)^2.
"""
SEQUENCE: Final[Mapping[str, Callable[[Any, Any], Any]]] = MappingProxyType(
    {
        "tv_seq": lambda L, _: _tv(saturated(L)),
        "log_ratio_seq": lambda L, _: L,
        "geometric_ratio": lambda L, T: np.exp(L / T),
        "chi2_seq": lambda L, _: _chi2(saturated(L)),
    }
)
"""Registry key -> function of a sequence's L = sum l_t (float64) and its number T of tokens.

(1-W)+, L, exp(L/T) and (W-1)^2 with W = exp(L) the product of the ratios; E_Q[(1-W)+] is the total variation between
the kernels' distributions over whole sequences.
"""


def renormalised(logprobs: Any, kept: Any) -> Any:
    """Log-probabilities given that a token is among those that were kept: log P(y) - log P(K), K of each token its own.

    Float32, or float64 where either is; +inf, which no input check lets pass, where the mass is above 1; NaN where P
    has no mass on the set. Without `kept` they are left alone.
    """
    if kept is None:
        return logprobs
    given, mass = (floats(array) for array in (logprobs, kept))
    with np.errstate(invalid="ignore"):
        return np.where(mass > TOLERANCE, np.inf, given - np.minimum(mass, 0))


def outside_mass(kept: Any, rows: NDArray[np.intp], mask: Any) -> tuple[NDArray[np.float64], NDArray[np.intp]]:
    """1 - P(K) of the tokens of some rows that count, and the row of each, [tokens]."""
    mass = floats(kept)[rows]
    counts = np.ones(mass.shape, dtype=np.bool_) if mask is None else as_bool(mask)[rows]
    return -np.expm1(np.minimum(mass[counts].astype(np.float64), 0.0)) + 0.0, rows[np.nonzero(counts)[0]]
