"""What a contract says of a recording: verdicts by clause and slice, from the evaluator's own functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from kc_otel.contract.clause import Clause
from kc_otel.contract.model import Contract
from kc_otel.contract.registry import Origin
from kc_otel.contract.slices import ALL
from kc_otel.contract.units import format_duration
from kc_otel.judge.cell_evidence import Evidence, Window
from kc_otel.judge.verdict import Cell, Verdict
from kc_otel.judge.verdicts import decide
from kc_otel.offline.gate.observations import RecordingObservations, RecordingSlice
from kc_otel.record.slice_table import SliceTable
from kc_otel.recordings import Recording
from kc_otel.stats import Binned

__all__ = ["RecordingVerdicts", "UnjudgedClause", "by_contract", "judge", "on_either_window", "without_windows"]

_NOBODY_IN = "no sequence of this recording is in slice {}"
_ROUNDING = 1.02
"""A mean ratio up to which log-probabilities that were rounded, or computed anew, are not told from other tokens."""
_LISTED = 5
"""Values of an attribute that a sentence lists."""


@dataclass(frozen=True, slots=True)
class UnjudgedClause:
    """A clause that a recording says nothing of.

    Attributes:
        clause: Its id.
        why: What is missing, as words that follow on the clause's name.
    """

    clause: str
    why: str

    def __str__(self) -> str:
        return f"{self.clause}: {self.why}"


@dataclass(frozen=True, slots=True)
class RecordingVerdicts:
    """What a contract says of a recording.

    Attributes:
        verdicts: A verdict for each clause that a recording can be judged by, on each slice.
        left_out: Clauses that it cannot.
        unreadable: Tokens whose logits are not numbers; no verdict rests on them.
        unknown_rewards: Sequences whose reward is missing or out of range, which counts as the worst that it could be.
        mean_ratio: What the mean of P(y)/Q(y) over its tokens surely is at least.
    """

    verdicts: tuple[Verdict, ...] = ()
    left_out: tuple[UnjudgedClause, ...] = ()
    unreadable: int = 0
    unknown_rewards: int = 0
    mean_ratio: float = 0.0

    @property
    def sampled_elsewhere(self) -> str:
        """That the inference kernel did not sample its tokens, as a sentence; empty where it may have."""
        if self.mean_ratio <= _ROUNDING:
            return ""
        return (
            f"the mean of P(y)/Q(y) is at least {self.mean_ratio:.3g}, and at most 1 over tokens that the inference "
            "kernel sampled: are they the training kernel's, sampled with other parameters than these are of, or are "
            "the two sides the wrong way round?"
        )

    def on(self, slices: Sequence[str]) -> RecordingVerdicts:
        """The verdicts on some slices; they were reached together with those on the others."""
        return replace(self, verdicts=tuple(each for each in self.verdicts if each.cell.slice in slices))


def by_contract(recording: Recording, contract: Contract) -> list[RecordingSlice]:
    """`all` and the contract's slices; those over its cap on series are together in `other`."""
    table = SliceTable.of(contract)
    measured, masked = (
        table.of_batch(rows, range(len(rows)), len(rows)) for rows in (recording.attributes, recording.masked)
    )
    parts = []
    for column, name in enumerate(table.names):
        inside = measured[:, column]
        parts.append(RecordingSlice(name, recording.only(inside, masked[:, column]) if inside.any() else None))
    return parts


def judge(
    contract: Contract,
    parts: Sequence[RecordingSlice],
    now: float,
    kernels: tuple[str, str] = ("", ""),
    *,
    anytime: bool = False,
) -> RecordingVerdicts:
    """Verdicts as an evaluator would give them, if the recording were what both of its windows hold.

    The intervals come from the values themselves, not from histograms. Holm's procedure counts the cells that can be
    judged from a recording.

    Args:
        contract: The contract.
        parts: `all` and the slices, as `by_contract` makes them.
        now: Unix time, seconds.
        kernels: Short fingerprints of the training and the inference kernel, where they are known.
        anytime: Whether somebody looks as the recording grows, so that the bounds have to hold at all sizes at once.

    Raises:
        ValueError: If a clause needs an assumption that the contract does not state.
    """
    known = {
        part.name: RecordingObservations(part.recording, contract.assumptions.reward_range)
        for part in parts
        if part.recording is not None
    }
    absent = {
        part.name: _nobody_in(contract, part.name, known[ALL].recording) for part in parts if part.name not in known
    }
    evidence, left_out = [], []
    for clause in contract.clauses:
        quantity = clause.quantity
        if quantity is None or known[ALL].of(quantity.key) is None:
            left_out.append(UnjudgedClause(clause.id, _why(clause, known[ALL].recording)))
            continue
        for part in parts:
            sample, samples = None, known.get(part.name)
            if samples is not None:
                of_mean = clause.parsed_statistic.kind == "mean"
                sample = samples.for_mean(quantity.key) if of_mean else samples.of(quantity.key)
                if clause.opposite is not None and sample is not None:
                    sample = replace(sample, opposite=samples.for_mean(clause.opposite.key))
            cell = Cell(contract.name, clause.id, part.name, *kernels)
            absence = "" if sample is not None else absent.get(part.name, _NOBODY_IN.format(part.name))
            evidence.append(Evidence(cell, clause, partial(on_either_window, sample), absence, anytime=anytime))
    verdicts = without_windows(contract, evidence, now)
    return RecordingVerdicts(
        verdicts, tuple(left_out), known[ALL].unreadable, known[ALL].unknown_rewards, known[ALL].mean_ratio
    )


def _nobody_in(contract: Contract, slice: str, recording: Recording) -> str:
    """That nothing is in a slice, and what the recording has of the attributes that the slice asks for."""
    said = _NOBODY_IN.format(slice)
    for name in contract.slices[slice].where if slice in contract.slices else ():
        there = dict.fromkeys(str(row[name]) for row in recording.attributes if name in row)
        listed = ", ".join([*list(there)[:_LISTED], *(["..."] if len(there) > _LISTED else [])])
        if there:
            said += f"; `{name}` is {listed} there"
        else:
            said += f"; `{name}` {recording.unread[name]}" if name in recording.unread else f"; none has `{name}`"
    return said


def without_windows(contract: Contract, evidence: Sequence[Evidence], now: float) -> tuple[Verdict, ...]:
    """Verdicts on observations that are no window: their reasons do not speak of its length."""
    spans = [f" in {format_duration(s)}" for s in (contract.observability.window, contract.observability.long_window)]
    return tuple(
        replace(verdict, reason=verdict.reason.replace(spans[verdict.window == "long"], "", 1))
        for verdict in decide(contract, evidence, now)
    )


def on_either_window(sample: Binned | None, _window: Window) -> Binned:
    """The same observations whichever window is asked for; without a sample, none."""
    return Binned.of_samples(np.zeros(0)) if sample is None else sample


def _why(clause: Clause, recording: Recording) -> str:
    said = f"{clause.metric_text} cannot be told from this recording"
    match clause.quantity and clause.quantity.source:
        case Origin.LOGITS:
            return f"{said}; it takes a .npz with train_logits and inference_logits"
        case Origin.ADVANTAGES:
            return f"{said}; it takes one with advantages"
        case Origin.TRUNCATION:
            return f"{said}; it takes one with train_kept_logprobs"
        case Origin.REWARDS:
            return f"{said}; {recording.unread_reward or 'it takes one whose rows have a reward'}"
        case _:
            return said
