"""Support deficit: the share of the training kernel's probability on what the inference kernel cannot sample.

`E_Q[w] = P(support of Q)`, so `1 - E_Q[w]` is the mass that top-k, top-p or underflow removed. Importance weights
cannot bring it back. `TV(P, Q) >= 1 - E_Q[w]`, with equality where Q is P cut to its support and renormalised.

Source: importance sampling identity; `TV = E_Q[(1 - w)_+] >= E_Q[1 - w]`.
"""

from __future__ import annotations

import math
from dataclasses import replace

from kc_otel.stats.binned import Binned
from kc_otel.stats.interval import Interval, affine
from kc_otel.stats.means import capped_mean_interval

__all__ = ["support_deficit"]


def support_deficit(ratio: Binned, *, cap: float = 10.0, alpha_lower: float, alpha_upper: float) -> Interval:
    """Interval for `1 - E_Q[w]` from importance ratios of sampled tokens, w cut at the cap.

    Cutting makes E_Q[w] smaller and the deficit larger, so the upper side holds for the deficit itself whatever the
    tail of w. The lower side is for `1 - E_Q[min(w, cap)]`, the deficit itself while w stays below the cap; once an
    observation is beyond it, only the trivial 0 is claimed. The estimate is the plain `1 - mean w`, negative by chance
    where the deficit is small.

    Args:
        ratio: w of sampled tokens, or W of sequences; samples (`Binned.of_samples(np.exp(l))`) or a histogram.
        cap: Where w is cut, above 1; it is in the note.
        alpha_lower: Error probability of the lower side.
        alpha_upper: Error probability of the upper side.

    Raises:
        ValueError: If an alpha is not in (0, 1), the cap is not above 1, or an edge is NaN.

    >>> import numpy as np
    >>> w = np.full(10_000, 0.95)                # top-p 0.95 and nothing else
    >>> found = support_deficit(Binned.of_samples(w), alpha_lower=0.005, alpha_upper=0.005)
    >>> round(found.estimate, 3), found.lower > 0.03, found.upper < 0.07
    (0.05, True, True)
    """
    if not (math.isfinite(cap) and cap > 1.0):
        msg = f"cap: {cap!r} is not a finite ratio above 1"
        raise ValueError(msg)
    mean = capped_mean_interval(
        ratio, low=0.0, high=math.inf, cap=cap, alpha_lower=alpha_upper, alpha_upper=alpha_lower
    )
    if not mean.samples:
        return replace(mean, lower=0.0, upper=1.0)
    deficit = affine(mean, -1.0, 1.0)
    said = "" if deficit.lower > -math.inf else f"; w above the cap {cap:g} was seen: only 0 is claimed below"
    return replace(
        deficit,
        lower=min(max(deficit.lower, 0.0), 1.0),
        upper=min(max(deficit.upper, 0.0), 1.0),
        note=f"w cut at {cap:g}: the upper bound holds for any tail of w, the lower one for w below the cap{said}",
    )
