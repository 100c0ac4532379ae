"""Engine mismatch separated from weight staleness: which of the two the drift of asynchronous training comes from.

A rollout was sampled by the inference kernel at old weights and is trained on by the training kernel at newer ones.
With the training kernel's log-probs at the rollout's weights as a third array the log ratio splits exactly,

    `l_total = log P_new - log Q_old = (log P_new - log P_old) + (log P_old - log Q_old) = l_staleness + l_mismatch`,

which is the product of ratios in PPO's clip range. Without that array, the drift of sequences whose weights lag by
0, 1, 2, ... updates can be followed back to lag 0, where only the mismatch is left.

Source: chain of importance ratios, as in Xu and Wu 2026, arXiv:2606.07581, and decoupled PPO (Hilton, Cobbe and
Schulman 2022, Batch Size-Invariance for Policy Optimization); MacKinnon and White 1985 for the regression's standard
errors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kc_otel.stats._check import level
from kc_otel.stats._samples import Floats, per_sequence, ratios_of, same_length, vector
from kc_otel.stats.interval import Interval

__all__ = ["Factor", "LagFit", "LagGroup", "Split", "mismatch_at_no_lag", "split_drift"]


@dataclass(frozen=True, slots=True)
class Factor:
    """One factor of the ratio: training kernel over sampler, or a part of that.

    With old and new the factor's two distributions (its ratio is new over old):

    Attributes:
        mean_abs: Mean |l| over the samples, nats.
        k1: Mean -l, nats. k1 of the parts add up to the total's, exactly.
        k3: KL(old || new), nats, as the mean of w - 1 - l under old.
        tv: TV(old, new), as the mean of (1 - w)_+ under old.
        variance: Variance of l over the samples.
        abs_share: mean_abs over the sum of the two parts' mean_abs; 1 for the total.
        variance_share: Cov(l, l_total) / Var(l_total): adds up to 1 over the parts; nan where the total does not vary.
    """

    mean_abs: float
    k1: float
    k3: float
    tv: float
    variance: float
    abs_share: float
    variance_share: float


@dataclass(frozen=True, slots=True)
class Split:
    """Drift of the samples, whole and by its two sources.

    Attributes:
        total: Training kernel now against the inference kernel at the rollout's weights.
        staleness: Training kernel now against the training kernel at the rollout's weights.
        mismatch: Training kernel against inference kernel, both at the rollout's weights.
        covariance: Cov(l_staleness, l_mismatch); `Var(l_total)` is the sum of the variances plus twice this.
        samples: Tokens, or sequences where lengths were given.
    """

    total: Factor
    staleness: Factor
    mismatch: Factor
    covariance: float
    samples: int


def split_drift(
    train_now: ArrayLike,
    train_rollout: ArrayLike,
    inference: ArrayLike,
    *,
    lengths: ArrayLike | None = None,
) -> Split:
    """Splits the drift of sampled tokens, or of whole sequences, into weight staleness and engine mismatch.

    Samples come from the inference kernel. Total and mismatch compare with it, so their k3 and tv are plain means. The
    staleness factor compares with the training kernel at the rollout's weights, from which nothing was sampled: its k3
    and tv are weighted by the mismatch ratio, `E_Q[w_m g(w_s)] = E_P_old[g(w_s)]`, which needs P_old << Q.
    `tv_total <= tv_staleness + tv_mismatch`.

    Args:
        train_now: Log-probs [N] of the sampled tokens under the training kernel at its current weights.
        train_rollout: The same at the weights that the rollout was sampled with.
        inference: Log-probs [N] of the inference kernel that sampled them.
        lengths: Tokens [S] of each of consecutive sequences; the ratios are then those of sequences.

    Raises:
        ValueError: If a log-prob is NaN or infinite, or the lengths differ.

    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> sampler = rng.uniform(-3, -1, 50_000)
    >>> rollout = sampler + rng.normal(-0.0002, 0.02, 50_000)     # engines differ a little
    >>> now = rollout + rng.normal(-0.0018, 0.06, 50_000)         # the policy has moved three times as far
    >>> found = split_drift(now, rollout, sampler)
    >>> round(found.mismatch.variance_share, 2), round(found.staleness.variance_share, 2)
    (0.1, 0.9)
    """
    now, sampler = vector("train_now", train_now), vector("inference", inference)
    rollout = same_length("train_rollout", vector("train_rollout", train_rollout), now.size, "of train_now")
    same_length("inference", sampler, now.size, "of train_now")
    stale, mismatch = now - rollout, rollout - sampler
    if lengths is not None:
        stale, mismatch = per_sequence(stale, lengths), per_sequence(mismatch, lengths)
    total = stale + mismatch
    spent = float(np.abs(stale).mean() + np.abs(mismatch).mean())
    plain = np.ones_like(total)
    return Split(
        total=_factor(total, plain, total, math.nan),
        staleness=_factor(stale, ratios_of(mismatch), total, spent),
        mismatch=_factor(mismatch, plain, total, spent),
        covariance=_covariance(stale, mismatch),
        samples=total.size,
    )


def _factor(log_w: Floats, weight: Floats, total: Floats, spent: float) -> Factor:
    mean_abs = float(np.abs(log_w).mean())
    with np.errstate(over="ignore", invalid="ignore"):
        k3 = float((weight * (np.expm1(log_w) - log_w)).mean())
    varies = _covariance(total, total)
    return Factor(
        mean_abs=mean_abs,
        k1=float(-log_w.mean()),
        k3=k3,
        tv=float((weight * np.maximum(-np.expm1(np.minimum(log_w, 0.0)), 0.0)).mean()),
        variance=_covariance(log_w, log_w),
        abs_share=1.0 if math.isnan(spent) else (mean_abs / spent if spent > 0.0 else math.nan),
        variance_share=_covariance(log_w, total) / varies if varies > 0.0 else math.nan,
    )


def _covariance(a: Floats, b: Floats) -> float:
    return float(((a - a.mean()) * (b - b.mean())).mean())


@dataclass(frozen=True, slots=True)
class LagGroup:
    """Sequences whose weights lagged equally.

    Attributes:
        lag: Updates by which the rollout's weights lagged.
        samples: Sequences.
        mean: Mean of their values.
    """

    lag: float
    samples: int
    mean: float


@dataclass(frozen=True, slots=True)
class LagFit:
    """Drift against the lag of the weights, followed back to lag 0.

    Attributes:
        mismatch: Value at lag 0: what the engines differ by with equal weights.
        per_lag: Added by the first update of lag (the slope at lag 0).
        fresh: Mean of the sequences of lag 0 alone, without any assumption on how drift grows; None without them.
        groups: Mean per lag, ascending.
        misfit: p-value of "the group means lie on the curve"; small means that the degree is wrong and `mismatch` not
            to be trusted; nan where there are no more groups than coefficients.
    """

    mismatch: Interval
    per_lag: Interval
    fresh: Interval | None
    groups: tuple[LagGroup, ...]
    misfit: float


def mismatch_at_no_lag(values: ArrayLike, lags: ArrayLike, *, alpha: float, degree: int = 1) -> LagFit:
    """Least squares of a drift per sequence on its weight lag; the intercept is the engine mismatch.

    Assumes that sequences are independent, that lag does not go with anything else that moves the drift (such as
    length or task), and that the mean drift is a polynomial of the lag. Which one depends on the value: k1 (mean -l)
    and mean l add up over the parts, and grow linearly under steps of equal size; mean l^2 and k3 add up where
    mismatch and staleness are uncorrelated, and grow linearly where updates point in random directions, quadratically
    (`degree=2`) where they keep theirs. Mean |l| does not add up: do not use it here.

    Intervals are Student's t with standard errors that allow each sequence its own variance (HC3), approximate for
    small samples.

    Args:
        values: Drift per sequence [S], such as its mean l^2 or k3.
        lags: Weight updates between rollout and training [S], at least 0.
        alpha: Error probability of each side of each interval.
        degree: 1 or 2.

    Raises:
        ValueError: If alpha is not in (0, 1), a number is out of range, the shapes differ, or there are not more
            distinct lags than `degree` and more sequences than coefficients.

    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> lag = rng.integers(1, 5, 4000)
    >>> drift = (0.02**2 + lag * 0.01**2) * rng.chisquare(50, 4000) / 50      # mean l^2 of 50 tokens each
    >>> found = mismatch_at_no_lag(drift, lag, alpha=0.005)
    >>> found.mismatch.lower < 0.0004 < found.mismatch.upper, found.fresh
    (True, None)
    """
    level("alpha", alpha)
    y, x = vector("values", values), vector("lags", lags, low=0.0)
    same_length("lags", x, y.size, "values")
    if degree not in {1, 2}:
        msg = f"degree: {degree!r} is neither 1 nor 2"
        raise ValueError(msg)
    distinct, group = np.unique(x, return_inverse=True)
    if distinct.size <= degree or y.size <= degree + 1:
        msg = (
            f"lags: {distinct.size} distinct lags of {y.size} sequences do not determine a curve of degree {degree}; "
            f"it takes {degree + 1} and {degree + 2}"
        )
        raise ValueError(msg)
    from scipy.special import stdtrit  # noqa: PLC0415 - a third of a second that not everybody needs

    design = np.vander(x, degree + 1, increasing=True)
    inverse = np.linalg.inv(design.T @ design)
    fitted = inverse @ (design.T @ y)
    residual = y - design @ fitted
    leverage = np.einsum("ij,jk,ik->i", design, inverse, design)
    # A sequence that alone determines its lag has leverage 1 and residual 0; it says nothing of the variance.
    scaled = np.divide(residual, 1.0 - leverage, out=np.zeros_like(residual), where=leverage < 1.0 - 1e-9)
    spread = inverse @ ((design * np.square(scaled)[:, None]).T @ design) @ inverse
    quantile = float(stdtrit(y.size - degree - 1, 1.0 - alpha))

    def around(at: int) -> Interval:
        half = quantile * math.sqrt(max(float(spread[at, at]), 0.0))
        center = float(fitted[at])
        return Interval(center, center - half, center + half, y.size, "least squares, HC3", "approximate")

    count = np.bincount(group)
    mean = np.bincount(group, weights=y) / count
    groups = tuple(LagGroup(float(lag), int(n), float(m)) for lag, n, m in zip(distinct, count, mean, strict=True))
    return LagFit(
        mismatch=around(0),
        per_lag=around(1),
        fresh=_mean(y[x == 0.0], alpha) if distinct[0] == 0.0 else None,
        groups=groups,
        misfit=_misfit(distinct, y, group, degree),
    )


def _mean(values: Floats, alpha: float) -> Interval:
    """Student's t interval."""
    from scipy.special import stdtrit  # noqa: PLC0415 - a third of a second that not everybody needs

    n, center = values.size, float(values.mean())
    if n < 2:
        return Interval(center, -math.inf, math.inf, n, "Student t", "one observation")
    half = float(stdtrit(n - 1, 1.0 - alpha)) * float(values.std(ddof=1)) / math.sqrt(n)
    return Interval(center, center - half, center + half, n, "Student t", "approximate")


def _misfit(distinct: Floats, y: Floats, group: NDArray[np.intp], degree: int) -> float:
    """p-value of a chi-square test of the group means against their weighted polynomial, each with its own variance.

    Groups of one sequence have no variance of their own and are left out.
    """
    count = np.bincount(group)
    mean = np.bincount(group, weights=y) / count
    squares = np.bincount(group, weights=np.square(y - mean[group]))
    used = (count > 1) & (squares > 0.0)
    spare = int(used.sum()) - degree - 1
    if spare < 1:
        return math.nan
    from scipy.special import chdtrc  # noqa: PLC0415 - a third of a second that not everybody needs

    weight = 1.0 / np.sqrt(squares[used] / (count[used] - 1) / count[used])
    design = np.vander(distinct[used], degree + 1, increasing=True) * weight[:, None]
    fitted = np.linalg.lstsq(design, mean[used] * weight, rcond=None)[0]
    return float(chdtrc(spare, float(np.square(mean[used] * weight - design @ fitted).sum())))
