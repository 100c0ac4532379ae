"""What people and their programs may tell a promotion: approve, hold, resume, force, roll back."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from kc_otel.contract.model import Contract
from kc_otel.judge.promotion.machine import Moved, rolled_back, stepped
from kc_otel.judge.promotion.promotion_state import Hold, MoveKind, OrderError, Promotion, PromotionStatus, path_of
from kc_otel.judge.promotion.stages import Decision, GateOutcome, Stage
from kc_otel.judge.verdict import Evaluation

__all__ = ["approve", "confirm", "force", "hold", "hook", "resume", "roll_back", "whereabouts"]

_LEAST: Final = "say who and why; both are kept"


def approve(promotion: Promotion, contract: Contract, stage: Stage, by: str) -> Promotion:
    """Let a version into a stage, as soon as its gate is open.

    Raises:
        OrderError: If the contract asks nobody, or the version is not on its way there.
    """
    _named(by, "-")
    _running(promotion)
    asked = contract.promotion.approve
    if stage.value not in asked:
        who = f"it asks about {', '.join(asked)}" if asked else "it asks about no stage"
        raise OrderError(f"the contract asks nobody about {stage}; {who}")
    if list(Stage).index(stage) <= promotion.position.rank[0]:
        raise OrderError(f"{promotion.version} is in {promotion.position} already")
    return replace(promotion, approved=tuple(sorted({*promotion.approved, stage.value})))


def hold(promotion: Promotion, by: str, why: str, now: float) -> Promotion:
    """Let a version go no further until somebody resumes it; a FAIL rolls it back all the same.

    Raises:
        OrderError: If nobody or no reason is named, or it is not on its way.
    """
    _named(by, why)
    _running(promotion)
    return replace(promotion, hold=Hold(by, why, now), awaiting="")


def resume(promotion: Promotion) -> Promotion:
    """End a hold; where there is none, the wait for a process with hooks that does not come back.

    Raises:
        OrderError: If there is neither.
    """
    if promotion.hold is not None:
        return replace(promotion, hold=None)
    if not promotion.hooked:
        raise OrderError(f"nobody holds {promotion.version}")
    return replace(promotion, hooked=False, awaiting="")


def hook(promotion: Promotion) -> Promotion:
    """From now on a process confirms every step before it is taken.

    Raises:
        OrderError: If the version is not on its way.
    """
    _running(promotion)
    return replace(promotion, hooked=True)


def confirm(promotion: Promotion, position: str) -> Promotion:
    """The hook before a step has ended well.

    Args:
        promotion: What is remembered.
        position: The position that was awaited, as it was named.

    Raises:
        OrderError: If another one is awaited by now, or none.
    """
    if promotion.awaiting != position or not position:
        raise OrderError(f"the step to {position!r} is not awaited; {promotion.awaiting or 'none'} is")
    return replace(promotion, confirmed=position, awaiting="")


def force(
    promotion: Promotion,
    contract: Contract,
    stage: Stage,
    by: str,
    why: str,
    latest: Evaluation,
    now: float,
) -> Moved:
    """Take a version on to a stage although its gate is not open.

    Raises:
        OrderError: If nobody or no reason is named, or the version is there already.
    """
    _named(by, why)
    target = next(
        (one for one in path_of(contract.promotion) if one.stage is stage and one.rank > promotion.position.rank), None
    )
    if target is None or promotion.status is PromotionStatus.REPLACED:
        raise OrderError(f"{promotion.version} cannot be forced into {stage}: it is {whereabouts(promotion)}")
    decision = Decision(GateOutcome.WAIT, promotion.position.stage, promotion.tally.passed, promotion.missing)
    forced = replace(promotion, offline="")
    return stepped(
        forced, target, MoveKind.FORCE, decision, now, by=by, why=why, failing=latest.fails(promotion.version)
    )  # fmt: skip


def roll_back(promotion: Promotion, by: str, why: str, now: float) -> Moved:
    """Take a version out of all traffic.

    Raises:
        OrderError: If nobody or no reason is named, or it is not on its way.
    """
    _named(by, why)
    _running(promotion)
    decision = Decision(GateOutcome.WAIT, promotion.position.stage, promotion.tally.passed, promotion.missing)
    return rolled_back(promotion, decision, now, by=by, why=why)


def _named(by: str, why: str) -> None:
    if not by.strip() or not why.strip():
        raise OrderError(_LEAST)


def _running(promotion: Promotion) -> None:
    if promotion.status is not PromotionStatus.RUNNING:
        raise OrderError(f"{promotion.version} is {whereabouts(promotion)}; start it again first")


def whereabouts(promotion: Promotion) -> str:
    """Where a version is, in words."""
    if promotion.status is PromotionStatus.RUNNING:
        return f"in {promotion.position}"
    return promotion.status.value.replace("-", " ")
