"""The first stage in a team's CI: recordings in, a decision out. Every recording is a window that has to pass.

Clauses that no recording can hold are reported as not judged; clauses whose columns are missing hold the gate. Of the
parameters in `promotion.sampling` every sequence must state a listed value: a missing top_p does not show that none was
used. Any other parameter must be neutral.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Final

import numpy as np

from kc_otel.contract.model import Contract
from kc_otel.contract.policy import SAMPLING_PARAMETERS
from kc_otel.contract.slices import Scalar
from kc_otel.contract.words import did_you_mean
from kc_otel.judge.promotion.stages import Decision, GateOutcome, GateSpec, Stage, Tally, decide
from kc_otel.judge.statistics import samples_needed
from kc_otel.judge.verdict import Evaluation
from kc_otel.offline.gate.copies import distinct, first_of_each, recording_notes, without_repeats
from kc_otel.offline.gate.recorded_verdicts import RecordingVerdicts, UnjudgedClause, by_contract, judge, recordable
from kc_otel.record.kernel import Kernel
from kc_otel.record.measure.blocks import Block
from kc_otel.record.measure.checks import remarks
from kc_otel.record.slice_table import SliceTable
from kc_otel.recordings.recording import ONE_MODEL, Recording, of_one_model
from kc_otel.recordings.recording_files import digest_of, load_recording
from kc_otel.recordings.request import NEUTRAL

_SHARED_DATA_ERROR: Final = "{}: has {}; windows that share data count once, so leave one of them out"
_FIRST_LOOK: Final = 20
_LOOK_GROWTH: Final = 1.25
"""Each look costs a pass over all sequences so far: with this factor all together cost five times the last."""


@dataclass(frozen=True, slots=True)
class GateTerms:
    """Requirements of a gate: clauses and slices that have to PASS, all if there are none; any FAIL refuses."""

    require: tuple[str, ...] = ()
    slices: tuple[str, ...] = ()
    columns: Mapping[str, str] = field(default_factory=dict)
    sequential: bool = False
    attributes: Mapping[str, Scalar] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class GatedRecording:
    """A file's sequences that count, what identifies the file, and once judged its sampling and verdicts."""

    name: str
    sha256: str
    size: int
    recording: Recording
    sampling: Mapping[str, Sequence[Scalar]] = field(default_factory=dict)
    judged: RecordingVerdicts = field(default_factory=RecordingVerdicts)

    @cached_property
    def notes(self) -> tuple[str, ...]:
        """Sentences about sides that are equal, or rounded otherwise, and about repeated sequences."""
        return tuple(recording_notes(self.recording))

    @cached_property
    def unchecked(self) -> str:
        """Conclusion on input checks that the recording has too few tokens for; empty where all were made."""
        of = self.recording
        block = Block(np.arange(of.lengths.size), of.starts, of.lengths, of.train, of.inference)
        return "" if of.density else remarks(block)


@dataclass(frozen=True, slots=True)
class OfflineGate:
    """A gate's terms, its verdicts on each recording and its decision on the inference kernel's version."""

    contract: Contract
    train: Kernel
    inference: Kernel
    terms: GateTerms
    inputs: tuple[GatedRecording, ...]
    decision: Decision
    at: float

    @property
    def judged(self) -> tuple[RecordingVerdicts, ...]:
        """The verdicts on each recording."""
        return tuple(of.judged for of in self.inputs)

    @property
    def unjudged(self) -> tuple[UnjudgedClause, ...]:
        """Clauses that no recording could be judged by."""
        return not_judged(self.judged)


def read_input(path: str | Path, terms: GateTerms = GateTerms()) -> GatedRecording:
    """A recording, and what identifies its file."""
    recording = distinct(load_recording(path, columns=terms.columns or None).with_attributes(terms.attributes))
    if (model := next((row[ONE_MODEL] for row in recording.attributes if ONE_MODEL in row), None)) is not None:
        raise ValueError(of_one_model(str(model), Path(path)))
    file = Path(path)
    return GatedRecording(file.as_posix(), digest_of(file), file.stat().st_size, recording)


def _apart(inputs: Sequence[GatedRecording]) -> list[GatedRecording]:
    """Remove sequences that another recording has; one that has nothing of its own is refused."""
    if len(inputs) == 1:
        return list(inputs)
    seen: dict[tuple[bytes, ...], str] = {}
    for of in inputs:
        if (content := tuple(sorted(of.recording.digests()))) in seen:
            raise ValueError(_SHARED_DATA_ERROR.format(of.name, f"the same content as {seen[content]}"))
        seen[content] = of.name
    found = []
    for of, first in zip(inputs, first_of_each(*(of.recording for of in inputs)), strict=True):
        if not first.any():
            raise ValueError(
                _SHARED_DATA_ERROR.format(of.name, "only sequences that repeat others of these recordings")
            )
        found.append(replace(of, recording=without_repeats(of.recording, first)))
    return found


def gate_recordings(
    contract: Contract,
    recordings: Sequence[GatedRecording],
    kernels: tuple[Kernel, Kernel],
    terms: GateTerms,
    now: float,
) -> OfflineGate:
    """Judge recordings, each as `read_input` returns it, and decide."""
    apart = list(_apart(recordings))
    check_terms(contract, terms)
    sampling = [in_force(of.name, of.recording, contract.promotion.sampling) for of in apart]
    pair = (kernels[0].fingerprint, kernels[1].fingerprint)
    inputs = []
    for of, values in zip(apart, sampling, strict=True):
        judged = judge(contract, by_contract(of.recording, contract), now, pair, anytime=terms.sequential)
        inputs.append(replace(of, sampling=values, judged=judged))
    decision = gate_decision(contract, [of.judged for of in inputs], pair[1], terms, now)
    equal = next((of for of in inputs if of.judged.equal), None)
    if equal is not None and decision.outcome is not GateOutcome.ROLLBACK:
        raise ValueError(f"{equal.name}: no decision: {equal.judged.equal}")
    return OfflineGate(contract, *kernels, terms, tuple(inputs), decision, now)


def check_terms(contract: Contract, terms: GateTerms) -> None:
    """Refuse terms that name a clause or slice that the contract does not have."""
    clauses, slices = [clause.id for clause in contract.clauses], SliceTable.whole(contract).judged
    for option, what, given, known in (
        ("--require", "clause", terms.require, clauses),
        ("--slice", "slice", terms.slices, slices),
    ):
        for name in given:
            if name not in known:
                raise ValueError(
                    f"{option}: the contract has no {what} {name!r}; {did_you_mean(name, known, 'there are')}"
                )


def gate_decision(
    contract: Contract, judged: Sequence[RecordingVerdicts], version: str, terms: GateTerms, now: float
) -> Decision:
    """Return the decision that follows from the verdicts on each recording, with `stages.decide`."""
    verdicts = [verdict for result in judged for verdict in result.verdicts]
    judgeable = {verdict.cell.clause for verdict in verdicts}
    slices = terms.slices or tuple(dict.fromkeys(verdict.cell.slice for verdict in verdicts))
    clauses = [clause for clause in contract.clauses if clause.id in (terms.require or judgeable)]
    if not judgeable or not clauses:
        raise ValueError(
            f"no clause of {contract.name} can be judged from these recordings: "
            + "; ".join(map(str, not_judged(judged)))
        )
    gate = GateSpec(
        stage=Stage.OFFLINE_CI,
        windows=len(judged),
        cells=tuple((clause.id, slice) for clause in clauses for slice in slices),
        needed={clause.id: samples_needed(clause, contract.observability) for clause in clauses},
    )
    holds = [f"logits of {result.unreadable:,} tokens are not numbers" for result in judged if result.unreadable]
    if not terms.require:
        why = {clause.clause: str(clause) for clause in not_judged(judged)}
        holds += [
            f"{why.get(clause.id, f'{clause.id}: no verdict')}; or --require the other clauses"
            for clause in contract.clauses
            if clause.id not in judgeable and recordable(clause)
        ]
    evaluations = [Evaluation(now, result.verdicts) for result in judged]
    return decide(gate, version, Tally(), evaluations, holds)[1]


def not_judged(judged: Sequence[RecordingVerdicts]) -> tuple[UnjudgedClause, ...]:
    """Clauses that none of the recordings could be judged by."""
    judgeable = {verdict.cell.clause for verdicts in judged for verdict in verdicts.verdicts}
    missing = {lost.clause: lost for verdicts in judged for lost in verdicts.left_out if lost.clause not in judgeable}
    return tuple(missing.values())


def looks() -> Iterator[int]:
    """Numbers of sequences at which a gate looks."""
    number = _FIRST_LOOK
    while True:
        yield number
        number = math.ceil(number * _LOOK_GROWTH)


def decides(contract: Contract, recording: Recording, kernels: tuple[Kernel, Kernel], terms: GateTerms) -> bool:
    """Return True if the sequences so far decide the gate; clauses that no recording can judge do not delay it.

    Looking again costs no confidence: the bounds are betting confidence sequences, if the order says nothing.
    """
    in_force("the recording", recording, contract.promotion.sampling)
    pair = kernels[0].fingerprint, kernels[1].fingerprint
    found = judge(contract, by_contract(recording, contract), 0.0, pair, anytime=True)
    asked = replace(terms, require=terms.require or tuple({judged.cell.clause for judged in found.verdicts}))
    return gate_decision(contract, [found], pair[1], asked, 0.0).outcome is not GateOutcome.WAIT


def in_force(name: str, recording: Recording, allowed: Mapping[str, Sequence[Scalar]]) -> dict[str, list[Scalar]]:
    """Values of each sampling parameter that a recording's sequences name, by vLLM's names, if all are allowed."""
    found: dict[str, list[Scalar]] = {}
    problems: dict[str, str] = {}
    for row, attributes in enumerate(recording.attributes if allowed else ()):
        for parameter in SAMPLING_PARAMETERS:
            value = attributes.get(parameter)
            if value is not None:
                seen = found.setdefault(parameter, [])
                if any(_same(parameter, value, other, exact=True) for other in seen):
                    continue
                seen.append(value)
            if why := not_allowed(parameter, value, allowed):
                unread = f" (its {parameter} {recording.unread[parameter]})" if parameter in recording.unread else ""
                problems.setdefault(parameter, f"{name}: sequence {row}: {why}{unread}")
    if problems:
        raise ValueError("\n".join(problems.values()))
    return found


def not_allowed(parameter: str, value: Scalar | None, allowed: Mapping[str, Sequence[Scalar]]) -> str:
    """Return why `promotion.sampling` does not allow a value, None where nothing is said; empty if it does."""
    listed = allowed.get(parameter)
    if listed is None:
        neutral = NEUTRAL.get(parameter, (0, False, ""))
        if value is None or any(_same(parameter, value, other) for other in neutral):
            return ""
        return f"{parameter} is {value!r}, and promotion.sampling lists no {parameter}; list it, or sample without"
    said = ", ".join(map(repr, listed))
    if value is None:
        return f"says no {parameter}, of which promotion.sampling allows {said}; record it with each sequence"
    if any(_same(parameter, value, other) for other in listed):
        return ""
    return f"{parameter} is {value!r}, and promotion.sampling allows {said}"


def _same(parameter: str, value: Scalar, other: Scalar, *, exact: bool = False) -> bool:
    """Return True if two values are equal in single precision, or both neutral."""
    if isinstance(value, bool | str) or isinstance(other, bool | str):
        return type(value) is type(other) and value == other
    if exact:
        return value == other
    neutral = NEUTRAL.get(parameter, ())
    return math.isclose(value, other, rel_tol=1e-6) or (value in neutral and other in neutral)
