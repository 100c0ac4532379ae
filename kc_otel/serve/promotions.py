"""The promotions of every contract: stepped with each evaluation, told by people, kept in the state file.

A step, its event and its evidence are in the transaction of the evaluation that caused it. How much traffic a version
gets is derived from where it is with every evaluation, so the decision table cannot disagree with it for longer.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from kc_otel.contract.model import Contract
from kc_otel.contract.words import did_you_mean, listed
from kc_otel.judge.decisions import Canary, DecisionTable, DirectiveKind, Promoted, changed
from kc_otel.judge.evaluator import Evaluator
from kc_otel.judge.incidents.incident import OF_RECORDERS, Incident, IncidentState, lifting_commands
from kc_otel.judge.plain_json import not_later, read_json, to_json
from kc_otel.judge.point_streams import Missing
from kc_otel.judge.promotion import machine
from kc_otel.judge.promotion.gate_evidence import SectionProblems, of_other_contracts, step_evidence
from kc_otel.judge.promotion.machine import Moved, share_of
from kc_otel.judge.promotion.stages import MoveKind, OrderError, Promotion, PromotionStatus, Stage
from kc_otel.judge.recorders import KernelInfo, unlike_declared
from kc_otel.judge.verdict import Evaluation
from kc_otel.serve.history import Announcement, EventLog
from kc_otel.serve.store.state_file import UnitOfWork, unit_of_work
from kc_otel.serve.store.values import Values

Key = tuple[str, str]
"""(contract, version)"""
_MAX_ENDED: Final = 500
"""Versions of a contract that were rolled back or replaced and are remembered, those that began last: each limits
requests in the decision table, which has some 150 bytes for it. One that is forgotten may serve again."""
_MAX_EVIDENCE_RECORDS: Final = 1000
"""Pieces of evidence of a contract that are kept; the oldest go first."""
_SEVERITY: Final = {
    **dict.fromkeys((MoveKind.ROLLBACK, MoveKind.FORCE, MoveKind.LAPSED), "warning"),
    MoveKind.SERVES: "critical",
}
_KIND: Final = "promotion"
_TABLES: Final = (
    """CREATE TABLE IF NOT EXISTS promotion_evidence (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        at REAL NOT NULL,
        contract TEXT NOT NULL,
        version TEXT NOT NULL,
        what TEXT NOT NULL,
        record TEXT NOT NULL
    ) STRICT""",
    "CREATE INDEX IF NOT EXISTS promotion_evidence_of ON promotion_evidence (contract, id)",
)


@dataclass(frozen=True, slots=True)
class EvidenceRecord:
    """A piece of evidence: the step in words, when it was, and a record that `kc-otel gate verify` checks."""

    id: int
    at: float
    what: str
    record: dict[str, Any]


class Promotions:
    """Every kernel version that is on its way, was rolled back, or was replaced; those of `dry_run` contracts stay."""

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
        for statement in _TABLES:
            connection.execute(statement)
        self._values = Values(connection)
        self._known = {(name, version): read_json(Promotion, data) for name, version, data in self._values.read(_KIND)}
        self._latest: Mapping[str, Evaluation] = {}

    def all(self, contract: str | None = None) -> list[Promotion]:
        """The promotions of one contract or of every contract that is served, by contract, the newest first."""
        found = [promotion for promotion in self._known.values() if promotion.contract in self._contracts]
        mine = [promotion for promotion in found if contract in {None, promotion.contract}]
        return sorted(mine, key=lambda promotion: (promotion.contract, -promotion.started, promotion.version))

    def of(self, contract: str, version: str) -> Promotion:
        """Return a promotion; a LookupError where there is none, or where no kernel has reported by that name."""
        self._contract(contract)
        if (contract, version) not in self._known:
            self._seen(contract, version)
            said = f"`kc-otel promote {contract} {version}` says what starting it changes"
            raise LookupError(f"kernel {version} is not in promotion under {contract}; {said}")
        return self._known[contract, version]

    def evidence(self, contract: str, version: str) -> list[EvidenceRecord]:
        """Records of a version's steps, oldest first."""
        rows = self._connection.execute(
            "SELECT id, at, what, record FROM promotion_evidence WHERE contract = ? AND version = ? ORDER BY id",
            (contract, version),
        )
        return [EvidenceRecord(id, at, what, json.loads(record)) for id, at, what, record in rows]

    def latest(self, contract: str) -> Evaluation:
        """The last evaluation of a contract; one without verdicts before the first."""
        return self._latest.get(contract, Evaluation(0.0))

    def write(
        self,
        name: str,
        evaluation: Evaluation,
        now: float,
        unit: UnitOfWork,
        decisions: DecisionTable,
        incidents: Sequence[Incident],
    ) -> tuple[DecisionTable, list[Promotion]]:
        """Step every promotion of a contract with an evaluation.

        Returns the decision table with each version's share, and the versions that are rolled back.
        """
        known = {key: promotion for key, promotion in self._known.items() if key[0] == name}
        unit.on_commit(lambda: self._adopt(known, name, evaluation))
        if name in self._dry_run:
            return decisions, []
        contract, judge = self._contracts[name], self._evaluator
        for key in sorted(known):
            before = known[key]
            moved: Moved = before, None
            if before.status is PromotionStatus.ROLLED_BACK:
                moved = machine.overheard(before, judge.newest_of(*key), contract, now)
            elif before.status is PromotionStatus.RUNNING:
                silent = judge.silent_recorders(*key, now)[1]
                reports = judge.kernels(name), judge.missing(name, now), incidents, silent
                holds = reasons_to_wait(contract, before, decisions, *reports)
                moved = machine.advance(self._under(contract, before), contract, evaluation, holds)
            for step in (machine.lapsed(before, contract, now), moved):
                self._step(known, contract, step, evaluation, now, unit)
        canaries = [canary for canary in decisions.canaries if canary.contract != name]
        canaries += [
            Canary(name, promotion.version, share, promotion.reason, promotion.entered)
            for promotion in known.values()
            if (share := share_of(promotion)) is not None
        ]
        promoted = [entry for entry in decisions.promoted if entry.contract != name]
        promoted += [Promoted(name, of.version, of.entered) for of in known.values() if of.full]
        rolled = [promotion for promotion in known.values() if promotion.status is PromotionStatus.ROLLED_BACK]
        return changed(decisions, now, canaries=canaries, promoted=promoted), rolled

    def set_back(self, now: float, ahead: float, unit: UnitOfWork) -> None:
        """The clock was set back: no step was later than now."""
        known = not_later(self._known, now, ahead)
        for key, promotion in known.items():
            if promotion != self._known[key]:
                self._save(promotion)
        unit.on_commit(lambda: setattr(self, "_known", known))

    def tell(
        self, contract: str, version: str, order: str, by: str, why: str, now: float, *, stage: Stage | None = None,
        evidence: Mapping[str, Any] | None = None, start: bool = False,
    ) -> None:  # fmt: skip
        """A person, or their program, decides: start, evidence, approve, hold, resume, force, rollback.

        `stage` is approved or forced; `evidence` is the record that `kc-otel gate run ... --evidence` wrote. With
        `start`, a version that is not known is started in the same transaction. Raises OrderError where the order
        cannot be carried out, and LookupError for a name that no inference kernel has reported, unless its evidence is
        handed over; nothing is started then either.
        """
        found = self._contract(contract)
        if contract in self._dry_run:
            raise OrderError(
                f"{contract} runs dry, so no order about {version} would be carried out; restart the evaluator without "
                f"`--dry-run-contract {contract}`, or pin slices"
            )
        if order != "evidence" and (contract, version) not in self._known:
            self._seen(contract, version)
        if order == "start":
            self._put(found, [self._begun(contract, version, by, now)], now, None)
            return
        begun: list[Moved] = []
        if start and (contract, version) not in self._known:
            begun = [self._begun(contract, version, by, now, alone=order != "rollback")]
        before = begun[0][0] if begun else self.of(contract, version)
        if order == "evidence":
            if evidence is None:
                raise OrderError("hand the evidence over, as `kc-otel gate run --evidence` wrote it")
            offline = machine.admit(before, found, evidence, self._offline_problems, now).offline
            said = f"hands over the evidence that the offline gate was open for {version}"
            moved = machine.noted(before, MoveKind.EVIDENCE, by, why, now, said, offline=offline, missing=())
        else:
            moved = machine.ordered(before, found, order, by, why, self.latest(contract), now, stage)
        if order == "rollback":
            begun = []  # it was not on its way: no start is written
        self._put(found, [*begun, moved], now, evidence)

    def _seen(self, contract: str, version: str) -> None:
        """Raise a LookupError if inference kernels have reported, and none by this name."""
        seen = self._evaluator.inference_versions(contract)
        if seen and version not in seen:
            hint = did_you_mean(version, seen, "seen are")
            raise LookupError(
                f"{version}: no inference kernel of {contract} has reported by that name, and a version that has not "
                f"served yet begins with --evidence; {hint}"
            )

    def _begun(self, contract: str, version: str, by: str, now: float, *, alone: bool = True) -> Moved:
        for other in self.all(contract) if alone else ():
            on_its_way = other.status is PromotionStatus.RUNNING and other.position.stage is not Stage.FULL
            if other.version != version and on_its_way:
                raise OrderError(f"{other.version} is in promotion, in {other.position}; one version goes at a time")
        previous = self._known.get((contract, version))
        return machine.begin(self._contract(contract), version, by, now, previous=previous)

    def _put(
        self, contract: Contract, moved: Sequence[Moved], now: float, handed_over: Mapping[str, Any] | None
    ) -> None:
        """Write moves, each after the one before, and the offline gate's record that a person hands over."""
        known = dict(self._known)
        with unit_of_work(self._connection) as unit:
            for step in moved:
                if step[0] != known.get((contract.name, step[0].version)):
                    self._step(known, contract, step, self.latest(contract.name), now, unit, handed_over)
            over = [
                key for key, of in known.items() if key[0] == contract.name and of.status is not PromotionStatus.RUNNING
            ]
            for key in sorted(over, key=lambda key: -known[key].started)[_MAX_ENDED:]:  # their evidence stays
                self._values.write(contract.name, _KIND, {key[1]: None})
                del known[key]
            unit.on_commit(lambda: setattr(self, "_known", known))

    def _step(
        self, known: dict[Key, Promotion], contract: Contract, moved: Moved, evaluation: Evaluation, now: float,
        unit: UnitOfWork, handed_over: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """Write what became of a version, with event and evidence of its move.

        A version that became full replaces the one before; once it is rolled back, that one is full again.
        """
        after, move = moved
        key = contract.name, after.version
        before = known.get(key, after)
        if after != known.get(key):
            known[key] = after
            self._save(after)
        if move is None:
            return
        kept = None
        if move.kind is MoveKind.EVIDENCE and handed_over is not None:
            kept = self._keep(before, "offline gate", handed_over, now)
        elif move.kind in {MoveKind.FORCE, MoveKind.ROLLBACK} or (
            move.kind is MoveKind.ADVANCE and move.before.stage is not Stage.OFFLINE_CI
        ):
            record = step_evidence(contract, before, move, evaluation.verdicts, now)
            kept = self._keep(before, f"{move.kind} from {move.before} to {move.after}", record, now)
        data = {
            "kernel_inference": before.version, "order": move.kind.value, "by": move.by, "why": move.why,
            "message": move.message, "from": str(move.before), "to": str(move.after), "share": move.after.share,
            "evidence": kept, "missing": list(move.decision.missing),
        }  # fmt: skip
        attributes = {"kc.contract": contract.name, "kc.kernel.inference": before.version}
        severity = _SEVERITY.get(move.kind, "info")
        announcement = Announcement(severity, f"{contract.name}: {move.message}", attributes)
        self._events.record(contract.name, "promotion", data, now, unit, announcement)
        if move.kind is MoveKind.ROLLBACK and before.full:
            replaced = [of for of in known.values() if of.contract == contract.name and of.replaced]
            for other in sorted(replaced, key=lambda promotion: promotion.entered)[-1:]:
                newest = self._evaluator.newest_of(contract.name, other.version)
                again = machine.restored(other, before.version, now, newest)
                self._step(known, contract, again, evaluation, now, unit)
        if after.full:
            for other_key, other in sorted(known.items()):
                if other.contract == contract.name and other.full and other_key != key:
                    gone = machine.replaced(other, before.version, now)
                    self._step(known, contract, gone, Evaluation(now), now, unit)

    def _under(self, contract: Contract, promotion: Promotion) -> Promotion:
        """The promotion, which says what of its evidence was made under another contract, once that has changed."""
        if promotion.contract_hash == contract.hash:
            return promotion
        kept = self.evidence(contract.name, promotion.version)
        own = (found.record for found in kept if found.at >= promotion.started)
        elsewhere, short = of_other_contracts(contract, own)
        return replace(promotion, elsewhere=elsewhere, short=short)

    def _adopt(self, known: Mapping[Key, Promotion], contract: str, evaluation: Evaluation) -> None:
        self._known, self._latest = {**self._known, **known}, {**self._latest, contract: evaluation}

    def _save(self, promotion: Promotion) -> None:
        self._values.write(promotion.contract, _KIND, {promotion.version: to_json(promotion)})

    def _keep(self, promotion: Promotion, what: str, record: Mapping[str, Any], now: float) -> int:
        contract = promotion.contract
        cursor = self._connection.execute(
            "INSERT INTO promotion_evidence (at, contract, version, what, record) VALUES (?, ?, ?, ?, ?)",
            (now, contract, promotion.version, what, json.dumps(record, sort_keys=True, allow_nan=False)),
        )
        self._connection.execute(
            "DELETE FROM promotion_evidence WHERE contract = ? AND id NOT IN "
            "(SELECT id FROM promotion_evidence WHERE contract = ? ORDER BY id DESC LIMIT ?)",
            (contract, contract, _MAX_EVIDENCE_RECORDS),
        )
        assert cursor.lastrowid is not None
        return cursor.lastrowid

    def _contract(self, name: str) -> Contract:
        if name not in self._contracts:
            raise LookupError(f"no contract {name!r}; there are {', '.join(self._contracts)}")
        return self._contracts[name]


def reasons_to_wait(
    contract: Contract,
    promotion: Promotion,
    decisions: DecisionTable,
    kernels: Sequence[KernelInfo],
    missing: Iterable[Missing],
    incidents: Iterable[Incident],
    silent: str,
) -> list[str]:
    """Return the reasons why a version stays in its stage whatever its verdicts are: each hold once, with its slices.

    A kernel that differs from the declaration, or does not say, waits; so does one of which points are not judged or a
    breach is not over, and one whose recorders fell silent, of which `silent` is a sentence.
    """
    version, held = promotion.version, dict[str, set[str]]()
    for directive in decisions.directives:
        own = directive.contract == contract.name and directive.is_about(version)
        if own and directive.kind is DirectiveKind.HOLD_PROMOTION:
            held.setdefault(directive.reason, set()).add(directive.slice)
    reasons = [f"{', '.join(sorted(slices))}: {reason}" for reason, slices in held.items()]
    found = [kernel for kernel in kernels if (kernel.role, kernel.version) == ("inference", version)]
    if not found and promotion.position.stage is not Stage.OFFLINE_CI:
        others = listed([kernel.version for kernel in kernels if kernel.role == "inference"])
        reasons.append(f"no inference kernel has reported by this name{f'; seen are {others}' * bool(others)}")
    reasons += [said for kernel in found for said in unlike_declared(contract.kernels, kernel, kernels)]
    reasons += [f"{row.what} of it are not judged: {row.text}" for row in missing if row.kernel_inference == version]
    for incident in incidents:
        open = incident.state in {IncidentState.BROKEN, IncidentState.UNPROVEN}
        if not open or incident.kernel_inference != version or incident.on not in OF_RECORDERS:
            continue
        said = f"is not over: {incident.headline}; {incident.state_text[:1].lower()}{incident.state_text[1:]}"
        if incident.only_route_left:
            said = f"is over but for its route: end it by {listed(lifting_commands(incident, decisions))}"
        reasons.append(f"incident {incident.id} of it {said}")
    return reasons + [silent] * bool(silent)
