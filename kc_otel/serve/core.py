"""One tick: verdicts, policy, decisions, webhooks, and what of them must survive, in one transaction.

    OTLP -> evaluator -> verdicts -> policy -> transitions -+-> notices -> outbox
                                                            +-> decision table
                                                            +-> events, log records

What people decide (acknowledge, silence, pin, resume) is written the same way: with its event, before it is in force.
Nothing is announced that is not also written: a crash either repeats a tick or never sees it.
"""

from __future__ import annotations

import logging
import sqlite3
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from kc_otel.contract.model import Contract
from kc_otel.contract.plain_text import plain
from kc_otel.contract.words import place
from kc_otel.judge.decisions.table import DecisionTable, resume
from kc_otel.judge.escalation.alert_lifecycle import edge
from kc_otel.judge.escalation.alerts import PolicyState, What
from kc_otel.judge.escalation.escalate import Escalation, EscalationState, ended_silence, escalate
from kc_otel.judge.escalation.message_groups import AT_ONCE, GroupTiming, IncidentMessage
from kc_otel.judge.escalation.notices import Notice, NoticeReason
from kc_otel.judge.escalation.people import People
from kc_otel.judge.escalation.webhook_body import alert_body, encode
from kc_otel.judge.evaluator import Evaluator
from kc_otel.judge.incidents.incident import Diagnosis, Incident
from kc_otel.judge.incidents.incident_lifecycle import by_urgency, with_diagnosis, with_word
from kc_otel.judge.otlp.sink import ExportResult
from kc_otel.judge.verdict import Evaluation, Status
from kc_otel.serve.announcements import Announcement, cell_fields, of_change, of_notice, of_transition
from kc_otel.serve.gate_history import GateHistory
from kc_otel.serve.history import CellHistory, StatusChange
from kc_otel.serve.listeners import Listeners
from kc_otel.serve.promotions import Promotions
from kc_otel.serve.shards.shard_health import ShardSeen
from kc_otel.serve.store.escalation_store import EscalationStore
from kc_otel.serve.store.evaluator_store import EvaluatorStore
from kc_otel.serve.store.policy_store import PolicyStore
from kc_otel.serve.store.state_connection import StateConnection
from kc_otel.serve.store.state_disk import StateDisk
from kc_otel.serve.store.state_file import reading_state
from kc_otel.serve.store.unit_of_work import UnitOfWork, unit_of_work
from kc_otel.serve.store.write_ahead_log import WriteAheadLog
from kc_otel.serve.webhooks.outbox import Outbox

__all__ = ["Core"]

_log: Final = logging.getLogger(__name__)

Announce = Callable[[Announcement], None]
"""Told of something that changed."""
_REPEATED: Final = frozenset({NoticeReason.REMINDER, NoticeReason.SILENCE_ENDED})
_RENEWAL_SECONDS: Final = 60.0
_REFUSALS: Final = 20
"""Reasons for which points are refused that the log names."""
_NOTIFYING: Final = frozenset({"notify", "webhook"})


class Core:
    """Everything that the evaluator process knows and decides. One thread; `now` is unix time in seconds.

    Args:
        contracts: Contracts to judge, names unique.
        connection: The state file; the core owns the transactions.
        external_url: How a person reaches the API, for links in webhooks.
        now: Time of the start.
        announce: Told of every change, after it has been written.
        dry_run: Names of contracts that are escalated without any consequence: what they would do is only recorded.
        forgetful: Webhook endpoints that let go of an alert unless it is said again every minute: Alertmanagers.
        timing: How long webhooks wait for what belongs to them.
        worst: Files of worst sequences that may be shown.

    Raises:
        DamagedStateError: If the state file holds what no evaluator has written.
        StateError: If it cannot be written.
    """

    def __init__(
        self,
        contracts: Sequence[Contract],
        connection: StateConnection,
        *,
        external_url: str,
        now: float,
        announce: Announce = lambda _announcement: None,
        dry_run: Collection[str] = (),
        forgetful: Collection[str] = (),
        timing: GroupTiming = AT_ONCE,
        worst: Iterable[Path] = (),
    ) -> None:
        self.contracts = {contract.name: contract for contract in contracts}
        self.dry_run = frozenset(dry_run)
        self.listeners = Listeners()
        self.started_at = now
        self.external_url = external_url
        self.otlp_port = 4318  # until it listens
        self.worst = tuple(worst)
        self.announce = announce
        self.log: WriteAheadLog | None = None
        self.forget: Callable[[int], None] = lambda _position: None
        """Told up to which position of the write-ahead log all is in the state, on disk."""
        self.shards: tuple[ShardSeen, ...] = ()
        """How its shards are; empty where streams are here."""
        self.resize: Callable[[int], Awaitable[None]] | None = None
        """Has another number of them; None where streams are here."""
        self.evaluated_at: float | None = None
        self.tick_seconds = 0.0
        self._refusals: set[str] = set()
        self._connection = connection
        self.disk = StateDisk(connection)
        self._forgetful = frozenset(forgetful)
        self._timing = timing
        self._renewed_at = now
        self.evaluator = Evaluator(contracts)
        with unit_of_work(connection), reading_state(connection):
            self._evaluator_store = EvaluatorStore(connection)
            self._evaluator_store.restore(self.evaluator)
            self.position = self.saved_position = self._evaluator_store.position
            self.merged = self._evaluator_store.merged
            self.settled = dict(self.merged)
            self._committed = self.position, self.settled
            self.events = PolicyStore(connection)
            self.outbox = Outbox(connection)
            self._store = EscalationStore(connection, self.events)
            self.history = CellHistory(
                connection, {contract.name: contract.observability.long_window for contract in contracts}
            )
            self.gate_history = GateHistory()
            self.promotions = Promotions(self.contracts, self.dry_run, connection, self.events)
            for contract, message in self._store.last_messages(self.contracts, self.dry_run, now):
                self._enqueue(contract, [message], now)
            self.escalation = self._store.begin(self.contracts, self.dry_run, now)

    @property
    def decisions(self) -> DecisionTable:
        """The decision table that is published."""
        return self.escalation.decisions

    @property
    def policies(self) -> Mapping[str, PolicyState]:
        """Alerts, by the contract's name."""
        return self.escalation.policies

    @property
    def people(self) -> People:
        """Silences and acknowledgements in force."""
        return self.escalation.people

    def incidents(self, contract: str | None = None) -> tuple[Incident, ...]:
        """Incidents that last, the most urgent first; of one contract, or of all for None."""
        found = self.escalation.incidents
        names = found.keys() if contract is None else {contract} & found.keys()
        return tuple(sorted((one for name in names for one in found[name]), key=by_urgency))

    def past_incidents(self, contract: str | None, since: float, limit: int) -> tuple[Incident, ...]:
        """Incidents that ended at or after a Unix time, newest first; of one contract, or of all for None."""
        return self._store.incidents.over(contract, since, limit)

    def incident(self, id: str) -> Incident | None:
        """An incident by its id, whether it lasts or is over; None when there is none."""
        lasting = next((one for one in self.incidents() if one.id == id), None)
        return self._store.incidents.find(id) if lasting is None else lasting

    def evidence(self, id: str, digest: str) -> str | None:
        """Evidence of a diagnosis of an incident, JSON, by its SHA-256; None when there is none."""
        return self._store.incidents.evidence(id, digest)

    def whole(self, contract: str) -> Core:  # noqa: ARG002 - a tenant's view has only some
        """The core that an order about a contract is given to."""
        return self

    def metrics(self, request: Any, at: float | None = None) -> ExportResult:
        """Take an ExportMetricsServiceRequest, or its columns, that arrived at `at`, Unix seconds; None for now."""
        now = time.time() if at is None else at
        result = self.evaluator.ingest_metrics(request, now)
        if result.message and result.message not in self._refusals and len(self._refusals) < _REFUSALS:
            self._refusals.add(result.message)  # senders in Python do not read what they are answered
            _log.warning("not judged: %s; further ones are only counted", plain(result.message))
        return result

    def traces(self, request: Any) -> ExportResult:
        """Take an ExportTraceServiceRequest."""
        return self.evaluator.ingest_traces(request, time.time())

    def logs(self, request: Any) -> ExportResult:  # noqa: ARG002 - the receiver's interface
        """Logs are not ours; they are accepted, so that a Collector's pipeline does not retry, and dropped."""
        return ExportResult()

    @property
    def sync_seconds(self) -> float | None:
        """How long the disk took for the state at last, seconds; None where it was not asked."""
        return self.disk.seconds

    async def on_disk(self) -> None:
        """Wait until all that was decided is on the disk. Before it is, nobody outside is to act on it.

        Raises:
            StateError: If the disk does not take it.
        """
        await self.disk.synced()

    async def evaluate(self, now: float) -> None:
        """Evaluate every cell, and wait until what follows is on the disk.

        Raises:
            StateError: If the state cannot be written.
        """
        await self.disk.room()
        self.tick(now)
        await self.settle()

    async def settle(self) -> None:
        """Wait for the disk; then let go of what was kept elsewhere until it was on it.

        Raises:
            StateError: If the disk does not take it.
        """
        position, merged = self._committed
        await self.on_disk()
        self.saved_position, self.settled = position, merged
        self.forget(position)

    def tick(self, now: float) -> None:
        """Evaluate every cell, and carry out what follows. It is written when this returns, but not on the disk.

        Raises:
            StateError: If the state cannot be written. Nothing has changed then, and the next tick makes up for it.
        """
        started = time.perf_counter()
        try:
            announcements = self._evaluate(now)
        finally:
            self.tick_seconds = time.perf_counter() - started
        self.announce_all(announcements)

    def _evaluate(self, now: float) -> list[Announcement]:
        """One transaction of a tick. Returns what is to be announced."""
        evaluations = self.evaluator.evaluate(now)
        renews = abs(now - self._renewed_at) >= _RENEWAL_SECONDS
        announcements: list[Announcement] = []
        with unit_of_work(self._connection) as unit:
            state = self.escalation
            for name, evaluation in evaluations.items():
                with self._alone(name, "history", "its verdicts", unit):
                    announcements += self._judged(evaluation, name, now, unit)
                with self._alone(name, "escalation", "its policy", unit):
                    state, said = self._escalated(state, evaluation, name, now, unit, renews=renews)
                    announcements += said
            self._evaluator_store.save(
                self.evaluator, unit, lambda name: self._alone(name, "saving", "its state", unit)
            )
            self._evaluator_store.save_position(self.position)
            committed = self.position, dict(self.merged)
            if committed[1] != self._committed[1]:
                self._evaluator_store.save_merged(self.merged)
            unit.on_commit(lambda: self._adopt(state, now, committed))
        if renews:
            self._renewed_at = now
        return announcements

    @contextmanager
    def _alone(self, contract: str, stage: str, where: str, unit: UnitOfWork) -> Iterator[None]:
        """A step of one contract: where it fails, what held of this contract still holds, and the others go on."""
        errors: dict[str, Exception] = {}
        try:
            with unit.apart(self._connection):
                yield
        except sqlite3.Error:  # the disk's fault is everybody's
            raise
        except Exception as error:  # noqa: BLE001 - one contract's fault is not the others'
            errors[where] = error
        self.evaluator.faults.report(contract, stage, errors)

    def _judged(self, evaluation: Evaluation, name: str, now: float, unit: UnitOfWork) -> list[Announcement]:
        """Write a contract's verdicts. Returns what is to be announced."""
        changes = self.history.write({name: evaluation}, unit)
        unit.on_commit(lambda: self.gate_history.add(name, evaluation))
        return [self._changed(change, now) for change in changes if not _first_silence(change)]

    def _escalated(
        self, before: EscalationState, evaluation: Evaluation, name: str, now: float, unit: UnitOfWork, *, renews: bool
    ) -> tuple[EscalationState, list[Announcement]]:
        """Carry out what a contract's verdicts lead to. Returns what holds from now on, and what is to be announced."""
        contract = self.contracts[name]
        invalid = self.evaluator.invalid_input(name, now, contract.observability.window)
        dry_run = name in self.dry_run
        step = escalate(contract, before, evaluation, invalid, now, dry_run=dry_run, timing=self._timing)
        decisions, moved = self.promotions.write(step.state.decisions, {name: evaluation}, now, unit)
        step = replace(step, state=replace(step.state, decisions=decisions))
        announcements = self._write(contract, before, step, now)
        if renews:
            self._renew(contract, step.state, now)
        return step.state, announcements + moved

    def resume(self, contract: str, slice: str | None, by: str, why: str, now: float) -> int:
        """A person lifts routes; returns how many.

        Raises:
            LookupError: If there is no such route.
            ValueError: If nobody or no reason is named.
        """
        before = self.decisions
        after = resume(before, contract, slice, by, why, now)
        where = "every slice" if slice is None else f"slice {slice}"
        said = {"slice": slice, "by": by, "why": why, "message": f"{by} resumed {where}: {why}"}
        self.amend(contract, "resumed", said, now, decisions=after)
        return len(before.routes) - len(after.routes)

    def amend(
        self,
        contract: str,
        kind: str,
        said: Mapping[str, Any],
        now: float,
        *,
        decisions: DecisionTable | None = None,
        people: People | None = None,
        endpoint: str | None = None,
    ) -> None:
        """Put in force what a person decided, once it is written together with its event.

        Args:
            contract: metadata.name.
            kind: Kind of the event.
            said: Its data, with `message`, `by` and `why`.
            now: Unix time, seconds.
            decisions: The new decision table; None leaves it as it is.
            people: The new silences and acknowledgements; None leaves them as they are.
            endpoint: One that webhooks are sent to again; None for none.

        Raises:
            StateError: If it cannot be written. Nothing has changed then.
        """
        before = self.escalation
        after = replace(
            before,
            decisions=decisions or before.decisions,
            people=people or before.people,
            incidents={**before.incidents, contract: with_word(before.incidents.get(contract, ()), kind, said, now)},
        )
        with unit_of_work(self._connection) as unit:
            self._store.save(before, after)
            self.events.record_event(contract, kind, said, now)
            if endpoint is not None:
                self.outbox.enable(endpoint)
            unit.on_commit(lambda: setattr(self, "escalation", after))
        self.announce_all([Announcement("info", f"{contract}: {said['message']}", {"kc.contract": contract})])

    def diagnose(self, one: Incident, found: Diagnosis, evidence: str, now: float) -> None:
        """Keep what was found out about an incident, whether it lasts or is over, once it is written.

        Args:
            one: The incident.
            found: What was found out.
            evidence: What it rests on, JSON; its SHA-256 is in `found`.
            now: Unix time, seconds.

        Raises:
            StateError: If it cannot be written. Nothing has changed then.
        """
        after = with_diagnosis(one, found)
        lasting = self.escalation.incidents.get(one.contract, ())
        incidents = tuple(after if each.id == one.id else each for each in lasting)
        state = replace(self.escalation, incidents={**self.escalation.incidents, one.contract: incidents})
        message = f"{found.by} on incident {one.id}: {found.text}"
        said = {"incident": one.id, "slice": found.slice, "by": found.by, "message": message}
        with unit_of_work(self._connection) as unit:
            self._store.incidents.diagnosed(after, found.evidence, evidence)
            self.events.record_event(one.contract, found.kind, said, now)
            unit.on_commit(lambda: setattr(self, "escalation", state))
        self.announce_all([Announcement("info", f"{one.contract}: {message}", {"kc.contract": one.contract})])

    def firing(self) -> Counter[tuple[str, str, str, str]]:
        """Alerts that fire, by (contract, clause, slice, severity)."""
        return Counter(
            (name, alert.cell.clause, alert.cell.slice, alert.severity)
            for name, state in self.policies.items()
            for alert in state.firing
        )

    def acting(self) -> Counter[tuple[str, str, str, str]]:
        """Actions of the alerts that fire, by (contract, clause, slice, action); of contracts that run dry, none."""
        return Counter(
            (name, alert.cell.clause, alert.cell.slice, str(action))
            for name, state in self.policies.items()
            if name not in self.dry_run
            for alert in state.firing
            for action in alert.actions
        )

    def announce_all(self, announcements: Iterable[Announcement]) -> None:
        """Say what has been written."""
        for one in announcements:
            _log.info("%s", one.message, extra={"attributes": one.attributes})
            self.announce(one)

    def _adopt(self, state: EscalationState, now: float, committed: tuple[int, dict[str, int]]) -> None:
        self.escalation, self.evaluated_at, self._committed = state, now, committed

    def _write(
        self, contract: Contract, before: EscalationState, escalation: Escalation, now: float
    ) -> list[Announcement]:
        """Write an evaluation: what holds, its events, its webhooks. Returns what is to be announced."""
        self._store.save(before, escalation.state)
        self._store.incidents.close(escalation.resolved)
        people = escalation.state.people
        self.events.record(escalation.transitions, dry_run=self.dry_run, people=people)
        for silence in escalation.ended_silences:
            self.events.record_event(silence.contract, "unsilenced", ended_silence(silence), now)
        for pin in escalation.ended_pins:
            message = f"the pin of {place(pin.slice)} to {pin.kernel} by {pin.by} has come to its end"
            self.events.record_event(pin.contract, "unpinned", {"slice": pin.slice, "message": message}, now)
        self._enqueue(contract, escalation.messages, now)
        announcements = [
            of_transition(one, contract, dry_run=contract.name in self.dry_run)
            for one in escalation.transitions
            if not people.silencing(one.cell, now)
        ]
        again = (one for one in escalation.notices if one.reason in _REPEATED)
        return announcements + [self._repeat(one, now) for one in again if _notifies(one)]

    def _enqueue(self, contract: Contract, messages: Sequence[IncidentMessage], now: float) -> None:
        for one in messages:
            body = alert_body(
                contract,
                one.alerts,
                receiver=one.endpoint,
                external_url=self.external_url,
                reason=one.reason.value,
                incident=one.incident,
                lasting=one.lasting,
                kernels=self.evaluator.kernels(contract.name) if contract.name in self.contracts else (),
            )
            self.outbox.enqueue(one.endpoint, contract.name, encode(body), now)

    def _renew(self, contract: Contract, state: EscalationState, now: float) -> None:
        """Tell endpoints that forget which of a contract's alerts still fire, of those that they were told of."""
        groups, policy = state.groups[contract.name], state.policies[contract.name]
        for target in self._forgetful:
            told = {fingerprint for one in groups if one.endpoint == target for fingerprint in one.told}
            firing = [edge(one, What.FIRING, now) for one in policy.firing if one.fingerprint in told]
            if firing:
                body = alert_body(contract, firing, receiver=target, external_url=self.external_url)
                self.outbox.renew(target, contract.name, encode(body), now)

    def _repeat(self, notice: Notice, now: float) -> Announcement:
        """Write that an alert is said again."""
        transition = notice.transition
        announcement = of_notice(notice, self.contracts[transition.contract])
        data = {
            **cell_fields(transition.cell),
            "fingerprint": transition.fingerprint,
            "actions": [action.written for action in transition.actions if action.kind in _NOTIFYING],
            "message": announcement.message,
        }
        self.events.record_event(transition.contract, notice.reason.value, data, now)
        return announcement

    def _changed(self, change: StatusChange, now: float) -> Announcement:
        """Write that a cell has another status."""
        contract = self.contracts[change.verdict.cell.contract]
        announcement = of_change(change, contract)
        data = {
            **cell_fields(change.verdict.cell),
            "status": change.verdict.status.value,
            "before": change.before and change.before.value,
            "message": announcement.message,
        }
        self.events.record_event(contract.name, "verdict", data, now)
        return announcement


def _first_silence(change: StatusChange) -> bool:
    """A cell that nobody has ever reported to is not news."""
    return change.before is None and change.verdict.status is Status.NO_DATA


def _notifies(notice: Notice) -> bool:
    return any(action.kind in _NOTIFYING for action in notice.transition.actions)
