"""Total variation and ratio of whole sequences y_1..y_T, from their tokens.

TV_t is the total variation of step t's next-token distributions given the prefix, tau_t a bound on it that holds for
every prefix, W the product of the token ratios w_t.
"""

from __future__ import annotations

import math
from typing import Any

from examples.rl_bias.sharpest import Bound, horizon_of, real, required, smallest
from examples.rl_bias.token_bounds import (
    chi2_from_half_range,
    chi2_from_log_ratio_range,
    chi2_from_ratio_range,
    kl_from_half_range,
    kl_from_log_ratio_range,
    kl_from_ratio_range,
    token_tv,
    tv_from_chi2,
    tv_from_kl,
)


def tv_sequence_uniform(token_tv: float, horizon: int) -> float:
    """`TV_seq <= 1 - (1 - tau)^T`: the worst case with one bound for every step.

    Args:
        token_tv: tau, in [0, 1].
        horizon: T.

    Raises:
        ValueError: If tau is not in [0, 1] or T is not a whole number of at least 1.
    """
    tau = real("token_tv", float(token_tv), high=1.0, what="a total variation")
    steps = horizon_of(horizon)
    return 1.0 if tau == 1.0 else -math.expm1(steps * math.log1p(-tau))


def sequence_tv(
    horizon: int,
    *,
    half_range: float | None = None,
    log_ratio: float | None = None,
    ratio_range: tuple[float, float] | None = None,
    token_tv_worst: float | None = None,
    token_tv_mean: float | None = None,
    token_kl_mean: float | None = None,
    token_chi2_worst: float | None = None,
    coupling_mean: float | None = None,
    sequence_chi2: float | None = None,
) -> Bound:
    """The smallest bound on TV_seq that follows from what is known of the tokens, and its name.

    The worst case over steps grows like T; KL adds up and goes through a square root, so that it grows like sqrt(T) and
    wins on long sequences. Chi-square multiplies; it wins where ratios reach far down and hardly up.

    >>> sequence_tv(4096, half_range=0.002).name
    'KL over steps, Pinsker, half range'

    Args:
        horizon: T.
        half_range: Bound on the half range of the logit difference at every prefix.
        log_ratio: Bound on |log P(y) - log Q(y)| over all tokens and prefixes, P << Q.
        ratio_range: (a, b) with 1 - a <= w <= 1 + b over all tokens and prefixes, P << Q.
        token_tv_worst: Bound on a step's total variation at every prefix.
        token_tv_mean: Mean total variation of a step over Q's rollouts: (1/T) E_Q[sum_t TV_t].
        token_kl_mean: Mean KL(Q||P) of a step over Q's rollouts (or KL(P||Q) over P's), nats: (1/T) E[sum_t KL_t].
        token_chi2_worst: Bound on a step's chi-square at every prefix, P << Q.
        coupling_mean: E_Q[1 - prod_t min(1, w_t)]; prod_t min(1, w_t) <= min(1, W), and TV_seq = 1 - E_Q[min(1, W)].
        sequence_chi2: E_Q[W^2] - 1, P << Q.

    Raises:
        ValueError: If nothing is given, or a number is out of its range.
    """
    ranges: dict[str, Any] = {"half_range": half_range, "log_ratio": log_ratio, "ratio_range": ratio_range}
    required(
        **ranges,
        token_tv_worst=token_tv_worst,
        token_tv_mean=token_tv_mean,
        token_kl_mean=token_kl_mean,
        token_chi2_worst=token_chi2_worst,
        coupling_mean=coupling_mean,
        sequence_chi2=sequence_chi2,
    )
    steps = horizon_of(horizon)
    known = []
    if any(value is not None for value in ranges.values()):
        token = token_tv(half_range=half_range, log_ratio=log_ratio, ratio_range=ratio_range)
        known.append(Bound(tv_sequence_uniform(token.value, steps), f"worst case over steps, {token.name}"))
    if token_tv_worst is not None:
        known.append(Bound(tv_sequence_uniform(token_tv_worst, steps), "worst case over steps"))
    if token_tv_mean is not None:
        mean = real("token_tv_mean", float(token_tv_mean), high=1.0, what="a total variation")
        known.append(Bound(min(1.0, steps * mean), "on policy"))
    if coupling_mean is not None:
        parted = real("coupling_mean", float(coupling_mean), high=1.0, what="a probability")
        known.append(Bound(parted, "coupling"))
    kls, chi2s = _step_bounds(**ranges)
    if token_kl_mean is not None:
        kls.append(Bound(real("token_kl_mean", float(token_kl_mean), infinite=True), "mean KL"))
    if token_chi2_worst is not None:
        worst = real("token_chi2_worst", float(token_chi2_worst), infinite=True)
        chi2s.append(Bound(worst, "worst chi-square"))
    known += [*_through_kl(steps, kls), *_through_chi2(steps, chi2s)]
    if sequence_chi2 is not None:
        known.append(Bound(float(tv_from_chi2(float(sequence_chi2))), "chi-square"))
    return smallest(*known)


def _step_bounds(
    half_range: float | None, log_ratio: float | None, ratio_range: tuple[float, float] | None
) -> tuple[list[Bound], list[Bound]]:
    """Bounds on the KL of a step, each one way round, and on its chi-square at every prefix."""
    kls, chi2s = [], []
    if half_range is not None:
        kls.append(Bound(float(kl_from_half_range(half_range)), "half range"))
        chi2s.append(Bound(float(chi2_from_half_range(half_range)), "half range"))
    if log_ratio is not None:
        kls.append(Bound(float(kl_from_log_ratio_range(log_ratio)), "log-ratio range"))
        chi2s.append(Bound(float(chi2_from_log_ratio_range(log_ratio)), "log-ratio range"))
    if ratio_range is not None:
        both_ways = (float(kl_from_ratio_range(*ratio_range, reverse=way)) for way in (False, True))
        kls.append(Bound(min(both_ways), "ratio range"))
        chi2s.append(Bound(float(chi2_from_ratio_range(*ratio_range)), "ratio range"))
    return kls, chi2s


def _through_kl(steps: int, known: list[Bound]) -> list[Bound]:
    if not known:
        return []
    kl = smallest(*known)
    tv = tv_from_kl(steps * kl.value)
    return [Bound(tv.value, f"KL over steps, {tv.name}, {kl.name}")]


def _through_chi2(steps: int, known: list[Bound]) -> list[Bound]:
    """Second moments multiply; and KL(P||Q) <= log(1 + chi2) at every prefix adds up, which is smaller far out."""
    if not known:
        return []
    chi2 = smallest(*known)
    exponent = steps * math.log1p(chi2.value)
    return [
        Bound(
            float(tv_from_chi2(math.expm1(exponent) if exponent < 709.0 else math.inf)),
            f"chi-square over steps, {chi2.name}",
        ),
        *_through_kl(steps, [Bound(math.log1p(chi2.value), chi2.name)]),
    ]
