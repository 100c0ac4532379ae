"""The way of a kernel version through its stages, as pure functions of verdicts, of what people decide, and of a clock.

    offline-ci -> shadow -> canary at 1% -> canary at 5% -> canary at 25% -> full
                     '--------- FAIL: rolled back, serves nothing ----------'

How much a version serves follows from where it is, so that nothing has to be undone after a crash: `share_of`. What a
person orders raises an OrderError where it cannot be done.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, Final

from kc_otel.contract.model import Contract
from kc_otel.contract.policy import PromotionTerms
from kc_otel.contract.words import MEASURED_LATER, listed, moment, place
from kc_otel.judge.promotion.gate_evidence import EvidenceError, SectionProblems, verify_record
from kc_otel.judge.promotion.stages import (
    Decision,
    GateOutcome,
    GateSpec,
    Hold,
    MoveKind,
    OrderError,
    Position,
    Promotion,
    PromotionMove,
    PromotionStatus,
    Stage,
    Tally,
    decide,
    of_no_version,
    path_of,
)
from kc_otel.judge.verdict import Evaluation, Status

Moved = tuple[Promotion, PromotionMove | None]
"""A promotion afterwards, and the move that it made."""

_RESET_TO: Final = Position(Stage.OFFLINE_CI)
_MAX_AHEAD_SECONDS: Final = 300.0
"""By which the clock of the machine that ran the gate may be ahead."""


def begin(contract: Contract, version: str, by: str, now: float, *, previous: Promotion | None = None) -> Moved:
    """A version starts on its way; of one that starts again, data from before do not count."""
    if previous is not None and previous.status is PromotionStatus.RUNNING:
        raise OrderError(f"{version} is already in promotion, in {previous.position}")
    attempt = 1 if previous is None else previous.attempt + 1
    first = path_of(contract.promotion)[0]
    message = f"{by} starts the promotion of {version} in {first}" + f", attempt {attempt}" * (attempt > 1)
    promotion = Promotion(
        contract.name, contract.hash, version, _RESET_TO, now, now, Tally(), attempt=attempt,
        proof_from=_rolled_back_at(previous),
    )  # fmt: skip
    tally = _tally_from(now, failing=previous is not None)
    return _moved(promotion, MoveKind.START, now, message, position=first, by=by, tally=tally)


def advance(promotion: Promotion, contract: Contract, evaluation: Evaluation, holds: Iterable[str]) -> Moved:
    """The promotion after an evaluation: held for the reasons in `holds`, whatever the verdicts say.

    One step on, when its gate is open, nobody holds it, and whoever has to be asked has agreed. Rolled back, on as many
    failing windows as the contract bears, held or not. Else the same place, with what is missing.
    """
    if promotion.status is not PromotionStatus.RUNNING:
        return promotion, None
    now = evaluation.at
    if promotion.contract_hash != contract.hash:
        # Results and approvals under other limits prove nothing under these.
        promotion = replace(promotion, contract_hash=contract.hash, offline="", approved=(), tally=Tally(pass_from=now))
    by_person = f"by {promotion.hold.by}: {promotion.hold.why}" if promotion.hold else ""
    asked = [*holds, *filter(None, (promotion.short, by_person))]
    offline, unjudged = promotion.position.stage is Stage.OFFLINE_CI, of_no_version(contract, evaluation)
    if offline:
        decision = _offline(promotion, asked)
    else:
        gate = GateSpec.of(contract, promotion.position.stage, unjudged)
        tally, decision = decide(gate, promotion.version, promotion.tally, [evaluation], asked)
        promotion = replace(promotion, tally=tally)
    if decision.outcome is GateOutcome.ROLLBACK:
        said = f"{promotion.version} is rolled back from {promotion.position}: {'; '.join(decision.missing)}"
        return _rolled_back(promotion, now, said, decision)
    following = next_position(promotion, contract.promotion)
    if decision.outcome is GateOutcome.WAIT or following is None:
        return replace(promotion, missing=decision.missing), None
    entering = following.stage is not promotion.position.stage
    if entering and following.stage.value in {*contract.promotion.approve} - {*promotion.approved}:
        order = f"kc-otel promote {promotion.contract} {promotion.version} --approve {following.stage}"
        needed = f"the gate is open; a person has to let it into {following.stage}: `{order}`"
        return replace(promotion, missing=(needed,)), None
    decision = replace(decision, stage=following.stage)
    shown = f"{decision.windows} consecutive windows have passed" if decision.windows > 1 else "a window has passed"
    message = f"{promotion.version} goes on from {promotion.position} to {following}: "
    message += "the offline gate is open" if offline else shown
    if unjudged and not offline:
        message += f"; nothing says which version {listed(unjudged)} {'are' if len(unjudged) > 1 else 'is'} of"
    return _moved(promotion, MoveKind.ADVANCE, now, message, decision, position=following, tally=_tally_from(now))


def next_position(promotion: Promotion, terms: PromotionTerms) -> Position | None:
    """Return where the next step leads to; None after the last."""
    return next((position for position in path_of(terms) if position.rank > promotion.position.rank), None)


def lapsed(promotion: Promotion, contract: Contract, now: float) -> Moved:
    """Say, once, that a changed contract ends the approvals of a version for the stages before it."""
    ahead = [stage for stage in promotion.approved if list(Stage).index(Stage(stage)) > promotion.position.rank[0]]
    if promotion.contract_hash == contract.hash or not ahead:
        return promotion, None
    message = (
        f"the approval of {promotion.version} for {listed(ahead)} has ended: the contract has changed since; "
        "a person has to approve it again"
    )
    return _moved(promotion, MoveKind.LAPSED, now, message)


def overheard(promotion: Promotion, newest: float, contract: Contract, now: float) -> Moved:
    """The promotion of a version that was rolled back, with since when it is known to be measured later.

    Silence afterwards does not show that it serves nobody: this lasts until a person rolls it back again or starts it.
    For a heartbeat, and a window at least, long answers and a backlog from before the roll-back are measured: a backlog
    may last longer. `newest` is the time of its newest observation.
    """
    if promotion.seen_serving is not None or newest <= promotion.entered + contract.observability.late:
        return promotion, None
    message = (
        f"{promotion.version} was measured after its rollback (at {moment(now)}): {MEASURED_LATER}; check that every "
        "serving process asks a router"
    )
    return _moved(promotion, MoveKind.SERVES, now, message, seen_serving=now)


def replaced(promotion: Promotion, version: str, now: float) -> Moved:
    """Another version has become the one that serves everything."""
    message = f"{promotion.version} is replaced by {version}"
    status = PromotionStatus.REPLACED
    return _moved(promotion, MoveKind.REPLACE, now, message, position=promotion.position, status=status)


def restored(promotion: Promotion, version: str, now: float, newest: float) -> Moved:
    """The version that served everything before `version`, which was rolled back, does so again, if it runs still.

    `newest` is the time of its newest observation; -inf for none.
    """
    measured = f"it had been measured last at {moment(newest)}" if newest > 0 else "nothing of it was measured"
    message = f"{promotion.version} is full again: {version} was rolled back; by then {measured}"
    status, tally = PromotionStatus.RUNNING, _tally_from(now, failing=True)
    return _moved(promotion, MoveKind.RESTORE, now, message, position=promotion.position, status=status, tally=tally)


def share_of(promotion: Promotion) -> float | None:
    """Share of the requests that the version may serve, 0 to 1; None where nothing limits it any more."""
    if promotion.status is PromotionStatus.ROLLED_BACK:
        return 0.0
    if promotion.status is PromotionStatus.REPLACED or promotion.position.stage is Stage.FULL:
        return None
    return promotion.position.share


def ordered(
    promotion: Promotion, contract: Contract, order: str, by: str, why: str, latest: Evaluation, now: float,
    stage: Stage | None = None,
) -> Moved:  # fmt: skip
    """Carry out a person's order about a promotion."""
    if order in {"approve", "force"} and stage is None:
        raise OrderError(f"name the stage to {order}")
    if order in {"hold", "force", "rollback"} and not why.strip():
        raise OrderError("say why; the reason is recorded")
    again = promotion.status is PromotionStatus.ROLLED_BACK
    idle = again and promotion.seen_serving is None
    if promotion.status is not PromotionStatus.RUNNING and (
        order in {"approve", "hold"} or (order == "rollback" and idle)
    ):
        further = " already" if idle and order == "rollback" else "; start it again first"
        raise OrderError(f"{promotion.version} is {_whereabouts(promotion)}{further}")
    version = promotion.version
    changes: dict[str, Any]
    match order, stage:
        case "rollback", _:
            where = " again" if again else f" from {promotion.position}" if promotion.started < now else ""
            message = f"{by} rolls {version} back{where}: {why}"
            return _rolled_back(promotion, now, message, by=by, why=why)
        case "force", Stage():
            return _forced(promotion, contract, stage, by, why, latest, now)
        case "approve", Stage():
            changes, said = _approved(promotion, contract, stage), f"lets {version} into {stage}"
        case "hold", _:
            changes, said = {"hold": Hold(by, why, now)}, f"holds {version} in {promotion.position}"
        case "resume", _ if promotion.hold is None:
            raise OrderError(f"nobody holds {version}")
        case "resume", _:
            changes, said = {"hold": None}, f"lets {version} go on"
        case _:
            raise OrderError(f"{order!r} is no order")
    return noted(promotion, MoveKind(order), by, why, now, said, **changes)


def noted(before: Promotion, kind: MoveKind, by: str, why: str, now: float, said: str, **changes: Any) -> Moved:
    """A person changes something of a version that stays where it is."""
    return _moved(before, kind, now, f"{by} {said}" + f": {why}" * bool(why.strip()), by=by, why=why, **changes)


def _approved(promotion: Promotion, contract: Contract, stage: Stage) -> dict[str, Any]:
    asked = contract.promotion.approve
    if stage.value not in asked:
        who = f"it requires approval for {', '.join(asked)}" if asked else "it requires approval for no stage"
        raise OrderError(f"the contract requires no approval for {stage}; {who}")
    if list(Stage).index(stage) <= promotion.position.rank[0]:
        raise OrderError(f"{promotion.version} is in {promotion.position} already")
    return {"approved": tuple(sorted({*promotion.approved, stage.value}))}


def _forced(
    promotion: Promotion, contract: Contract, stage: Stage, by: str, why: str, latest: Evaluation, now: float
) -> Moved:
    """Take a version on to a stage although its gate is not open; what fails in `latest` is known, and forgiven."""
    again = promotion.replaced
    least = (promotion.position.rank, False)
    target = next((at for at in path_of(contract.promotion) if at.stage is stage and (at.rank, again) > least), None)
    if target is None:
        raise OrderError(f"{promotion.version} cannot be forced into {stage}: it is {_whereabouts(promotion)}")
    way = "back" if again else f"on from {promotion.position}"
    message = f"{by} forces {promotion.version} {way} to {target}: {why}"
    forced = replace(promotion, offline="", proof_from=_rolled_back_at(promotion))
    failing = latest.fails(promotion.version)
    tally = _tally_from(now, failing=failing)
    status = PromotionStatus.RUNNING
    return _moved(forced, MoveKind.FORCE, now, message, position=target, by=by, why=why, tally=tally, status=status)


def _tally_from(now: float, *, failing: bool = False) -> Tally:
    """A tally of later data only; what is known to be failing now is forgiven."""
    return Tally(pass_from=now, fail_from=now if failing else None)


def _moved(
    before: Promotion, kind: MoveKind, now: float, message: str, decision: Decision | None = None, *,
    position: Position | None = None, by: str = "", why: str = "", **changes: Any,
) -> Moved:  # fmt: skip
    """The promotion afterwards, and the move; in another position it waits for nothing yet."""
    if decision is None:
        decision = Decision(GateOutcome.WAIT, before.position.stage, before.tally.passed, before.missing)
    if kind in {MoveKind.ADVANCE, MoveKind.FORCE} and before.elsewhere:
        message += f"; {before.elsewhere}"
    if position is not None:
        changes |= {"position": position, "entered": now, "missing": (), "reason": message, "seen_serving": None}
    after = replace(before, **changes)
    return after, PromotionMove(
        kind, before.position, after.position, now, decision, by, why, before.tally.failed, message
    )


def _rolled_back(
    before: Promotion, now: float, message: str, decision: Decision | None = None, *, by: str = "", why: str = ""
) -> Moved:
    return _moved(
        before, MoveKind.ROLLBACK, now, message, decision, position=_RESET_TO, by=by, why=why,
        status=PromotionStatus.ROLLED_BACK, tally=Tally(), offline="", approved=(), hold=None, elsewhere="", short="",
    )  # fmt: skip


def _rolled_back_at(previous: Promotion | None) -> float:
    """Return when a version was rolled back last, Unix seconds; 0 for never."""
    if previous is None:
        return 0.0
    return previous.entered if previous.status is PromotionStatus.ROLLED_BACK else previous.proof_from


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


def _whereabouts(promotion: Promotion) -> str:
    if promotion.status is PromotionStatus.RUNNING:
        return f"in {promotion.position}"
    return promotion.status.value.replace("-", " ")


def admit(
    promotion: Promotion, contract: Contract, record: Mapping[str, Any], offline_problems: SectionProblems, now: float
) -> Promotion:
    """Take in what `kc-otel gate run ... --evidence` wrote; OrderError if it does not prove that the gate was open."""
    if promotion.position.stage is not Stage.OFFLINE_CI or promotion.status is not PromotionStatus.RUNNING:
        raise OrderError(f"{promotion.version} is not in offline-ci but {_whereabouts(promotion)}")
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
