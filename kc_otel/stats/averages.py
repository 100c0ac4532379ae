"""From a statistic that a contract limits (a mean, a quantile, a share above a threshold) to a mean total variation.

Drift that a limit on a mean or a quantile allows may sit anywhere, so these speak of the mean of TV_t over the tokens
that the statistic was taken of, never of a single token.
"""

from __future__ import annotations

import numpy as np

from kc_otel.stats._check import Real, real

__all__ = ["tv_from_js", "tv_from_mean_abs_log_ratio", "tv_from_tail"]


def tv_from_mean_abs_log_ratio(mean: Real) -> Real:
    """`TV <= 1 - exp(-E_Q|l|)`, whatever the supports; attained in a limit.

    It holds for a token, on average over tokens, and for sequences with `E_Q sum_t |l_t|` in place of `E_Q|l|`. It is
    below Pinsker's bound of the same number, which is one on KL too: `KL(Q||P) = -E_Q[l] <= E_Q|l|`.

    Source: TV = E_Q[(1 - w)_+] = E_Q[1 - exp(-l_-)] with l_- = max(-l, 0), Jensen's inequality, and l_- <= |l|. The
    limit is P that moves the same share of every token's probability to one that Q hardly ever samples.

    Args:
        mean: E_Q|l|, nats.

    Raises:
        ValueError: If it is negative or NaN.
    """
    bound: Real = -np.expm1(-real("mean", mean, infinite=True))
    return bound


def tv_from_tail(inside: Real, share: Real) -> Real:
    """Mean TV when all tokens but a share q are within a bound: `E[TV_t] <= a (1 - q) + q`; attained.

    For a quantile of rank r the share is 1 - r. Nothing is known of the tokens beyond, so they count with 1: a limit on
    a p99.9 alone never bounds the mean below 0.001.

    Args:
        inside: a, what (1 - w)_+ or TV_t does not exceed on the other tokens, in [0, 1].
        share: q, in [0, 1].

    Raises:
        ValueError: If either is not in [0, 1].
    """
    a = real("inside", inside, high=1.0, what="a total variation")
    q = real("share", share, high=1.0, what="a share")
    return a * (1.0 - q) + q


def tv_from_js(js: Real) -> Real:
    """`TV <= sqrt(2 JS)`, cut at 1, JS the Jensen-Shannon divergence in nats.

    Source: Pinsker's inequality for P and Q against their midpoint M, from which each is TV / 2 away.

    Args:
        js: Jensen-Shannon divergence, nats.

    Raises:
        ValueError: If it is negative or NaN.
    """
    bound: Real = np.minimum(1.0, np.sqrt(2.0 * real("js", js, infinite=True)))
    return bound
