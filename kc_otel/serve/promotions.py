"""The promotions of every contract: stepped with each evaluation, told by people, kept in the state file.

A step, its event and its evidence are in the transaction of the evaluation that caused it. How much traffic a version
gets is derived from where it is with every evaluation, so the decision table cannot disagree with it for longer.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from kc_otel.contract.model import Contract
from kc_otel.contract.words import listed
from kc_otel.judge.decisions import Canary, DecisionTable, DirectiveKind, Promoted, changed
from kc_otel.judge.evaluator import Evaluator
from kc_otel.judge.incidents.incident import Incident, IncidentState
from kc_otel.judge.promotion import machine
from kc_otel.judge.promotion.gate_evidence import SectionProblems, of_other_contracts, step_evidence
from kc_otel.judge.promotion.machine import Moved, share_of
from kc_otel.judge.promotion.stages import MoveKind, OrderError, Promotion, PromotionMove, PromotionStatus, Stage
from kc_otel.judge.recorders import KernelInfo, unlike_declared
from kc_otel.judge.refused_points import Missing
from kc_otel.judge.set_back import not_later
from kc_otel.judge.verdict import Evaluation
from kc_otel.serve.event_log import Announcement, EventLog
from kc_otel.serve.store.promotion_store import EvidenceRecord, PromotionStore
from kc_otel.serve.store.state_connection import UnitOfWork, unit_of_work

Key = tuple[str, str]
"""(contract, version)"""
_MAX_ENDED: Final = 500
"""Versions of a contract that were rolled back or replaced and are remembered, those that began last: each limits
requests in the decision table, which has some 150 bytes for it. One that is forgotten may serve again."""
_MAX_EVIDENCE_CHARACTERS: Final = 32 * 1024 * 1024
"""Characters of evidence that is handed over; that of 100 clauses on 500 slices has some 17 million."""
_MOVES_WITH_EVIDENCE: Final = frozenset({MoveKind.ADVANCE, MoveKind.FORCE, MoveKind.ROLLBACK})


class Promotions:
    """Every kernel version that is on its way, was rolled back, or was replaced.

    Of contracts in `dry_run` nothing is promoted, and nothing rolled back.
    """

    def __init__(
        self,
        contracts: Mapping[str, Contract],
        dry_run: Collection[str],
        connection: sqlite3.Connection,
        events: EventLog,
        offline_problems: SectionProblems,
        evaluator: Evaluator,
    ) -> None:
        self._evaluator = evaluator
        self._offline_problems = offline_problems
        self._contracts, self._dry_run = contracts, dry_run
        self._connection, self._events = connection, events
        self._store = PromotionStore(connection)
        self._known: dict[Key, Promotion] = {
            (promotion.contract, promotion.version): promotion for promotion in self._store.load()
        }
        self._latest: Mapping[str, Evaluation] = {}

    def all(self, contract: str | None = None) -> list[Promotion]:
        """The promotions of one contract or of every contract that is served, by contract, the newest first."""
        found = [promotion for promotion in self._known.values() if promotion.contract in self._contracts]
        mine = [promotion for promotion in found if contract in {None, promotion.contract}]
        return sorted(mine, key=lambda promotion: (promotion.contract, -promotion.started, promotion.version))

    def of(self, contract: str, version: str) -> Promotion:
        """Return a promotion; a LookupError where there is none."""
        self._contract(contract)
        found = self._known.get((contract, version))
        if found is None:
            raise LookupError(f"kernel {version} is not in promotion under {contract}; start its promotion first")
        return found

    def evidence(self, contract: str, version: str) -> list[EvidenceRecord]:
        """Records of a version's steps, oldest first."""
        return self._store.evidence(contract, version)

    def latest(self, contract: str) -> Evaluation:
        """The last evaluation of a contract; one without verdicts before the first."""
        return self._latest.get(contract, Evaluation(0.0))

    def write(
        self,
        decisions: DecisionTable,
        name: str,
        evaluation: Evaluation,
        incidents: Iterable[Incident],
        now: float,
        unit: UnitOfWork,
    ) -> tuple[DecisionTable, list[Announcement], list[Promotion]]:
        """Step every promotion of a contract with an evaluation. While an incident of a version lasts, it waits.

        Returns the decision table with every such version's share, what is to be announced, and the versions that are
        rolled back.
        """
        known = {key: promotion for key, promotion in self._known.items() if key[0] == name}
        unit.on_commit(lambda: self._adopt(known, name, evaluation))
        if name in self._dry_run:
            return decisions, [], []
        contract, judge, incidents = self._contracts[name], self._evaluator, list(incidents)
        said: list[Announcement] = []
        for key, before in sorted(known.items()):
            if before.status is PromotionStatus.ROLLED_BACK:
                known[key] = machine.overheard(before, judge.newest_of(*key), contract, now)
                said += self._overheard(before, known[key], now)
            if before.status is not PromotionStatus.RUNNING:
                continue
            reports = judge.kernels(name), judge.missing(name, now)
            holds = reasons_to_wait(contract, before.version, before.position.stage, decisions, *reports)
            holds += unproven_of(before.version, incidents, judge.silent_recorders(*key, now)[1])
            after, moves = machine.advance(self._under(contract, before), contract, evaluation, holds)
            known[key] = after
            if after != before:
                self._store.save(after)
            said += self._lapsed(before, contract, now)
            said += self._moved(contract, before, moves, evaluation, now)
            if any(move.after.stage is Stage.FULL for move in moves):
                said += self._replace_others(known, contract, after, now)
        rolled = [promotion for promotion in known.values() if promotion.status is PromotionStatus.ROLLED_BACK]
        canaries = [canary for canary in decisions.canaries if canary.contract != name]
        promoted = [entry for entry in decisions.promoted if entry.contract != name]
        for (_, version), promotion in known.items():
            if (share := share_of(promotion)) is not None:
                canaries.append(Canary(name, version, share, promotion.reason, promotion.entered))
            if promotion.full:
                promoted.append(Promoted(name, version, promotion.entered))
        return changed(decisions, now, canaries=canaries, promoted=promoted), said, rolled

    def set_back(self, now: float, ahead: float, unit: UnitOfWork) -> None:
        """The clock was set back: no step was later than now."""
        known = not_later(self._known, now, ahead)
        for key, promotion in known.items():
            if promotion != self._known[key]:
                self._store.save(promotion)
        unit.on_commit(lambda: setattr(self, "_known", known))

    def _under(self, contract: Contract, promotion: Promotion) -> Promotion:
        """The promotion, which says what of its evidence was made under another contract, once that has changed."""
        if promotion.contract_hash == contract.hash:
            return promotion
        kept = self._store.evidence(contract.name, promotion.version)
        own = (found.record for found in kept if found.at >= promotion.started)
        elsewhere, short = of_other_contracts(contract, own)
        return replace(promotion, elsewhere=elsewhere, short=short)

    def _lapsed(self, before: Promotion, contract: Contract, now: float) -> list[Announcement]:
        """Write that a changed contract ends the approvals of a version for the stages before it, once."""
        ahead = [stage for stage in before.approved if list(Stage).index(Stage(stage)) > before.position.rank[0]]
        if before.contract_hash == contract.hash or not ahead:
            return []
        message = (
            f"the approval of {before.version} for {listed(ahead)} has ended: the contract has changed since; "
            "a person has to approve it again"
        )
        return [self._said(before, "lapsed", message, now, "warning")]

    def _overheard(self, before: Promotion, after: Promotion, now: float) -> list[Announcement]:
        """Write that a version which was rolled back serves, once."""
        if after == before:
            return []
        self._store.save(after)
        message = (
            f"{after.version} was rolled back but still serves: its drift has been measured since; "
            "check that every serving process asks a router"
        )
        return [self._said(after, "serves", message, now, "critical")]

    def _said(
        self, promotion: Promotion, order: str, message: str, now: float, severity: str = "info", *,
        by: str = "", why: str = "", **data: Any,
    ) -> Announcement:  # fmt: skip
        """Write an event of a version."""
        data |= {"kernel_inference": promotion.version, "order": order, "by": by, "why": why, "message": message}
        return self._events.record(promotion.contract, "promotion", data, now, severity)

    def _adopt(self, known: Mapping[Key, Promotion], contract: str, evaluation: Evaluation) -> None:
        self._known, self._latest = {**self._known, **known}, {**self._latest, contract: evaluation}

    def start(self, contract: str, version: str, by: str, now: float) -> list[Announcement]:
        """A person starts a version on its way, for the first time or again.

        An OrderError if it, or another version of the contract, is on its way already.
        """
        return self._put(self._contract(contract), self._begun(contract, version, by, now))

    def _begun(self, contract: str, version: str, by: str, now: float) -> Moved:
        found = self._contract(contract)
        for other in self.all(contract):
            on_its_way = other.status is PromotionStatus.RUNNING and other.position.stage is not Stage.FULL
            if other.version != version and on_its_way:
                raise OrderError(f"{other.version} is in promotion, in {other.position}; one version goes at a time")
        previous = self._known.get((contract, version))
        failing = self.latest(contract).fails(version)
        return machine.begin(found, version, by, now, previous=previous, failing=failing)

    def _subject(
        self, contract: str, version: str, by: str, now: float, *, start: bool
    ) -> tuple[Promotion, tuple[Moved, ...]]:
        """The promotion that an order is about, and its start where the order starts it."""
        if not start or (contract, version) in self._known:
            return self.of(contract, version), ()
        begun = self._begun(contract, version, by, now)
        return begun[0], (begun,)

    def admit(
        self, contract: str, version: str, record: Mapping[str, Any], by: str, now: float, *, start: bool = False
    ) -> list[Announcement]:
        """Take the evidence of the offline stage in, a record that `kc-otel gate run ... --evidence` wrote; see `tell`.

        An OrderError if it does not open the gate; nothing is started then either.
        """
        found = self._contract(contract)
        before, begun = self._subject(contract, version, by, now, start=start)
        if (size := len(json.dumps(record))) > _MAX_EVIDENCE_CHARACTERS:
            raise OrderError(f"the evidence has {size:,} characters; at most {_MAX_EVIDENCE_CHARACTERS:,} are kept")
        after = machine.admit(before, found, record, self._offline_problems, now)
        message = f"{by} hands over the evidence that the offline gate was open for {version}"
        return self._tell(before, after, "evidence", message, now, begun, by=by, record=record)

    def tell(
        self, contract: str, version: str, order: str, by: str, why: str, now: float, *, stage: Stage | None = None,
        position: str = "", start: bool = False,
    ) -> list[Announcement]:  # fmt: skip
        """A person, or their program, decides: approve, hold, resume, force, rollback, hook or confirm.

        `stage` is approved or forced; `position` is what the hook before it has been run for. With `start`, a version
        that is not known is started in the same transaction; an OrderError where that cannot be done, and nothing is
        started.
        """
        found = self._contract(contract)
        before, begun = self._subject(contract, version, by, now, start=start)
        reason = f": {why}" if why.strip() else ""
        if order in {"approve", "force"} and stage is None:
            raise OrderError(f"name the stage to {order}")
        match order:
            case "approve":
                assert stage is not None
                after, said = machine.approve(before, found, stage), f"lets {version} into {stage}"
            case "hold":
                after, said = machine.hold(before, by, why, now), f"holds {version} in {before.position}"
            case "resume":
                after, said = machine.resume(before), f"lets {version} go on"
            case "hook":
                after, said = machine.hook(before), f"confirms each step of {version} from now on"
            case "confirm":
                after, said = machine.confirm(before, position), f"confirms the step of {version} to {position}"
            case "force":
                assert stage is not None
                moved = machine.force(before, found, stage, by, why, self.latest(contract), now)
                return self._put(found, *begun, moved)
            case "rollback":
                if contract in self._dry_run:
                    raise OrderError(
                        f"{contract} runs dry, so nothing would keep requests from {version}; pin its slices"
                    )
                return self._put(found, machine.roll_back(before, by, why, now))  # it was not on its way: no start
            case _:
                raise OrderError(f"{order!r} is no order")
        return self._tell(before, after, order, f"{by} {said}{reason}", now, begun, by=by, why=why)

    def _tell(
        self, before: Promotion, after: Promotion, order: str, message: str, now: float, begun: Sequence[Moved], *,
        by: str, why: str = "", record: Mapping[str, Any] | None = None,
    ) -> list[Announcement]:  # fmt: skip
        """Keep what changes nothing about where a version is, but for its start."""
        if after == before and not begun:
            return []
        data: dict[str, Any] = {}
        with unit_of_work(self._connection) as unit:
            said, known = self._write(self._contract(after.contract), begun)
            self._store.save(after)
            if record is not None:
                data["evidence"] = self._store.keep(after.contract, after.version, "offline gate", record, now)
            said.append(self._said(after, order, message, now, by=by, why=why, **data))
            known[after.contract, after.version] = after
            unit.on_commit(lambda: setattr(self, "_known", known))
        return said

    def _put(self, contract: Contract, *moved: Moved) -> list[Announcement]:
        with unit_of_work(self._connection) as unit:
            said, known = self._write(contract, moved)
            unit.on_commit(lambda: setattr(self, "_known", known))
        return said

    def _write(self, contract: Contract, moved: Iterable[Moved]) -> tuple[list[Announcement], dict[Key, Promotion]]:
        """Write moves into the open transaction; the announcements and the new state take effect after it."""
        known, said = dict(self._known), list[Announcement]()
        for after, moves in moved:
            before = known.get((contract.name, after.version), after)
            known[contract.name, after.version] = after
            self._store.save(after)
            for gone in self._too_old(known, contract.name):
                self._store.forget(gone)
                del known[gone.contract, gone.version]
            said += self._moved(contract, before, moves, self.latest(contract.name), moves[0].at)
            if after.position.stage is Stage.FULL and after.status is PromotionStatus.RUNNING:
                said += self._replace_others(known, contract, after, moves[0].at)
        return said, known

    def _moved(
        self,
        contract: Contract,
        before: Promotion,
        moves: Sequence[PromotionMove],
        evaluation: Evaluation,
        now: float,
    ) -> list[Announcement]:
        """Write the events and the evidence of moves."""
        said = []
        for move in moves:
            kept = None
            if move.kind in _MOVES_WITH_EVIDENCE and not (
                move.kind is MoveKind.ADVANCE and move.before.stage is Stage.OFFLINE_CI
            ):
                record = step_evidence(contract, before, move, evaluation.verdicts, now)
                label = f"{move.kind} from {move.before} to {move.after}"
                kept = self._store.keep(contract.name, before.version, label, record, now)
            severity = "warning" if move.kind in {MoveKind.ROLLBACK, MoveKind.FORCE} else "info"
            data = {
                "from": str(move.before), "to": str(move.after), "share": move.after.share, "evidence": kept,
                "missing": list(move.decision.missing),
            }  # fmt: skip
            said.append(
                self._said(before, move.kind.value, move.message, now, severity, by=move.by, why=move.why, **data)
            )
        return said

    def _replace_others(
        self, known: dict[Key, Promotion], contract: Contract, by: Promotion, now: float
    ) -> list[Announcement]:
        said = []
        for key, other in sorted(known.items()):
            running = other.status is PromotionStatus.RUNNING and other.contract == contract.name
            if running and other.version != by.version and other.position.stage is Stage.FULL:
                known[key], moves = machine.replaced(other, by.version, now)
                self._store.save(known[key])
                said += self._moved(contract, other, moves, Evaluation(now), now)
        return said

    def _too_old(self, known: Mapping[Key, Promotion], contract: str) -> list[Promotion]:
        own = [
            promotion
            for promotion in known.values()
            if promotion.contract == contract and promotion.status is not PromotionStatus.RUNNING
        ]
        return sorted(own, key=lambda promotion: -promotion.started)[_MAX_ENDED:]

    def _contract(self, name: str) -> Contract:
        if name not in self._contracts:
            raise LookupError(f"no contract {name!r}; there are {', '.join(self._contracts)}")
        return self._contracts[name]


def reasons_to_wait(
    contract: Contract,
    version: str,
    stage: Stage,
    decisions: DecisionTable,
    kernels: Iterable[KernelInfo],
    missing: Iterable[Missing],
) -> list[str]:
    """Return the reasons why a version stays in its stage whatever its verdicts are.

    Each hold is told once with the slices that it is about. A kernel that differs from the declaration, or does not
    say, waits; so does a version of which points are not judged.
    """
    held: dict[str, set[str]] = {}
    for directive in decisions.directives:
        if directive.contract == contract.name and directive.kind is DirectiveKind.HOLD_PROMOTION:
            held.setdefault(directive.reason, set()).add(directive.slice)
    reasons = [f"{', '.join(sorted(slices))}: {reason}" for reason, slices in held.items()]
    known = list(kernels)
    found = [kernel for kernel in known if (kernel.role, kernel.version) == ("inference", version)]
    if not found and stage is not Stage.OFFLINE_CI:
        reasons.append("it has not reported its fields, so nothing shows that it is what the contract declares")
    reasons += [said for kernel in found for said in unlike_declared(contract.kernels, kernel, known)]
    return reasons + [f"{row.what} of it are not judged: {row.text}" for row in missing if row.pair[1] == version]


def unproven_of(version: str, incidents: Iterable[Incident], silent: str) -> list[str]:
    """Return the reasons why what is measured of a version now does not show that it holds.

    `silent` is a sentence about its recorders that fell silent without having shut down; empty for none.
    """
    reasons = [
        f"incident {incident.id} of it is not over: {incident.headline}; {incident.state_text[:1].lower()}"
        f"{incident.state_text[1:]}"
        for incident in incidents
        if incident.kernel_inference == version and incident.on in {"fail", "invalid-input"}
        if incident.state in {IncidentState.BROKEN, IncidentState.UNPROVEN}
    ]
    return reasons + [silent] * bool(silent)
