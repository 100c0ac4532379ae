"""What people and their programs may tell a promotion: approve, hold, resume, force, roll back, hand over evidence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from kc_otel.contract.model import Contract
from kc_otel.evaluator.verdict import Verdict
from kc_otel.promotion.evidence import EvidenceError, verify_evidence
from kc_otel.promotion.machine import Moved, refused, rolled_back, stepped
from kc_otel.promotion.stages import Decision, Outcome, Stage
from kc_otel.promotion.state import Kind, OrderError, Promotion, Said, Standing, path_of

__all__ = ["admit", "approve", "confirm", "force", "hold", "hook", "resume", "roll_back"]

_LEAST: Final = "say who and why; both are kept"


def admit(promotion: Promotion, contract: Contract, record: Mapping[str, Any]) -> Promotion:
    """Take the evidence of the offline stage in.

    Args:
        promotion: A version in the offline stage.
        contract: The contract in force.
        record: What `kc-otel gate --contract ... --evidence` wrote.

    Raises:
        OrderError: If the version is not there, or the record is no sound evidence that its gate was open under this
            contract.
    """
    if promotion.place.stage is not Stage.OFFLINE_CI or promotion.standing is not Standing.RUNNING:
        raise OrderError(f"{promotion.version} is not in offline-ci but {_whereabouts(promotion)}")
    try:
        verify_evidence(record)
    except EvidenceError as error:
        raise OrderError(f"the evidence is not sound: {error}") from None
    if record["stage"] != Stage.OFFLINE_CI or "offline" not in record:
        raise OrderError(f"the evidence is of stage {record['stage']}; give what the offline stage's gate wrote")
    if record["kernel"] != promotion.version:
        raise OrderError(f"the evidence is about kernel {record['kernel']}, not about {promotion.version}")
    if record["contract"]["hash"] != contract.hash:
        raise OrderError(
            f"the evidence is of another contract ({record['contract']['name']} {record['contract']['hash'][:12]}) "
            f"than the one in force ({contract.name} {contract.hash[:12]}); run the gate again"
        )
    decision = record["decision"]
    if decision["outcome"] != Outcome.ADVANCE:
        raise OrderError(
            f"the offline gate says {decision['outcome']}: {'; '.join(decision['missing'])}; to go on all the same, "
            f"a person has to force it and say why"
        )
    return replace(promotion, offline=record["checksum"])


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
    if list(Stage).index(stage) <= promotion.place.rank[0]:
        raise OrderError(f"{promotion.version} is in {promotion.place} already")
    return replace(promotion, approved=tuple(sorted({*promotion.approved, stage.value})))


def hold(promotion: Promotion, by: str, why: str, now: float) -> Promotion:
    """Let a version go no further until somebody resumes it; a FAIL rolls it back all the same.

    Raises:
        OrderError: If nobody or no reason is named, or it is not on its way.
    """
    _named(by, why)
    _running(promotion)
    return replace(promotion, hold=Said(by, why, now), awaiting="")


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


def confirm(promotion: Promotion, place: str) -> Promotion:
    """The hook before a step has ended well.

    Args:
        promotion: What is remembered.
        place: The place that was awaited, as it was named.

    Raises:
        OrderError: If another one is awaited by now, or none.
    """
    if promotion.awaiting != place or not place:
        raise OrderError(f"the step to {place!r} is not awaited; {promotion.awaiting or 'none'} is")
    return replace(promotion, confirmed=place, awaiting="")


def force(
    promotion: Promotion,
    contract: Contract,
    stage: Stage,
    by: str,
    why: str,
    verdicts: Sequence[Verdict],
    now: float,
) -> Moved:
    """Take a version on to a stage although its gate is not open.

    Raises:
        OrderError: If nobody or no reason is named, or the version is there already.
    """
    _named(by, why)
    target = next(
        (one for one in path_of(contract.promotion) if one.stage is stage and one.rank > promotion.place.rank), None
    )
    if target is None or promotion.standing is Standing.REPLACED:
        raise OrderError(f"{promotion.version} cannot be forced into {stage}: it is {_whereabouts(promotion)}")
    decision = Decision(Outcome.WAIT, promotion.place.stage, promotion.tally.passed, promotion.missing)
    forced = replace(promotion, offline="")
    return stepped(
        forced, target, Kind.FORCE, decision, now, by=by, why=why, failing=refused(promotion, verdicts)
    )  # fmt: skip


def roll_back(promotion: Promotion, by: str, why: str, now: float) -> Moved:
    """Take a version out of all traffic.

    Raises:
        OrderError: If nobody or no reason is named, or it is not on its way.
    """
    _named(by, why)
    _running(promotion)
    decision = Decision(Outcome.WAIT, promotion.place.stage, promotion.tally.passed, promotion.missing)
    return rolled_back(promotion, decision, now, by=by, why=why)


def _named(by: str, why: str) -> None:
    if not by.strip() or not why.strip():
        raise OrderError(_LEAST)


def _running(promotion: Promotion) -> None:
    if promotion.standing is not Standing.RUNNING:
        raise OrderError(f"{promotion.version} is {_whereabouts(promotion)}; start it again first")


def _whereabouts(promotion: Promotion) -> str:
    if promotion.standing is Standing.RUNNING:
        return f"in {promotion.place}"
    return promotion.standing.value.replace("-", " ")
