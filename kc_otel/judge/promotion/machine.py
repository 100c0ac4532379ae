"""The way of a kernel version through its stages, as pure functions of verdicts, of what people decide, and of a clock.

    offline-ci -> shadow -> canary at 1% -> canary at 5% -> canary at 25% -> full
                     '--------- FAIL: rolled back, serves nothing ----------'

Each returns the promotion afterwards and the moves it made, at most one. How much a version serves follows from where
it is, so that nothing has to be undone after a crash: `share_of`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from kc_otel.contract.model import Contract
from kc_otel.contract.promotion import PromotionTerms
from kc_otel.judge.promotion.promotion_state import (
    MoveKind,
    OrderError,
    Position,
    Promotion,
    PromotionMove,
    PromotionStatus,
    path_of,
)
from kc_otel.judge.promotion.stages import Decision, GateOutcome, GateSpec, Stage, Tally, counted, decided
from kc_otel.judge.verdict import Evaluation

Moved = tuple[Promotion, tuple[PromotionMove, ...]]

_RESET_TO: Final = Position(Stage.OFFLINE_CI)


def begin(
    contract: Contract, version: str, by: str, now: float, *, previous: Promotion | None = None, failing: bool = False
) -> Moved:
    """A version starts on its way, for the first time or again.

    Args:
        contract: The contract in force.
        version: Short fingerprint of the inference kernel version.
        by: Person who starts it.
        now: Unix time, seconds.
        previous: Outcome of the version's last attempt.
        failing: Whether it FAILs at the moment: data from before do not count against a new attempt, which a person
            wants although they know it.

    Raises:
        OrderError: If it is on its way already.
    """
    if previous is not None and previous.status is PromotionStatus.RUNNING:
        raise OrderError(f"{version} is already in promotion, in {previous.position}")
    attempt = 1 if previous is None else previous.attempt + 1
    first = path_of(contract.promotion)[0]
    again = previous is not None and failing
    message = f"{by} starts the promotion of {version} in {first}" + f", attempt {attempt}" * (attempt > 1)
    promotion = Promotion(
        contract.name, contract.hash, version, first, now, now, Tally(pass_from=now, fail_from=now if again else None),
        attempt=attempt, reason=message, proof_from=_rolled_back_at(previous),
    )  # fmt: skip
    nothing = Decision(GateOutcome.WAIT, first.stage, 0)
    return promotion, (PromotionMove(MoveKind.START, _RESET_TO, first, now, nothing, by, message=message),)


def advance(promotion: Promotion, contract: Contract, evaluation: Evaluation, holds: Iterable[str]) -> Moved:
    """The promotion after an evaluation.

    Args:
        promotion: State of the promotion.
        contract: The contract in force.
        evaluation: The contract's verdicts, of any kernel versions.
        holds: Reasons to wait whatever the verdicts say, such as hold-promotion directives.

    Returns:
        One step on, when its gate is open, nobody holds it, and whoever has to be asked has agreed. Rolled back, on as
        many failing windows as the contract bears, held or not. Else the same place, with what is missing.
    """
    if promotion.status is not PromotionStatus.RUNNING:
        return promotion, ()
    now = evaluation.at
    if promotion.contract_hash != contract.hash:
        # Results under other limits prove nothing under these.
        promotion = replace(promotion, contract_hash=contract.hash, offline="", tally=Tally(pass_from=now))
    by_person = f"by {promotion.hold.by}: {promotion.hold.why}" if promotion.hold else ""
    asked = [*holds, *filter(None, (promotion.short, by_person))]
    if promotion.position.stage is Stage.OFFLINE_CI:
        tally, decision = promotion.tally, _offline(promotion, asked)
    else:
        terms = contract.promotion
        gate = GateSpec.of(contract, promotion.position.stage, terms.windows, terms.failure_limit)
        tally = counted(gate, promotion.version, promotion.tally, evaluation)
        decision = decided(gate, promotion.version, tally, evaluation, None, asked, now)
    promotion = replace(promotion, tally=tally)
    if decision.outcome is GateOutcome.ROLLBACK:
        return rolled_back(promotion, decision, now)
    following = next(
        (position for position in path_of(contract.promotion) if position.rank > promotion.position.rank), None
    )
    if decision.outcome is GateOutcome.WAIT or following is None:
        return replace(promotion, missing=decision.missing, awaiting=""), ()
    needed, awaiting = _agreement(promotion, following, contract.promotion)
    if needed:
        return replace(promotion, missing=(needed,), awaiting=awaiting), ()
    decision = replace(decision, stage=following.stage)
    shown = f"{decision.windows} consecutive windows have passed" if decision.windows > 1 else "a window has passed"
    shown = "the offline gate is open" if promotion.position.stage is Stage.OFFLINE_CI else shown
    return stepped(promotion, following, MoveKind.ADVANCE, decision, now, said=shown)


def stepped(
    promotion: Promotion,
    to: Position,
    kind: MoveKind,
    decision: Decision,
    now: float,
    *,
    by: str = "",
    why: str = "",
    said: str = "",
    failing: bool = False,
) -> Moved:
    """The promotion in its next position, and the move.

    Args:
        promotion: State of the promotion.
        to: Where it goes.
        kind: advance or force.
        decision: Decision of the position's gate.
        now: Unix time, seconds.
        by: The person who decided; empty where the gate did.
        why: Their reason.
        said: Finding of the gate, in words.
        failing: Whether it FAILs at the moment and a person forces it on: data from before do not count then.
    """
    before, verb = promotion.position, f"{by} forces" if by else "goes"
    subject = f"{verb} {promotion.version} on" if by else f"{promotion.version} {verb} on"
    message = f"{subject} from {before} to {to}: {why or said}" + f"; {promotion.elsewhere}" * bool(promotion.elsewhere)
    after = replace(
        promotion,
        position=to, entered=now, status=PromotionStatus.RUNNING,
        tally=Tally(pass_from=now, fail_from=now if failing else None),
        confirmed="", awaiting="", missing=(), reason=message,
    )  # fmt: skip
    return after, (PromotionMove(kind, before, to, now, decision, by, why, promotion.tally.failed, message),)


def rolled_back(promotion: Promotion, decision: Decision, now: float, *, by: str = "", why: str = "") -> Moved:
    """The version serves nothing any more, because it failed or because a person says so."""
    position = promotion.position
    if by:
        again = promotion.status is PromotionStatus.ROLLED_BACK
        where = " again" if again else f" from {position}" if promotion.started < now else ""
        message = f"{by} rolls {promotion.version} back{where}: {why}"
    else:
        message = f"{promotion.version} is rolled back from {position}: {'; '.join(decision.missing)}"
    after = replace(
        promotion,
        position=_RESET_TO, entered=now, status=PromotionStatus.ROLLED_BACK, tally=Tally(), offline="", approved=(),
        hold=None, confirmed="", awaiting="", missing=(), reason=message, seen_serving=None,
        elsewhere="", short="",
    )  # fmt: skip
    return after, (
        PromotionMove(MoveKind.ROLLBACK, position, _RESET_TO, now, decision, by, why, promotion.tally.failed, message),
    )


def overheard(promotion: Promotion, newest: float, contract: Contract, now: float) -> Promotion:
    """The promotion of a version that was rolled back, with since when it is known to serve.

    Silence afterwards does not show that it serves nobody: this lasts until a person rolls it back again or starts it.

    Args:
        promotion: State of the promotion.
        newest: Unix time of the newest observation of the version, seconds; -inf for none.
        contract: The contract in force. Within its heartbeat what was under way at the roll-back is measured.
        now: Unix time, seconds.
    """
    serves = newest > promotion.entered + contract.observability.heartbeat
    return replace(promotion, seen_serving=now) if serves and promotion.seen_serving is None else promotion


def replaced(promotion: Promotion, version: str, now: float) -> Moved:
    """Another version has become the one that serves everything."""
    message = f"{promotion.version} is replaced by {version}"
    after = replace(promotion, status=PromotionStatus.REPLACED, entered=now, missing=(), awaiting="", reason=message)
    decision = Decision(GateOutcome.WAIT, promotion.position.stage, 0)
    return after, (
        PromotionMove(MoveKind.REPLACE, promotion.position, promotion.position, now, decision, message=message),
    )


def _rolled_back_at(previous: Promotion | None) -> float:
    """Return when a version was rolled back last, Unix seconds; 0 for never."""
    if previous is None:
        return 0.0
    return previous.entered if previous.status is PromotionStatus.ROLLED_BACK else previous.proof_from


def share_of(promotion: Promotion) -> float | None:
    """Share of the requests that the version may serve, 0 to 1; None where nothing limits it any more."""
    if promotion.status is PromotionStatus.ROLLED_BACK:
        return 0.0
    if promotion.status is PromotionStatus.REPLACED or promotion.position.stage is Stage.FULL:
        return None
    return promotion.position.share


def _offline(promotion: Promotion, holds: Sequence[str]) -> Decision:
    missing = [f"held: {reason}" for reason in holds]
    if not promotion.offline:
        missing.insert(
            0, f"no evidence of the offline stage; `kc-otel gate run ... --evidence FILE` writes it, "
            f"`kc-otel promote {promotion.contract} {promotion.version} --evidence FILE` hands it over"
        )  # fmt: skip
    if missing:
        return Decision(GateOutcome.WAIT, Stage.OFFLINE_CI, 0, tuple(missing))
    return Decision(GateOutcome.ADVANCE, Stage.SHADOW, 1)


def _agreement(promotion: Promotion, to: Position, terms: PromotionTerms) -> tuple[str, str]:
    """Return the missing consent to a step that the gate allows, and the position if a process has to agree."""
    entering = to.stage is not promotion.position.stage
    if entering and to.stage.value in terms.approve and to.stage.value not in promotion.approved:
        name = f"kc-otel promote {promotion.contract} {promotion.version}"
        return f"the gate is open; a person has to let it into {to.stage}: `{name} --approve {to.stage}`", ""
    if promotion.hooked and promotion.confirmed != str(to):
        return f"the gate is open; the hook before {to} has not ended yet: `kc-otel promote --watch` runs it", str(to)
    return "", ""
