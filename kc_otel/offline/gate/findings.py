"""An offline gate's verdicts as findings: worst first, and in words."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from kc_otel.contract.registry.clause_metrics import Unit
from kc_otel.contract.slices import ALL
from kc_otel.judge.verdict import Status, Verdict
from kc_otel.offline.gate.recorded_gate import GatedRecording, OfflineGate
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
        f"{rec.name}: both sides have the same number at every token; unless the kernels agree bit for bit, one side "
        f"is a copy of the other"
        for rec in gate.inputs
        if rec.identical
    ]
    said += [f"{rec.name}: {rec.coarse}" for rec in gate.inputs if rec.coarse]
    said += [f"{rec.name}: {rec.unchecked}" for rec in gate.inputs if rec.unchecked]
    said += [
        f"{rec.name}: {rec.repeated:,} of {rec.repeated + rec.sequences:,} sequences repeat others, in whole or "
        f"in part: the same tokens or nearly the same log-probabilities; each counts once, so the gate decides on "
        f"{rec.sequences:,}"
        for rec in gate.inputs
        if rec.repeated
    ]
    span = gate.contract.assumptions.reward_range
    said += [
        f"{rec.name}: {judged.unknown_rewards:,} of {rec.sequences:,} rewards are missing or outside of "
        f"assumptions.reward_range [{span[0]:g}, {span[1]:g}] and count as the worst possible value; record all "
        f"rewards, and correct the range"
        for rec, judged in zip(gate.inputs, gate.judged, strict=True)
        if judged.unknown_rewards and span is not None
    ]
    said += [
        f"{rec.name}: sampled with "
        + ", ".join(f"{name} {'/'.join(map(str, of))}" for name, of in rec.sampling.items())
        for rec in gate.inputs
        if rec.sampling
    ]
    said += [
        f"{rec.name}: {judged.reward_estimate}; the verdict rests on bounds without assumptions"
        for rec, judged in zip(gate.inputs, gate.judged, strict=True)
        if judged.reward_estimate
    ]
    said += [
        f"{rec.name}: {of.clause}: {100 * of.share:.3g} % was sampled by older weights and is not held against the "
        f"kernels; {of.text}"
        for rec, judged in zip(gate.inputs, gate.judged, strict=True)
        for of in judged.causes
    ]
    said += [
        f"{rec.name}: {judged.age_note}"
        for rec, judged in zip(gate.inputs, gate.judged, strict=True)
        if judged.age_note
    ]
    if any(clause.averaged in {Unit.PROMPT, Unit.STEP} for clause in gate.contract.clauses):
        said += [
            f"{rec.name}: assumes that sequences are independent, because it names no prompts; if some share one, name "
            f"it in a column {', '.join(GROUPS[:-1])} or {GROUPS[-1]}"
            for rec, judged in zip(gate.inputs, gate.judged, strict=True)
            if judged.prompts is None
        ]
    if gate.terms.sequential:
        said.append("bounds hold at every number of sequences at once: the gate may stop as soon as it is decided")
    if gate.terms.require:
        named = ", ".join(gate.terms.require)
        said.append(f"only {named} had to pass; a failure of any other clause still rejects the kernel")
    if gate.terms.slices:
        named = ", ".join(gate.terms.slices)
        said.append(f"only {named} had to pass; a failure on any other slice still rejects the kernel")
    return tuple(said)


def _badness(finding: GateFinding) -> tuple[int, bool, float, str, str, str]:
    verdict = finding.verdict
    bound = verdict.lower if verdict.status is Status.FAIL else verdict.upper
    over = bound / verdict.limit if verdict.limit > 0 else bound - verdict.limit
    cell = verdict.cell
    rank = _WORST_FIRST.index(verdict.status)
    return rank, not finding.required, 0.0 if math.isnan(over) else -over, cell.clause, cell.slice, finding.input.name


def _times(factor: float) -> str:
    return f"{factor:.3g} times" if factor >= 0.01 or factor == 0 else f"{factor:.1g} times"
