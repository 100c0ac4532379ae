"""Confidence sequences for the mean of a bounded stream, observation by observation, in order.

Both are valid at every moment at once: the chance that a side ever misses is at most its alpha. They choose each bet in
view of all earlier observations (a predictable plug-in), so that they need no mixture, and they need the order. The
mean is what each observation has given the earlier ones; independence is not needed, a constant conditional mean is. If
it changes, the lower side still lies below the largest of the conditional means so far and the upper above the
smallest.

These objects are stateful: `update` moves them on. They are for one thread.

Source: Waudby-Smith and Ramdas 2024, Estimating means of bounded random variables by betting, JRSS-B 86(1).
"""

from __future__ import annotations

import math
from typing import Final, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kc_otel.stats._check import level, real
from kc_otel.stats.interval import Interval, nothing
from kc_otel.stats.placement import finite_range

__all__ = ["BernsteinSequence", "BettingSequence", "running_bounds"]

Floats = NDArray[np.float64]

_BERNSTEIN_LARGEST: Final = 0.5
"""Largest bet of the empirical Bernstein sequence; the paper's default c."""
_BETTING_LARGEST: Final = 0.75
"""Largest share of the wealth that the betting sequence can lose on one observation, at the mean it expects."""
_PER_OCTAVE: Final = 4
_OCTAVES: Final = (-24, 24)
"""Powers of 2 that bets are rounded within."""
_CHUNK: Final = 4096
"""Observations whose bounds are solved for together."""
_STEPS: Final = 100
_TOLERANCE: Final = 1e-9


class _Side:
    """One side: bounds from below the mean of y in [0, 1], which is x rescaled, or mirrored for the upper side."""

    def __init__(self, alpha: float) -> None:
        self.log = -math.log(alpha)
        self.n = 0
        self.sum = 0.0
        self.squares = 0.0

    def plug_in(self, y: Floats) -> tuple[Floats, Floats]:
        """Bets and predictions for each of the next observations [k], from those before it; moves the moments on.

        `lam_t = sqrt(2 ln(1/alpha) / (var_(t-1) t ln(1 + t)))` with `mean_t = (1/2 + sum y) / (t + 1)` and
        `var_t = (1/4 + sum (y_i - mean_i)^2) / (t + 1)`, as in the paper's Theorem 2, for one side.
        """
        t = np.arange(self.n + 1, self.n + y.size + 1, dtype=np.float64)
        means = (0.5 + self.sum + np.cumsum(y)) / (t + 1.0)
        squares = self.squares + np.cumsum((y - means) ** 2)
        before = np.concatenate(([(0.5 + self.sum) / t[0]], means[:-1]))
        variance = np.concatenate(([(0.25 + self.squares) / t[0]], ((0.25 + squares) / (t + 1.0))[:-1]))
        self.n += y.size
        self.sum += float(y.sum())
        self.squares = float(squares[-1])
        return np.sqrt(2.0 * self.log / (variance * t * np.log1p(t))), before

    def trace(self, y: Floats) -> Floats:
        """Lower bounds after each of the next observations [k]."""
        raise NotImplementedError

    def advance(self, y: Floats) -> None:
        """Takes in the next observations [k]."""
        raise NotImplementedError

    def bound(self) -> float:
        """Lower bound after what came so far."""
        raise NotImplementedError


class _BernsteinSide(_Side):
    def __init__(self, alpha: float) -> None:
        super().__init__(alpha)
        self.bets = self.gained = self.paid = 0.0

    def trace(self, y: Floats) -> Floats:
        bets, before = self.plug_in(y)
        bets = np.minimum(bets, _BERNSTEIN_LARGEST)
        total = self.bets + np.cumsum(bets)
        gained = self.gained + np.cumsum(bets * y)
        paid = self.paid + np.cumsum((y - before) ** 2 * (-np.log1p(-bets) - bets))
        self.bets, self.gained, self.paid = float(total[-1]), float(gained[-1]), float(paid[-1])
        return np.asarray(np.maximum((gained - paid - self.log) / total, 0.0))

    def advance(self, y: Floats) -> None:
        self.trace(y)

    def bound(self) -> float:
        return max((self.gained - self.paid - self.log) / self.bets, 0.0)


class _BettingSide(_Side):
    def __init__(self, alpha: float) -> None:
        super().__init__(alpha)
        self.grid = np.exp2(np.arange(_OCTAVES[0] * _PER_OCTAVE, _OCTAVES[1] * _PER_OCTAVE + 1) / _PER_OCTAVE)
        self.used = np.zeros(self.grid.size)
        self.grown = 0.0

    def trace(self, y: Floats) -> Floats:
        at = self._choose(y)
        grown = self.grown + np.cumsum(np.log1p(self.grid[at] * y))
        self.grown = float(grown[-1])
        bounds = np.empty(y.size)
        for start in range(0, y.size, _CHUNK):
            part = at[start : start + _CHUNK]
            first, end = int(part.min()), int(part.max()) + 1
            seen = np.flatnonzero(self.used)
            if seen.size:
                first, end = min(first, int(seen[0])), max(end, int(seen[-1]) + 1)
            counts = np.zeros((part.size, end - first))
            counts[np.arange(part.size), part - first] = 1.0
            counts = self.used[first:end] + np.cumsum(counts, axis=0)
            self.used[first:end] = counts[-1]
            bounds[start : start + _CHUNK] = _roots(
                grown[start : start + _CHUNK], self.grid[first:end], counts, self.log
            )
        return bounds

    def advance(self, y: Floats) -> None:
        at = self._choose(y)
        self.grown += float(np.log1p(self.grid[at] * y).sum())
        self.used += np.bincount(at, minlength=self.grid.size)

    def bound(self) -> float:
        return float(_roots(np.array([self.grown]), self.grid, self.used[None, :], self.log)[0])

    def _choose(self, y: Floats) -> NDArray[np.int64]:
        """Positions in the grid of the bets on the next observations: each near the best one at the expected mean."""
        bets, before = self.plug_in(y)
        stake = np.minimum(bets * before, _BETTING_LARGEST)
        ideal = stake / (before * (1.0 - stake))
        place = np.rint(_PER_OCTAVE * (np.log2(ideal) - _OCTAVES[0]))
        return np.asarray(np.clip(place, 0, self.grid.size - 1).astype(np.int64))


def _roots(grown: Floats, grid: Floats, counts: Floats, log: float) -> Floats:
    """For each row the m with `grown - sum_j count_j log(1 + c_j m) = log`; 0 where there is none above it.

    Convex and falling in m, so that Newton's method from 0 never passes the root.
    """
    means = np.zeros(grown.size)
    open_ = np.flatnonzero(grown > log)
    for _ in range(_STEPS):
        if not open_.size:
            break
        stakes = 1.0 + np.multiply.outer(means[open_], grid)
        excess = grown[open_] - (counts[open_] * np.log(stakes)).sum(axis=1) - log
        step = excess / (counts[open_] * (grid / stakes)).sum(axis=1)
        more = excess > _TOLERANCE
        open_ = open_[more]
        means[open_] += step[more]
    return means


class _Sequence:
    """What both sequences share: checks, rescaling, and a side for the mirrored stream."""

    def __init__(self, lower: _Side, upper: _Side, low: float, high: float, method: str) -> None:
        self._lower, self._upper = lower, upper
        self._low, self._high = low, high
        self._method = method
        self._sum, self._n = 0.0, 0

    def update(self, values: ArrayLike) -> None:
        """Takes in the next observations, in order; any shape, read in C order.

        Raises:
            ValueError: If a value is NaN or outside [low, high]; nothing is taken in then.
        """
        x = self._checked(values)
        if x.size:
            self._lower.advance((x - self._low) / (self._high - self._low))
            self._upper.advance((self._high - x) / (self._high - self._low))

    def trace(self, values: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """As `update`; returns the lower and the upper bound after each of the values, [k] each.

        Raises:
            ValueError: If a value is NaN or outside [low, high]; nothing is taken in then.
        """
        x = self._checked(values)
        if not x.size:
            return x, x.copy()
        width = self._high - self._low
        lower = self._low + width * self._lower.trace((x - self._low) / width)
        return lower, self._high - width * self._upper.trace((self._high - x) / width)

    def interval(self) -> Interval:
        """The interval after what came so far; it claims nothing before the first observation."""
        if not self._n:
            return nothing(self._method)
        width = self._high - self._low
        lower, upper = self._low + width * self._lower.bound(), self._high - width * self._upper.bound()
        return Interval(self._sum / self._n, lower, upper, self._n, self._method)

    def _checked(self, values: ArrayLike) -> Floats:
        x = np.asarray(values, dtype=np.float64).ravel()
        if x.size:
            real("values", x, low=self._low, high=self._high)
        self._n += x.size
        self._sum += float(x.sum())
        return x


class BernsteinSequence(_Sequence):
    """Empirical Bernstein confidence sequence with predictable plug-in bets, for a stream in [low, high].

    On a scale where the range is 1, each side is, with lam_i = min(1/2, the plug-in bet) and psi(lam) = -ln(1-lam) -
    lam, `sum lam_i x_i / sum lam_i +- (ln(1/alpha) + sum psi(lam_i) (x_i - mean_(i-1))^2) / sum lam_i`. In closed form
    and quick; `BettingSequence` is narrower.

    Source: Waudby-Smith and Ramdas 2024, Theorem 2, each side with its own alpha.

    >>> sequence = BernsteinSequence(low=0.0, high=1.0, alpha_lower=0.05, alpha_upper=0.05)
    >>> sequence.update([0.2, 0.4] * 500)
    >>> sequence.interval().lower < 0.3 < sequence.interval().upper
    True

    Args:
        low: Smallest value that the stream can take.
        high: Largest value that the stream can take.
        alpha_lower: Probability that the lower side is ever above the mean.
        alpha_upper: Probability that the upper side is ever below it.

    Raises:
        ValueError: If an alpha is not in (0, 1) or [low, high] is not a finite range.
    """

    def __init__(self, *, low: float, high: float, alpha_lower: float, alpha_upper: float) -> None:
        finite_range(low, high)
        sides = _BernsteinSide(level("alpha_lower", alpha_lower)), _BernsteinSide(level("alpha_upper", alpha_upper))
        super().__init__(*sides, low, high, "empirical Bernstein sequence")


class BettingSequence(_Sequence):
    """Betting confidence sequence (hedged capital) with predictable plug-in bets, for a stream in [low, high].

    A side ends at the mean m against which the capital `prod (1 + lam_i(m) (x_i - m))` has reached 1/alpha, with
    lam_i(m) = c_i / (1 + c_i m) on a scale where the range is 1 and c_i the bet whose lam_i at the expected mean is the
    plug-in bet, cut to 3/4 of what would risk everything, and rounded to a power of 2^(1/4). Of the paper's family of
    bets this is a member that needs no grid of means: the number of times each c was used says it all.

    Source: Waudby-Smith and Ramdas 2024, Theorem 3, each side with its own alpha.

    >>> sequence = BettingSequence(low=0.0, high=1.0, alpha_lower=0.05, alpha_upper=0.05)
    >>> sequence.update([0.2, 0.4] * 500)
    >>> sequence.interval().lower < 0.3 < sequence.interval().upper
    True

    Args:
        low: Smallest value that the stream can take.
        high: Largest value that the stream can take.
        alpha_lower: Probability that the lower side is ever above the mean.
        alpha_upper: Probability that the upper side is ever below it.

    Raises:
        ValueError: If an alpha is not in (0, 1) or [low, high] is not a finite range.
    """

    def __init__(self, *, low: float, high: float, alpha_lower: float, alpha_upper: float) -> None:
        finite_range(low, high)
        sides = _BettingSide(level("alpha_lower", alpha_lower)), _BettingSide(level("alpha_upper", alpha_upper))
        super().__init__(*sides, low, high, "betting sequence")


def running_bounds(
    values: ArrayLike,
    *,
    low: float,
    high: float,
    alpha_lower: float,
    alpha_upper: float,
    kind: Literal["betting", "bernstein"] = "betting",
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Lower and upper bounds [N] each for the mean of a stream after each of its values, for plots.

    Args:
        values: The stream, in order [N].
        low: Smallest value that the stream can take.
        high: Largest value that the stream can take.
        alpha_lower: Probability that the lower side is ever above the mean.
        alpha_upper: Probability that the upper side is ever below it.
        kind: `betting` for `BettingSequence`, `bernstein` for `BernsteinSequence`.

    Raises:
        ValueError: If the kind is unknown, an alpha is not in (0, 1), [low, high] is not a finite range, or a value is
            NaN or outside of it.
    """
    kinds = {"betting": BettingSequence, "bernstein": BernsteinSequence}
    if kind not in kinds:
        msg = f"kind: {kind!r} is unknown; write one of {', '.join(kinds)}"
        raise ValueError(msg)
    return kinds[kind](low=low, high=high, alpha_lower=alpha_lower, alpha_upper=alpha_upper).trace(values)
