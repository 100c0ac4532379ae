"""Every correction replayed on a recording, and each trainer's that keeps a contract at the least variance."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kc_otel.contract.model import Contract
from kc_otel.contract.slices import ALL
from kc_otel.offline.remedy.corrections import Correction, Ratios
from kc_otel.offline.remedy.effects import Effects, effects
from kc_otel.offline.remedy.promises import RemedyBound, RemedyTarget, finding, promises
from kc_otel.offline.remedy.trainers import TRAINERS, Trainer, catalogue, line
from kc_otel.record.slice_table import SliceTable
from kc_otel.recordings import Recording
from kc_otel.stats import Interval

__all__ = ["CorrectionReplay", "Costs", "Remedy", "as_data", "remedy"]


@dataclass(frozen=True, slots=True)
class Costs:
    """What a correction costs on a slice, as shares of its sequences or tokens.

    Attributes:
        sequences: Sequences of the slice.
        tokens: Tokens of the slice.
        variance: E[c^2] / E[c]^2: as many times as many rollouts give the same standard error, where scores do not
            depend on weights; 1 without weights, inf where nothing is left.
        dropped: Share of tokens with weight 0.
        dropped_sequences: Share of sequences of which no token is left.
        dropped_positive: Share of the tokens with a positive advantage that are dropped; None where there are none.
        dropped_negative: The same of those with a negative advantage.
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
    """A correction, as if it had been in use when a recording was made.

    Attributes:
        correction: The correction.
        costs: By slice.
        findings: One for each promise.
    """

    correction: Correction
    costs: Mapping[str, Costs]
    findings: tuple[RemedyBound, ...]

    @property
    def meets(self) -> bool:
        """Whether it keeps every promise on every slice."""
        return all(each.state == "met" for each in self.findings)

    @property
    def worst(self) -> RemedyBound | None:
        """The promise that it is farthest from keeping, by the upper bound in limits."""
        return max(self.findings, key=_in_limits, default=None)

    @property
    def rank(self) -> tuple[bool, float, float, float]:
        """What is better comes first: keeping every promise, then the least variance, else the least beyond a limit.

        Variance counts to four digits on all traffic, then the share of tokens that are dropped.
        """
        costs = self.costs[ALL]
        worst = 0.0 if self.meets or self.worst is None else _in_limits(self.worst)
        return not self.meets, worst, float(f"{costs.variance:.4g}"), costs.dropped


@dataclass(frozen=True, slots=True)
class Remedy:
    """What each correction would have done to a recording.

    Attributes:
        source: The file.
        contract: Name of the contract.
        confidence: That all intervals hold together.
        replayed: Every correction of the trainers asked for, the one without any first.
        chosen: For each trainer the one that keeps the contract at the least variance; None where none does.
        beyond: A sentence for each clause that no correction can be asked to keep.
    """

    source: str
    contract: str
    confidence: float
    replayed: tuple[CorrectionReplay, ...]
    chosen: Mapping[Trainer, CorrectionReplay | None]
    beyond: tuple[str, ...]

    @property
    def promises(self) -> tuple[RemedyTarget, ...]:
        """What was asked of each correction."""
        return tuple(each.promise for each in self.replayed[0].findings)

    def closest(self, trainer: Trainer) -> CorrectionReplay:
        """Of a trainer's corrections the best one, whether it keeps the contract or comes closest to that."""
        mine = (each for each in self.replayed if line(trainer, each.correction) is not None)
        return min(mine, key=lambda each: each.rank)


def remedy(recording: Recording, contract: Contract, trainers: Sequence[Trainer] = TRAINERS) -> Remedy:
    """Replay every correction of some trainers on a recording, and choose.

    All intervals hold together with the contract's confidence: the choice among corrections is paid for by splitting
    its error probability over corrections, promises and sides. Sequences are the unit throughout, each counting alike;
    caps of clauses are not applied. A promise is met on no fewer sequences than `observability.min_sequences`.

    Args:
        recording: Log-probabilities of both kernels, before any correction.
        contract: Whose clauses and slices apply.
        trainers: Whose corrections to try.

    Raises:
        ValueError: If a clause needs an assumption that the contract does not state.
    """
    table = SliceTable.of(contract)
    inside = table.of_batch(recording.attributes, range(recording.lengths.size), recording.lengths.size)
    slices = {name: inside[:, column] for column, name in enumerate(table.names) if inside[:, column].any()}
    known = recording.advantages is not None
    asked, beyond = promises(contract, list(slices), advantages=known)
    tried = tuple(
        each for each in catalogue(advantages=known) if any(line(trainer, each) is not None for trainer in trainers)
    )
    alpha = (1.0 - contract.observability.confidence) / max(1, 2 * len(tried) * len(asked))
    totals = _totals(recording)
    replayed = []
    for correction, found in zip(tried, effects(Ratios(recording), tried), strict=True):
        parts = {name: found.only(of) for name, of in slices.items()}
        findings = tuple(
            finding(each, correction, parts[each.slice], alpha=alpha, fewest=contract.observability.min_sequences)
            for each in asked
        )
        costs = {name: _costs(part, totals[slices[name]]) for name, part in parts.items()}
        replayed.append(CorrectionReplay(correction, costs, findings))
    whole = Remedy(
        recording.source, contract.name, contract.observability.confidence, tuple(replayed), {}, tuple(beyond)
    )
    best = {trainer: whole.closest(trainer) for trainer in trainers}
    return replace(whole, chosen={name: each if asked and each.meets else None for name, each in best.items()})


def _in_limits(of: RemedyBound) -> float:
    if of.promise.limit > 0.0:
        return of.interval.upper / of.promise.limit
    return math.inf if of.interval.upper > of.promise.limit else -math.inf


def _totals(recording: Recording) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Tokens, tokens with a positive and with a negative advantage of each sequence, [S, 3]."""
    advantages = recording.advantages
    if advantages is None:
        return np.stack([recording.lengths.astype(np.float64), *(np.zeros(recording.lengths.size),) * 2], axis=1)
    sides = [np.add.reduceat(side.astype(np.float64), recording.starts) for side in (advantages > 0, advantages < 0)]
    return np.stack([recording.lengths.astype(np.float64), *sides], axis=1)


def _costs(found: Effects, totals: np.ndarray[Any, np.dtype[np.float64]]) -> Costs:
    tokens, positive, negative = totals.sum(axis=0)
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
    """Every number of everything, for JSON; what is not bounded or does not exist is null."""
    return {
        "source": of.source,
        "contract": of.contract,
        "confidence": of.confidence,
        "beyond": list(of.beyond),
        "chosen": {trainer: None if each is None else each.correction.name for trainer, each in of.chosen.items()},
        "lines": {
            trainer: None if each is None else line(trainer, each.correction) for trainer, each in of.chosen.items()
        },
        "corrections": [
            {
                "name": each.correction.name,
                "family": each.correction.family,
                "meets": each.meets,
                "lines": {trainer: line(trainer, each.correction) for trainer in of.chosen},
                "slices": [
                    {
                        "slice": name,
                        "sequences": costs.sequences,
                        "tokens": costs.tokens,
                        "variance": _finite(costs.variance),
                        "ess": costs.ess,
                        "dropped_tokens": costs.dropped,
                        "dropped_sequences": costs.dropped_sequences,
                        "dropped_tokens_positive_advantage": costs.dropped_positive,
                        "dropped_tokens_negative_advantage": costs.dropped_negative,
                        "clauses": [_finding_data(one) for one in each.findings if one.promise.slice == name],
                    }
                    for name, costs in each.costs.items()
                ],
            }
            for each in of.replayed
        ],
    }


def _finding_data(of: RemedyBound) -> dict[str, Any]:
    return {
        "clause": of.promise.clause,
        "metric": of.promise.metric,
        "limit": of.promise.limit,
        "state": of.state,
        **_interval_data(of.interval),
    }


def _interval_data(of: Interval) -> dict[str, Any]:
    ends = {"estimate": of.estimate, "lower": of.lower, "upper": of.upper}
    return {name: _finite(value) for name, value in ends.items()} | {"sequences": of.samples, "note": of.note}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
