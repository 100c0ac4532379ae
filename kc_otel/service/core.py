"""One tick: verdicts, policy, decisions, webhooks, and what of them must survive, in one transaction.

    OTLP -> evaluator -> verdicts -> policy -> transitions -+-> outbox
                                                            +-> decision table
                                                            +-> events, log records

Nothing is announced that is not also written: a crash either repeats a tick or never sees it.
"""

from __future__ import annotations

import logging
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any, Final

from kc_otel.contract.model import Contract
from kc_otel.escalation.alerts import PolicyState, Transition, What
from kc_otel.escalation.body import alert_body, encode, summary
from kc_otel.escalation.outbox import Outbox
from kc_otel.escalation.policy import advance, retire
from kc_otel.escalation.store import PolicyStore
from kc_otel.evaluator.evaluator import Evaluator
from kc_otel.evaluator.store import EvaluatorStore, StoreError
from kc_otel.evaluator.verdict import Status, Verdict
from kc_otel.otlp.sink import Outcome
from kc_otel.routing.store import DecisionStore
from kc_otel.routing.table import DecisionTable, apply, forget, resume
from kc_otel.service.history import CellHistory, Change
from kc_otel.service.rounds import Rounds
from kc_otel.service.state import StateError, transaction

__all__ = ["Core"]

_log: Final = logging.getLogger(__name__)

Announce = Callable[[str, str, Mapping[str, str]], None]
"""(severity, message, attributes) of something that changed."""


class Core:
    """Everything that the evaluator process knows and decides. One thread; `now` is unix time in seconds.

    Args:
        contracts: Contracts to judge, names unique.
        connection: The state file; the core owns the transactions.
        external_url: How a person reaches the API, for links in webhooks.
        now: Time of the start.
        announce: Told of every change, after it has been written.
    """

    def __init__(
        self,
        contracts: Sequence[Contract],
        connection: sqlite3.Connection,
        *,
        external_url: str,
        now: float,
        announce: Announce = lambda _severity, _message, _attributes: None,
    ) -> None:
        self.contracts = {contract.name: contract for contract in contracts}
        self.external_url = external_url
        self.announce = announce
        self.evaluated_at: float | None = None
        self.tick_seconds = 0.0
        self._connection = connection
        with transaction(connection):
            self.evaluator = Evaluator(contracts)
            self._evaluator_store = EvaluatorStore(connection)
            self._evaluator_store.restore(self.evaluator)
            self.events = PolicyStore(connection)
            self.outbox = Outbox(connection)
            self._decisions = DecisionStore(connection)
            self.history = CellHistory(
                connection, {contract.name: contract.observability.long_window for contract in contracts}
            )
            self.rounds = Rounds()
            self.decisions: DecisionTable = self._decisions.load()
            self.policies: dict[str, PolicyState] = {name: self.events.load(name) for name in self.contracts}
            self._retire(now)

    def metrics(self, request: Any) -> Outcome:
        """Take an ExportMetricsServiceRequest."""
        return self.evaluator.ingest_metrics(request, time.time())

    def traces(self, request: Any) -> Outcome:
        """Take an ExportTraceServiceRequest."""
        return self.evaluator.ingest_traces(request, time.time())

    def logs(self, request: Any) -> Outcome:  # noqa: ARG002 - the receiver's interface
        """Logs are not ours; they are accepted, so that a Collector's pipeline does not retry, and dropped."""
        return Outcome()

    def tick(self, now: float) -> None:
        """Evaluate every cell, and carry out what follows.

        Raises:
            StateError: If the state cannot be written. Nothing has changed then, and the next tick makes up for it.
        """
        started = time.perf_counter()
        verdicts = self.evaluator.evaluate(now)
        try:
            with transaction(self._connection):
                changes = self.history.write(verdicts)
                said = [self._changed(change, now) for change in changes if not _first_silence(change)]
                policies, decisions, transitions = self._judge(verdicts, now)
                said += [self._escalated(transition) for transition in transitions]
                self._evaluator_store.save(self.evaluator)
        except (sqlite3.DatabaseError, StoreError) as error:
            self._evaluator_store.rolled_back()
            msg = f"the state cannot be written, so nothing is decided: {error}"
            raise StateError(msg) from error
        self._evaluator_store.committed(self.evaluator)
        self.policies, self.decisions = policies, decisions
        self.history.adopt(verdicts)
        for name in self.contracts:
            self.rounds.add(name, now, [verdict for verdict in verdicts if verdict.cell.contract == name])
        self.evaluated_at, self.tick_seconds = now, time.perf_counter() - started
        for severity, message, attributes in said:
            _log.info("%s", message)
            self.announce(severity, message, attributes)

    def resume(self, contract: str, slice: str | None, by: str, why: str, now: float) -> int:
        """A person lifts routes; returns how many.

        Raises:
            LookupError: If there is no such route.
            ValueError: If nobody or no reason is named.
        """
        before = self.decisions
        after = resume(before, contract, slice, by, why, now)
        lifted = len(before.routes) - len(after.routes)
        where = "every slice" if slice is None else f"slice {slice}"
        with transaction(self._connection):
            self._decisions.save(after)
            self.events.record_event(
                contract,
                "resumed",
                {"slice": slice, "by": by, "why": why, "message": f"{by} resumed {where}: {why}"},
                now,
            )
        self.decisions = after
        return lifted

    def firing(self) -> Counter[tuple[str, str, str, str]]:
        """Alerts that fire, by (contract, clause, slice, severity)."""
        return Counter(
            (name, alert.cell.clause, alert.cell.slice, alert.severity)
            for name, state in self.policies.items()
            for alert in state.firing
        )

    def acting(self) -> Counter[tuple[str, str, str, str]]:
        """Actions of the alerts that fire, by (contract, clause, slice, action)."""
        return Counter(
            (name, alert.cell.clause, alert.cell.slice, str(action))
            for name, state in self.policies.items()
            for alert in state.firing
            for action in alert.actions
        )

    def _judge(
        self, verdicts: Sequence[Verdict], now: float
    ) -> tuple[dict[str, PolicyState], DecisionTable, list[Transition]]:
        """What the policies make of the verdicts: written, but not yet in force."""
        policies: dict[str, PolicyState] = {}
        decisions, happened = self.decisions, list[Transition]()
        for name, contract in self.contracts.items():
            own = [verdict for verdict in verdicts if verdict.cell.contract == name]
            invalid = self.evaluator.invalid_input(name, now, contract.observability.window)
            policies[name], transitions = advance(contract, self.policies[name], own, invalid, now)
            if policies[name] != self.policies[name]:
                self.events.save(policies[name], now)
            self.events.record(transitions)
            self._enqueue(contract, transitions, now)
            decisions = apply(decisions, transitions, contract, now)
            happened += transitions
        if decisions.version != self.decisions.version:
            self._decisions.save(decisions)
        return policies, decisions, happened

    def _enqueue(self, contract: Contract, transitions: Sequence[Transition], now: float) -> None:
        """One message per endpoint and step, with every alert that fired or resolved in this tick."""
        targets = {
            str(action.target)
            for transition in transitions
            for action in transition.actions
            if action.kind == "webhook"
        }
        for target in sorted(targets):
            wanted = [t for t in transitions if any(a.kind == "webhook" and a.target == target for a in t.actions)]
            for _, group in groupby(wanted, key=lambda transition: (transition.step, transition.what)):
                body = alert_body(contract, list(group), receiver=target, external_url=self.external_url)
                self.outbox.enqueue(target, contract.name, encode(body), now)

    def _escalated(self, transition: Transition) -> tuple[str, str, Mapping[str, str]]:
        severity = transition.severity if transition.what is What.FIRING else "info"
        attributes = _attributes(self.contracts[transition.contract], transition.verdict)
        return severity, summary(transition), attributes | {"kc.severity": transition.severity}

    def _changed(self, change: Change, now: float) -> tuple[str, str, Mapping[str, str]]:
        verdict = change.verdict
        cell, contract = verdict.cell, self.contracts[verdict.cell.contract]
        before = change.before.value if change.before else "new"
        message = f"{cell.clause} on {cell.slice}: {before} -> {verdict.status.value}: {verdict.reason}"
        self.events.record_event(
            contract.name,
            "verdict",
            {
                "clause": cell.clause,
                "slice": cell.slice,
                "kernel_train": cell.kernel_train,
                "kernel_inference": cell.kernel_inference,
                "status": verdict.status.value,
                "before": change.before.value if change.before else None,
                "message": message,
            },
            now,
        )
        severity = "warning" if verdict.status is Status.FAIL else "info"
        return severity, message, _attributes(contract, verdict)

    def _retire(self, now: float) -> None:
        """Contracts that are no longer served leave nothing firing and nothing routed."""
        for name in self.events.contracts():
            if name not in self.contracts:
                _, transitions = retire(self.events.load(name), now)
                self.events.record(transitions)
                self.events.forget(name)
                self.decisions = forget(self.decisions, name, now)
        self._decisions.save(self.decisions)


def _first_silence(change: Change) -> bool:
    """A cell that nobody has ever reported to is not news."""
    return change.before is None and change.verdict.status is Status.NO_DATA


def _attributes(contract: Contract, verdict: Verdict) -> dict[str, str]:
    cell = verdict.cell
    return {
        "kc.contract": cell.contract,
        "kc.contract.version": str(contract.metadata.version),
        "kc.contract.hash": contract.hash,
        "kc.clause": cell.clause,
        "kc.slice": cell.slice,
        "kc.kernel.train": cell.kernel_train,
        "kc.kernel.inference": cell.kernel_inference,
        "kc.verdict.status": verdict.status.value,
    }
