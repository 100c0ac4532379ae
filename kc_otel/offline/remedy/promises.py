"""A contract's limits on the rollouts that are learned from, and the check that a correction keeps them.

A clause is read with the corrected rollouts in place of the plain ones: `tv_token` and `tv_seq` (with
`reward_drift_bound` and `gradient_bias_bound`) become the distances below, `advantage_drift_*` the push that is still
missing. For `tv_token` the smaller of both distances counts: token ratios bring steps to the training kernel's at the
rollouts' prefixes, ratios of sequences at its own. `chi2_token` becomes the cost of the weights in effective sample
size, E[c^2] / E[c]^2 - 1. All other metrics are of the kernels, and no weight changes them.

With c_t the weight of token t, w_t and W the ratios of the token and of its sequence, P the training and Q the rollout
kernel, the bias of the surrogate, the mean over sequences of the mean over tokens of c_t A_t grad log pi, against the
training kernel's own rollouts is at most `2 A_max G` times

`distance = E_Q[ mean_t ((c_t - W)_+ - c_t / 2) ] + 1/2 = (1/2) sum_y mean_t |c_t(y) Q(y) - P(y)|`,

for any P and Q: sequences that Q never samples count with their full mass. Without a correction it is TV_seq, with c =
W half of the support deficit, and every integrand is bounded by the largest weight. With w_t in place of W it is the
distance of single steps at the prefixes that Q visited, which token ratios aim at; without a correction TV of a token.
G bounds a token's score; summed over tokens instead of averaged, G_seq = T G takes its place.

Source: E_Q[c f] - E_P[f] = sum_y (c Q - P) f, and |a - b| = 2 (a - b)_+ - a + b summed over P and Q of mass 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from kc_otel.contract.limits import factors
from kc_otel.contract.model import Contract
from kc_otel.contract.registry.clause_metrics import DERIVED, QUANTITIES
from kc_otel.offline.remedy.corrections import Correction, Ratios, weights
from kc_otel.stats import Binned, Interval, affine, capped_mean_interval

Aim = Literal["token", "sequence", "positive", "negative", "ess"]
"""Part of `Effects` that a promise is about; `ess` is its squared weights against its weights."""

_AIMS: Final[dict[str, Aim]] = {
    "tv_token": "token",
    "tv_seq": "sequence",
    "advantage_drift_positive": "positive",
    "advantage_drift_negative": "negative",
    "chi2_token": "ess",
}
_MIN_VALUES_FOR_BINS: Final = 1024
"""Distinct values from which an interval is computed from bins of neighbours: hundreds of them stay quick."""
_MAX_SIZE_FACTOR: Final = 1 << 16
"""Times as many sequences as a recording has, beyond which nobody records any."""
_FIXED_REASON: Final = "is of the kernels themselves: weights do not change it"
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class RemedyTarget:
    """A clause on a slice, the effect of a correction that it is about, and the factor from that to the metric."""

    clause: str
    metric: str
    slice: str
    limit: float
    aim: Aim
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class RemedyBound:
    """Check of a promise: `met` by the upper bound, `broken` where the lower one is beyond the limit, else `open`."""

    promise: RemedyTarget
    interval: Interval
    state: Literal["met", "open", "broken"]


def promises(contract: Contract, slices: Sequence[str], *, advantages: bool) -> tuple[list[RemedyTarget], list[str]]:
    """Return the promises a correction can keep, on each slice, and a sentence for each clause it cannot."""
    asked: list[RemedyTarget] = []
    beyond: list[str] = []
    for clause in contract.clauses:
        base = DERIVED[clause.metric].base if clause.metric in DERIVED else clause.metric
        aim = _AIMS.get(base)
        if aim is None:
            beyond.append(f"{clause.id}: {clause.metric_text} {_FIXED_REASON}")
        elif clause.parsed_statistic.kind != "mean":
            beyond.append(f"{clause.id}: {clause.statistic_text} is not a mean, and only means are of the surrogate")
        elif aim in {"positive", "negative"} and not advantages:
            beyond.append(f"{clause.id}: the recording has no advantages")
        else:
            scale = factors(clause.metric, contract.assumptions)[0] if clause.metric in DERIVED else 1.0
            asked += [
                RemedyTarget(clause.id, clause.metric, name, clause.limit_for(name), aim, scale) for name in slices
            ]
    return asked, beyond


def finding(
    promise: RemedyTarget, correction: Correction, found: Effects, *, alpha: float, fewest: int, times: int = 1
) -> RemedyBound:
    """A promise against a correction's effects on its slice, or on so many `times` as many sequences.

    `alpha` is the error probability of each side; below `fewest` units nothing but an exact value is met.
    """
    interval = _interval(promise.aim, correction, found, alpha, times)
    if promise.scale != 1.0:
        interval = affine(interval, promise.scale)
    if interval.lower > promise.limit:
        return RemedyBound(promise, interval, "broken")
    enough = interval.samples >= fewest or interval.lower == interval.upper
    return RemedyBound(promise, interval, "met" if enough and interval.upper <= promise.limit else "open")


def lacking(promise: RemedyTarget, correction: Correction, found: Effects, *, alpha: float, fewest: int) -> int | None:
    """Return how many more such prompts or sequences decide an open promise at most; None where no number does."""

    def is_open(times: int) -> bool:
        return finding(promise, correction, found, alpha=alpha, fewest=fewest, times=times).state == "open"

    low, high = 1, 2
    while is_open(high):
        low, high = high, 2 * high
        if high > _MAX_SIZE_FACTOR:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_open(middle) else (low, middle)
    return (high - 1) * found.kept.size


def _interval(aim: Aim, correction: Correction, found: Effects, alpha: float, times: int) -> Interval:
    if aim == "ess":
        return _chi2(found, correction, alpha, times)
    values: NDArray[np.float64] = getattr(found, aim)
    if aim in {"positive", "negative"}:
        known = QUANTITIES[f"advantage_drift_{aim}"]
        return _mean(values[~np.isnan(values)], known.low, known.high, alpha, times, cap=known.cap)
    if aim == "sequence":
        return _distance(values, correction, "sequence", alpha, times)
    steps, whole = (
        _distance(numbers, correction, level, alpha / 2, times)
        for numbers, level in ((values, "token"), (found.sequence, "sequence"))
    )
    nearest = min(steps, whole, key=lambda interval: interval.estimate)
    return replace(nearest, lower=min(steps.lower, whole.lower), upper=min(steps.upper, whole.upper))


def _distance(values: NDArray[np.float64], correction: Correction, level: str, alpha: float, times: int) -> Interval:
    """Bound the mean of 1/2 + c/2 - min(c, r), with c the weight of a token or sequence and r its ratio."""
    largest = correction.largest
    most = 0.5 if correction.never_above(level) else 0.5 + 0.5 * largest
    interval = _mean(values, 0.5 - 0.5 * largest if largest > 1.0 else 0.0, most, alpha, times)
    ends = {end: max(0.0, getattr(interval, end)) for end in ("estimate", "lower", "upper")}
    return replace(interval, **ends)


def _chi2(found: Effects, correction: Correction, alpha: float, times: int) -> Interval:
    """E[c^2] / E[c]^2 - 1 from the two means, each with half of the error probability; exactly 0 if every c is 1."""
    if correction == Correction():
        return Interval(0.0, 0.0, 0.0, times * found.weight.size, "exact")
    largest = correction.largest
    square = _mean(found.square, 0.0, largest * largest, alpha / 2, times)
    mean = _mean(found.weight, 0.0, largest, alpha / 2, times)

    def ratio(above: float, below: float) -> float:
        return max(0.0, above / (below * below) - 1.0) if below > 0.0 else math.inf

    return Interval(
        ratio(square.estimate, mean.estimate),
        ratio(square.lower, mean.upper),
        ratio(square.upper, mean.lower),
        mean.samples,
        mean.method,
        "from E[c^2] and E[c]",
    )


def _mean(
    values: NDArray[np.float64], low: float, high: float, alpha: float, times: int, cap: float | None = None
) -> Interval:
    if math.isfinite(low):
        values = values.clip(low, high)  # a mean of equal values may be off by its rounding
    return capped_mean_interval(
        Binned.of_samples(values).merged(_MIN_VALUES_FOR_BINS).times(times),
        low=low,
        high=high,
        cap=cap or max(abs(low), abs(high)),
        alpha_lower=alpha,
        alpha_upper=alpha,
    )


@dataclass(frozen=True, slots=True, eq=False)
class Effects:
    """Effect of a correction on each of S sequences, [S]; the mean of an array is the effect on their distribution.

    `token` and `sequence` are parts of the distances of steps and of whole sequences. `positive` is the mean of (w - c)
    A over tokens with A > 0, the push that is still missing; NaN without such. `kept` tokens have a weight above 0.
    """

    weight: Floats
    square: Floats
    token: Floats
    sequence: Floats
    positive: Floats
    negative: Floats
    kept: Floats
    kept_positive: Floats
    kept_negative: Floats

    def only(self, inside: NDArray[np.bool_]) -> Effects:
        """Those on some of the sequences, bool [S]."""
        return Effects(**{field.name: getattr(self, field.name)[inside] for field in fields(self)})

    def by_prompt(self, prompts: NDArray[np.int64]) -> Effects:
        """Means over the sequences of each prompt, by the sequences' prompts [S]: its answers share its drift."""
        _, of = np.unique(prompts, return_inverse=True)

        def means(values: Floats) -> Floats:
            known = ~np.isnan(values)
            sums, counts = (np.bincount(of[known], w, of.max() + 1) for w in (values[known], None))
            averaged: Floats = np.divide(sums, counts, out=np.full(sums.size, np.nan), where=counts > 0)
            return averaged

        return Effects(**{field.name: means(getattr(self, field.name)) for field in fields(self)})


def effects(of: Ratios, corrections: tuple[Correction, ...]) -> Iterator[Effects]:
    """The effects of each correction, one after the other: no more than one weight per token is held at a time."""
    advantages, none = of.recording.advantages, np.full(of.recording.lengths.size, np.nan)
    for correction in corrections:
        c = weights(of, correction)
        half = 0.5 - 0.5 * c
        used = c > 0.0
        pushes, kept = [none, none], [none, none]
        if advantages is not None:
            for at, inside in enumerate((advantages > 0.0, advantages < 0.0)):
                missing, many = of.sums(np.where(inside, (of.token - c) * advantages, 0.0)), of.sums(inside)
                pushes[at] = np.divide(missing, many, out=none.copy(), where=many > 0.0)
                kept[at] = of.sums(used & inside)
        yield Effects(
            weight=of.means(c),
            square=of.means(c * c),
            token=of.means(np.maximum(c - of.token, 0.0) + half),
            sequence=of.means(np.maximum(c - of.sequence, 0.0) + half),
            positive=pushes[0],
            negative=pushes[1],
            kept=of.sums(used),
            kept_positive=kept[0],
            kept_negative=kept[1],
        )
