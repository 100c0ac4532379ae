"""The four stages of a kernel version, and the gate between two of them as a pure function of verdicts.

    offline CI  ->  shadow  ->  canary  ->  full

A gate opens when every cell it asks for has been PASS over a number of consecutive windows that share no data. A FAIL
rolls back to the start. INCONCLUSIVE and NO_DATA wait, and the decision says what is missing.
Source: Xu and Wu 2026, arXiv:2606.07581, four promotion stages.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from kc_otel.contract.model import Contract
from kc_otel.contract.slices import ALL
from kc_otel.contract.units import format_duration
from kc_otel.judge.promotion.tally import Tally
from kc_otel.judge.statistics import samples_needed
from kc_otel.judge.verdict import Evaluation, Status, Verdict

__all__ = ["Decision", "GateOutcome", "GateSpec", "Stage", "counted", "decide", "decided"]


class Stage(StrEnum):
    """How much a kernel version is trusted with."""

    OFFLINE_CI = "offline-ci"
    SHADOW = "shadow"
    CANARY = "canary"
    FULL = "full"

    @property
    def next(self) -> Stage | None:
        """The stage behind the gate; None after the last."""
        stages = list(Stage)
        place = stages.index(self) + 1
        return stages[place] if place < len(stages) else None


class GateOutcome(StrEnum):
    """What a gate says."""

    ADVANCE = "advance"
    WAIT = "wait"
    ROLLBACK = "rollback"


@dataclass(frozen=True, slots=True)
class GateSpec:
    """What a kernel version has to show before it leaves a stage.

    Attributes:
        stage: The stage it is in.
        windows: Consecutive windows without shared data in which every cell is PASS.
        window: Length of the short window, seconds; 0 for offline stages, where each evaluation is a window.
        long_window: Length of the long window, seconds, for evaluations with a verdict that the long window decided.
        cells: (clause, slice) pairs that have to be PASS; others are looked at only for FAIL.
        failure_limit: Windows without shared data in which something FAILs, until the version is rolled back.
        needed: Observations below which a clause cannot pass, by its id, for the explanation of what is missing.
    """

    stage: Stage
    windows: int
    window: float
    long_window: float
    cells: tuple[tuple[str, str], ...]
    failure_limit: int = 1
    needed: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.failure_limit < 1 or self.windows < 1 or not 0 <= self.window <= self.long_window < math.inf:
            raise ValueError("a gate needs at least one window, of zero or more seconds, and no shorter long window")
        if not self.cells:
            raise ValueError("a gate without cells would open for anything; name at least one (clause, slice)")

    @classmethod
    def of(cls, contract: Contract, stage: Stage, windows: int, failure_limit: int = 1) -> GateSpec:
        """The gate that asks for every clause of a contract on all traffic and on every declared slice."""
        slices = (ALL, *contract.slices)
        offline, watched = stage is Stage.OFFLINE_CI, contract.observability
        return cls(
            stage=stage,
            windows=windows,
            window=0.0 if offline else watched.window,
            long_window=0.0 if offline else max(watched.window, watched.long_window),
            cells=tuple((clause.id, slice) for clause in contract.clauses for slice in slices),
            failure_limit=failure_limit,
            needed={clause.id: samples_needed(clause, watched) for clause in contract.clauses},
        )


@dataclass(frozen=True, slots=True)
class Decision:
    """What a gate says, and why.

    Attributes:
        outcome: advance, wait or rollback.
        stage: The stage that the kernel version is in from now on.
        windows: Windows that have passed so far, at most as many as are needed.
        missing: For wait, what has to happen; for rollback, what failed; one sentence each.
    """

    outcome: GateOutcome
    stage: Stage
    windows: int
    missing: tuple[str, ...] = ()


def decide(gate: GateSpec, version: str, history: Sequence[Evaluation], holds: Iterable[str], now: float) -> Decision:
    """Whether a kernel version leaves its stage.

    Args:
        gate: What it has to show.
        version: Short fingerprint of the inference kernel version.
        history: Evaluations of the contract since the version entered the stage, oldest first.
        holds: Reasons to wait whatever the verdicts say, such as hold-promotion directives.
        now: Unix time, seconds.

    Returns:
        Rollback once the version had a FAIL in as many windows of the stage as the gate bears, held or not. Else wait
        while anything is missing. Else advance; a version in the last stage stays there.
    """
    tally, failed = Tally(), dict[tuple[str, str, str], str]()
    for one in history:
        tally = counted(gate, version, tally, one)
        failed |= _failures(version, one)
    return decided(gate, version, tally, history[-1] if history else None, failed, holds, now)


def counted(gate: GateSpec, version: str, tally: Tally, one: Evaluation) -> Tally:
    """The tally after one more evaluation."""
    own = one.of_kernel(version)
    failing = [verdict for verdict in own.verdicts if verdict.status is Status.FAIL]
    if failing:
        return tally.after_fail(own.at, max(_span(gate, verdict) for verdict in failing))
    if _missing(gate, own):
        return tally.after_doubt(own.at)
    asked = [verdict for verdict in own.verdicts if (verdict.cell.clause, verdict.cell.slice) in gate.cells]
    return tally.after_pass(own.at, max(_span(gate, verdict) for verdict in asked), gate.window)


def decided(
    gate: GateSpec,
    version: str,
    tally: Tally,
    latest: Evaluation | None,
    failed: Mapping[tuple[str, str, str], str] | None,
    holds: Iterable[str],
    now: float,
) -> Decision:
    """What follows from a tally that has been kept up with every evaluation; `decide` keeps one and asks this.

    Args:
        gate: What the version has to show.
        version: Short fingerprint of the inference kernel version.
        tally: What it has shown, the latest evaluation included.
        latest: The latest evaluation.
        failed: What failed, as sentences by cell; None for what fails in the latest evaluation.
        holds: Reasons to wait whatever the verdicts say.
        now: Unix time, seconds.
    """
    own = None if latest is None else latest.of_kernel(version)
    if failed is None:
        failed = {} if own is None else _failures(version, own)
    if tally.failed >= gate.failure_limit:
        return Decision(GateOutcome.ROLLBACK, Stage.OFFLINE_CI, 0, tuple(said for _, said in sorted(failed.items())))
    windows = min(tally.passed, gate.windows)
    missing = [f"held: {reason}" for reason in holds]
    if own is None or now - own.at > gate.window > 0:
        within = f" in the last {format_duration(gate.window)}" if gate.window else ""
        missing.append(f"no evaluation of {version}{within}")
    else:
        missing += _missing(gate, own)
    if windows < gate.windows:
        missing.append(f"{windows} of {gate.windows} consecutive windows have passed")
    following = gate.stage.next
    if missing or following is None:
        return Decision(GateOutcome.WAIT, gate.stage, windows, tuple(missing) or (f"{gate.stage} is the last stage",))
    return Decision(GateOutcome.ADVANCE, following, windows)


def _failures(version: str, one: Evaluation) -> dict[tuple[str, str, str], str]:
    return {
        (verdict.cell.clause, verdict.cell.slice, verdict.cell.kernel_train): _said(verdict)
        for verdict in one.verdicts
        if verdict.status is Status.FAIL and verdict.cell.kernel_inference == version
    }


def _span(gate: GateSpec, verdict: Verdict) -> float:
    return gate.long_window if verdict.window == "long" else gate.window


def _missing(gate: GateSpec, one: Evaluation) -> list[str]:
    found: dict[tuple[str, str], list[Verdict]] = {}
    for verdict in one.verdicts:
        found.setdefault((verdict.cell.clause, verdict.cell.slice), []).append(verdict)
    missing = []
    for clause, slice in gate.cells:
        verdicts = found.get((clause, slice))
        if not verdicts:
            missing.append(f"{clause} on {slice}: no verdict yet")
            continue
        needed = gate.needed.get(clause, 1)
        missing += [_said(verdict, needed) for verdict in verdicts if verdict.status is not Status.PASS]
    return missing


def _said(verdict: Verdict, needed: int = 0) -> str:
    cell = verdict.cell
    said = f"{cell.clause} on {cell.slice}: {verdict.status}"
    if verdict.status is Status.NO_DATA:
        return f"{said}, no samples arrive"
    said += f", between {verdict.lower:.4g} and {verdict.upper:.4g} against a limit of {verdict.limit:.4g}"
    if verdict.samples < needed:
        return f"{said}, {needed - verdict.samples:,} more samples are needed before it can pass"
    return f"{said}, from {verdict.samples:,} samples"
