"""Tail index from bins: Pareto k and Hill's estimator where a histogram is all that is left of the sample.

Each observation is known to lie in a bin, so the likelihood is that of interval-censored data; no placement inside the
bins is assumed. What k means is in `tails`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kc_otel.stats._check import usable
from kc_otel.stats._samples import Floats
from kc_otel.stats.binned import Binned
from kc_otel.stats.tails import FEWEST, TailIndex, positive_threshold, tail_or_default, towards_half, unknown

__all__ = ["hill_binned", "magnitudes", "pareto_k_binned", "ratios"]

_STARTS: Final = ((0.1, -0.1), (1.0, -1.0))
"""Shape and log of the scale over the mean excess, to begin from: a light and a heavy tail."""


def pareto_k_binned(sample: Binned, *, tail: int | None = None) -> TailIndex:
    """Pareto k from bins: maximum likelihood for a GPD beyond a bin's edge, each observation known to its bin only.

    The likelihood of `count` observations in (a, b] is `(S(a) - S(b))^count`, S the GPD's survival function; the
    largest observation, where it is known, counts with its density. That is the likelihood of what a histogram says,
    so no placement inside the bins is assumed. u is the highest edge that no bin straddles with at least M
    observations beyond it; the prior is that of `pareto_k`.

    Accuracy, over 400 samples of 10 000 GPD observations each, for k = -0.3, 0, 0.3, 0.7, 1 and 1.5: root mean square
    error 0.04, 0.06, 0.07, 0.10, 0.12, 0.14 from buckets of scale 4 (edges 4.4% apart), and 0.06, 0.06, 0.08, 0.10,
    0.12, 0.15 from the raw values by `pareto_k`; the same from buckets of scale 0 (edges a factor of 2 apart), except
    that a bounded tail (k = -0.3) then lies in one bucket and gives no index. What is lost in the bins is not the
    limit, the length of the tail is.

    Args:
        sample: Observations that are not negative, such as `magnitudes(bins of l)` or the bins of w.
        tail: M; `tail_length(total)` by default.

    Raises:
        ValueError: If the sample is empty, has an edge that is NaN, or the tail is not between 1 and total - 1.
    """
    threshold, tailed = _beyond_edge(sample, tail)
    method = "generalised Pareto (censored likelihood)"
    if tailed.total < FEWEST or tailed.count.size < 2 or tailed.upper.max() <= 0.0:
        return unknown(threshold, tailed.total, sample.total, method)
    k, sigma = _censored_pareto(tailed)
    k = towards_half(k, tailed.total)
    return TailIndex(k, sigma, threshold, tailed.total, sample.total, (1.0 + k) / math.sqrt(tailed.total), method)


def hill_binned(sample: Binned, *, tail: int | None = None) -> TailIndex:
    """Hill's estimator from bins: log(x / u) is exponential with mean k, each observation known to its bin only.

    Args:
        sample: Observations that are not negative.
        tail: M; `tail_length(total)` by default.

    Raises:
        ValueError: If the sample is empty, has an edge that is NaN, the threshold is not positive, or the tail is not
            between 1 and total - 1.
    """
    threshold, tailed = _beyond_edge(sample, tail)
    if tailed.total < FEWEST or tailed.count.size < 2 or tailed.upper.max() <= 0.0:
        return unknown(threshold, tailed.total, sample.total, "Hill (censored likelihood)")
    u = positive_threshold(threshold)
    lower, upper = np.log1p(tailed.lower / u), np.log1p(tailed.upper / u)
    known = replace(tailed, lower=lower, upper=upper, maximum=float(np.log1p(tailed.maximum / u)))
    from scipy.optimize import minimize_scalar  # noqa: PLC0415 - a third of a second that not everybody needs

    fit = minimize_scalar(
        lambda log_k: -_log_likelihood(known, lambda x: -x * math.exp(-log_k), lambda x: -log_k - x * math.exp(-log_k)),
        bounds=(math.log(1e-4), math.log(1e2)),
        method="bounded",
        options={"xatol": 1e-8},
    )
    k = float(math.exp(fit.x))
    return TailIndex(k, k * u, u, tailed.total, sample.total, k / math.sqrt(tailed.total), "Hill (censored likelihood)")


def magnitudes(sample: Binned) -> Binned:
    """Bins of |x| from bins of x; the sum is not known any more.

    Raises:
        ValueError: If an edge is NaN.
    """
    usable(sample)
    lower = np.maximum(np.maximum(sample.lower, -sample.upper), 0.0)
    upper = np.maximum(np.abs(sample.lower), np.abs(sample.upper))
    known = sample.maximum_observed and sample.maximum >= -sample.minimum
    return _sorted(sample, lower, upper, observed=bool(known))


def ratios(sample: Binned) -> Binned:
    """Bins of w = exp(l) from bins of l; the sum is not known any more.

    Raises:
        ValueError: If an edge is NaN.
    """
    usable(sample)
    with np.errstate(over="ignore"):
        return _sorted(sample, np.exp(sample.lower), np.exp(sample.upper), observed=sample.maximum_observed)


def _sorted(sample: Binned, lower: Floats, upper: Floats, *, observed: bool) -> Binned:
    order = np.lexsort((upper, lower))
    return Binned(
        lower[order],
        upper[order],
        sample.count[order],
        sample.total,
        math.nan,
        float(lower.min(initial=math.inf)) if sample.total else math.nan,
        float(upper.max(initial=0.0)) if sample.total else math.nan,
        observed,
    )


def _beyond_edge(sample: Binned, tail: int | None) -> tuple[float, Binned]:
    """An edge that no bin straddles, with M observations beyond it, and those as excesses."""
    if not sample.total:
        msg = "sample: is empty; pass at least one observation"
        raise ValueError(msg)
    usable(sample)
    wanted = tail_or_default(tail, sample.total)
    before = np.concatenate(([-math.inf], np.maximum.accumulate(sample.upper)[:-1]))
    beyond = np.cumsum(sample.count[::-1])[::-1]
    clean = np.flatnonzero((before <= sample.lower) & (beyond >= wanted))
    first = int(clean[-1]) if clean.size else 0
    # A bin of no width at the edge would have no excess: the threshold is then the observation before, as for samples.
    flat = sample.lower[first] == sample.upper[first]
    threshold = float(before[first] if flat and first else sample.lower[first])
    excess = replace(
        sample,
        lower=np.maximum(sample.lower[first:] - threshold, 0.0),
        upper=sample.upper[first:] - threshold,
        count=sample.count[first:],
        total=int(beyond[first]),
        maximum=sample.maximum - threshold,
    )
    return threshold, excess


def _censored_pareto(excess: Binned) -> tuple[float, float]:
    """Shape and scale that maximise the likelihood of binned excesses, k > -1 (below, it has no maximum)."""
    from scipy.optimize import minimize  # noqa: PLC0415 - a third of a second that not everybody needs

    middle = np.where(np.isinf(excess.upper), excess.lower * 2.0, (excess.lower + excess.upper) / 2.0)
    unit = float(np.average(middle, weights=excess.count))

    def loss(at: NDArray[np.float64]) -> float:
        k, sigma = float(at[0]), unit * math.exp(at[1])
        if not (-1.0 < k < 10.0 and abs(at[1]) < 30.0):
            return math.inf

        def stretched(x: Floats) -> Floats:
            with np.errstate(divide="ignore", over="ignore"):
                logarithm: Floats = np.log1p(np.maximum(k * x / sigma, -1.0))
            return logarithm

        def survival(x: Floats) -> Floats:
            return -x / sigma if abs(k) < 1e-9 else -stretched(x) / k

        def density(x: Floats) -> Floats:
            # Not survival(x) - stretched(x): at the end of a bounded tail both are infinite.
            hazard = -x / sigma if abs(k) < 1e-9 else -(1.0 / k + 1.0) * stretched(x)
            return hazard - math.log(sigma)

        return -_log_likelihood(excess, survival, density)

    best = min(
        (minimize(loss, start, method="Nelder-Mead", options={"xatol": 1e-6, "fatol": 1e-9}) for start in _STARTS),
        key=lambda fit: float(fit.fun),
    )
    return float(best.x[0]), unit * math.exp(best.x[1])


def _log_likelihood(sample: Binned, survival: Callable[[Floats], Floats], density: Callable[[Floats], Floats]) -> float:
    """Log likelihood of a binned sample under a log survival function and its log density."""
    lower, upper, count = sample.lower, sample.upper, sample.count.astype(np.float64)
    exact = lower == upper
    total = 0.0
    if not exact[-1] and sample.maximum_observed and sample.maximum == upper[-1]:
        count[-1] -= 1.0
        total += float(density(upper[-1:])[0])
    used = ~exact & (count > 0.0)
    first = survival(lower[used])
    if np.isneginf(first).any():
        return -math.inf
    with np.errstate(divide="ignore"):
        inside = first + np.log(-np.expm1(survival(upper[used]) - first))
    total += float(count[used] @ inside)
    if exact.any():
        total += float(count[exact] @ density(lower[exact]))
    return -math.inf if math.isnan(total) else total
