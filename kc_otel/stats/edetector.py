"""Change detection without normality: the e-detector. Of the detectors here, the one to use first.

Before a change every observation x_t is at least `low` and has, given the past, a mean of at most `limit`; nothing
else is assumed, neither a distribution, nor an upper end, nor independence. With y = x - low and m = limit - low, the
factor `1 + lam (y_t / m - 1)`, 0 <= lam <= 1, is not negative and has a mean of at most 1: a fair bet against "no
change". Beginning one such bet at every observation and adding up what they have grown to,

    `M_t = (M_(t-1) + 1) (1 + lam (y_t / m - 1))`,

M_t - t can only fall on average before a change, so reaching c takes at least c observations on average:
`E[false alarm time] >= ARL` with c = ARL, and `P(false alarm within n) <= n / ARL`. The same holds for an average of
M over several lam, which is how the detector does without knowing the size of the change.

What to feed it: many noisy observations rather than few quiet ones. Where y > m a factor is at most y / m, so a quiet
stream gathers evidence slowly: means of small windows, or single sequences, are better than one mean over all.
Measured on gamma noise around the limit, ARL 10 000, a rise by one standard deviation: found after 17, 38 and 131
observations where that deviation is 1, 0.25 and 0.05 of the limit (CUSUM: 16, 14 and 14). Of such streams without a
change 0.2%, 0.2% and 0% alarmed within 300 observations; of CUSUM's 29%, 9% and 4%, where Gaussian noise would give
3%.

Source: Shin, Ramdas and Rinaldo 2024, E-detectors: A Nonparametric Framework for Sequential Change Detection, New
England Journal of Statistics in Data Science 2(2), Shiryaev-Roberts e-detector with the increment of Waudby-Smith and
Ramdas 2024, Estimating Means of Bounded Random Variables by Betting.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kc_otel.stats._check import real

__all__ = ["EWatch", "e_detector"]

Floats = NDArray[np.float64]

_BETS: Final[Floats] = np.geomspace(1e-4, 1.0, 16)
"""Sizes of bets that are averaged, which costs at most a factor 16 of evidence.

The best bet on a mean mu with variance v is about m (mu - m) / (v + (mu - m)^2): near 1 for window means of little
noise, mu - m for single outcomes in {0, 1} with a small m.
"""


@dataclass(frozen=True, slots=True, eq=False)
class EWatch:
    """What an e-detector knows of its streams so far.

    A stream that has alarmed stays as it was then; to watch on, start anew.

    Attributes:
        seen: Observations of each stream so far.
        statistic: The e-detector [...], to be compared with the ARL.
        alarm: Index [...] of the observation that raised the alarm; -1 for none.
        change: Estimated index [...] of the first observation after the change; -1 without an alarm.
        sums: M of each bet [..., B].
        best: What the best single start of each bet has grown to [..., B].
        start: That start [..., B].
    """

    seen: int
    statistic: Floats
    alarm: NDArray[np.int64]
    change: NDArray[np.int64]
    sums: Floats
    best: Floats
    start: NDArray[np.int64]


def e_detector(
    values: ArrayLike, *, limit: float, low: float = 0.0, arl: float = 10_000.0, watch: EWatch | None = None
) -> EWatch:
    """Alarms when a stream's mean has risen above `limit`; `E[false alarm time] >= arl` whatever the stream.

    The change is dated to the start whose bet has grown most, over all sizes of bets; a stream that runs right at its
    limit before the change is dated early.

    A detector of changes, not of levels: `limit` is a mean that the stream keeps to while nothing is wrong. A stream
    whose mean is above it from the start alarms too. To watch for a fall of values of at most b, pass b - x and b -
    limit.

    Args:
        values: Observations [..., T], one stream per row; none below `low`.
        limit: Largest mean before a change; above `low`.
        low: Smallest value possible; 0 for total variation, k3 and |l|. The higher, the sooner a change is seen.
        arl: Smallest expected number of observations between false alarms.
        watch: What the same call returned for the observations before these.

    Raises:
        ValueError: If a value is below `low`, NaN or infinite, the limit is not above `low`, the ARL is below 1, or the
            shapes do not fit.

    >>> import numpy as np
    >>> stream = np.random.default_rng(1).beta(2, 498, 400)        # mean 0.004
    >>> stream[300:] *= 2
    >>> found = e_detector(stream, limit=0.004)
    >>> int(found.alarm), int(found.change)
    (316, 300)
    """
    if not (math.isfinite(low) and math.isfinite(limit) and low < limit):
        msg = f"limit: {limit!r} is not a finite number above low = {low!r}"
        raise ValueError(msg)
    real("arl", arl, low=1.0)
    x = np.asarray(values, dtype=np.float64)
    if x.ndim == 0:
        msg = f"values: {values!r} is a number; pass a stream [..., T]"
        raise ValueError(msg)
    real("values", x, low=low)
    before = watch or _fresh(x)
    if before.statistic.shape != x.shape[:-1]:
        msg = f"values: streams of shape {x.shape[:-1]}, but those of watch have {before.statistic.shape}"
        raise ValueError(msg)
    gain = (x - low) / (limit - low) - 1.0
    sums, best, start = before.sums, before.best, before.start
    statistic, alarm, change = before.statistic, before.alarm, before.change
    for step in range(x.shape[-1]):
        factor = 1.0 + _BETS * gain[..., step, None]
        running = alarm < 0
        with np.errstate(over="ignore"):
            sums = np.where(running[..., None], (sums + 1.0) * factor, sums)
            anew = best <= 1.0
            best = np.where(running[..., None], np.where(anew, 1.0, best) * factor, best)
        start = np.where(running[..., None] & anew, before.seen + step, start)
        statistic = np.where(running, sums.mean(axis=-1), statistic)
        rises = running & (statistic >= arl)
        if rises.any():
            winner = np.take_along_axis(start, best.argmax(axis=-1)[..., None], -1)[..., 0]
            alarm = np.where(rises, before.seen + step, alarm)
            change = np.where(rises, winner, change)
    return EWatch(before.seen + x.shape[-1], statistic, alarm, change, sums, best, start)


def _fresh(x: Floats) -> EWatch:
    streams, bets = x.shape[:-1], (*x.shape[:-1], _BETS.size)
    none = np.full(streams, -1, dtype=np.int64)
    return EWatch(0, np.zeros(streams), none, none, np.zeros(bets), np.ones(bets), np.zeros(bets, dtype=np.int64))
