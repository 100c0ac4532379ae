"""An offline gate's verdicts as findings: worst first, and in words."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from kc_otel.contract.slices import ALL
from kc_otel.judge.promotion.stages import GateOutcome
from kc_otel.judge.verdict import Status, Verdict
from kc_otel.offline.gate.recorded_gate import GatedRecording, OfflineGate

__all__ = ["GateFinding", "findings", "for_whom", "how_far", "notes"]

_REPEATED: Final = 0.1
"""Share of sequences that occur again from which on it is said: some do where few completions are likely."""
_ORDER: Final = (Status.FAIL, Status.INCONCLUSIVE, Status.NO_DATA, Status.PASS)


@dataclass(frozen=True, slots=True)
class GateFinding:
    """A verdict on a recording.

    Attributes:
        verdict: The verdict.
        input: The recording's file.
        required: Whether the gate asks for its PASS.
    """

    verdict: Verdict
    input: GatedRecording
    required: bool


def findings(gate: OfflineGate) -> tuple[GateFinding, ...]:
    """Every verdict: what failed by most first, then what is open, then what passed with least room."""
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
    """By how much a limit is broken or kept, as the bound that decided says."""
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


def for_whom(slice: str) -> str:
    """A slice in words."""
    return "all traffic" if slice == ALL else f"slice {slice}"


def notes(gate: OfflineGate) -> tuple[str, ...]:
    """What a reader has to know besides the verdicts."""
    said = [
        f"{one.name}: both sides are the same number in every token; unless the kernels are bit by bit equal, one side "
        f"is a copy of the other"
        for one in gate.inputs
        if one.identical
    ]
    said += [f"{one.name}: {one.coarse}" for one in gate.inputs if one.coarse]
    said += [
        f"{one.name}: {one.repeated:,} of {one.sequences:,} sequences are others of it again, number for number; "
        f"bounds take each for one that was sampled by itself, and are too narrow"
        for one in gate.inputs
        if one.repeated > _REPEATED * one.sequences
    ]
    said += [
        f"{one.name}: {judged.sampled_elsewhere}"
        for one, judged in zip(gate.inputs, gate.judged, strict=True)
        if judged.sampled_elsewhere and gate.decision.outcome is not GateOutcome.WAIT
    ]
    span = gate.contract.assumptions.reward_range
    said += [
        f"{one.name}: {judged.unknown_rewards:,} of {one.sequences:,} rewards are missing or outside of "
        f"assumptions.reward_range [{span[0]:g}, {span[1]:g}] and count as the worst that they could be; record them "
        f"all, and write the range that they have"
        for one, judged in zip(gate.inputs, gate.judged, strict=True)
        if judged.unknown_rewards and span is not None
    ]
    said += [
        f"{one.name}: sampled with "
        + ", ".join(f"{name} {'/'.join(map(str, of))}" for name, of in one.sampling.items())
        for one in gate.inputs
        if one.sampling
    ]
    if gate.terms.sequential:
        said.append("bounds hold at every number of sequences at once: the gate may stop as soon as it is decided")
    if gate.terms.require:
        said.append(f"only {', '.join(gate.terms.require)} had to pass; a failure of any other clause still refuses")
    if gate.terms.slices:
        said.append(f"only {', '.join(gate.terms.slices)} had to pass; a failure on any other slice still refuses")
    return tuple(said)


def _badness(finding: GateFinding) -> tuple[int, bool, float, str, str, str]:
    verdict = finding.verdict
    bound = verdict.lower if verdict.status is Status.FAIL else verdict.upper
    over = bound / verdict.limit if verdict.limit > 0 else bound - verdict.limit
    cell = verdict.cell
    rank = _ORDER.index(verdict.status)
    return rank, not finding.required, 0.0 if math.isnan(over) else -over, cell.clause, cell.slice, finding.input.name


def _times(factor: float) -> str:
    return f"{factor:.3g} times" if factor >= 0.01 or factor == 0 else f"{factor:.1g} times"
