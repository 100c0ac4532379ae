"""Support deficit: the share of the training kernel's probability on what the inference kernel cannot sample.

`E_Q[w] = P(support of Q)`, so `1 - E_Q[w]` is the mass that top-k, top-p or underflow removed. Importance weights
cannot bring it back. `TV(P, Q) >= 1 - E_Q[w]`, with equality where Q is P cut to its support and renormalised.

Source: importance sampling identity; `TV = E_Q[(1 - w)_+] >= E_Q[1 - w]`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

from kc_otel.stats.binned import Binned
from kc_otel.stats.interval import Interval
from kc_otel.stats.means import capped_mean_interval


def support_deficit(
    ratio: Binned,
    *,
    cap: float = 10.0,
    highest: float | None = None,
    alpha_lower: float,
    alpha_upper: float,
    anytime: bool = False,
) -> Interval:
    """Interval for `1 - E_Q[w]` from importance ratios of sampled tokens, or W of sequences.

    Cutting w at `cap`, above 1, makes E_Q[w] smaller and the deficit larger, so the upper side holds for the deficit
    itself whatever the tail of w. No sample bounds it from below: a ratio of D/e that occurs once in 1/e tokens makes
    up for a deficit of D and may be missing from the sample. So the lower side is 0, unless the caller vouches for a
    `highest` ratio, as exists for two kernels whose samplers keep the same tokens; then it is that of w in [0,
    highest], and 0 again once a larger one was observed. The estimate is the plain `1 - mean w`, negative by chance
    where the deficit is small.

    >>> import numpy as np
    >>> w = Binned.of_samples(np.full(10_000, 0.95))         # top-p 0.95 and nothing else
    >>> found = support_deficit(w, alpha_lower=0.005, alpha_upper=0.005)
    >>> round(found.estimate, 3), found.lower, found.upper < 0.07
    (0.05, 0.0, True)
    >>> support_deficit(w, highest=5.0, alpha_lower=0.005, alpha_upper=0.005).lower > 0.04
    True
    """
    if not (math.isfinite(cap) and cap > 1.0):
        raise ValueError(f"cap: {cap!r} is not a finite ratio above 1")
    if highest is not None and not (math.isfinite(highest) and highest >= 1.0):
        raise ValueError(f"highest: {highest!r} is not a finite ratio of at least 1")
    mean_of = partial(
        capped_mean_interval,
        ratio,
        low=0.0,
        high=math.inf,
        alpha_lower=alpha_upper,
        alpha_upper=alpha_lower,
        anytime=anytime,
    )
    mean = mean_of(cap=cap)
    if not mean.samples:
        return replace(mean, lower=0.0, upper=1.0)
    lower, said = 0.0, "a lower one above 0 would take a ratio that none exceeds"
    if highest is not None:
        most = mean_of(cap=highest).upper
        seen = "; larger ones were observed, so only 0 is claimed" if most == math.inf else ""
        lower, said = 1.0 - most, f"the lower one if no ratio is above {highest:g}{seen}"
    return Interval(
        estimate=1.0 - mean.estimate,
        lower=min(max(lower, 0.0), 1.0),
        upper=min(max(1.0 - mean.lower, 0.0), 1.0),
        samples=mean.samples,
        method=mean.method,
        note=f"the upper bound, with w cut at {cap:g}, holds for any tail of w; {said}",
    )
