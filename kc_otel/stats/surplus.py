"""Evidence that tokens were not sampled with the inference kernel's probabilities, of two kinds.

Of tokens that Q sampled, E_Q[P/Q] <= 1. And a token that has m > 1/2 of the mass is sampled with probability m, any
other one of its place with 1 - m: with f = (1 - q)/q where q > 1/2 and -1 elsewhere, E_Q[f] <= 0 at every place,
whatever the rest of Q is. Where improbable tokens are too few for how sure Q says it was, f adds up to more.

Four bets, each with a quarter of the stake, put a share of their wealth on each token. By Ville's inequality the wealth
reaches a million by chance at most once in a million runs, whenever one looks (Waudby-Smith and Ramdas 2024).
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

_Floats = NDArray[np.floating]

_BET_SHARES: Final = np.array([0.005, 0.05, 0.2, 0.5])
BET_COUNT: Final = 4
"""Bets against E_Q[P/Q] <= 1, each a share of the wealth; the first wins by single tokens of which P/Q is huge."""
RATIO_CUT: Final = 10.0
"""Largest P/Q of a token that counts."""
_RATIO_CUTS: Final = np.array([1000.0, RATIO_CUT, RATIO_CUT, RATIO_CUT])
"""The same for each bet."""
ROUNDING_SURPLUS: Final = 0.02
"""Mean P/Q above 1 that rounding, or a kernel that computes its own tokens anew, explains."""
_ALARM_LOG_WEALTH: Final = math.log(1e6)
LIKELY: Final = math.log(2.0)
"""-log q below which a token has more than half of the mass."""
_TOO_FEW_FACTOR: Final = 1.1
"""Improbable tokens that each one counts for: a tenth of them may be missing, by masks and by rounding."""


class Surplus:
    """Evidence against E_Q[P/Q] <= 1, added up over batches: a window that begins anew whenever there is none."""

    def __init__(self) -> None:
        self._logs = np.zeros((2, BET_COUNT))

    def add(self, more: NDArray[np.float64], mean: float) -> tuple[bool, bool]:
        """Add the log of the wealth that each bet of either kind makes of a batch [2, bets], whose mean P/Q is `mean`.

        Returns whether its P/Q are too large, and whether Q is too sure of its tokens. Evidence is kept from growing so
        far that a run which was mended would stay accused.
        """
        self._logs = np.clip(self._logs + more, 0.0, _ALARM_LOG_WEALTH + math.log(BET_COUNT) + 1.0)
        return surely_surplus(self._logs[0]) and mean > 1.0 + ROUNDING_SURPLUS, surely_surplus(self._logs[1])


def surplus(changes: NDArray[np.float64]) -> NDArray[np.float64]:
    """Log of the wealth that each bet against E_Q[P/Q] <= 1.02 makes of tokens with these P/Q - 1, [bets].

    A bet of a share lam multiplies by 1 + lam (min(P/Q, cut) - 1.02) at each token, so that its expectation stays at
    most 1 whatever the tokens before were (Ville; Waudby-Smith and Ramdas 2024).
    """
    return np.array(
        [
            np.log1p(bet * (np.minimum(changes, cut - 1.0) - ROUNDING_SURPLUS)).sum()
            for bet, cut in zip(_BET_SHARES, _RATIO_CUTS, strict=True)
        ]
    )


def sureness(logprobs: NDArray[np.floating]) -> NDArray[np.float64]:
    """Log of the wealth, at least, that each bet makes of sampled tokens with these log q, in nats, [bets].

    (1 - q)/q >= x = -log q, log(1 + y) >= y - y^2/2, and x^2 <= LIKELY x of a likely token.
    """
    improbable = int(np.count_nonzero(logprobs <= -LIKELY))
    likely = max(-float(np.maximum(logprobs, -LIKELY).sum()) - LIKELY * improbable, 0.0)
    return np.asarray(
        (_BET_SHARES - _BET_SHARES**2 * LIKELY / 2.0) * likely + improbable * np.log1p(-_BET_SHARES * _TOO_FEW_FACTOR)
    )


def surely_surplus(logs: NDArray[np.float64]) -> bool:
    """Return whether the bets, each with its part of the stake, won more than chance does; see `surplus`."""
    return float(np.logaddexp.reduce(logs)) - math.log(BET_COUNT) > _ALARM_LOG_WEALTH


def surplus_of_sums(total: float, squares: float, tokens: int) -> NDArray[np.float64]:
    """A lower bound of `surplus` without the cut, from sum and sum of squares of P/Q - 1: log(1+y) >= y - y^2."""
    over = total - ROUNDING_SURPLUS * tokens
    return np.asarray(
        _BET_SHARES * over
        - _BET_SHARES**2 * (squares + ROUNDING_SURPLUS**2 * tokens + 2 * ROUNDING_SURPLUS * abs(total))
    )


def is_surplus(lower: _Floats, upper: _Floats, count: NDArray[np.integer], total: float) -> bool:
    """Return whether the mean of P/Q is surely above 1, given the edges and counts of its bins [bins], and its sum."""
    tokens = int(count.sum())
    if not tokens or not total > (1.0 + ROUNDING_SURPLUS) * tokens:
        return False
    logs = np.array(
        [
            float(count @ np.log1p(bet * (np.minimum(lower, cut) - 1.0 - ROUNDING_SURPLUS)))
            for bet, cut in zip(_BET_SHARES, _RATIO_CUTS, strict=True)
        ]
    )
    squares = float(count @ np.maximum(np.square(lower - 1.0), np.square(upper - 1.0)))
    return surely_surplus(np.maximum(logs, surplus_of_sums(total - tokens, squares, tokens)))
