"""Truncated sampling (top-p, top-k, min-p) whose kept tokens are known: both policies are compared over them.

Where Q was cut to a set K of tokens before it was sampled, tokens come from q(y)/q(K), and no trainer has that number:
its log P(y) is of the whole vocabulary. Over the same set both are distributions again, P(y)/P(K) and Q(y)/Q(K), of
which w is the ratio, and TV = E_Q[(1-w)+] holds as ever. Nothing about K is drift then, and nothing of P outside of K
is seen: that mass, 1 - P(K), is `outside_mass`, an observation of its own. By the triangle inequality
TV(P, Q/Q(K)) <= TV(P/P(K), Q/Q(K)) + 1 - P(K), since TV(P, P/P(K)) = 1 - P(K).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kc_otel.record.measure.arrays import as_bool, host_rows, is_tensor

_TOLERANCE = 1e-3
"""As in `measure.checks`: how far above 0 the log of a mass may be."""


def renormalised(logprobs: Any, kept: Any) -> Any:
    """Log-probabilities given that a token is among those that were kept: log P(y) - log P(K).

    Args:
        logprobs: log P(y) of sampled tokens before truncation, nats, any shape, NumPy or torch.
        kept: log P(K), nats, same shape, of the set that each token was sampled from; None to leave `logprobs` alone.

    Returns:
        Float32, or float64 where either is; +inf, which no input check lets pass, where the mass is above 1; NaN where
        P has no mass on the set.
    """
    if kept is None:
        return logprobs
    if is_tensor(logprobs):
        import torch  # noqa: PLC0415 - a caller with a tensor has loaded it

        mass = torch.as_tensor(kept, device=logprobs.device)
        wide = torch.float64 if torch.float64 in (logprobs.dtype, mass.dtype) else torch.float32
        return (logprobs.to(wide) - mass.to(wide).clamp(max=0)).masked_fill(mass > _TOLERANCE, float("inf"))
    given, mass = (host_rows(array).read(...) for array in (logprobs, kept))
    with np.errstate(invalid="ignore"):
        return np.where(mass > _TOLERANCE, np.inf, given - np.minimum(mass, 0))


def outside_mass(kept: Any, rows: NDArray[np.intp], mask: Any) -> tuple[NDArray[np.float64], NDArray[np.intp]]:
    """1 - P(K) of the tokens of some rows that count, [tokens], row after row, and how many each row has, [rows].

    Args:
        kept: log P(K), nats, [sequences, tokens].
        rows: Which sequences.
        mask: Which tokens count, [sequences, tokens]; None for all.
    """
    mass = host_rows(kept).read(rows)
    counts = np.ones(mass.shape, dtype=np.bool_) if mask is None else as_bool(mask)[rows]
    return -np.expm1(np.minimum(mass[counts].astype(np.float64), 0.0)) + 0.0, np.count_nonzero(counts, axis=1)
