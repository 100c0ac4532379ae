"""What a histogram of observations is asked for, in the two query languages that rules are written in.

Prometheus and Mimir keep the recorders' histograms as native ones, which functions read whole. VictoriaMetrics keeps a
series per bucket, whose label `vmrange` holds the bucket's edges, rounded to four digits.

Deviations are bounded from above. Every observation stands for a point of its bucket that is off by at most a part r of
itself: the geometric middle in Prometheus, the arithmetic one in VictoriaMetrics. By the triangle inequality for root
mean squares the true deviation is at most the points' own, plus r times their root mean square.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Protocol

from kc_otel.record.telemetry.buckets import ZERO_THRESHOLD

__all__ = ["GROWTH", "RANGE_CELL", "SCALE", "Native", "Ranges", "Reading", "text"]

SCALE: Final = 4
"""Scale of the histograms that recorders send."""
GROWTH: Final = 2.0 ** (2.0**-SCALE)
"""Upper edge of a bucket, as a multiple of the lower one."""
RANGE_CELL: Final = "kc_slice, kc_kernel_train, kc_kernel_inference, kc_window"
"""Labels of a cell's window."""

_ROOT: Final = math.sqrt(GROWTH)
_ROUNDED: Final = 1e-3
"""More than four digits lose of an edge, as a part of it."""
_HALF: Final = (GROWTH - 1.0) / (GROWTH + 1.0) + 2.0 * _ROUNDED


class Reading(Protocol):
    """Questions to the histograms of every cell and window; answers are expressions with the labels of those.

    Attributes:
        blur: What the edges of buckets can be off by, as a part of them.
        mean: Mean of the observations, exact.
        deviation: Their standard deviation, or more.
        largest: Upper edge of the highest bucket in use.
        smallest: Lower edge of the lowest bucket in use.
    """

    @property
    def blur(self) -> float: ...  # noqa: D102 - described above

    @property
    def mean(self) -> str: ...  # noqa: D102

    @property
    def deviation(self) -> str: ...  # noqa: D102

    @property
    def largest(self) -> str: ...  # noqa: D102

    @property
    def smallest(self) -> str: ...  # noqa: D102

    def above(self, edge: float) -> str:
        """Share of the observations above the edge of a bucket."""

    def below(self, edge: float) -> str:
        """Share of the observations below the edge of a bucket."""

    def quantile(self, rank: float, where: str = "") -> str:
        """A quantile, anywhere in its bucket; only of cells and windows for which `where` says anything."""


@dataclass(frozen=True, slots=True)
class Native:
    """Native histograms, in PromQL.

    Attributes:
        histogram: Selector of them.
        blur: None.
    """

    histogram: str
    blur: float = 0.0

    @property
    def mean(self) -> str:
        """Sum by count."""
        return f"histogram_sum({self.histogram}) / histogram_count({self.histogram})"

    @property
    def deviation(self) -> str:
        """Of geometric middles, off by at most sqrt(g) - 1 of themselves, g being the growth of edges."""
        return (
            f"({text(_ROOT)} * histogram_stddev({self.histogram}) + {text(_ROOT - 1.0)} * abs({self.mean})"
            f" + {text(ZERO_THRESHOLD)})"
        )

    @property
    def largest(self) -> str:
        """The quantile of rank 1 is an edge."""
        return self.quantile(1.0)

    @property
    def smallest(self) -> str:
        """The quantile of rank 0 is an edge."""
        return self.quantile(0.0)

    def above(self, edge: float) -> str:
        """Exact, for an edge."""
        return f"histogram_fraction({edge!r}, +Inf, {self.histogram})"

    def below(self, edge: float) -> str:
        """Exact, for an edge."""
        return f"histogram_fraction(-Inf, {edge!r}, {self.histogram})"

    def quantile(self, rank: float, where: str = "") -> str:
        """Interpolated within its bucket."""
        chosen = f"{self.histogram} and {where}" if where else self.histogram
        return f"histogram_quantile({text(rank)}, {chosen})"


@dataclass(frozen=True, slots=True)
class Ranges:
    """Series per bucket, in MetricsQL.

    Attributes:
        ranges: Number of observations by cell, window and `vmrange`; none of an empty bucket.
        total: Sum of the observations, by cell and window.
        samples: Number of the observations, by cell and window.
        low_edge: Lower edge of each of `ranges`, with the same labels.
        high_edge: Upper edge, likewise.
        blur: What rounding can take from an edge.
    """

    ranges: str
    total: str
    samples: str
    low_edge: str
    high_edge: str
    blur: float = _ROUNDED

    @property
    def mean(self) -> str:
        """Sum by count."""
        return f"{self.total} / {self.samples}"

    @property
    def deviation(self) -> str:
        """Of arithmetic middles about the exact mean."""
        middle = f"(({self.low_edge} + {self.high_edge}) / 2)"
        squares = f"({middle} - ignoring (vmrange) group_left () ({self.mean})) ^ 2"
        own = f"sqrt({self._sum(f'{self.ranges} * {squares}')} / {self.samples})"
        size = f"sqrt({self._sum(f'{self.ranges} * {middle} ^ 2')} / {self.samples})"
        return f"({own} + {text(_HALF)} * {size} + {text(ZERO_THRESHOLD)})"

    @property
    def largest(self) -> str:
        """The highest of the upper edges."""
        return f"max by ({RANGE_CELL}) ({self.high_edge})"

    @property
    def smallest(self) -> str:
        """The lowest of the lower edges."""
        return f"min by ({RANGE_CELL}) ({self.low_edge})"

    def above(self, edge: float) -> str:
        """Exact, for an edge: buckets are told apart half a bucket away from it, where rounding does not matter."""
        return self._share(f"{self.low_edge} > {text(_beside(edge, -1))}")

    def below(self, edge: float) -> str:
        """Exact, for an edge."""
        return self._share(f"{self.high_edge} < {text(_beside(edge, 1))}")

    def quantile(self, rank: float, where: str = "") -> str:
        """Interpolated within its bucket."""
        chosen = f"{self.ranges} and on ({RANGE_CELL}) {where}" if where else self.ranges
        return f"histogram_quantile({text(rank)}, {chosen})"

    def _share(self, which: str) -> str:
        return f"(({self._sum(f'{self.ranges} and {which}')} or {self.samples} * 0) / {self.samples})"

    def _sum(self, what: str) -> str:
        return f"sum by ({RANGE_CELL}) ({what})"


def text(number: float) -> str:
    """A constant of a formula; edges of buckets are written in full instead, so that they are edges."""
    return f"{number:.12g}"


def _beside(edge: float, direction: int) -> float:
    """Half a bucket below an edge (-1) or above it (1)."""
    return edge * _ROOT ** (direction if edge > 0 else -direction)
