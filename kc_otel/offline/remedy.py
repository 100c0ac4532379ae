"""Every correction replayed on a recording, and each trainer's that keeps a contract with the lowest variance.

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
import time
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from kc_otel.contract.limits import factors
from kc_otel.contract.model import Contract
from kc_otel.contract.registry.clause_metrics import DERIVED, QUANTITIES
from kc_otel.contract.slices import ALL, OLDER
from kc_otel.judge.plain_json import for_others
from kc_otel.judge.verdict import Verdict
from kc_otel.offline.corrections import TRAINERS, Correction, Floats, Ratios, Trainer, catalogue, line, weights
from kc_otel.offline.gate.copies import recording_notes, repeats_notes
from kc_otel.offline.gate.recorded_verdicts import by_contract, judge, verdict_for_others
from kc_otel.record.slice_table import SliceTable
from kc_otel.recordings.recording import Recording
from kc_otel.stats import Binned, Interval, capped_mean_interval

_AIMS: Final = {
    "tv_token": "token",
    "tv_seq": "sequence",
    "advantage_drift_positive": "positive",
    "advantage_drift_negative": "negative",
    "chi2_token": "ess",
}
"""Metric -> the part of `Effects` that a promise on it is about; `ess` is its squared weights against its weights."""
_MIN_VALUES_FOR_BINS: Final = 1024
"""Distinct values from which an interval is computed from bins of neighbours: hundreds of them stay quick."""
_MAX_SIZE_FACTOR: Final = 1 << 16
"""Times as many sequences as a recording has, beyond which nobody records any."""
_NO_DATA: Final = Interval(math.nan, -math.inf, math.inf, 0, "no data")

Effects = Mapping[str, Floats]
"""Effect of a correction on each of S sequences, [S]; the mean of an array is the effect on their distribution.

`token` and `sequence` are parts of the distances of steps and of whole sequences. `positive` is the mean of (w - c) A
over tokens with A > 0, the push that is still missing; NaN without such. `kept` tokens have a weight above 0.
"""


def effects(of: Ratios, correction: Correction) -> Effects:
    """The effects of a correction; those by sign of the advantage where there are advantages."""
    c = weights(of, correction)
    half, used = 0.5 - 0.5 * c, c > 0.0
    found = {
        "weight": of.means(c),
        "square": of.means(c * c),
        "token": of.means(np.maximum(c - of.token, 0.0) + half),
        "sequence": of.means(np.maximum(c - of.sequence, 0.0) + half),
        "kept": of.sums(used),
    }
    for side, advantages in of.sides.items():
        pushed, many = of.sums((of.token - c) * advantages), of.sums(advantages != 0.0)
        found[side] = np.divide(pushed, many, out=np.full(many.size, np.nan), where=many > 0.0)
        found[f"kept_{side}"] = of.sums(used & (advantages != 0.0))
    return found


def _by_prompt(found: Effects, prompts: NDArray[np.int64]) -> Effects:
    """Means over the sequences of each prompt, by the sequences' prompts [S]: its answers share its drift."""
    _, of = np.unique(prompts, return_inverse=True)

    def means(values: Floats) -> Floats:
        known = ~np.isnan(values)
        sums, counts = (np.bincount(of[known], w, of.max() + 1) for w in (values[known], None))
        averaged: Floats = np.divide(sums, counts, out=np.full(sums.size, np.nan), where=counts > 0)
        return averaged

    return {name: means(values) for name, values in found.items()}


@dataclass(frozen=True, slots=True)
class RemedyTarget:
    """A clause on a slice, the effect of a correction that it is about, and the factor from that to the metric."""

    clause: str
    metric: str
    slice: str
    limit: float
    aim: str
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
        aim = _AIMS.get(clause.base)
        if aim is None:
            beyond.append(f"{clause.id}: {clause.metric_text} is of the kernels themselves: weights do not change it")
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
    ends = {end: promise.scale * getattr(interval, end) for end in ("estimate", "lower", "upper")}
    interval = replace(interval, **ends)
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
    return (high - 1) * found["kept"].size


def _interval(aim: str, correction: Correction, found: Effects, alpha: float, times: int) -> Interval:
    if aim == "ess":
        return _chi2(found, correction, alpha, times)
    values = found[aim]
    if aim in {"positive", "negative"}:
        known = QUANTITIES[f"advantage_drift_{aim}"]
        return _mean(values[~np.isnan(values)], known.low, known.high, alpha, times, cap=known.cap)
    if aim == "sequence":
        return _distance(values, correction, "sequence", alpha, times)
    steps, whole = (
        _distance(numbers, correction, level, alpha / 2, times)
        for numbers, level in ((values, "token"), (found["sequence"], "sequence"))
    )
    nearest = min(steps, whole, key=lambda interval: interval.estimate)
    return replace(nearest, lower=min(steps.lower, whole.lower), upper=min(steps.upper, whole.upper))


def _distance(values: Floats, correction: Correction, level: str, alpha: float, times: int) -> Interval:
    """Bound the mean of 1/2 + c/2 - min(c, r), with c the weight of a token or sequence and r its ratio."""
    largest = correction.largest
    most = 0.5 if correction.never_above(level) else 0.5 + 0.5 * largest
    interval = _mean(values, 0.5 - 0.5 * largest if largest > 1.0 else 0.0, most, alpha, times)
    ends = {end: max(0.0, getattr(interval, end)) for end in ("estimate", "lower", "upper")}
    return replace(interval, **ends)


def _chi2(found: Effects, correction: Correction, alpha: float, times: int) -> Interval:
    """E[c^2] / E[c]^2 - 1 from the two means, each with half of the error probability; exactly 0 if every c is 1."""
    if correction == Correction():
        return Interval(0.0, 0.0, 0.0, times * found["weight"].size, "exact")
    largest = correction.largest
    square = _mean(found["square"], 0.0, largest * largest, alpha / 2, times)
    mean = _mean(found["weight"], 0.0, largest, alpha / 2, times)

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


def _mean(values: Floats, low: float, high: float, alpha: float, times: int, cap: float | None = None) -> Interval:
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


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs of a correction on a slice, shares of its sequences or tokens; `variance` is E[c^2] / E[c]^2."""

    sequences: int
    tokens: int
    variance: float
    dropped: float
    dropped_sequences: float
    dropped_positive: float | None
    dropped_negative: float | None

    @property
    def ess(self) -> float:
        """Effective sample size, as a share."""
        return 1.0 / self.variance


@dataclass(frozen=True, slots=True)
class CorrectionReplay:
    """A correction, as if it had been in use when a recording was made: costs by slice, a finding for each promise."""

    correction: Correction
    costs: Mapping[str, Costs]
    findings: tuple[RemedyBound, ...]

    @property
    def meets(self) -> bool:
        """True if the correction keeps every promise on every slice."""
        return all(found.state == "met" for found in self.findings)

    @property
    def worst(self) -> RemedyBound | None:
        """The promise that it is farthest from keeping: a broken one, else by how far it is beyond its limit."""
        return max(self.findings, key=lambda found: (found.state == "broken", *_excess(found)), default=None)

    @property
    def rank(self) -> tuple[bool, float, float, float, float]:
        """Sort key, best first: keeps every promise, then the least variance, else the smallest excess over a limit."""
        costs = self.costs[ALL]
        known = [found for found in self.findings if found.interval.samples]
        excess = (0.0, 0.0) if all(found.state == "met" for found in known) else max(map(_excess, known))
        return not self.meets, *excess, float(f"{costs.variance:.4g}"), costs.dropped


@dataclass(frozen=True, slots=True)
class Remedy:
    """Effect of each correction on a recording; all intervals hold together with `confidence`.

    `closest` is each trainer's that keeps the contract with the lowest variance, or comes closest; `lacking` how many
    more prompts or sequences decide at most, None for no number; `exceeded` the worst verdicts of clauses `beyond` any
    whose estimates exceed their limits.
    """

    source: str
    contract: str
    confidence: float
    unit: str
    replayed: tuple[CorrectionReplay, ...]
    closest: Mapping[Trainer, CorrectionReplay]
    lacking: Mapping[Trainer, int | None]
    beyond: tuple[str, ...]
    exceeded: tuple[Verdict, ...]
    notes: tuple[str, ...] = ()

    @property
    def promises(self) -> tuple[RemedyTarget, ...]:
        """The promises that each correction was checked against."""
        return tuple(found.promise for found in self.replayed[0].findings)

    @property
    def chosen(self) -> dict[Trainer, CorrectionReplay | None]:
        """Each trainer's closest correction where it keeps the contract."""
        return {name: replay if replay.findings and replay.meets else None for name, replay in self.closest.items()}

    @property
    def empty(self) -> tuple[str, ...]:
        """The slices with a promise of which the recording has no whole sequence: every correction is open there."""
        return tuple(
            dict.fromkeys(promise.slice for promise in self.promises if promise.slice not in self.replayed[0].costs)
        )


def remedy(recording: Recording, contract: Contract, trainers: Sequence[Trainer] = TRAINERS) -> Remedy:
    """Replay every correction of some trainers on a recording, made before any correction, and choose.

    The choice is paid for by splitting the contract's error probability over corrections, promises and sides. Caps are
    not applied. A promise takes `observability.min_sequences` prompts or sequences; without any it is open. A trainer
    corrects whole sequences: one that older weights sampled in part is on the slices of its oldest weights.

    Raises:
        ValueError: If older weights sampled all of every sequence, or a part.
    """
    table, recording = SliceTable.whole(contract), recording.by_age(split=False)
    inside = table.of_batch(recording.attributes, range(recording.lengths.size), recording.lengths.size)
    slices = {name: inside[:, column] for column, name in enumerate(table.names) if inside[:, column].any()}
    if ALL not in slices:
        raise ValueError(
            f"{recording.source}: older weights sampled all of every sequence, or a part; record rollouts at lag 0 or "
            "leave lag out to correct drift and staleness together"
        )
    known, prompts = recording.advantages is not None, recording.prompts
    names = [name for name in table.names if name in slices or name not in OLDER]
    asked, beyond = promises(contract, names, advantages=known)
    tried = tuple(
        correction
        for correction in catalogue(advantages=known)
        if any(line(trainer, correction) is not None for trainer in trainers)
    )
    checked = sum(promise.slice in slices for promise in asked)
    alpha = (1.0 - contract.observability.confidence) / max(1, 2 * len(tried) * checked)
    terms: dict[str, Any] = {"alpha": alpha, "fewest": contract.observability.min_sequences}
    ratios = Ratios(recording)
    totals = {"kept": ratios.recording.lengths} | {
        f"kept_{side}": ratios.sums(of != 0.0) for side, of in ratios.sides.items()
    }

    def by_unit(found: Effects, inside: NDArray[np.bool_]) -> Effects:
        """Effects on a slice by prompt, if the recording names prompts."""
        part = {name: values[inside] for name, values in found.items()}
        return part if prompts is None else _by_prompt(part, prompts[inside])

    replayed = []
    for correction in tried:
        found = effects(ratios, correction)
        units = {name: by_unit(found, inside) for name, inside in slices.items()}
        findings = tuple(
            finding(promise, correction, units[promise.slice], **terms)
            if promise.slice in units
            else RemedyBound(promise, _NO_DATA, "open")
            for promise in asked
        )
        costs = {name: _costs(found, totals, inside) for name, inside in slices.items()}
        replayed.append(CorrectionReplay(correction, costs, findings))
    closest, more = {}, dict[Trainer, int | None]()
    for trainer in trainers:
        mine = (replay for replay in replayed if line(trainer, replay.correction) is not None)
        near = closest[trainer] = min(mine, key=lambda replay: replay.rank)
        if (worst := near.worst) is not None and worst.state == "open" and not near.meets:
            part = slices.get(worst.promise.slice)
            more[trainer] = (
                part
                if part is None
                else lacking(worst.promise, near.correction, by_unit(effects(ratios, near.correction), part), **terms)
            )
    return Remedy(
        recording.source,
        contract.name,
        contract.observability.confidence,
        "sequence" if prompts is None else "prompt",
        tuple(replayed),
        closest,
        more,
        tuple(beyond),
        _exceeded(recording, contract, {promise.clause for promise in asked}),
        (*recording_notes(recording), *repeats_notes(recording)),
    )


def _exceeded(recording: Recording, contract: Contract, asked: AbstractSet[str]) -> tuple[Verdict, ...]:
    """Return the worst verdict of each clause estimated beyond its limit that no correction is asked to keep."""

    def how_far(of: Verdict) -> tuple[bool, float]:
        return of.lower > of.limit, -of.limit / of.estimate

    worst: dict[str, Verdict] = {}
    for verdict in judge(contract, by_contract(recording, contract), time.time()).verdicts:
        known = worst.get(verdict.cell.clause)
        if (
            verdict.cell.clause not in asked
            and verdict.estimate > verdict.limit
            and (known is None or how_far(verdict) > how_far(known))
        ):
            worst[verdict.cell.clause] = verdict
    return tuple(worst.values())


def _excess(of: RemedyBound) -> tuple[float, float]:
    """Estimate in limits, 1 within the limit, and the upper bound in limits."""

    def in_limits(value: float) -> float:
        if of.promise.limit > 0.0:
            return value / of.promise.limit
        return math.inf if value > of.promise.limit else -math.inf

    return max(1.0, in_limits(of.interval.estimate)), in_limits(of.interval.upper)


def _costs(found: Effects, totals: Mapping[str, NDArray[Any]], inside: NDArray[np.bool_]) -> Costs:
    """Costs on a slice, from the number of tokens of each sequence, and of those with either sign of the advantage."""

    def dropped(kept: str) -> float | None:
        whole = float(totals[kept][inside].sum()) if kept in totals else 0.0
        return 1.0 - float(found[kept][inside].sum()) / whole if whole else None

    weight, square, kept = (found[name][inside] for name in ("weight", "square", "kept"))
    mean = float(weight.mean())
    return Costs(
        sequences=kept.size,
        tokens=int(totals["kept"][inside].sum()),
        variance=float(square.mean()) / (mean * mean) if mean > 0.0 else math.inf,
        dropped=dropped("kept") or 0.0,
        dropped_sequences=float((kept == 0.0).mean()),
        dropped_positive=dropped("kept_positive"),
        dropped_negative=dropped("kept_negative"),
    )


def as_data(of: Remedy) -> dict[str, Any]:
    """Return all numbers for JSON; unbounded or missing ones are null."""
    found: dict[str, Any] = for_others(
        {
            "source": of.source,
            "contract": of.contract,
            "confidence": of.confidence,
            "notes": of.notes,
            "empty": of.empty,
            "beyond": of.beyond,
            "exceeded": list(map(verdict_for_others, of.exceeded)),
            "chosen": {trainer: best and best.correction.name for trainer, best in of.chosen.items()},
            "lines": {trainer: best and line(trainer, best.correction) for trainer, best in of.chosen.items()},
            "unit": of.unit,
            "more": of.lacking,
            "corrections": [
                {
                    "name": replay.correction.name,
                    "meets": replay.meets,
                    "lines": {trainer: line(trainer, replay.correction) for trainer in of.chosen},
                    "costs": replay.costs,
                    "findings": replay.findings,
                }
                for replay in of.replayed
            ],
        }
    )
    return found
