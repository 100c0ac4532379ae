"""Change detection with a stated expected time between false alarms: CUSUM and Page-Hinkley on nearly Gaussian streams.

A detector watches a stream, such as the mean drift of each window, for a lasting shift upwards. What has to be chosen
is the average run length (ARL), the expected number of observations until it cries wolf; the threshold follows from
it. Both detectors here take the noise to be Gaussian and independent, which means over many tokens nearly are; where
that is in doubt use `edetector.e_detector`, whose ARL needs no such assumption. To watch for a shift downwards negate
the stream.

All calls work on many streams at once, and in pieces: pass the `Watch` that the last piece returned.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kc_otel.stats._check import Real, real

__all__ = ["Watch", "cusum", "cusum_arl", "cusum_threshold", "page_hinkley"]

Floats = NDArray[np.float64]

OVERSHOOT = 1.1659
"""Twice 0.58297 = -zeta(1/2) / sqrt(2 pi): by how much a Gaussian walk oversteps both of its boundaries on average."""


@dataclass(frozen=True, slots=True, eq=False)
class Watch:
    """What a detector knows of its streams so far; one element per stream.

    A stream that has alarmed stays as it was then; to watch on, start anew.

    Attributes:
        seen: Observations of each stream so far.
        statistic: The statistic after the last observation, or at the alarm.
        start: Index of the first observation of the change that the statistic would date now, or dated at the alarm.
        alarm: Index of the observation that raised the alarm; -1 for none.
        mean: Mean of the observations so far (only Page-Hinkley keeps it).
    """

    seen: int
    statistic: Floats
    start: NDArray[np.int64]
    alarm: NDArray[np.int64]
    mean: Floats

    @property
    def change(self) -> NDArray[np.int64]:
        """Estimated index of the first observation after the change; -1 without an alarm."""
        return np.where(self.alarm >= 0, self.start, -1)


def cusum_arl(threshold: float, allowance: float, shift: float = 0.0) -> float:
    """Expected observations until a CUSUM of N(shift, 1) reaches h.

    With D = shift - allowance and b = h + 1.166,
    `ARL = (exp(-2 D b) + 2 D b - 1) / (2 D^2)`, and `b^2` at D = 0. With shift = 0 it is the time between false alarms,
    with the shift looked for it is the mean delay of detection.

    Against the exact solution of Page's integral equation, for ARLs of 100 to 100 000 between false alarms: within 1%
    for allowances up to 0.5, within 4% up to 0.75, within 7% up to 1; a threshold from it has an ARL that is that much
    short.

    Source: Siegmund 1985, Sequential Analysis, chapters II and X (corrected diffusion approximation).

    Args:
        threshold: h, in standard deviations.
        allowance: Half of the shift looked for, in standard deviations.
        shift: Mean of the observations, in standard deviations from their reference.

    Raises:
        ValueError: If the threshold or the allowance is negative, or one is NaN or infinite.

    >>> round(cusum_arl(5.0, 0.5))             # the textbook chart; exactly 931
    938
    >>> round(cusum_arl(5.0, 0.5, 1.0), 1)     # and so many until it sees a shift by one deviation
    10.3
    """
    real("threshold", threshold)
    real("allowance", allowance)
    drift = real("shift", shift, low=-math.inf) - allowance
    b = threshold + OVERSHOOT
    x = 2.0 * drift * b
    if abs(x) < 1e-5:
        return b * b
    return math.inf if x < -700.0 else (math.expm1(-x) + x) / (2.0 * drift * drift)


def cusum_threshold(arl: float, allowance: float) -> float:
    """The threshold h whose expected time between false alarms is `arl`: `cusum_arl(h, allowance) = arl`.

    Args:
        arl: Wanted expected number of observations between false alarms.
        allowance: Half of the shift looked for, in standard deviations.

    Raises:
        ValueError: If the allowance is negative or infinite, or the ARL is so small that any observation alarms.

    >>> round(cusum_threshold(938.2, 0.5), 2)
    5.0
    """
    real("arl", arl, low=1.0)
    real("allowance", allowance)
    low, high = 0.0, 1.0
    if cusum_arl(low, allowance) > arl:
        least = cusum_arl(low, allowance)
        msg = f"arl: {arl!r} is below {least:.3g}, that of a threshold of 0 at allowance {allowance:g}; ask for more"
        raise ValueError(msg)
    while cusum_arl(high, allowance) < arl:
        high *= 2.0
    for _ in range(200):
        middle = (low + high) / 2.0
        low, high = (middle, high) if cusum_arl(middle, allowance) < arl else (low, middle)
    return high


def cusum(
    values: ArrayLike,
    *,
    mean: Real,
    deviation: Real,
    shift: float = 1.0,
    arl: float = 10_000.0,
    watch: Watch | None = None,
) -> Watch:
    """One-sided CUSUM: `S_t = max(0, S_(t-1) + z_t - shift / 2)`, z the standardised value; alarm at `S_t >= h`.

    The change is dated to the observation after S was last 0. It is the likelihood ratio test for a jump by `shift`,
    and of all detectors with its ARL the one with the smallest worst-case delay (Moustakides 1986).

    Source: Page 1954, Continuous Inspection Schemes; h from `cusum_threshold`.

    Args:
        values: Observations [..., T], one stream per row.
        mean: Their mean before a change; a number, or one per stream.
        deviation: Their standard deviation; a number, or one per stream.
        shift: Smallest shift worth an alarm, in standard deviations.
        arl: Expected number of observations between false alarms.
        watch: What the same call returned for the observations before these.

    Raises:
        ValueError: If a value is NaN or infinite, the deviation or the shift is not positive, or the shapes do not fit.

    >>> import numpy as np
    >>> stream = np.random.default_rng(1).normal(0.004, 0.001, 400)
    >>> stream[300:] += 0.001
    >>> found = cusum(stream, mean=0.004, deviation=0.001)
    >>> int(found.alarm), int(found.change)
    (311, 297)
    """
    x = _stream(values)
    sigma = _positive("deviation", deviation)
    center = np.asarray(real("mean", mean, low=-math.inf))
    before = watch or _fresh(x)
    z = (x - _column(center, x, "mean")) / _column(sigma, x, "deviation")
    return _accumulate(before, x, z, shift, arl)


def page_hinkley(
    values: ArrayLike, *, deviation: Real, shift: float = 1.0, arl: float = 10_000.0, watch: Watch | None = None
) -> Watch:
    """Page-Hinkley: the CUSUM for a stream whose mean before the change is not known but learnt on the way.

    Each value is compared with the mean of those before it: `z_t = sqrt((t-1)/t) (x_t - mean_(t-1)) / deviation`.
    Without a change these recursive residuals are independent N(0, 1) whatever the mean (Brown, Durbin and Evans
    1975), so the threshold and the ARL are exactly those of `cusum`; the usual form without the root alarms too often
    early on. After a change the mean follows it: the longer the stream before, the better a change is seen.

    Source: Hinkley 1971, Inference About the Change-Point from Cumulative Sum Tests; Page 1954.

    Args:
        values: Observations [..., T], one stream per row.
        deviation: Their standard deviation; a number, or one per stream.
        shift: Smallest shift worth an alarm, in standard deviations.
        arl: Expected number of observations between false alarms.
        watch: What the same call returned for the observations before these.

    Raises:
        ValueError: If a value is NaN or infinite, the deviation or the shift is not positive, or the shapes do not fit.
    """
    x = _stream(values)
    sigma = _positive("deviation", deviation)
    before = watch or _fresh(x)
    t = before.seen + np.arange(1.0, x.shape[-1] + 1.0)
    # Relative to one observation, so that a large common offset costs no digits.
    origin = before.mean if before.seen else x[..., 0]
    relative = x - origin[..., None]
    sums = np.cumsum(relative, axis=-1) - relative
    earlier = np.divide(sums, t - 1.0, out=np.zeros_like(x), where=t > 1.0)
    z = np.sqrt((t - 1.0) / t) * (relative - earlier) / _column(sigma, x, "deviation")
    mean = origin + (sums[..., -1] + relative[..., -1]) / t[-1]
    return _accumulate(before, x, z, shift, arl, mean)


def _accumulate(before: Watch, x: Floats, z: Floats, shift: float, arl: float, mean: Floats | None = None) -> Watch:
    """The CUSUM of z, all at once: the walk less its running minimum, which starts at minus the statistic so far."""
    if not (math.isfinite(shift) and shift > 0.0):
        msg = f"shift: {shift!r} is not a positive number of standard deviations"
        raise ValueError(msg)
    if before.statistic.shape != x.shape[:-1]:
        msg = f"values: streams of shape {x.shape[:-1]}, but those of watch have {before.statistic.shape}"
        raise ValueError(msg)
    threshold = cusum_threshold(arl, shift / 2.0)
    walk = before.statistic[..., None] + np.cumsum(z - shift / 2.0, axis=-1)
    lowest = np.minimum(np.minimum.accumulate(walk, axis=-1), 0.0)
    statistic = walk - lowest
    place = before.seen + np.arange(x.shape[-1], dtype=np.int64)
    start = np.maximum.accumulate(np.where(statistic > 0.0, before.start[..., None], place + 1), axis=-1)
    over = statistic >= threshold
    alarmed = over.any(axis=-1)
    at = np.where(alarmed, over.argmax(axis=-1), x.shape[-1] - 1)[..., None]
    return _frozen(
        before,
        seen=before.seen + x.shape[-1],
        statistic=np.take_along_axis(statistic, at, -1)[..., 0],
        start=np.take_along_axis(start, at, -1)[..., 0],
        alarm=np.where(alarmed, before.seen + at[..., 0], -1),
        mean=before.mean if mean is None else mean,
    )


def _frozen(
    before: Watch,
    *,
    seen: int,
    statistic: Floats,
    start: NDArray[np.int64],
    alarm: NDArray[np.int64],
    mean: Floats,
) -> Watch:
    """The new state, except for streams that had alarmed before."""
    open_ = before.alarm < 0
    return Watch(
        seen=seen,
        statistic=np.where(open_, statistic, before.statistic),
        start=np.where(open_, start, before.start),
        alarm=np.where(open_, alarm, before.alarm),
        mean=mean,
    )


def _fresh(x: Floats) -> Watch:
    shape = x.shape[:-1]
    return Watch(
        0, np.zeros(shape), np.zeros(shape, dtype=np.int64), np.full(shape, -1, dtype=np.int64), np.zeros(shape)
    )


def _stream(values: ArrayLike) -> Floats:
    x = np.asarray(values, dtype=np.float64)
    if x.ndim == 0:
        msg = f"values: {values!r} is a number; pass a stream [..., T]"
        raise ValueError(msg)
    checked: Floats = real("values", x, low=-math.inf)
    return checked


def _positive(name: str, value: Real) -> Floats:
    array = np.asarray(real(name, value))
    if not (array > 0.0).all():
        msg = f"{name}: {float(array.min())!r} is not a positive number"
        raise ValueError(msg)
    return array


def _column(value: Floats, x: Floats, name: str) -> Floats:
    """A number, or one per stream, ready to meet [..., T]."""
    if value.ndim == 0:
        return value
    if value.shape != x.shape[:-1]:
        msg = f"{name}: shape {value.shape} is not that of the streams, {x.shape[:-1]}"
        raise ValueError(msg)
    return value[..., None]
