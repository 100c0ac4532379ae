"""Every correction replayed on a recording, and each trainer's that keeps a contract with the lowest variance."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kc_otel.contract.model import Contract
from kc_otel.contract.slices import ALL, OLDER
from kc_otel.judge.plain_json import for_others
from kc_otel.judge.verdict import Verdict
from kc_otel.offline.gate.recorded_verdicts import by_contract, judge
from kc_otel.offline.remedy.corrections import TRAINERS, Correction, Ratios, Trainer, catalogue, line
from kc_otel.offline.remedy.promises import Effects, RemedyBound, RemedyTarget, effects, finding, lacking, promises
from kc_otel.record.slice_table import SliceTable
from kc_otel.recordings.recording import Recording
from kc_otel.stats import Interval

_NO_DATA: Final = Interval(math.nan, -math.inf, math.inf, 0, "no data")


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs of a correction on a slice, as shares of its sequences or tokens.

    `variance` is E[c^2] / E[c]^2: as many times as many rollouts give the same standard error, where scores do not
    depend on weights; inf where nothing is left. `dropped_positive` is of the tokens with A > 0.
    """

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
        """Sort key, best first: keeps every promise, then the least variance, else the smallest excess over a limit.

        The excess is the largest estimate in limits, else the largest upper bound; promises without data do not count.
        """
        costs = self.costs[ALL]
        known = [found for found in self.findings if found.interval.samples]
        excess = (0.0, 0.0) if all(found.state == "met" for found in known) else max(map(_excess, known))
        return not self.meets, *excess, float(f"{costs.variance:.4g}"), costs.dropped


@dataclass(frozen=True, slots=True)
class Remedy:
    """Effect of each correction on a recording; all intervals hold together with `confidence`.

    No correction can be asked to keep the clauses of `beyond`; `exceeded` are the worst verdicts of those. `lacking`
    is, by undecided trainer, how many more prompts or sequences decide at most; None where no number does.
    """

    source: str
    contract: str
    confidence: float
    replayed: tuple[CorrectionReplay, ...]
    chosen: Mapping[Trainer, CorrectionReplay | None]
    beyond: tuple[str, ...]
    exceeded: tuple[Verdict, ...] = ()
    lacking: Mapping[Trainer, int | None] = field(default_factory=dict)
    unit: str = "sequence"

    @property
    def promises(self) -> tuple[RemedyTarget, ...]:
        """The promises that each correction was checked against."""
        return tuple(found.promise for found in self.replayed[0].findings)

    @property
    def empty(self) -> tuple[str, ...]:
        """The slices with a promise of which the recording has no whole sequence: every correction is open there."""
        return tuple(
            dict.fromkeys(promise.slice for promise in self.promises if promise.slice not in self.replayed[0].costs)
        )

    def closest(self, trainer: Trainer) -> CorrectionReplay:
        """Return a trainer's best correction: one that keeps the contract, else the closest to it."""
        mine = (replay for replay in self.replayed if line(trainer, replay.correction) is not None)
        return min(mine, key=lambda replay: replay.rank)


def remedy(recording: Recording, contract: Contract, trainers: Sequence[Trainer] = TRAINERS) -> Remedy:
    """Replay every correction of some trainers on a recording, made before any correction, and choose.

    The choice is paid for by splitting the contract's error probability over corrections, promises and sides. Caps are
    not applied. A promise takes `observability.min_sequences` prompts or sequences; without any it is open.

    Raises:
        ValueError: If older weights sampled all of the recording: a contract's clauses count none of that.
    """
    table, recording = SliceTable.whole(contract), recording.by_age()
    inside = table.of_batch(recording.attributes, range(recording.lengths.size), recording.lengths.size)
    slices = {name: inside[:, column] for column, name in enumerate(table.names) if inside[:, column].any()}
    if ALL not in slices:
        raise ValueError(
            f"{recording.source}: older weights sampled all of it, and no clause counts that; record rollouts at lag 0 "
            "or leave lag out to correct drift and staleness together"
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
    ratios = Ratios(recording)
    counted = [np.ones(recording.train.size, dtype=np.bool_)]
    counted += [] if recording.advantages is None else [recording.advantages > 0, recording.advantages < 0]
    totals = [ratios.sums(of) for of in counted]

    def by_unit(found: Effects, inside: NDArray[np.bool_]) -> Effects:
        """Effects on a slice by prompt, if the recording names prompts."""
        part = found.only(inside)
        return part if prompts is None else part.by_prompt(prompts[inside])

    fewest = contract.observability.min_sequences
    replayed = []
    for correction, found in zip(tried, effects(ratios, tried), strict=True):
        units = {name: by_unit(found, inside) for name, inside in slices.items()}
        findings = tuple(
            finding(promise, correction, units[promise.slice], alpha=alpha, fewest=fewest)
            if promise.slice in units
            else RemedyBound(promise, _NO_DATA, "open")
            for promise in asked
        )
        costs = {name: _costs(found.only(of), [side[of] for side in totals]) for name, of in slices.items()}
        replayed.append(CorrectionReplay(correction, costs, findings))
    unit = "sequence" if prompts is None else "prompt"
    whole = Remedy(
        recording.source,
        contract.name,
        contract.observability.confidence,
        tuple(replayed),
        {},
        tuple(beyond),
        _exceeded(recording, contract, {promise.clause for promise in asked}),
        unit=unit,
    )
    best = {trainer: whole.closest(trainer) for trainer in trainers}
    chosen = {name: replay if asked and replay.meets else None for name, replay in best.items()}

    def more(near: CorrectionReplay, worst: RemedyBound) -> int | None:
        if worst.promise.slice not in slices:
            return None
        (found,) = effects(ratios, (near.correction,))
        part = by_unit(found, slices[worst.promise.slice])
        return lacking(worst.promise, near.correction, part, alpha=alpha, fewest=fewest)

    undecided = {
        name: more(best[name], worst)
        for name, replay in chosen.items()
        if replay is None and (worst := best[name].worst) is not None and worst.state == "open"
    }
    return replace(whole, chosen=chosen, lacking=undecided)


def _exceeded(recording: Recording, contract: Contract, asked: AbstractSet[str]) -> tuple[Verdict, ...]:
    """Return the worst verdict of each clause beyond its limit that no correction is asked to keep."""
    worst: dict[str, Verdict] = {}
    for verdict in judge(contract, by_contract(recording, contract), time.time()).verdicts:
        known = worst.get(verdict.cell.clause)
        if (
            verdict.cell.clause not in asked
            and verdict.estimate > verdict.limit
            and (known is None or verdict.estimate / verdict.limit > known.estimate / known.limit)
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


def _costs(found: Effects, totals: Sequence[NDArray[np.float64]]) -> Costs:
    """Costs on a slice, from the number of tokens of each sequence, and of those with either sign of the advantage."""
    tokens, *signed = (float(side.sum()) for side in totals)
    positive, negative = signed or (0.0, 0.0)
    mean = float(found.weight.mean())
    return Costs(
        sequences=found.kept.size,
        tokens=int(tokens),
        variance=float(found.square.mean()) / (mean * mean) if mean > 0.0 else math.inf,
        dropped=1.0 - float(found.kept.sum() / tokens),
        dropped_sequences=float((found.kept == 0.0).mean()),
        dropped_positive=1.0 - float(found.kept_positive.sum() / positive) if positive else None,
        dropped_negative=1.0 - float(found.kept_negative.sum() / negative) if negative else None,
    )


def as_data(of: Remedy) -> dict[str, Any]:
    """Return all numbers for JSON; unbounded or missing ones are null."""
    found: dict[str, Any] = for_others(
        {
            "source": of.source,
            "contract": of.contract,
            "confidence": of.confidence,
            "empty": of.empty,
            "beyond": of.beyond,
            "exceeded": [
                {
                    "clause": verdict.cell.clause,
                    "slice": verdict.cell.slice,
                    "estimate": verdict.estimate,
                    "limit": verdict.limit,
                }
                for verdict in of.exceeded
            ],
            "chosen": {trainer: best and best.correction.name for trainer, best in of.chosen.items()},
            "lines": {trainer: best and line(trainer, best.correction) for trainer, best in of.chosen.items()},
            "unit": of.unit,
            "more": of.lacking,
            "corrections": [
                {
                    "name": replay.correction.name,
                    "family": replay.correction.family,
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
