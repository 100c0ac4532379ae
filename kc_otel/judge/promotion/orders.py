"""Orders that people and their programs give a promotion: evidence, approve, hold, resume, force, roll back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any, Final

from kc_otel.contract.model import Contract
from kc_otel.contract.words import listed, moment, place
from kc_otel.judge.promotion.gate_evidence import EvidenceError, SectionProblems, verify_record
from kc_otel.judge.promotion.machine import Moved, rolled_back, stepped
from kc_otel.judge.promotion.promotion_state import Hold, MoveKind, OrderError, Promotion, PromotionStatus, path_of
from kc_otel.judge.promotion.stages import Decision, GateOutcome, Stage
from kc_otel.judge.verdict import Evaluation, Status

_MAX_AHEAD_SECONDS: Final = 300.0
"""By which the clock of the machine that ran the gate may be ahead."""


def approve(promotion: Promotion, contract: Contract, stage: Stage) -> Promotion:
    """Let a version into a stage, as soon as its gate is open.

    Raises:
        OrderError: If the contract asks nobody, or the version is not on its way there.
    """
    _running(promotion)
    asked = contract.promotion.approve
    if stage.value not in asked:
        who = f"it requires approval for {', '.join(asked)}" if asked else "it requires approval for no stage"
        raise OrderError(f"the contract requires no approval for {stage}; {who}")
    if list(Stage).index(stage) <= promotion.position.rank[0]:
        raise OrderError(f"{promotion.version} is in {promotion.position} already")
    return replace(promotion, approved=tuple(sorted({*promotion.approved, stage.value})))


def hold(promotion: Promotion, by: str, why: str, now: float) -> Promotion:
    """Let a version go no further until somebody resumes it; a FAIL rolls it back all the same.

    Raises:
        OrderError: If no reason is named, or it is not on its way.
    """
    _explained(why)
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
    """Require a process to confirm every step before it is taken.

    Raises:
        OrderError: If the version is not on its way.
    """
    _running(promotion)
    return replace(promotion, hooked=True)


def confirm(promotion: Promotion, position: str) -> Promotion:
    """The hook before a step has succeeded.

    Args:
        promotion: State of the promotion.
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
        OrderError: If no reason is named, or the version is there already.
    """
    _explained(why)
    target = next(
        (
            position
            for position in path_of(contract.promotion)
            if position.stage is stage and position.rank > promotion.position.rank
        ),
        None,
    )
    if target is None or promotion.status is PromotionStatus.REPLACED:
        raise OrderError(f"{promotion.version} cannot be forced into {stage}: it is {whereabouts(promotion)}")
    decision = Decision(GateOutcome.WAIT, promotion.position.stage, promotion.tally.passed, promotion.missing)
    forced = replace(promotion, offline="")
    return stepped(
        forced, target, MoveKind.FORCE, decision, now, by=by, why=why, failing=latest.fails(promotion.version)
    )  # fmt: skip


def roll_back(promotion: Promotion, by: str, why: str, now: float) -> Moved:
    """Take a version out of all traffic; once more where it was seen to serve after that.

    Raises:
        OrderError: If no reason is named, or it is not on its way.
    """
    _explained(why)
    if promotion.seen_serving is None:
        _running(promotion)
    decision = Decision(GateOutcome.WAIT, promotion.position.stage, promotion.tally.passed, promotion.missing)
    return rolled_back(promotion, decision, now, by=by, why=why)


def _explained(why: str) -> None:
    if not why.strip():
        raise OrderError("say why; the reason is recorded")


def _running(promotion: Promotion) -> None:
    if promotion.status is not PromotionStatus.RUNNING:
        raise OrderError(f"{promotion.version} is {whereabouts(promotion)}; start it again first")


def whereabouts(promotion: Promotion) -> str:
    """Return the position of a version, in words."""
    if promotion.status is PromotionStatus.RUNNING:
        return f"in {promotion.position}"
    return promotion.status.value.replace("-", " ")


def admit(
    promotion: Promotion, contract: Contract, record: Mapping[str, Any], offline_problems: SectionProblems, now: float
) -> Promotion:
    """Take the evidence of the offline stage in.

    Args:
        promotion: A version in the offline stage.
        contract: The contract in force.
        record: Record of `kc-otel gate run ... --evidence`.
        offline_problems: Checks the section of the offline stage; see `verify_record`.
        now: Unix time, seconds.

    Raises:
        OrderError: If the version is not there, or the record is no sound evidence that its gate was open under this
            contract.
    """
    if promotion.position.stage is not Stage.OFFLINE_CI or promotion.status is not PromotionStatus.RUNNING:
        raise OrderError(f"{promotion.version} is not in offline-ci but {whereabouts(promotion)}")
    try:
        verify_record(record, offline_problems)
    except EvidenceError as error:
        raise OrderError(f"the evidence is invalid: {error}") from None
    if record["stage"] != Stage.OFFLINE_CI or "offline" not in record:
        raise OrderError(
            f"the evidence is of stage {record['stage']}; give the evidence that the offline stage's gate wrote"
        )
    if record["kernel"] != promotion.version:
        raise OrderError(f"the evidence is about kernel {record['kernel']}, not about {promotion.version}")
    if record["contract"]["hash"] != contract.hash:
        raise OrderError(
            f"the evidence is of another contract ({record['contract']['name']} {record['contract']['hash'][:12]}) "
            f"than the one in force ({contract.name} {contract.hash[:12]}); run the gate again"
        )
    written = datetime.fromisoformat(record["time"]).timestamp()
    if written > now + _MAX_AHEAD_SECONDS:
        raise OrderError(
            f"the evidence is of {record['time']}, in the future: correct that clock and run the gate again"
        )
    if written < promotion.proof_from:
        raise OrderError(
            f"the evidence is of {record['time']}, and {promotion.version} was rolled back at "
            f"{moment(promotion.proof_from)}; run the gate again"
        )
    decision = record["decision"]
    if decision["outcome"] != GateOutcome.ADVANCE:
        raise OrderError(
            f"the offline gate says {decision['outcome']}: {'; '.join(decision['missing'])}; to go on all the same, "
            f"a person has to force it and say why"
        )
    open_rows = [row for row in record["verdicts"] if row["status"] != Status.PASS]
    if open_rows:
        places = listed([f"{row['clause']} on {place(row['slice'])}" for row in open_rows])
        raise OrderError(
            f"the offline gate judged only a part (--require, --slice), and {places} did not pass; run it without "
            "these options, or a person has to force it and say why"
        )
    # Requirements open at the last evaluation may be met by now.
    return replace(promotion, offline=record["checksum"], missing=())
