"""The promotions of every contract: stepped with each evaluation, told by people, kept in the state file.

A step, its event and its evidence are in the transaction of the evaluation that caused it. How much traffic a version
gets is derived from where it is with every evaluation, so the decision table cannot disagree with it for longer.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from kc_otel.contract.model import Contract
from kc_otel.contract.slices import ALL
from kc_otel.judge.decisions.table import Canary, DecisionTable, DirectiveKind, remove_canary, set_canary
from kc_otel.judge.promotion import machine, orders
from kc_otel.judge.promotion.machine import Moved, share_of
from kc_otel.judge.promotion.promotion_state import MoveKind, OrderError, Promotion, PromotionMove, PromotionStatus
from kc_otel.judge.promotion.stages import Stage
from kc_otel.judge.verdict import Evaluation
from kc_otel.offline.gate.admission import admit
from kc_otel.offline.gate.evidence import step_evidence
from kc_otel.serve.announcements import Announcement
from kc_otel.serve.store.policy_store import PolicyStore
from kc_otel.serve.store.promotion_store import EvidenceRecord, PromotionStore
from kc_otel.serve.store.unit_of_work import UnitOfWork, unit_of_work

__all__ = ["Promotions"]

Key = tuple[str, str]
"""(contract, version)"""
_ENDED: Final = 20
"""Versions of a contract that were rolled back or replaced and are remembered: each limits requests in the decision
table, and a router looks at all of them."""
_LARGEST: Final = 32 * 1024 * 1024
"""Characters of evidence that is handed over; that of 100 clauses on 500 slices has some 17 million."""
_EVIDENT: Final = frozenset({MoveKind.ADVANCE, MoveKind.FORCE, MoveKind.ROLLBACK})


class Promotions:
    """Every kernel version that is on its way, was rolled back, or was replaced.

    Args:
        contracts: The contracts in force, by name.
        dry_run: Names of those that run dry: nothing of them is promoted, and nothing rolled back.
        connection: The state file.
        events: The log of events in it.
    """

    def __init__(
        self,
        contracts: Mapping[str, Contract],
        dry_run: Collection[str],
        connection: sqlite3.Connection,
        events: PolicyStore,
    ) -> None:
        self._contracts, self._dry_run = contracts, dry_run
        self._connection, self._events = connection, events
        self._store = PromotionStore(connection)
        self._known: dict[Key, Promotion] = {(one.contract, one.version): one for one in self._store.load()}
        self._latest: Mapping[str, Evaluation] = {}

    def all(self, contract: str | None = None) -> list[Promotion]:
        """The promotions of one contract or of every contract that is served, by contract, the newest first."""
        found = [one for one in self._known.values() if one.contract in self._contracts]
        mine = [one for one in found if contract in {None, one.contract}]
        return sorted(mine, key=lambda one: (one.contract, -one.started, one.version))

    def of(self, contract: str, version: str) -> Promotion:
        """One promotion.

        Raises:
            LookupError: If there is none.
        """
        self._contract(contract)
        found = self._known.get((contract, version))
        if found is None:
            raise LookupError(f"kernel {version} is not on its way under {contract}; start its promotion first")
        return found

    def evidence(self, contract: str, version: str) -> list[EvidenceRecord]:
        """What was kept of a version's steps, oldest first."""
        return self._store.evidence(contract, version)

    def latest(self, contract: str) -> Evaluation:
        """The last evaluation of a contract; one without verdicts before the first."""
        return self._latest.get(contract, Evaluation(0.0))

    def write(
        self, decisions: DecisionTable, evaluations: Mapping[str, Evaluation], now: float, unit: UnitOfWork
    ) -> tuple[DecisionTable, list[Announcement]]:
        """Step every promotion of some contracts with an evaluation.

        Args:
            decisions: The decision table after the evaluation.
            evaluations: The evaluation, by the contract's name; promotions of other contracts stay as they are.
            now: Its unix time, seconds.
            unit: The transaction.

        Returns:
            The decision table with every such version's share, and what is to be announced.
        """
        known = {key: one for key, one in self._known.items() if one.contract in evaluations}
        said: list[Announcement] = []
        for key, before in sorted(known.items()):
            if not self._acts(before.contract) or before.status is not PromotionStatus.RUNNING:
                continue
            contract = self._contracts[before.contract]
            own = evaluations[contract.name]
            after, moves = machine.advance(before, contract, own, _holds(decisions, contract.name))
            known[key] = after
            if after != before:
                self._store.save(after)
            said += self._moved(contract, before, moves, own, now)
            if any(move.after.stage is Stage.FULL for move in moves):
                said += self._replace_others(known, contract, after, now)
        unit.on_commit(lambda: self._adopt(known, evaluations))
        return self._shares(decisions, known, evaluations, now), said

    def _adopt(self, known: dict[Key, Promotion], evaluations: Mapping[str, Evaluation]) -> None:
        others = {key: one for key, one in self._known.items() if one.contract not in evaluations}
        self._known, self._latest = {**others, **known}, {**self._latest, **evaluations}

    def start(self, contract: str, version: str, by: str, now: float) -> list[Announcement]:
        """A person starts a version on its way, for the first time or again.

        Raises:
            LookupError: If there is no such contract.
            OrderError: If it, or another version of the contract, is on its way already.
        """
        found = self._contract(contract)
        if not by.strip():
            raise OrderError("say who starts it; it is kept")
        for other in self.all(contract):
            on_its_way = other.status is PromotionStatus.RUNNING and other.position.stage is not Stage.FULL
            if other.version != version and on_its_way:
                raise OrderError(f"{other.version} is on its way, in {other.position}; one version goes at a time")
        previous = self._known.get((contract, version))
        failing = self.latest(contract).fails(version)
        return self._put(found, previous, machine.begin(found, version, by, now, previous=previous, failing=failing))

    def admit(self, contract: str, version: str, record: Mapping[str, Any], by: str, now: float) -> list[Announcement]:
        """Take the evidence of the offline stage in.

        Raises:
            LookupError: If the version is not on its way.
            OrderError: If the evidence does not open the gate.
        """
        before, found = self.of(contract, version), self._contract(contract)
        if (size := len(json.dumps(record))) > _LARGEST:
            raise OrderError(f"the evidence has {size:,} characters; at most {_LARGEST:,} are kept")
        after = admit(before, found, record)
        message = f"{by} hands over the evidence that the offline gate was open for {version}"
        return self._tell(before, after, "evidence", message, now, by=by, record=record)

    def tell(
        self, contract: str, version: str, order: str, by: str, why: str, now: float, *, stage: Stage | None = None,
        position: str = "",
    ) -> list[Announcement]:  # fmt: skip
        """A person, or their program, decides something about a version.

        Args:
            contract: metadata.name.
            version: Short fingerprint of the inference kernel version.
            order: approve, hold, resume, force, rollback, hook or confirm.
            by: Who.
            why: Their reason.
            now: Unix time, seconds.
            stage: Stage to approve or to force it into.
            position: Position that the hook before it has been run for.

        Raises:
            LookupError: If the version is not on its way.
            OrderError: If that cannot be done.
        """
        before, found = self.of(contract, version), self._contract(contract)
        reason = f": {why}" if why.strip() else ""
        if order in {"approve", "force"} and stage is None:
            raise OrderError(f"name the stage to {order}")
        match order:
            case "approve":
                assert stage is not None
                after, said = orders.approve(before, found, stage, by), f"lets {version} into {stage}"
            case "hold":
                after, said = orders.hold(before, by, why, now), f"holds {version} in {before.position}"
            case "resume":
                after, said = orders.resume(before), f"lets {version} go on"
            case "hook":
                after, said = orders.hook(before), f"confirms each step of {version} from now on"
            case "confirm":
                after, said = orders.confirm(before, position), f"confirms the step of {version} to {position}"
            case "force":
                assert stage is not None
                return self._put(found, before, orders.force(before, found, stage, by, why, self.latest(contract), now))
            case "rollback":
                return self._put(found, before, orders.roll_back(before, by, why, now))
            case _:
                raise OrderError(f"{order!r} is no order")
        return self._tell(before, after, order, f"{by} {said}{reason}", now, by=by, why=why)

    def _tell(
        self, before: Promotion, after: Promotion, order: str, message: str, now: float, *, by: str, why: str = "",
        record: Mapping[str, Any] | None = None,
    ) -> list[Announcement]:  # fmt: skip
        """Keep what changes nothing about where a version is."""
        if after == before:
            return []
        data: dict[str, Any] = {"kernel_inference": after.version, "order": order, "by": by, "why": why}
        with unit_of_work(self._connection) as unit:
            self._store.save(after)
            if record is not None:
                data["evidence"] = self._store.keep(after.contract, after.version, "offline gate", record, now)
            data["message"] = message
            self._events.record_event(after.contract, "promotion", data, now)
            known = {**self._known, (after.contract, after.version): after}
            unit.on_commit(lambda: self._adopt(known, self._latest))
        return [_announced(after, "info", message)]

    def _put(self, contract: Contract, before: Promotion | None, moved: Moved) -> list[Announcement]:
        after, moves = moved
        known = {**self._known, (contract.name, after.version): after}
        with unit_of_work(self._connection) as unit:
            unit.on_commit(lambda: self._adopt(known, self._latest))
            self._store.save(after)
            for gone in self._too_old(known, contract.name):
                self._store.forget(gone)
                del known[gone.contract, gone.version]
            said = self._moved(contract, before or after, moves, self.latest(contract.name), moves[0].at)
            if after.position.stage is Stage.FULL and after.status is PromotionStatus.RUNNING:
                said += self._replace_others(known, contract, after, moves[0].at)
        return said

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
            if move.kind in _EVIDENT and not (move.kind is MoveKind.ADVANCE and move.before.stage is Stage.OFFLINE_CI):
                record = step_evidence(contract, before, move, evaluation.verdicts, now)
                label = f"{move.kind} from {move.before} to {move.after}"
                kept = self._store.keep(contract.name, before.version, label, record, now)
            data = {
                "kernel_inference": before.version, "order": move.kind.value, "from": str(move.before),
                "to": str(move.after), "share": move.after.share, "by": move.by, "why": move.why, "evidence": kept,
                "missing": list(move.decision.missing), "message": move.message,
            }  # fmt: skip
            self._events.record_event(contract.name, "promotion", data, now)
            severity = "warning" if move.kind in {MoveKind.ROLLBACK, MoveKind.FORCE} else "info"
            said.append(_announced(before, severity, move.message))
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
        own = [one for one in known.values() if one.contract == contract and one.status is not PromotionStatus.RUNNING]
        return sorted(own, key=lambda one: -one.started)[_ENDED:]

    def _shares(
        self, decisions: DecisionTable, known: Mapping[Key, Promotion], of: Collection[str], now: float
    ) -> DecisionTable:
        shares: dict[Key, Canary] = {}
        for key, promotion in known.items():
            if (share := share_of(promotion)) is not None:
                shares[key] = Canary(key[0], ALL, key[1], share, promotion.reason, promotion.entered)
        for old in decisions.canaries:
            key = (old.contract, old.version)
            if old.contract in of and self._acts(old.contract) and old.slice == ALL and key not in shares:
                decisions = remove_canary(decisions, *key, ALL, now=now)
        for (contract, _), wanted in sorted(shares.items()):
            if self._acts(contract) and wanted not in decisions.canaries:
                decisions = replace(set_canary(decisions, wanted), at=now)
        return decisions

    def _acts(self, contract: str) -> bool:
        return contract in self._contracts and contract not in self._dry_run

    def _contract(self, name: str) -> Contract:
        if name not in self._contracts:
            raise LookupError(f"no contract {name!r}; there are {', '.join(self._contracts)}")
        return self._contracts[name]


def _holds(decisions: DecisionTable, contract: str) -> list[str]:
    """Why promotion waits, each reason once with the slices that it is about."""
    found: dict[str, set[str]] = {}
    for one in decisions.directives:
        if one.contract == contract and one.kind is DirectiveKind.HOLD_PROMOTION:
            found.setdefault(one.reason, set()).add(one.slice)
    return [f"{', '.join(sorted(slices))}: {reason}" for reason, slices in found.items()]


def _announced(promotion: Promotion, severity: str, message: str) -> Announcement:
    attributes = {"kc.contract": promotion.contract, "kc.kernel.inference": promotion.version}
    return Announcement(severity, f"{promotion.contract}: {message}", attributes)
