"""From one divergence of two distributions to another: what KL or chi-square says about total variation.

The statements hold for any pair P, Q: next-token distributions and distributions of whole sequences alike.
chi2 is chi2(P, Q) = E_Q[(w - 1)^2] with P << Q; it is infinite otherwise. All functions work on numbers and,
elementwise, on arrays.
"""

from __future__ import annotations

import numpy as np

from kc_otel.stats._check import Real, real
from kc_otel.stats.bound import Bound, smallest

__all__ = ["tv_bretagnolle_huber", "tv_from_chi2", "tv_from_kl", "tv_pinsker"]


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
        Bound(float(tv_pinsker(kl)), "Pinsker"),
        Bound(float(tv_bretagnolle_huber(kl)), "Bretagnolle-Huber"),
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
