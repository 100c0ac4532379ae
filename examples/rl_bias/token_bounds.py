"""Largest distance of two next-token distributions P and Q, from their logits or ratios.

P is the training kernel's distribution, Q the inference kernel's, w = P(y)/Q(y), l = log w in nats.
The statements hold for any pair P, Q: next-token distributions and distributions of whole sequences alike.
chi2 is chi2(P, Q) = E_Q[(w - 1)^2] with P << Q; it is infinite otherwise. All functions work on numbers and,
elementwise, on arrays.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from examples.rl_bias.sharpest import Bound, Real, real, required, smallest


def half_range(train_logits: ArrayLike, inference_logits: ArrayLike, axis: int = -1) -> NDArray[np.float64]:
    """Half range of the logit difference: `(max d - min d) / 2`, d = train_logits - inference_logits.

    It is the smallest sup-norm of d over all constant shifts, which softmax does not see, and half of the Hilbert
    projective distance between the two distributions.

    Source: Reeb, Kastoryano and Wolf 2011, Hilbert's projective metric in quantum information theory, section II.

    Args:
        train_logits: Logits [..., V], after temperature and sampling processing. Tokens that a side
            excludes (-inf) have to be excluded by both; they are left out.
        inference_logits: Logits [..., V], after the same processing.
        axis: The axis of the vocabulary.

    Returns:
        Half ranges, the shape without the vocabulary's axis.

    Raises:
        ValueError: If the shapes differ, there are no tokens, or a difference is NaN or infinite.
    """
    train, inference = np.asarray(train_logits, dtype=np.float64), np.asarray(inference_logits, dtype=np.float64)
    if train.shape != inference.shape:
        raise ValueError(f"inference_logits: shape {inference.shape} is not that of train_logits, {train.shape}")
    if train.ndim == 0 or train.shape[axis] == 0:
        raise ValueError(f"train_logits: shape {train.shape} has no tokens along axis {axis}")
    excluded = np.isneginf(train) & np.isneginf(inference)
    difference = np.subtract(train, inference, out=np.zeros_like(train), where=~excluded)
    if not np.isfinite(difference).all():
        at = tuple(int(i) for i in np.argwhere(~np.isfinite(difference))[0])
        raise ValueError(
            f"train_logits, inference_logits: {train[at]!r} and {inference[at]!r} at {at} have no finite difference; "
            "only a token that both sides exclude may be -inf"
        )
    if excluded.all(axis=axis).any():
        raise ValueError("train_logits: every token is excluded somewhere; at least one has to remain")
    highest = np.max(difference, axis=axis, initial=-np.inf, where=~excluded)
    lowest = np.min(difference, axis=axis, initial=np.inf, where=~excluded)
    return np.asarray((highest - lowest) / 2.0)


def tv_from_half_range(half_range: Real) -> Real:
    """`TV(P, Q) <= tanh(rho / 2)`, attained by two groups of tokens whose probabilities P and Q swap.

    Source: Reeb, Kastoryano and Wolf 2011, Hilbert's projective metric in quantum information theory: trace distance
    against Hilbert's metric.

    Args:
        half_range: Half range rho of the logit difference.

    Raises:
        ValueError: If it is negative or NaN.
    """
    bound: Real = np.tanh(real("half_range", half_range, infinite=True) / 2.0)
    return bound


def kl_from_half_range(half_range: Real) -> Real:
    """`KL <= log(sinh(rho) / rho) + rho coth(rho) - 1 <= rho^2 / 2`, both ways; the first is attained.

    Source: KL(Q||P) = log E_Q[exp d] - E_Q[d] is at most rho^2/2 by Hoeffding's lemma. For a given mean it is largest
    when d takes only its two extremes (exp is convex); maximised over their probabilities it is the first form.

    Args:
        half_range: Half range rho of the logit difference.

    Raises:
        ValueError: If it is negative or NaN.
    """
    rho = np.asarray(real("half_range", half_range, infinite=True))
    with np.errstate(all="ignore"):
        # log(sinh(rho)/rho) without overflow; below 1e-3 the subtraction would cost more digits than the form gains.
        exact = rho + np.log1p(-np.exp(-2.0 * rho)) - np.log(2.0 * rho) + rho / np.tanh(rho) - 1.0
        bound = np.where(rho < 1e-3, rho * rho / 2.0, exact)
    return _as(half_range, np.where(np.isinf(rho), np.inf, bound))


def kl_from_log_ratio_range(log_ratio: Real) -> Real:
    """`|l| <= lam` for every token, P and Q with one support  =>  `KL <= lam tanh(lam / 2) <= lam^2 / 2`, both ways.

    Source: for a convex function of w in [exp(-lam), exp(lam)] with mean 1, the two extremes are the worst; attained.

    Args:
        log_ratio: Bound lam on |log P(y) - log Q(y)|, nats.

    Raises:
        ValueError: If it is negative or NaN.
    """
    lam = real("log_ratio", log_ratio, infinite=True)
    bound: Real = lam * np.tanh(lam / 2.0)
    return bound


def kl_from_ratio_range(below: Real, above: Real, *, reverse: bool = False) -> Real:
    """`1 - a <= w <= 1 + b` under Q and P << Q  =>  a bound on KL(P||Q), or on KL(Q||P) when reversed; both attained.

    `KL(P||Q) <= (a (1+b) log(1+b) + b (1-a) log(1-a)) / (a+b)`, `KL(Q||P) <= -(a log(1+b) + b log(1-a)) / (a+b)`. Both
    are about a b / 2 for a narrow range. The second is infinite at a = 1.

    Source: w log w and -log w are convex, so the two-point w with mean 1 on the extremes is the worst.

    Args:
        below: a, in [0, 1].
        above: b, at least 0.
        reverse: Whether KL(Q||P) is meant.

    Raises:
        ValueError: If a is not in [0, 1] or b is negative or NaN.
    """
    a, b = np.asarray(real("below", below, high=1.0)), np.asarray(real("above", above))
    excess = _minus_log_excess if reverse else _x_log_x_excess
    shape = np.broadcast_shapes(a.shape, b.shape)
    with np.errstate(invalid="ignore"):  # 0 times inf: no room above, so w is 1 however far down it might go
        sum_of_ends = np.where(b > 0.0, a * excess(b) + b * excess(-a), 0.0)
    bound = np.divide(sum_of_ends, a + b, out=np.zeros(shape), where=(a + b) > 0.0)
    return _as(below if np.ndim(below) else above, bound)


def chi2_from_half_range(half_range: Real) -> Real:
    """`chi2(P, Q) = E_Q[(w - 1)^2] <= sinh(rho)^2`; attained.

    Source: w lies in [m, m exp(2 rho)] with mean 1, so its variance is at most (1 - m)(m exp(2 rho) - 1) (Bhatia and
    Davis 2000), and the worst m gives the bound.

    Args:
        half_range: Half range rho of the logit difference.

    Raises:
        ValueError: If it is negative or NaN.
    """
    with np.errstate(over="ignore"):
        bound: Real = np.square(np.sinh(real("half_range", half_range, infinite=True)))
    return bound


def tv_from_ratio_range(below: Real, above: Real) -> Real:
    """`1 - a <= w <= 1 + b` under Q and P << Q  =>  `TV(P, Q) <= a b / (a + b)`; attained; `eta / 2` for a = b = eta.

    P << Q (what Q can never sample, P cannot either) is what makes E_Q[w] = 1; a truncated sampler breaks it.

    Source: E_Q[(1 - w)_+] is largest for the two-point w with mean 1 on its extremes.

    Args:
        below: a, in [0, 1].
        above: b, at least 0.

    Raises:
        ValueError: If a is not in [0, 1] or b is negative or NaN.
    """
    a, b = np.asarray(real("below", below, high=1.0)), np.asarray(real("above", above))
    shape = np.broadcast_shapes(a.shape, b.shape)
    bound = np.divide(a * b, a + b, out=np.zeros(shape), where=(a + b) > 0.0)
    return _as(below if np.ndim(below) else above, bound)


def chi2_from_ratio_range(below: Real, above: Real) -> Real:
    """`1 - a <= w <= 1 + b` under Q and P << Q  =>  `chi2(P, Q) <= a b`; attained; `eta^2` for a = b = eta.

    Source: Bhatia and Davis 2000, A Better Bound on the Variance: Var(w) <= (max - mean)(mean - min).

    Args:
        below: a, in [0, 1].
        above: b, at least 0.

    Raises:
        ValueError: If a is not in [0, 1] or b is negative or NaN.
    """
    return real("below", below, high=1.0) * real("above", above)


def chi2_from_log_ratio_range(log_ratio: Real) -> Real:
    """`|l| <= lam` for every token, P << Q  =>  `chi2(P, Q) <= 2 cosh(lam) - 2 = (2 sinh(lam / 2))^2`; attained.

    Source: `chi2_from_ratio_range` with a = 1 - exp(-lam), b = exp(lam) - 1.

    Args:
        log_ratio: Bound lam on |log P(y) - log Q(y)|, nats.

    Raises:
        ValueError: If it is negative or NaN.
    """
    with np.errstate(over="ignore"):
        bound: Real = np.square(2.0 * np.sinh(real("log_ratio", log_ratio, infinite=True) / 2.0))
    return bound


def tv_from_log_ratio_range(log_ratio: Real) -> Real:
    """`|l| <= lam` for every token, P << Q  =>  `TV(P, Q) <= tanh(lam / 2)`; attained.

    Source: `tv_from_ratio_range` with a = 1 - exp(-lam), b = exp(lam) - 1.

    Args:
        log_ratio: Bound lam on |log P(y) - log Q(y)|, nats.

    Raises:
        ValueError: If it is negative or NaN.
    """
    bound: Real = np.tanh(real("log_ratio", log_ratio, infinite=True) / 2.0)
    return bound


def token_tv(
    *,
    half_range: float | None = None,
    log_ratio: float | None = None,
    ratio_range: tuple[float, float] | None = None,
    kl: float | None = None,
    chi2: float | None = None,
) -> Bound:
    """The smallest bound on `TV(P, Q)` of one token that follows from what is known, and its name.

    Args:
        half_range: Half range rho of the logit difference.
        log_ratio: Bound on |log P(y) - log Q(y)| over all tokens, P << Q.
        ratio_range: (a, b) with 1 - a <= w <= 1 + b over all tokens, P << Q.
        kl: KL(P||Q) or KL(Q||P), nats.
        chi2: chi2(P, Q) = E_Q[w^2] - 1, P << Q.

    Raises:
        ValueError: If nothing is given, or a number is out of its range.
    """
    required(half_range=half_range, log_ratio=log_ratio, ratio_range=ratio_range, kl=kl, chi2=chi2)
    known = []
    if half_range is not None:
        known.append(Bound(float(tv_from_half_range(half_range)), "half range"))
    if ratio_range is not None:
        known.append(Bound(float(tv_from_ratio_range(*ratio_range)), "ratio range"))
    if log_ratio is not None:
        known.append(Bound(float(tv_from_log_ratio_range(log_ratio)), "log-ratio range"))
    if kl is not None:
        known.append(tv_from_kl(kl))
    if chi2 is not None:
        known.append(Bound(float(tv_from_chi2(chi2)), "chi-square"))
    return smallest(*known)


def _x_log_x_excess(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """(1 + x) log(1 + x) - x; by its series where the difference would lose its digits."""
    with np.errstate(divide="ignore", invalid="ignore"):
        direct = np.where(x > -1.0, (1.0 + x) * np.log1p(x), 0.0) - x
    return np.where(np.abs(x) < 1e-4, x * x * (1.0 / 2.0 - x * (1.0 / 6.0 - x / 12.0)), direct)


def _minus_log_excess(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """X - log(1 + x); by its series where the difference would lose its digits."""
    with np.errstate(divide="ignore"):
        direct = x - np.log1p(x)
    return np.where(np.abs(x) < 1e-4, x * x * (1.0 / 2.0 - x * (1.0 / 3.0 - x / 4.0)), direct)


def _as(like: Real, value: NDArray[np.float64]) -> Real:
    shaped: Real = value if np.ndim(like) else float(value)  # type: ignore[assignment]
    return shaped


def tv_pinsker(kl: Real) -> Real:
    """`TV <= sqrt(KL / 2)`, KL in nats, either way round. It says nothing from KL = 2 on.

    Source: Pinsker 1964, with the constant of Csiszar 1967 and Kullback 1967.

    Args:
        kl: Kullback-Leibler divergence, nats.

    Raises:
        ValueError: If it is negative or NaN.
    """
    bound: Real = np.sqrt(real("kl", kl, infinite=True) / 2.0)
    return bound


def tv_bretagnolle_huber(kl: Real) -> Real:
    """`TV <= sqrt(1 - exp(-KL))`, KL in nats, either way round. It stays below 1 for every KL.

    Source: Bretagnolle and Huber 1979, Estimation des densites: risque minimax.

    Args:
        kl: Kullback-Leibler divergence, nats.

    Raises:
        ValueError: If it is negative or NaN.
    """
    bound: Real = np.sqrt(-np.expm1(-real("kl", kl, infinite=True)))
    return bound


def tv_from_kl(kl: float) -> Bound:
    """The smaller of Pinsker's and Bretagnolle and Huber's bound on total variation, and its name.

    Pinsker's wins up to KL = 1.594 nats.

    Args:
        kl: Kullback-Leibler divergence, nats, either way round.

    Raises:
        ValueError: If it is negative or NaN.
    """
    return smallest(
        Bound(float(tv_pinsker(kl)), "Pinsker"), Bound(float(tv_bretagnolle_huber(kl)), "Bretagnolle-Huber")
    )


def tv_from_chi2(chi2: Real) -> Real:
    """`TV <= sqrt(chi2) / 2` up to chi2 = 1, `TV <= chi2 / (1 + chi2)` from there on; attained everywhere.

    Attained by w = 1 +- sqrt(chi2) with equal probabilities, and by w in {0, 1 + chi2}. The first form holds for every
    chi2; from 1 on the second is smaller and never reaches 1.

    Source: with t = TV and A = {P > Q}, chi2 >= t^2 / (Q(A) (1 - Q(A))) by Cauchy and Schwarz, and Q(A) <= 1 - t;
    minimised over Q(A).

    Args:
        chi2: chi2(P, Q) = E_Q[w^2] - 1, P << Q.

    Raises:
        ValueError: If it is negative or NaN.
    """
    given = real("chi2", chi2, infinite=True)
    far = np.maximum(given, 1.0)
    bound: Real = np.where(given <= 1.0, np.sqrt(np.minimum(given, 1.0)) / 2.0, 1.0 / (1.0 + 1.0 / far))
    return bound if np.ndim(chi2) else float(bound)  # type: ignore[return-value]
