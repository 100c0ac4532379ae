"""Wealth of one who bets that a mean is larger than it is said to be: e-values and betting intervals are made of it.

For observations x in [0, 1], a hypothetical mean m and a bet c > 0, the product of (1 + c x_i) / (1 + c m) is the
wealth of one who starts with 1 and puts lambda = c / (1 + c m) of it on each observation: 1 + lambda (x_i - m). If m is
the mean of every observation given the earlier ones, no bet gains on average, so the wealth is a martingale, and its
average over any bets chosen beforehand is one, too. By Ville's inequality it ever reaches 1/alpha with probability at
most alpha.

Written this way the observations and m come apart: the sum of log(1 + c_j x_i), one number per bet, is all that a
sample is needed for. It depends on no order, never falls when an observation grows, and is concave in each of them,
which is why bins can bound it. For the opposite side, mirror the sample: x -> 1 - x.

Source: Waudby-Smith and Ramdas 2024, Estimating means of bounded random variables by betting, JRSS-B 86(1), Theorem 3
and section 4.3 (mixtures over bets); Ville 1939. The mixture here is a finite one, over powers of sqrt(2).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kc_otel.stats.binned import Placement

Floats = NDArray[np.float64]
Bets = tuple[Floats, Floats]
"""Bets c [J], ascending, and the logarithms of their weights [J], which add up to 1."""

_PER_OCTAVE: Final = 2
"""Bets per factor of 2: with four the bounds would be narrower by less than a part in a hundred."""
_WEIGHT_DECAY: Final = 0.125
"""Exponent of the weight of bets above 1, c^-_WEIGHT_DECAY: they pay where the mean is tiny, often but not always."""
_SMALLEST_BET: Final = 4.0
"""Smallest bet for n observations, in 1/sqrt(n): about the best one for a coin, which has the largest variance."""
_LARGEST_BET: Final = 16.0
"""Largest bet for few observations; for more than that it is n, which one observation of 1 among n zeros pays."""
_ALL_BET_POWERS: Final = (-16, 20)
"""Powers of 2 that the bets for any number of observations span."""
_TOLERANCE_NATS: Final = 1e-9
"""Nats by which the wealth at a bound may exceed 1/alpha: the bound is that much too cautious, never too bold."""
_VALUES_PER_BLOCK: Final = 1024
"""Values at a time: for all bets together they stay in a core's cache, which halves the time."""
_MAX_NEWTON_STEPS: Final = 50
"""Newton steps; three or four are usual."""


def bets_for(n: int, *, anytime: bool = False) -> Bets:
    """The bets for a sample of a size that is known beforehand, or for any size; the same for every alpha."""
    first, last = (_PER_OCTAVE * power for power in _ALL_BET_POWERS) if anytime else span_of(n)
    return _geometric(first, last)


@lru_cache(maxsize=4096)
def span_of(n: int) -> tuple[int, int]:
    """The numbers of the first and the last of the bets for n observations in the geometric series of all bets."""
    return (
        math.floor(_PER_OCTAVE * math.log2(_SMALLEST_BET / math.sqrt(n))),
        math.ceil(_PER_OCTAVE * math.log2(max(float(n), _LARGEST_BET))),
    )


def grid_of(spans: Sequence[tuple[int, int]]) -> tuple[Floats, Floats]:
    """The bets of many samples [J], and the logarithms of their weights in each [R, J], -inf where there is none."""
    kinds = {span: kind for kind, span in enumerate(dict.fromkeys(spans))}
    first, last = min(begin for begin, _ in kinds), max(end for _, end in kinds)
    weights = np.full((len(kinds), last - first + 1), -math.inf)
    for (begin, end), kind in kinds.items():
        weights[kind, begin - first : end - first + 1] = _geometric(begin, end)[1]
    return np.exp2(np.arange(first, last + 1) / _PER_OCTAVE), weights[[kinds[span] for span in spans]]


@lru_cache(maxsize=1024)
def _geometric(first: int, last: int) -> Bets:
    bets = np.exp2(np.arange(first, last + 1) / _PER_OCTAVE)
    weights = np.maximum(bets, 1.0) ** -_WEIGHT_DECAY
    return bets, np.log(weights / weights.sum())


def growth(bets: Floats, values: Floats, weights: Floats) -> Floats:
    """Sum over observations of log(1 + c x) for each bet [J], from values in [0, 1] [k] that stand for weights [k]."""
    total = np.zeros(len(bets))
    for first in range(0, len(values), _VALUES_PER_BLOCK):
        block = slice(first, first + _VALUES_PER_BLOCK)
        stakes = np.multiply.outer(bets, values[block])
        stakes += 1.0
        # log, and not log1p: five times as fast, and wrong by 1e-16 per observation at most.
        total += np.log(stakes, out=stakes) @ weights[block]
    return total


def lower_bound(bets: Bets, grown: Floats, n: float, alpha: float) -> float:
    """The mean in [0, 1] at which the mixture's wealth is 1/alpha; all smaller ones are refuted. 0 when none is.

    Newton's method from below on a convex, falling function never passes the root, so that every step is a valid bound.
    """
    scores = grown + bets[1] + math.log(alpha)
    return float(lower_bounds(bets[0], scores[None], np.array([n]))[0])


def lower_bounds(bets: Floats, scores: Floats, n: Floats) -> Floats:
    """`lower_bound` of many samples [R], from bets [J], the logs of wealth, weight and alpha [R, J], and sizes [R]."""
    # Alone, each bet has its root in closed form. The mixture refutes at least what the luckiest of them refutes.
    mean: Floats = np.clip((np.expm1(scores / n[:, None]) / bets).max(axis=1), 0.0, 1.0)
    active = np.arange(n.size)
    for _ in range(_MAX_NEWTON_STEPS):
        excess, slope = _wealth(bets, scores[active], n[active], mean[active])
        on = excess > _TOLERANCE_NATS
        if not on.any():
            break
        active = active[on]
        mean[active] = np.minimum(mean[active] - excess[on] / slope[on], 1.0)
    return mean


def worst_bound(
    known: Placement, mean: float, place: Callable[[Floats], Floats], alpha: float, *, anytime: bool
) -> float:
    """`lower_bound` of a sample's worst placement with this mean, whose values `place` puts into [0, 1]."""
    bets, (values, weights) = bets_for(known.n, anytime=anytime), known.worst(mean)
    return lower_bound(bets, growth(bets[0], place(values), weights), known.n, alpha)


def _wealth(bets: Floats, scores: Floats, n: Floats, mean: Floats) -> tuple[Floats, Floats]:
    """Logarithm of sum_j exp(score_j - n log(1 + c_j m)) of each row [R], and its derivative in m."""
    stakes = 1.0 + bets * mean[:, None]
    exponents = scores - n[:, None] * np.log(stakes)
    top = exponents.max(axis=1)
    share = np.exp(exponents - top[:, None])
    whole = share.sum(axis=1)
    return top + np.log(whole), -n * np.einsum("rb,rb->r", bets / stakes, share) / whole
