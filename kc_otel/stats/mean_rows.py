"""How bets on the means of many samples fared: what `mixture` says of one sample, of the rows of a matrix at once."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kc_otel.stats.histogram_rows import HistogramRows
from kc_otel.stats.mixture import grid_of, span_of

__all__ = ["MeanRows", "wealth"]

Floats = NDArray[np.float64]


class _Sums(NamedTuple):
    """What the values of samples add up to.

    Attributes:
        least: The least that the mean of each may be [R].
        most: The most [R].
        at_least: What the lower edges add up to [R].
        room: How much more the values in a bin may add up to [R, B].
    """

    least: Floats
    most: Floats
    at_least: Floats
    room: Floats


class MeanRows:
    """What the means of many samples lie between, and how bets on them fared.

    Args:
        rows: The samples.
        low: Of the range.
        high: The same.
        cap: Values count up to this, on both sides of 0.
        cut: Whether values beyond it are cut there, instead of refused.

    Attributes:
        rows: The samples.
        floor: Where values count from.
        ceiling: Up to where they count.
        width: Between these.
        odd: Whether a row has values that do not count [R].
        cuts: Whether a bin reaches beyond these, so that values may be cut.
    """

    def __init__(self, rows: HistogramRows, low: float, high: float, cap: float, *, cut: bool) -> None:
        self.rows, self._cut = rows, cut
        self.floor, self.ceiling = floor, ceiling = max(low, -cap), min(high, cap)
        self.width = ceiling - floor
        # Edges ascend, so that what is beyond the range is beyond it in the outermost bins.
        (low_begin, high_begin), (low_end, high_end) = rows.own
        self.cuts = bool(low_begin.min() < floor or ceiling < high_end.max())
        self.odd = np.zeros(rows.total.size, np.bool_)
        if floor == low or not cut:
            self.odd |= (low_end if floor == low else low_begin) < floor
        if ceiling == high or not cut:
            self.odd |= (high_begin if ceiling == high else high_end) > ceiling

    @property
    def least(self) -> Floats:
        """The least that the mean of each may be [R]."""
        return self._sums.least

    @property
    def most(self) -> Floats:
        """The most [R]."""
        return self._sums.most

    @cached_property
    def estimate(self) -> Floats:
        """The mean of each [R]."""
        middle = (self.least + self.most) / 2.0
        return middle if self._cut else np.where(np.isfinite(self.rows.sum), self.rows.sum / self.rows.total, middle)

    @property
    def bets(self) -> Floats:
        """Stakes [J]."""
        return self._grid[0]

    def scores_below(self, alpha: float) -> Floats:
        """What bets that the mean is larger have won, by row, and 1/alpha less [R, J]: logarithms."""
        return self._scores(self.least, lambda x: (x - self.floor) / self.width, alpha)

    def scores_above(self, alpha: float) -> Floats:
        """The same of bets that it is smaller."""
        return self._scores(self.most, lambda x: (self.ceiling - x) / self.width, alpha)

    def at_upper_edges(self, alpha: float) -> tuple[Floats, Floats]:
        """`scores_above` if every value were as large as its bin allows, which are less [R, J]; and means then [R]."""
        values = np.clip(self.rows.shared[1], self.floor, self.ceiling)[:, None]
        won = np.log(1.0 + self.bets * ((self.ceiling - values) / self.width))
        added = self.rows.count @ np.concatenate([won, values], axis=1)
        return added[:, :-1] + (self._grid[1] + math.log(alpha)), added[:, -1] / self.rows.total

    @cached_property
    def _grid(self) -> tuple[Floats, Floats]:
        return grid_of([span_of(int(size)) for size in self.rows.total.tolist()])

    @cached_property
    def _sums(self) -> _Sums:
        rows, floor, ceiling = self.rows, self.floor, self.ceiling
        total = np.where(np.isfinite(rows.sum), rows.sum, math.nan)
        lower, upper, count = rows.lower, rows.upper, rows.count
        if not self.cuts:
            at_least, at_most = _dot(count, lower), _dot(count, upper)
            one, other = np.fmax(at_least, total), np.fmin(at_most, total)
        else:
            lower, upper = np.clip(lower, floor, ceiling), np.clip(upper, floor, ceiling)
            at_least, at_most = _dot(count, lower), _dot(count, upper)
            one = np.fmax(at_least, total - _dot(count, rows.upper - upper))
            other = np.fmin(at_most, total - _dot(count, rows.lower - lower))
        n = rows.total
        return _Sums(np.minimum(one, other) / n, np.maximum(one, other) / n, at_least, count * (upper - lower))

    @cached_property
    def _reach(self) -> tuple[Floats, Floats]:
        room = self._sums.room
        return np.cumsum(room[:, ::-1], axis=1)[:, ::-1] - room, np.where(room > 0.0, room, 1.0)

    def _scores(self, mean: Floats, place: Callable[[Floats], Floats], alpha: float) -> Floats:
        reach, divisor = self._reach
        raised = (mean * self.rows.total - self._sums.at_least)[:, None] - reach
        np.minimum(np.maximum(raised, 0.0, out=raised), self._sums.room, out=raised)
        raised /= divisor
        raised *= self.rows.count

        def won(edges: Floats) -> Floats:
            return np.asarray(np.log(1.0 + self.bets * place(np.clip(edges, self.floor, self.ceiling))[:, None]))

        grown = self.rows.added_up(won, self.rows.count - raised) + self.rows.added_up(won, raised, upper=True)
        return grown + self._grid[1] + math.log(alpha)


def _dot(a: Floats, b: Floats) -> Floats:
    product: Floats = np.einsum("rb,rb->r", a, b)
    return product


def wealth(bets: Floats, scores: Floats, n: Floats, mean: Floats) -> tuple[Floats, Floats]:
    """`mixture._wealth` of each row [R], and its slope, of bets [J] and their scores [R, J]."""
    stakes = 1.0 + bets * mean[:, None]
    each = scores - n[:, None] * np.log(stakes)
    top = each.max(axis=1)
    share = np.exp(each - top[:, None])
    whole = share.sum(axis=1)
    return top + np.log(whole), -n * _dot(bets / stakes, share) / whole
