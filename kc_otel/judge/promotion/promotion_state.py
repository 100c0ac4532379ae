"""State of a kernel version's promotion, and its steps."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kc_otel.contract.promotion import PromotionTerms, shown_share
from kc_otel.judge.promotion.stages import Decision, Stage, Tally


class OrderError(ValueError):
    """An order that cannot be carried out; the message says why, and what is possible."""


class PromotionStatus(StrEnum):
    """Status of a version's promotion."""

    RUNNING = "running"
    ROLLED_BACK = "rolled-back"
    REPLACED = "replaced"


class MoveKind(StrEnum):
    """Reason for a move."""

    START = "start"
    ADVANCE = "advance"
    FORCE = "force"
    ROLLBACK = "rollback"
    REPLACE = "replace"


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
    """Everything that is remembered of one kernel version under one contract.

    Attributes:
        contract: metadata.name.
        contract_hash: Content hash of the contract that the tally was made under.
        version: Short fingerprint of the inference kernel version.
        position: Where it is.
        entered: Unix time since when it is there, seconds.
        started: Unix time of the attempt's start, seconds.
        tally: Windows counted there.
        status: running, rolled-back or replaced.
        attempt: Counts up whenever a person starts again.
        offline: Checksum of the offline stage's evidence; empty without.
        approved: Stages that a person has let it into.
        hold: A person's hold.
        hooked: Whether a process (`kc-otel promote --watch --hook-before`) has to confirm every step.
        confirmed: Position whose step that process has confirmed.
        awaiting: Position whose step waits for that process; empty while other things are missing.
        missing: Open requirements of the next step, one sentence each.
        reason: Why it is where it is, in a sentence.
        seen_serving: Unix time at which drift of it was first measured after it was rolled back, seconds; else None.
        elsewhere: Sentence that says which of its evidence was made under another contract; empty for none.
        short: The same, where that evidence does not show that the limits in force hold: it goes no further.
        proof_from: Unix time at which its last attempt was rolled back, seconds: evidence from before proves nothing.
    """

    contract: str
    contract_hash: str
    version: str
    position: Position
    entered: float
    started: float
    tally: Tally
    status: PromotionStatus = PromotionStatus.RUNNING
    attempt: int = 1
    offline: str = ""
    approved: tuple[str, ...] = ()
    hold: Hold | None = None
    hooked: bool = False
    confirmed: str = ""
    awaiting: str = ""
    missing: tuple[str, ...] = ()
    reason: str = ""
    seen_serving: float | None = None
    proof_from: float = 0.0
    elsewhere: str = ""
    short: str = ""

    @property
    def full(self) -> bool:
        """True if the version has passed every stage and serves everything."""
        return self.status is PromotionStatus.RUNNING and self.position.stage is Stage.FULL


@dataclass(frozen=True, slots=True)
class PromotionMove:
    """Move of a version from one position to another, which traffic, hooks, evidence and events follow.

    Attributes:
        kind: Why.
        before: Where it was.
        after: Where it is now.
        at: Unix time, seconds.
        decision: Decision of the position's gate.
        by: The person who decided; empty where the gate did.
        why: Their reason.
        failed: Windows of the stage with a FAIL.
        message: The whole of it in a sentence.
    """

    kind: MoveKind
    before: Position
    after: Position
    at: float
    decision: Decision
    by: str = ""
    why: str = ""
    failed: int = 0
    message: str = ""
