"""End of a fault: the test that refutes "it is still as it was" while the later observations keep the limit.

A PASS asks for more than an incident does. An incident claims that a mean stands above its limit; it has ended when
that is refuted. Everything here is in units of the limit. Let L be the larger of 1 and the lower confidence bound of
E[min(x, c)] during the fault, with c = 10 limits, or more where what raised the alarm lies beyond that. Under "still as
it was" the product of `1 + lam (L - min(x, c))`, with 0 < lam < 1/(c - L), is a supermartingale, and so is its average
over bets; begun anew after a run of observations that looks like a recovery, it exceeds `k (k + 1) / alpha` at the k-th
of these with a chance of at most alpha for all of them together, however long the fault lasts.

Where it is refuted and what came since is still above the limit, the fault lasts at a lower level.

Source: Ville 1939; Waudby-Smith and Ramdas 2024, Estimating means of bounded random variables by betting, JRSS-B 86(1).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from kc_otel.judge.statistics import MeanTest
from kc_otel.judge.stored_numbers import StoredFloats, StoredHistogram
from kc_otel.stats import Binned, capped_mean_interval
from kc_otel.stats.histogram import Histogram
from kc_otel.stats.interval import Floats

_CAPS_IN_LIMITS: Final = (10.0, 100.0, 1000.0)
"""Caps c, in limits; the first under which the mean of what was seen of a fault is above the limit is taken."""
_BETS: Final[Floats] = np.array([0.03, 0.1, 0.3, 0.6, 0.9])
"""Bets lam, in units of 1 / (c - L)."""
_RECOVERY_RUN: Final = 20
"""Observations that are looked at together for a sign of recovery."""
_RECOVERY_SHARE: Final = 2.0 / 3.0
"""Part of a fault's mean down to which a run has to fall to be one, where it stays above the limit."""
_GIVEN_UP: Final = math.log(1.0 / 20.0)
"""Logarithm of the wealth at which a recovery is taken for none."""


class Recovery(NamedTuple):
    """A recovery that is being watched."""

    log_wealth: StoredFloats
    level: float
    cap: float

    @property
    def won(self) -> float:
        """Logarithm of the average over the bets."""
        return float(np.logaddexp.reduce(self.log_wealth) - math.log(self.log_wealth.size))


@dataclass(slots=True, eq=False)
class Fault:
    """A fault that has not ended."""

    sample: StoredHistogram | None = None
    """Observations during it."""
    run: StoredHistogram | None = None
    recent: StoredHistogram | None = None
    """Observations since the recovery under watch began."""
    begun: int = 0
    recovery: Recovery | None = None
    """The one that is being watched; None while there is no sign of any."""
    improved: tuple[float, float] | None = None
    """Mean before and after it improved last, in limits."""

    def take(self, parts: Iterable[Histogram], test: MeanTest, alpha: float) -> bool:
        """Add the next observations; return True if the fault has ended: falsely at most with a chance of `alpha`."""
        new = together(parts)
        if new is None or not new.count:
            return False
        self.run = _both(self.run, new)
        if self.recovery is not None:
            wealth, level, cap = self.recovery
            values, counts = test.in_limits(new.binned(), most=True)
            wealth = wealth + counts @ np.log1p(_BETS / (cap - level) * (level - np.minimum(values, cap))[:, None])
            self.recovery, self.recent = Recovery(wealth, level, cap), _both(self.recent, new)
            won = self.recovery.won
            if won >= math.log(self.begun * (self.begun + 1) / alpha):
                mean = _mean(self.recent, test)
                if mean <= 1.0:
                    return True
                self.improved = (math.nan if self.sample is None else _mean(self.sample, test)), mean
                self.sample, self.recent, self.recovery, self.run = self.recent, None, None, None
            elif won < _GIVEN_UP:
                self._give_up()
        if self.run is not None and self.run.count >= _RECOVERY_RUN:
            self._look(self.run, test, alpha)
            self.run = None
        return False

    def _look(self, run: Histogram, test: MeanTest, alpha: float) -> None:
        """Begin to watch a recovery, where a run of observations is a sign of one; none of these is part of it."""
        sign = self.sample is not None and _mean(run, test) <= max(1.0, _RECOVERY_SHARE * _mean(self.sample, test))
        if self.recovery is None and not sign:
            self.sample = _both(self.sample, run)
        elif sign and (self.recovery is None or self.recovery.won <= 0.0):
            self._give_up()
            assert self.sample is not None
            self.begun += 1
            self.recovery = Recovery(np.zeros(_BETS.size), *_level(self.sample, test, alpha))

    def _give_up(self) -> None:
        """Discard a supposed recovery: its observations were part of the fault."""
        if self.recent is not None:
            self.sample = _both(self.sample, self.recent)
        self.recent, self.recovery = None, None


def _mean(sample: Histogram, test: MeanTest) -> float:
    """Mean in limits: halfway between the least and the most that the observations can count for."""
    binned = sample.binned()
    sides = (test.in_limits(binned), test.in_limits(binned, most=True))
    return float(sum(values @ counts / counts.sum() for values, counts in sides)) / 2.0


def _level(sample: Histogram, test: MeanTest, alpha: float) -> tuple[float, float]:
    """L and c of a fault."""
    values, counts = test.in_limits(sample.binned())
    values, counts = values[counts > 0], counts[counts > 0]
    whole = float(values @ counts / counts.sum())
    caps = [cap for cap in _CAPS_IN_LIMITS if cap < test.top_in_limits] or [test.top_in_limits]
    if math.isfinite(test.top_in_limits):
        caps.append(test.top_in_limits)

    means = [float(np.minimum(values, cap) @ counts / counts.sum()) for cap in caps]
    cap = next((cap for cap, mean in zip(caps, means, strict=True) if mean > 1.0 or whole <= 1.0), caps[-1])
    order = np.argsort(values)
    cut = Binned(
        lower=values[order],
        upper=values[order],
        count=counts[order].astype(np.int64),
        total=int(counts.sum()),
        sum=float(values @ counts),
        minimum=float(values.min()),
        maximum=float(values.max()),
    )
    bounds = capped_mean_interval(
        cut, low=0.0, high=math.inf, cap=cap, alpha_lower=alpha, alpha_upper=0.5, cut=True, anytime=True
    )
    level = max(1.0, bounds.lower)
    return level, max(cap, 2.0 * level)


def _both(histogram: Histogram | None, other: Histogram) -> Histogram:
    return other if histogram is None else Histogram.union([histogram, other])


def together(parts: Iterable[Histogram]) -> Histogram | None:
    """`union` of any number of them."""
    known = list(parts)
    return Histogram.union(known) if known else None
