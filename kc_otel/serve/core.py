"""One tick: verdicts, policy, decisions, webhooks, and what of them must survive, in one transaction.

    OTLP -> evaluator -> verdicts -> policy -> edges of alerts -+-> messages -> outbox
                                                                +-> decision table
                                                                +-> events, log records

People's decisions are written the same way, with their event, before they take effect. Nothing is announced that is not
also written: a crash either repeats a tick or never sees it.
"""

from __future__ import annotations

import logging
import sqlite3
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kc_otel.contract.model import Contract
from kc_otel.contract.plain_text import plain
from kc_otel.contract.words import NOTIFYING, place
from kc_otel.judge.decisions import TRAIN_KERNEL, DecisionTable
from kc_otel.judge.escalation.alerts import Alert, People, PolicyState
from kc_otel.judge.escalation.escalate import (
    AT_ONCE,
    Escalation,
    EscalationState,
    GroupTiming,
    IncidentMessage,
    MessageReason,
    ended_silence,
    escalate,
)
from kc_otel.judge.escalation.webhook_body import alert_body, encode
from kc_otel.judge.evaluator import Evaluator
from kc_otel.judge.incidents.incident import (
    OF_RECORDERS,
    Diagnosis,
    Incident,
    IncidentState,
    actions_taken,
    lifting_commands,
)
from kc_otel.judge.incidents.incident_lifecycle import by_urgency, with_diagnosis, with_word
from kc_otel.judge.otlp.requests import ExportResult
from kc_otel.judge.plain_json import not_later
from kc_otel.judge.promotion.gate_evidence import SectionProblems, unchecked_offline
from kc_otel.judge.recorders import KernelInfo, kernel_names
from kc_otel.judge.series import SeriesKey
from kc_otel.judge.verdict import Causes, Cell, Evaluation, Status
from kc_otel.serve.durable_sink import Inbox, TrafficRecording
from kc_otel.serve.history import CellHistory, EventLog
from kc_otel.serve.listeners import Listeners
from kc_otel.serve.promotions import Promotions
from kc_otel.serve.store.escalation_store import EscalationStore
from kc_otel.serve.store.evaluator_store import EvaluatorStore
from kc_otel.serve.store.state_file import StateConnection, UnitOfWork, reading_state, unit_of_work
from kc_otel.serve.traffic import traffic_seen
from kc_otel.serve.webhooks.outbox import Outbox

if TYPE_CHECKING:
    from kc_otel.serve.shards import ShardSeen

_log: Final = logging.getLogger(__name__)

_POLICY: Final = "escalation"
"""Stage of a tick that carries a contract's policy out."""
_BETWEEN_TICKS: Final = 60.0
"""Seconds after an evaluation within which the next one follows, and what is noted meanwhile happens."""
_MAX_LOGGED_REFUSALS: Final = 20
"""Reasons for which points are refused that the log names."""
_NOT_TOLD_ACTIONS: Final = NOTIFYING | {"would-fire"}
"""Actions that a message does not tell of: it is one, or they were not done."""


class Core:
    """Everything that the evaluator process knows and decides. One thread; `now` is unix time in seconds.

    The core owns the transactions of `connection`, the state file. Contracts of `dry_run` are escalated without
    consequences: their actions are only recorded. `external_url` is how a person reaches the API, for links; `worst`
    are files of sequences that may be shown; `offline_problems` checks the offline section of the evidence that a
    promotion is given.
    """

    def __init__(
        self,
        contracts: Sequence[Contract],
        connection: StateConnection,
        *,
        external_url: str,
        now: float,
        dry_run: Collection[str] = (),
        timing: GroupTiming = AT_ONCE,
        worst: Iterable[Path] = (),
        offline_problems: SectionProblems = unchecked_offline,
    ) -> None:
        self.contracts = {contract.name: contract for contract in contracts}
        self.dry_run = frozenset(dry_run)
        self.started_at = now
        self.external_url = external_url
        self.otlp_port = 4318  # until it listens
        self.worst = tuple(worst)
        self.recording: TrafficRecording | None = None
        """Recording of arrivals and evaluations, for `kc-otel replay`."""
        self.shards: tuple[ShardSeen, ...] = ()
        """State of the shards; empty where streams are in this process."""
        self.evaluated_at: float | None = None
        self._clocks = time.time(), time.perf_counter()
        self.tick_seconds = 0.0
        self.causes: Mapping[Cell, Causes] = {}
        self._refusals: set[str] = set()
        self.connection = connection
        self._timing = timing
        self.evaluator = Evaluator(contracts)
        with unit_of_work(connection), reading_state(connection):
            self._evaluator_store = EvaluatorStore(connection)
            self._evaluator_store.restore(self.evaluator)
            self._evaluated_before = max(self.evaluator.judged_at, 0.0)
            self.merged: dict[str, int] = self._evaluator_store.values.load("merged", dict[str, int], {})
            """Number of the last batch in the state of each shard, by its name; and `shards`, how many there are."""
            self.settled: dict[str, int] = dict(self.merged)
            self.inbox = Inbox(connection)
            self.events = EventLog(connection)
            self.outbox = Outbox(connection)
            self._store = EscalationStore(connection, self.events)
            self.past = self._store.incidents
            """Incidents as they were written last, with those that are over."""
            self.history = CellHistory(
                connection, {contract.name: contract.observability.long_window for contract in contracts}
            )
            self.promotions = Promotions(
                self.contracts, self.dry_run, connection, self.events, offline_problems, self.evaluator
            )
            for contract, message in self._store.last_messages(self.contracts, self.dry_run, now):
                self._enqueue(contract, [message], DecisionTable(), now)
            self.escalation = self._store.begin(self.contracts, self.dry_run, now)
            self.listeners = Listeners(now, self._store.routers(self.contracts))

    @property
    def age(self) -> float:
        """Seconds since the last evaluation, also of a process before this one; since 1970 if there was none."""
        return max(0.0, time.time() - (self.evaluated_at or self._evaluated_before))

    @property
    def seen_at(self) -> float:
        """Unix time of the last evaluation; that of the start before the first."""
        return self.evaluated_at or self.started_at

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
        by_contract = self.escalation.incidents
        names = by_contract.keys() if contract is None else {contract} & by_contract.keys()
        return tuple(sorted((incident for name in names for incident in by_contract[name]), key=by_urgency))

    def window(self, contract: str) -> float:
        """Seconds of a contract's window; 0 where the contract is served no more."""
        return self.contracts[contract].observability.window if contract in self.contracts else 0.0

    def incident(self, id: str) -> Incident | None:
        """An incident by its id, whether it lasts or is over; None when there is none."""
        lasting = next((incident for incident in self.incidents() if incident.id == id), None)
        return self.past.find(id) if lasting is None else lasting

    def metrics(self, request: Any, at: float | None = None) -> ExportResult:
        """Take an ExportMetricsServiceRequest, or its columns, that arrived at `at`, Unix seconds; None for now."""
        now = time.time() if at is None else at
        result = self.evaluator.ingest_metrics(request, now)
        if result.message and result.message not in self._refusals and len(self._refusals) < _MAX_LOGGED_REFUSALS:
            self._refusals.add(result.message)  # senders in Python do not read what they are answered
            _log.warning("not judged: %s; further ones are only counted", plain(result.message))
        return result

    async def aclose(self) -> None:
        """Close the state file, once nobody waits for the disk any more."""
        await self.inbox.settle()
        await self.connection.aclose()

    def turn(self) -> AbstractAsyncContextManager[object]:
        """Hold the exclusive turn of one order: it is on the disk when the context ends, or raises a StateError."""
        return self.connection.turn()

    async def evaluate(self, now: float | None = None) -> None:
        """Evaluate every cell in a turn, at a Unix time or, for None, once those before have had their turn."""
        async with self.connection.turn():
            self.tick(self.clock() if now is None else now)

    def clock(self) -> float:
        """Unix time in seconds. Where it was set forward, nobody was silent meanwhile: silence counts from now on."""
        before, steadily = self._clocks
        self._clocks = now, steady = time.time(), time.perf_counter()
        if now - before > steady - steadily + _BETWEEN_TICKS:
            self.evaluator.listen_anew(now)
        return now

    def tick(self, now: float) -> None:
        """Evaluate every cell in a turn, or wait for the disk outside of one; a StateError has changed nothing."""
        started = time.perf_counter()
        try:
            self._commit_tick(now)
        finally:
            self.tick_seconds = time.perf_counter() - started

    def _commit_tick(self, now: float) -> None:
        """Run a tick's transaction."""
        if now < self.evaluator.judged_at:
            self._set_back(now, self.evaluator.judged_at + _BETWEEN_TICKS)
        evaluations = self.evaluator.evaluate(now, self.decisions)
        with unit_of_work(self.connection) as unit:
            state = self.escalation
            for name, evaluation in evaluations.items():
                with self._alone(name, "history", "its verdicts", unit):
                    self._write_verdicts(evaluation, name, now, unit)
                with self._alone(name, _POLICY, "its policy", unit):
                    state = self._escalated(state, evaluation, name, now, unit)
            self._evaluator_store.save(
                self.evaluator, unit, lambda name: self._alone(name, "saving", "its state", unit)
            )
            self._store.save_routers(self.listeners.routers)
            self.inbox.take_out(unit)
            merged = dict(self.merged)
            self._evaluator_store.values.save("merged", merged)

            def adopt() -> None:
                self.escalation, self.evaluated_at, self.settled = state, now, merged

            unit.on_commit(adopt)
        self.causes = {cell: cause for evaluation in evaluations.values() for cell, cause in evaluation.causes.items()}
        if self.recording is not None:
            self.recording.evaluated(now)

    def _set_back(self, now: float, ahead: float) -> None:
        """The clock was set back: nothing that is remembered happened later than now."""
        state = not_later(self.escalation, now, ahead)
        with unit_of_work(self.connection) as unit:
            self._store.save(self.escalation, state)
            self.promotions.set_back(now, ahead, unit)
            unit.on_commit(lambda: setattr(self, "escalation", state))
            unit.on_commit(lambda: self.listeners.set_back(now, ahead))

    def fails(self, contract: str) -> bool:
        """Return whether a contract's policy is not carried out because of an error."""
        return self.evaluator.faults.fails(contract, _POLICY)

    @contextmanager
    def _alone(self, contract: str, stage: str, where: str, unit: UnitOfWork) -> Iterator[None]:
        """A step of one contract: where it fails, what held of this contract still holds, and the others go on."""
        errors: dict[str, Exception] = {}
        try:
            with unit.apart(self.connection):
                yield
        except sqlite3.Error:  # the disk's fault is everybody's
            raise
        except Exception as error:  # noqa: BLE001 - one contract's fault is not the others'
            errors[where] = error
        self.evaluator.faults.report(contract, stage, errors)

    def _write_verdicts(self, evaluation: Evaluation, name: str, now: float, unit: UnitOfWork) -> None:
        """Write a contract's verdicts. A cell that nobody has ever reported to is no news."""
        for verdict, before in self.history.write(name, evaluation, unit):
            if before is not None or verdict.status is not Status.NO_DATA:
                self.events.changed(verdict, before, self._names(name), now, unit)

    def _escalated(
        self, before: EscalationState, evaluation: Evaluation, name: str, now: float, unit: UnitOfWork
    ) -> EscalationState:
        """Carry out what a contract's verdicts lead to. Returns what holds from now on."""
        contract = self.contracts[name]
        step = escalate(
            contract, before, evaluation, dry_run=name in self.dry_run, timing=self._timing,
            traffic=traffic_seen(self, name, before, now),
            promote=partial(self.promotions.write, name, evaluation, now, unit),
        )  # fmt: skip
        self._owe(name, step.state.incidents.get(name, ()))
        self._write(contract, before, step, now, unit)
        return step.state

    def _owe(self, name: str, incidents: Iterable[Incident]) -> None:
        """Have the recorders that measure what is broken show, each for itself, when it is over."""
        before = self.evaluated_at or self._evaluated_before  # what begins now began after that
        broken: dict[SeriesKey, float] = {}
        kept: set[SeriesKey] = set()
        for incident in incidents:
            for cell in incident.cells if incident.on in OF_RECORDERS else ():
                where = Cell(name, cell.clause, cell.slice, *incident.pair)
                if (key := self.evaluator.series_of_cell(where)) is not None:
                    kept.add(key)
                    if cell.until is None and not cell.held:
                        broken[key] = min(cell.since, before, broken.get(key, cell.since))
        self.evaluator.states[name].recorders.owe(broken, kept)

    def inference_versions(self, contract: str) -> frozenset[str]:
        """Versions of the inference kernel that have reported; "" where there is one, which routers need not name."""
        versions = frozenset(self.evaluator.inference_versions(contract))
        return versions | {""} if len(versions) == 1 else versions

    def amend(
        self,
        contract: str,
        words: Mapping[str, Mapping[str, Any]],
        now: float,
        *,
        decisions: DecisionTable | None = None,
        people: People | None = None,
    ) -> None:
        """Put in force what a person decided, once it is written with its events; None leaves things as they are.

        `words` has the data of each event by its kind, with `message`, `by` and `why`. If it cannot be written
        (StateError) nothing has changed.
        """
        before = self.escalation
        incidents = before.incidents.get(contract, ())
        for kind, data in words.items():
            incidents = with_word(incidents, kind, data, now)
        after = replace(
            before,
            decisions=decisions or before.decisions,
            people=people or before.people,
            incidents={**before.incidents, contract: incidents},
        )
        with unit_of_work(self.connection) as unit:
            self._store.save(before, after)
            for kind, data in words.items():
                self.events.record(contract, kind, data, now, unit)
            unit.on_commit(lambda: setattr(self, "escalation", after))

    def diagnose(self, incident: Incident, diagnosis: Diagnosis, evidence: str, now: float) -> None:
        """Attach a diagnosis to an incident, open or over; its evidence is JSON, whose SHA-256 is in it."""
        after = with_diagnosis(incident, diagnosis)
        lasting = self.escalation.incidents.get(incident.contract, ())
        incidents = tuple(after if other.id == incident.id else other for other in lasting)
        state = replace(self.escalation, incidents={**self.escalation.incidents, incident.contract: incidents})
        message = f"{diagnosis.by} on incident {incident.id}: {diagnosis.text}"
        data = {"incident": incident.id, "slice": diagnosis.slice, "by": diagnosis.by, "message": message}
        with unit_of_work(self.connection) as unit:
            self.past.diagnosed(after, diagnosis.evidence, evidence)
            self.events.record(incident.contract, diagnosis.kind, data, now, unit)
            unit.on_commit(lambda: setattr(self, "escalation", state))

    def firing(self, contract: str | None = None) -> list[Alert]:
        """Alerts that fire; of one contract, or of all for None."""
        return [alert for name, state in self.policies.items() if contract in {None, name} for alert in state.firing]

    def actions(self, alert: Alert) -> list[str]:
        """Actions of an alert's step; of one that fires, a route only until a person has lifted it."""
        of = alert.cell.contract, alert.cell.slice, alert.cell.kernel_inference
        routed = any((route.contract, route.slice, route.avoid) == of for route in self.decisions.routes)
        lifted = alert.fires and not routed and alert.cell.contract not in self.dry_run
        return [str(action) for action in alert.actions if not lifted or action.target != TRAIN_KERNEL]

    def _write(
        self, contract: Contract, before: EscalationState, escalation: Escalation, now: float, unit: UnitOfWork
    ) -> None:
        """Write an evaluation: its state, events and webhooks."""
        self._store.save(before, escalation.state)
        self.past.close(escalation.resolved)
        people = escalation.state.people
        names = self._names(contract.name)
        lasting = escalation.state.incidents[contract.name]
        incidents = {incident.key: incident for incident in (*escalation.resolved, *lasting)}
        for edge in escalation.edges:
            silenced = [silence.id for silence in people.silencing(edge.cell, now)]
            self.events.transition(
                edge, names, incidents.get(edge.incident), dry_run=contract.name in self.dry_run, silenced=silenced,
                unit=unit,
            )  # fmt: skip
        was_over = {incident.id for incident in before.incidents.get(contract.name, ()) if incident.only_route_left}
        left = [incident for incident in lasting if incident.only_route_left and incident.id not in was_over]
        for incident in (*escalation.resolved, *left):
            cells = (Cell(contract.name, cell.clause, cell.slice, *incident.pair) for cell in incident.cells)
            muted = all(people.silencing(cell, now) for cell in cells)
            self.events.over(incident, names, now, None if muted else unit)
        for silence in escalation.ended_silences:
            self.events.record(silence.contract, "unsilenced", ended_silence(silence), now)
        for pin in escalation.ended_pins:
            message = f"the pin of {place(pin.slice)} to {pin.kernel} by {pin.by} has ended"
            self.events.record(pin.contract, "unpinned", {"slice": pin.slice, "message": message}, now)
        self._enqueue(contract, escalation.messages, escalation.state.decisions, now)
        for alert in escalation.state.policies[contract.name].firing:
            reason = escalation.told_again.get(alert.fingerprint)
            if reason is not None and any(action.kind in NOTIFYING for action in alert.actions):
                self.events.repeated(alert, reason, names, now, unit)

    def _enqueue(
        self, contract: Contract, messages: Sequence[IncidentMessage], decisions: DecisionTable, now: float
    ) -> None:
        for message in messages:
            incident = message.incident
            done = () if incident is None else actions_taken(incident, decisions)
            body = alert_body(
                contract,
                message,
                at=now,
                external_url=self.external_url,
                lifting=() if incident is None else lifting_commands(incident, decisions),
                done=[action.text for action in done if action.kind not in _NOT_TOLD_ACTIONS],
                kernels=self._kernels(contract.name),
            )
            over = incident is None or incident.recovered or incident.state is IncidentState.RESOLVED
            unproven = message.reason is MessageReason.UNFOLLOWED or (incident is not None and incident.ended_unrefuted)
            ends = body["status"] == "resolved" and over and not unproven
            self.outbox.enqueue(message.endpoint, contract.name, encode(body), now, group=body["groupKey"], ends=ends)

    def _kernels(self, contract: str) -> tuple[KernelInfo, ...]:
        """Kernels that have reported; none of a contract that is served no more."""
        return self.evaluator.kernels(contract) if contract in self.contracts else ()

    def _names(self, contract: str) -> dict[tuple[str, str], str]:
        return kernel_names(self._kernels(contract))
