"""An offline gate's verdicts as findings: worst first, and in words."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from kc_otel.contract.model import Contract
from kc_otel.contract.registry.clause_metrics import Unit
from kc_otel.contract.slices import ALL
from kc_otel.judge.verdict import Status, Verdict
from kc_otel.offline.gate.recorded_gate import GatedRecording, OfflineGate
from kc_otel.offline.gate.recorded_verdicts import RecordingVerdicts
from kc_otel.recordings.recording import GROUPS

_WORST_FIRST: Final = (Status.FAIL, Status.INCONCLUSIVE, Status.NO_DATA, Status.PASS)


@dataclass(frozen=True, slots=True)
class GateFinding:
    """A verdict on a recording, and whether the gate asks for its PASS."""

    verdict: Verdict
    input: GatedRecording
    required: bool


def findings(gate: OfflineGate) -> tuple[GateFinding, ...]:
    """Every verdict: failures by excess, then undecided ones, then passes with the smallest margin first."""
    terms = gate.terms
    found = [
        GateFinding(
            verdict,
            about,
            (not terms.require or verdict.cell.clause in terms.require)
            and (not terms.slices or verdict.cell.slice in terms.slices),
        )
        for about, judged in zip(gate.inputs, gate.judged, strict=True)
        for verdict in judged.verdicts
    ]
    return tuple(sorted(found, key=_badness))


def how_far(verdict: Verdict) -> str:
    """Say by what factor a limit is exceeded or kept, from the bound that decided."""
    if verdict.status is Status.NO_DATA:
        return ""
    if verdict.status is Status.FAIL:
        if verdict.limit > 0:
            return f"at least {_times(verdict.lower / verdict.limit)} the limit"
        return f"at least {verdict.lower - verdict.limit:.3g} above the limit"
    if not math.isfinite(verdict.upper):
        return "no upper bound"
    if verdict.limit > 0:
        return f"at most {_times(max(verdict.upper, 0.0) / verdict.limit)} the limit"
    return f"at most {verdict.upper - verdict.limit:.3g} above the limit"


def missing(gate: OfflineGate) -> tuple[str, ...]:
    """Return what the gate waits for. Whether a single window has passed, its verdicts say."""
    return tuple(
        reason for reason in gate.decision.missing if gate.terms.windows > 1 or "windows have passed" not in reason
    )


def for_whom(slice: str) -> str:
    """A slice in words."""
    return "all traffic" if slice == ALL else f"slice {slice}"


def notes(gate: OfflineGate) -> tuple[str, ...]:
    """Return notes for the reader besides the verdicts."""
    said = [
        f"{rec.name}: {note}"
        for rec, judged in zip(gate.inputs, gate.judged, strict=True)
        for note in _notes_on(gate.contract, rec, judged)
    ]
    if gate.terms.sequential:
        said.append("bounds hold at every number of sequences at once: the gate may stop as soon as it is decided")
    for names, other in ((gate.terms.require, "of any other clause"), (gate.terms.slices, "on any other slice")):
        if names:
            said.append(f"only {', '.join(names)} had to pass; a failure {other} still rejects the kernel")
    return tuple(said)


def _notes_on(contract: Contract, rec: GatedRecording, judged: RecordingVerdicts) -> Iterator[str]:
    if rec.identical:
        yield (
            "both sides have the same number at every token; unless the kernels agree bit for bit, one side is a copy "
            "of the other"
        )
    if rec.coarse:
        yield str(rec.coarse)
    if rec.unchecked:
        yield rec.unchecked
    if rec.repeated:
        yield (
            f"{rec.repeated:,} of {rec.repeated + rec.sequences:,} sequences repeat others, in whole or in part: the "
            f"same tokens or nearly the same log-probabilities; each counts once, so the gate decides on "
            f"{rec.sequences:,}"
        )
    span = contract.assumptions.reward_range
    if judged.unknown_rewards and span is not None:
        yield (
            f"{judged.unknown_rewards:,} of {rec.sequences:,} rewards are missing or outside of "
            f"assumptions.reward_range [{span[0]:g}, {span[1]:g}] and count as the worst possible value; record all "
            f"rewards, and correct the range"
        )
    if rec.sampling:
        yield "sampled with " + ", ".join(f"{name} {'/'.join(map(str, of))}" for name, of in rec.sampling.items())
    for of in judged.causes:
        share = f"{100 * of.share:.3g} %"
        yield f"{of.clause}: {share} was sampled by older weights and is not held against the kernels; {of.text}"
    if judged.age_note:
        yield judged.age_note
    if judged.prompts is None and any(clause.averaged in {Unit.PROMPT, Unit.STEP} for clause in contract.clauses):
        yield (
            "assumes that sequences are independent, because it names no prompts; if some share one, name it in a "
            f"column {', '.join(GROUPS[:-1])} or {GROUPS[-1]}"
        )


def _badness(finding: GateFinding) -> tuple[int, bool, float, str, str, str]:
    verdict = finding.verdict
    bound = verdict.lower if verdict.status is Status.FAIL else verdict.upper
    over = bound / verdict.limit if verdict.limit > 0 else bound - verdict.limit
    cell = verdict.cell
    rank = _WORST_FIRST.index(verdict.status)
    return rank, not finding.required, 0.0 if math.isnan(over) else -over, cell.clause, cell.slice, finding.input.name


def _times(factor: float) -> str:
    return f"{factor:.3g} times" if factor >= 0.01 or factor == 0 else f"{factor:.1g} times"
