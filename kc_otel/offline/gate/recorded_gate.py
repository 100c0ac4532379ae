"""The first stage in a team's CI: recordings in, a decision out.

Every recording is a window of its own, and every one has to pass. A clause that no recording can be judged by holds the
gate until somebody allows it by name of an option.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import numpy as np

from kc_otel.contract.model import Contract
from kc_otel.contract.slices import Scalar
from kc_otel.judge.promotion.stages import Decision, GateSpec, Stage, decide
from kc_otel.judge.statistics import samples_needed
from kc_otel.judge.verdict import Evaluation
from kc_otel.offline.gate.recorded_verdicts import RecordingVerdicts, UnjudgedClause, by_contract, judge
from kc_otel.offline.gate.sampling_terms import in_force
from kc_otel.record.kernel import Kernel
from kc_otel.record.measure.storage_grid import CoarseSide, coarse_side
from kc_otel.record.slice_table import SliceTable
from kc_otel.recordings import Recording, load_recording

__all__ = [
    "GateTerms",
    "GatedRecording",
    "OfflineGate",
    "check_terms",
    "digest_of",
    "gate_decision",
    "gate_recordings",
    "not_judged",
    "read_input",
]


_TELLING: Final = 8
"""Tokens from which on a sequence that occurs again was not sampled again by chance."""


@dataclass(frozen=True, slots=True)
class GateTerms:
    """What a gate asks of a kernel version.

    Attributes:
        windows: Fewest recordings; where more are given, all of them have to pass, and this is their number.
        require: Clauses that have to PASS; empty for every clause. A FAIL of any other still refuses the version.
        slices: Slices on which they have to; empty for all traffic and every slice of the contract.
        allow_unjudged: Whether clauses that no recording can be judged by may be left out.
        columns: Names of the recordings' columns, by role, where they are others than tools use.
        sequential: Whether somebody looks as a recording grows and stops when it suits, so that the bounds have to
            hold at every number of sequences at once.
    """

    windows: int = 1
    require: tuple[str, ...] = ()
    slices: tuple[str, ...] = ()
    allow_unjudged: bool = False
    columns: Mapping[str, str] = field(default_factory=dict)
    sequential: bool = False


@dataclass(frozen=True, slots=True)
class GatedRecording:
    """A recording's file.

    Attributes:
        name: Its path, as it was given.
        sha256: Of its bytes, 64 hex digits.
        size: Its bytes.
        sequences: Sequences in it that count.
        tokens: Tokens in it that count.
        identical: Whether both sides are the same number in every token.
        coarse: The side that was rounded to half precision where the other was not, None where none was; it follows
            from the bytes, so that evidence does not repeat it.
        sampling: Values of each sampling parameter that its sequences name, where the contract lists any.
        content: SHA-256 of the numbers in it, 64 hex digits; the same for a file that was saved in another way.
        repeated: Sequences that are an earlier one again, number for number.
    """

    name: str
    sha256: str
    size: int
    sequences: int
    tokens: int
    identical: bool
    coarse: CoarseSide | None = None
    sampling: Mapping[str, Sequence[Scalar]] = field(default_factory=dict)
    content: str = ""
    repeated: int = 0


@dataclass(frozen=True, slots=True)
class OfflineGate:
    """What was asked, what was found, and what follows.

    Attributes:
        contract: The contract in force.
        train: The training kernel.
        inference: The inference kernel, whose version asks to leave the stage.
        terms: What the gate asks.
        inputs: The recordings' files.
        judged: What the contract says of each.
        decision: advance, wait or rollback.
        at: Unix time, seconds.
    """

    contract: Contract
    train: Kernel
    inference: Kernel
    terms: GateTerms
    inputs: tuple[GatedRecording, ...]
    judged: tuple[RecordingVerdicts, ...]
    decision: Decision
    at: float

    @property
    def unjudged(self) -> tuple[UnjudgedClause, ...]:
        """Clauses that no recording could be judged by."""
        return not_judged(self.judged)


def read_input(path: str | Path, columns: Mapping[str, str] | None = None) -> tuple[GatedRecording, Recording]:
    """A recording, and what identifies its file.

    Raises:
        RecordingError: If the file cannot be used.
    """
    recording = load_recording(path, columns=columns or None)
    digest, size = digest_of(Path(path))
    identical = bool(np.array_equal(recording.train, recording.inference))
    about = GatedRecording(
        Path(path).as_posix(),
        digest,
        size,
        int(recording.lengths.size),
        int(recording.train.size),
        identical,
        coarse_side(recording.train, recording.inference),
        content=_content(recording),
        repeated=_repeated(recording),
    )
    return about, recording


def _content(recording: Recording) -> str:
    found = hashlib.sha256()
    for numbers in (recording.lengths, recording.train, recording.inference):
        found.update(np.ascontiguousarray(numbers).data)
    return found.hexdigest()


def _repeated(recording: Recording) -> int:
    """Sequences of some tokens that are an earlier one again: two that were sampled differ somewhere by then."""
    long = np.flatnonzero(recording.lengths >= _TELLING)
    ends = np.cumsum(recording.lengths)[long]
    parts = zip((ends - recording.lengths[long]).tolist(), ends.tolist(), strict=True)
    seen = {recording.train[a:b].tobytes() + recording.inference[a:b].tobytes() for a, b in parts}
    return int(long.size) - len(seen)


def digest_of(path: Path) -> tuple[str, int]:
    """SHA-256 of a file's bytes, 64 hex digits, and their number."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest(), file.tell()


def gate_recordings(
    contract: Contract,
    recordings: Sequence[tuple[GatedRecording, Recording]],
    kernels: tuple[Kernel, Kernel],
    terms: GateTerms,
    now: float,
) -> OfflineGate:
    """Judge recordings and decide.

    Args:
        contract: The contract in force.
        recordings: What `read_input` returned for each file.
        kernels: The training and the inference kernel.
        terms: What the gate asks.
        now: Unix time, seconds.

    Raises:
        ValueError: If a recording is given twice, was sampled otherwise than the contract allows or does not say how,
            a clause or slice of the terms is not of the contract, an assumption is missing, or no clause can be judged
            by a recording at all.
    """
    seen: dict[str, str] = {}
    for about, _ in recordings:
        content = about.content or about.sha256
        if content in seen:
            raise ValueError(
                f"{about.name}: has the same content as {seen[content]}; windows that share data count once, so leave "
                f"one of them out"
            )
        seen[content] = about.name
    check_terms(contract, terms)
    allowed = contract.promotion.sampling
    inputs = tuple(replace(about, sampling=in_force(about.name, recording, allowed)) for about, recording in recordings)
    pair = (kernels[0].fingerprint, kernels[1].fingerprint)
    judged = []
    for _, recording in recordings:
        parts = by_contract(recording, contract)
        judged.append(judge(contract, parts, now, pair, anytime=terms.sequential))
    terms = replace(terms, windows=max(terms.windows, len(judged)))
    decision = gate_decision(contract, judged, pair[1], terms, now)
    return OfflineGate(contract, *kernels, terms, inputs, tuple(judged), decision, now)


def check_terms(contract: Contract, terms: GateTerms) -> None:
    """Refuse terms that name what a contract does not have.

    Raises:
        ValueError: If a clause or slice of the terms is not of the contract.
    """
    clauses, slices = [clause.id for clause in contract.clauses], SliceTable.of(contract).names
    for option, what, given, known in (
        ("--require", "clause", terms.require, clauses),
        ("--slice", "slice", terms.slices, slices),
    ):
        for name in given:
            if name not in known:
                raise ValueError(f"{option}: the contract has no {what} {name!r}; there are {', '.join(known)}")


def gate_decision(
    contract: Contract, judged: Sequence[RecordingVerdicts], version: str, terms: GateTerms, now: float
) -> Decision:
    """What follows from the verdicts, with `stages.decide`.

    Args:
        contract: The contract in force.
        judged: What it says of each recording.
        version: Short fingerprint of the inference kernel.
        terms: What the gate asks.
        now: Unix time, seconds.

    Raises:
        ValueError: If no clause can be judged by these recordings.
    """
    verdicts = [verdict for one in judged for verdict in one.verdicts]
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
        windows=terms.windows,
        window=0.0,
        long_window=0.0,
        cells=tuple((clause.id, slice) for clause in clauses for slice in slices),
        needed={clause.id: samples_needed(clause, contract.observability) for clause in clauses},
    )
    holds = [f"logits of {each.unreadable:,} tokens are no numbers" for each in judged if each.unreadable]
    holds += [each.sampled_elsewhere for each in judged if each.sampled_elsewhere]
    if not (terms.require or terms.allow_unjudged):
        holds += [f"{each}; --allow-unjudged leaves it out" for each in not_judged(judged)]
    return decide(gate, version, [Evaluation(now, each.verdicts) for each in judged], holds, now)


def not_judged(judged: Sequence[RecordingVerdicts]) -> tuple[UnjudgedClause, ...]:
    """Clauses that none of the recordings could be judged by."""
    judgeable = {verdict.cell.clause for each in judged for verdict in each.verdicts}
    missing = {one.clause: one for each in judged for one in each.left_out if one.clause not in judgeable}
    return tuple(missing.values())
