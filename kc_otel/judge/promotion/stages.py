"""The four stages of a kernel version, the gate between two of them, and what is remembered of a version on its way.

    offline CI  ->  shadow  ->  canary  ->  full

A gate opens when every cell it asks for has been PASS over a number of consecutive windows. A verdict rests on a window
of data, and evaluations come every second: two of them count as two windows only where they share no data. A FAIL rolls
back to the start. INCONCLUSIVE, NO_DATA and INVALID_INPUT wait, and the decision says what is missing.
Source: Xu and Wu 2026, arXiv:2606.07581, four promotion stages.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from kc_otel.contract.model import Contract
from kc_otel.contract.policy import PromotionTerms, shown_share
from kc_otel.contract.units import format_duration
from kc_otel.judge.statistics import samples_needed
from kc_otel.judge.verdict import Evaluation, Status, Verdict


class Stage(StrEnum):
    """Degree of trust in a kernel version."""

    OFFLINE_CI = "offline-ci"
    SHADOW = "shadow"
    CANARY = "canary"
    FULL = "full"

    @property
    def next(self) -> Stage | None:
        """The stage behind the gate; None after the last."""
        return next(iter(list(Stage)[list(Stage).index(self) + 1 :]), None)


class GateOutcome(StrEnum):
    """Outcome of a gate."""

    ADVANCE = "advance"
    WAIT = "wait"
    ROLLBACK = "rollback"


@dataclass(frozen=True, slots=True)
class GateSpec:
    """Requirements for a kernel version to leave a stage."""

    stage: Stage
    windows: int
    """Consecutive ones without shared data in which every cell is PASS."""
    cells: tuple[tuple[str, str], ...]
    """(clause, slice) pairs that have to be PASS; others are looked at only for FAIL."""
    window: float = 0.0
    """Length of the short window, seconds; 0 for the offline stage, where each evaluation is a window."""
    long_window: float = 0.0
    failure_limit: int = 1
    """Windows without shared data in which something FAILs, until the version is rolled back."""
    needed: Mapping[str, int] = field(default_factory=dict)
    """Observations below which a clause cannot pass, by its id, for the explanation of what is missing."""

    @classmethod
    def of(cls, contract: Contract, stage: Stage, unjudged: Collection[str] = ()) -> GateSpec:
        """The gate that asks for every clause of a contract that is not `unjudged`, on all traffic and every slice."""
        watched, terms = contract.observability, contract.promotion
        judged = (clause for clause in contract.clauses if clause.id not in unjudged)
        return cls(
            stage=stage,
            windows=terms.windows,
            cells=tuple((clause.id, slice) for clause in judged for slice in contract.slices_for(clause)),
            window=watched.window,
            long_window=watched.long_window,
            failure_limit=terms.failure_limit,
            needed={clause.id: samples_needed(clause, watched) for clause in contract.clauses},
        )


def of_no_version(contract: Contract, evaluation: Evaluation) -> tuple[str, ...]:
    """Return the ids of clauses by which no version can be judged, beside others: `gen_ai.*` metrics of no version."""
    unnamed = [clause.id for clause in contract.clauses if clause.metric.startswith("gen_ai.")]
    if not unnamed or len(unnamed) == len(contract.clauses):
        return ()
    named = {verdict.cell.clause for verdict in evaluation.verdicts if verdict.cell.kernel_inference}
    return tuple(clause for clause in unnamed if clause not in named)


@dataclass(frozen=True, slots=True)
class Decision:
    """Outcome of a gate, with its reasons."""

    outcome: GateOutcome
    stage: Stage
    windows: int
    """Those that have passed so far, at most as many as are needed."""
    missing: tuple[str, ...] = ()
    """For wait, the open requirements; for rollback, the failures; one sentence each."""


def decide(
    gate: GateSpec, version: str, tally: Tally, evaluations: Iterable[Evaluation], holds: Iterable[str]
) -> tuple[Tally, Decision]:
    """Return the tally after further evaluations, oldest first, and the decision if a kernel version leaves its stage.

    Rollback once the version had a FAIL in as many windows of the stage as the gate bears, held or not, unless the
    training kernel is to blame. Else wait while anything is missing. Else advance; a version in the last stage stays
    there, and lacks nothing.
    """
    failed, own = dict[tuple[str, str, str], str](), Evaluation(0.0)
    for evaluation in evaluations:
        own = evaluation.of_kernel(version)
        tally = _counted(gate, tally, own)
        failed |= {
            (verdict.cell.clause, verdict.cell.slice, verdict.cell.kernel_train): _said(verdict)
            for verdict in own.verdicts
            if verdict.status is Status.FAIL and verdict.cell.kernel_train not in tally.spared
        }
    if tally.failed >= gate.failure_limit:
        reasons = tuple(said for _, said in sorted(failed.items()))
        return tally, Decision(GateOutcome.ROLLBACK, Stage.OFFLINE_CI, 0, reasons)
    windows, following = min(tally.passed, gate.windows), gate.stage.next
    if following is None:
        return tally, Decision(GateOutcome.WAIT, gate.stage, windows)
    missing = [*(f"held: {reason}" for reason in holds), *_missing(gate, own)]
    if windows < gate.windows:
        slow = [of.cell for of in own.verdicts if gate.window and of.window == "long"][:1]
        why = [f", each {format_duration(gate.long_window)} long because of {of.clause} on {of.slice}" for of in slow]
        missing.append(f"{windows} of {gate.windows} consecutive windows have passed{''.join(why)}")
    if missing:
        return tally, Decision(GateOutcome.WAIT, gate.stage, windows, tuple(missing))
    return tally, Decision(GateOutcome.ADVANCE, following, windows)


def _counted(gate: GateSpec, tally: Tally, own: Evaluation) -> Tally:
    """The tally after one more evaluation."""

    def span(verdicts: Iterable[Verdict]) -> float:
        return max(gate.long_window if verdict.window == "long" else gate.window for verdict in verdicts)

    failing = [verdict for verdict in own.verdicts if verdict.status is Status.FAIL]
    doubted = {verdict.cell.kernel_train for verdict in own.verdicts if verdict.status is not Status.PASS}
    said = {verdict.cell: own.passes_against.get(verdict.cell) for verdict in failing}
    new = {cell.kernel_train for cell in said} - {cell.kernel_train for cell, against in said.items() if not against}
    sound = {cell.kernel_train for cell, against in said.items() if against == ""}
    tally = replace(tally, spared=tuple(sorted(doubted & {*tally.spared, *new} - sound)))
    if failing := [verdict for verdict in failing if verdict.cell.kernel_train not in tally.spared]:
        return tally.after_fail(own.at, span(failing))
    if _missing(gate, own):
        return tally.after_doubt(own.at)
    asked = [verdict for verdict in own.verdicts if (verdict.cell.clause, verdict.cell.slice) in gate.cells]
    return tally.after_pass(own.at, span(asked), gate.window)


def _missing(gate: GateSpec, evaluation: Evaluation) -> list[str]:
    found: dict[tuple[str, str], list[Verdict]] = {}
    for verdict in evaluation.verdicts:
        found.setdefault((verdict.cell.clause, verdict.cell.slice), []).append(verdict)
    missing = []
    for clause, slice in gate.cells:
        verdicts = found.get((clause, slice))
        if not verdicts:
            missing.append(f"{clause} on {slice}: no verdict")
            continue
        needed, where = gate.needed.get(clause, 1), ""
        if gate.window:
            where = f" in one window of {format_duration(gate.long_window)}"
        missing += [_said(verdict, needed, where) for verdict in verdicts if verdict.status is not Status.PASS]
    return missing


def _said(verdict: Verdict, needed: int = 0, where: str = "") -> str:
    cell = verdict.cell
    said = f"{cell.clause} on {cell.slice}: {verdict.status}"
    if verdict.status is Status.NO_DATA:
        return f"{said}, no samples arrive"
    if verdict.status is Status.INVALID_INPUT:
        return f"{cell.clause} on {cell.slice}: {verdict.reason}"
    if verdict.status is Status.FAIL and not verdict.lower > verdict.limit:  # not by its interval
        return f"{said}, {verdict.reason}"
    said += f", between {verdict.lower:.4g} and {verdict.upper:.4g} against a limit of {verdict.limit:.4g}"
    if verdict.samples < needed:
        return f"{said}, {needed - verdict.samples:,} more samples are needed{where} before it can pass"
    return f"{said}, from {verdict.samples:,} samples"


@dataclass(frozen=True, slots=True)
class Tally:
    """Windows counted so far, and from when on data count."""

    passed: int = 0
    failed: int = 0
    pass_from: float | None = None
    """Unix time; only windows of later data count towards `passed`. None for any data."""
    fail_from: float | None = None
    """The same for `failed`."""
    seen: float | None = None
    spared: tuple[str, ...] = ()
    """Training kernels that a FAIL is due to: while the version failed against them, it passed against another. They
    are so until any version passes against them."""

    def after_pass(self, at: float, span: float, most_silence: float) -> Tally:
        """An evaluation in which everything that is asked for was PASS, on a window of `span` seconds.

        More than `most_silence` seconds in which nobody looked end a streak; 0 for any time.
        """
        before = self._restarted(at, most_silence)
        if before.pass_from is not None and at - span < before.pass_from:
            return replace(before, seen=at)
        return replace(before, passed=before.passed + 1, pass_from=at, seen=at)

    def after_doubt(self, at: float) -> Tally:
        """An evaluation in which something that is asked for was not PASS."""
        return replace(self, passed=0, seen=at)

    def after_fail(self, at: float, span: float) -> Tally:
        """An evaluation with a FAIL on a window of `span` seconds."""
        after = replace(self, passed=0, seen=at)
        shared = self.fail_from is not None and at - span < self.fail_from
        return after if shared else replace(after, failed=self.failed + 1, fail_from=at)

    def _restarted(self, at: float, most_silence: float) -> Tally:
        """Return the tally; silence, or a clock that was set back, ends its streak."""
        if self.seen is None:
            return self
        if at < self.seen:
            return replace(self, passed=0, pass_from=at)
        return replace(self, passed=0) if 0 < most_silence < at - self.seen else self


class OrderError(ValueError):
    """An order that cannot be carried out; the message says why, and what is possible."""


class PromotionStatus(StrEnum):
    """Status of a version's promotion."""

    RUNNING = "running"
    ROLLED_BACK = "rolled-back"
    REPLACED = "replaced"


class MoveKind(StrEnum):
    """Event in a promotion: the version moves, an order changes something else of it, or something is noticed."""

    START = "start"
    ADVANCE = "advance"
    FORCE = "force"
    ROLLBACK = "rollback"
    REPLACE = "replace"
    RESTORE = "restore"
    EVIDENCE = "evidence"
    APPROVE = "approve"
    HOLD = "hold"
    RESUME = "resume"
    LAPSED = "lapsed"
    """Its approvals ended with the contract that they were given under."""
    SERVES = "serves"
    """It was measured after its roll-back."""


@dataclass(frozen=True, slots=True)
class Position:
    """A stage, and in the canary the share of the requests.

    >>> str(Position(Stage.CANARY, 0.05)), str(Position(Stage.SHADOW))
    ('canary at 5%', 'shadow')
    """

    stage: Stage
    share: float = 0.0

    @property
    def rank(self) -> tuple[int, float]:
        """Places in the order in which a version passes them."""
        return list(Stage).index(self.stage), self.share

    def __str__(self) -> str:
        return f"{self.stage} at {shown_share(self.share)}" if self.stage is Stage.CANARY else self.stage.value


def path_of(terms: PromotionTerms) -> tuple[Position, ...]:
    """Every position that a version passes under a contract's terms, in order."""
    before = [Position(stage) for stage in (Stage.OFFLINE_CI, Stage.SHADOW) if stage.value not in terms.skip]
    return (*before, *(Position(Stage.CANARY, share) for share in terms.steps), Position(Stage.FULL, 1.0))


@dataclass(frozen=True, slots=True)
class Hold:
    """Decision of a person: author, reason, and time (unix time, seconds)."""

    by: str
    why: str
    at: float


@dataclass(frozen=True, slots=True)
class Promotion:
    """Everything that is remembered of one kernel version under one contract; times are Unix seconds."""

    contract: str
    contract_hash: str
    version: str
    position: Position
    entered: float
    started: float
    tally: Tally
    status: PromotionStatus = PromotionStatus.RUNNING
    attempt: int = 1
    """Counts up whenever a person starts it again."""
    offline: str = ""
    approved: tuple[str, ...] = ()
    hold: Hold | None = None
    missing: tuple[str, ...] = ()
    reason: str = ""
    seen_serving: float | None = None
    """When drift of it was first measured later than its roll-back explains; it may serve."""
    proof_from: float = 0.0
    """When its last attempt was rolled back: evidence from before proves nothing."""
    elsewhere: str = ""
    """Sentence that says which of its evidence was made under another contract; empty for none."""
    short: str = ""
    """The same, where that evidence does not show that the limits in force hold: it goes no further."""

    @property
    def full(self) -> bool:
        """True if the version has passed every stage and serves everything."""
        return self.status is PromotionStatus.RUNNING and self.position.stage is Stage.FULL

    @property
    def replaced(self) -> bool:
        """True if another version has become the one that serves everything."""
        return self.status is PromotionStatus.REPLACED


@dataclass(frozen=True, slots=True)
class PromotionMove:
    """Change of a version, from one position to another or to the same, which traffic, evidence and events follow."""

    kind: MoveKind
    before: Position
    after: Position
    at: float
    decision: Decision
    by: str = ""
    """The person who decided; empty where the gate did."""
    why: str = ""
    failed: int = 0
    message: str = ""
