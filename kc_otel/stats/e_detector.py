"""E-detectors: when a mean has risen above its limit, with a stated time between false alarms, for many cells at once.

For a quantity x >= 0 whose mean given the past is at most m, and a bet 0 < lam <= 1/m, a factor `1 + lam (x - m)` is
never negative and on average at most 1: a fair bet against "within the limit". Beginning one such bet at each pane and
keeping the one that has grown the most,

    `M <- max(M, 1) prod over the pane of (1 + lam (x - m))`,

M is at most the sum of all of them, S <- (S + 1) prod (...). S less the number of panes can only fall on average while
the limit is kept, so reaching A takes at least A panes on average: `E[panes until a false alarm] >= A`. The same is
true of an average of M over several bets, and with K cells that alarm at `A K` of all of them together, however they
depend on each other: their sum, divided by K, grows by at most 1 a pane. K may grow on the way, which only lessens
that, and must not shrink. It is true within a pane, too, where M is looked at before the pane's end, and of an M that
was made smaller on the way (`clipped`). Nothing is assumed of the distribution, and no upper end. The assumption is
that the mean of each observation given the earlier ones is at most m. Observations need not be independent, but those
that share a drift, such as the rollouts of one prompt, must be one observation, their mean; otherwise the guarantee is
lost.

The sum S would alarm sooner where a mean is a little above its limit (table: 186 instead of 248), and as soon at half
more. But within the limit S stands at 10 to 1000, by how many observations a pane has, and grows with the age of a
cell: nobody could see an alarm coming, nor tell when what raised it is gone. M stands at 1 at most.

Panes of 20 sequences until a cell's alarm, at A = 10,000 panes for K = 20 cells, gamma laws, histograms of scale 4:

| truth / limit | 1.1 | 1.2 | 1.5 | 2 |
| --- | --- | --- | --- | --- |
| coefficient of variation 0.45 | 50 | 11 | 3 | 2 |
| 1.0 | 248 | 59 | 10 | 4 |
| 2.6 | 1362 | 353 | 57 | 20 |

From a histogram a value counts with the lower edge of its bucket, which makes every factor smaller: the time between
false alarms stays, and evidence grows more slowly, at scale 4 by 4 to 8 % where the mean is twice the limit and by half
where it is a tenth above. The increment of a pane, `sum_b n_b log(1 + lam (edge_b - m))`, is a product of counts
[cells, buckets] with a matrix [buckets, bets]. A share above a threshold, and with it a quantile, is the mean of an
indicator: two buckets with the edges 0 and 1, and nothing is lost.

Source: Shin, Ramdas and Rinaldo 2024, E-detectors: A Nonparametric Framework for Sequential Change Detection, New
England Journal of Statistics in Data Science 2(2), the CUSUM e-detector, with the increments of Waudby-Smith and Ramdas
2024, Estimating means of bounded random variables by betting, JRSS-B 86(1).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import ArrayLike

from kc_otel.stats.interval import Floats

BETS: Final[Floats] = np.geomspace(1e-4, 0.9, 16)
"""Bets lam, in units of 1/m [bets], that are averaged, which costs at most a factor 16 of evidence.

The best one against a mean mu with variance v is m (mu - m) / (v + (mu - m)^2): near 1 where panes hardly vary, and
about mu - m for single outcomes in {0, 1} with a small m. Below 1 a value of 0 takes not all of what was won.
"""


@dataclass(frozen=True, slots=True, eq=False)
class EDetector:
    """Evidence against "the mean is at most its limit" in each of many cells.

    Attributes:
        log_sums: Logarithm of M for each cell and bet [cells, bets]; 0 before the first observation.

    >>> import numpy as np
    >>> rng = np.random.default_rng(1)
    >>> edges = np.exp2(np.arange(-160, 1) / 16)                       # a histogram at scale 4
    >>> detector, panes = EDetector.fresh(cells=1), 0
    >>> while detector.log_evidence[0] < alarm_level(panes=10_000, cells=1):
    ...     drift = rng.gamma(1.0, 0.004 if panes < 300 else 0.008, 20)    # 20 sequences a pane; twice the limit
    ...     counts = np.histogram(drift, [0.0, *edges[1:], np.inf])[0]
    ...     gains = counts @ np.log1p(BETS * (np.r_[0.0, edges[1:]][:, None] / 0.004 - 1.0))
    ...     detector, panes = detector.opened().gained(gains[None]), panes + 1
    >>> panes
    302
    """

    log_sums: Floats

    @classmethod
    def fresh(cls, cells: int) -> EDetector:
        """A detector that has seen nothing."""
        return cls(np.zeros((cells, BETS.size)))

    def opened(self, cells: ArrayLike = True) -> EDetector:
        """The detector at the start of a pane, in which new bets begin; a mask [cells], or all of them.

        Call it at most once a pane, and at times that do not depend on what is observed.
        """
        begins = np.asarray(cells, dtype=np.bool_)
        return EDetector(np.where(begins[..., None], np.maximum(self.log_sums, 0.0), self.log_sums))

    def gained(self, gains: Floats) -> EDetector:
        """The detector after observations within a pane, from what each bet gains from them [cells, bets]: logarithms.

        `sum log(1 + lam (x / m - 1))` with x the lower edges, above the smallest value, lam the `BETS`, m the limit.
        """
        return EDetector(self.log_sums + gains)

    def clipped(self, level: float) -> EDetector:
        """The detector with `log_evidence` at most the level.

        All bets are scaled down alike, so that those that did not raise the evidence begin anew: after a fault the
        evidence falls as fast as the bet that found the fault loses.
        """
        over = np.maximum(self.log_evidence - level, 0.0)
        return EDetector(self.log_sums - over[:, None])

    @property
    def log_evidence(self) -> Floats:
        """Logarithm of the average of M over the bets [cells]; 0 before the first observation."""
        most = self.log_sums.max(axis=-1)
        return np.asarray(most + np.log(np.exp(self.log_sums - most[..., None]).sum(axis=-1)) - math.log(BETS.size))


def alarm_level(panes: float, cells: int) -> float:
    """Return the level of an alarm: `log(A K)`, for A panes between the false alarms of K cells together.

    Raises:
        ValueError: If either is less than 1.
    """
    for name, value in (("panes", panes), ("cells", cells)):
        if not 1.0 <= value < math.inf:
            raise ValueError(f"{name}: {float(value)!r} is not a finite number of at least 1")
    return math.log(panes * cells)
