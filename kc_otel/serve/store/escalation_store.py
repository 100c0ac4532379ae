"""What the escalation remembers between two evaluations, in SQLite. Nothing here commits.

Alerts are saved by contract, because those of one contract change while the others' stay; the decision tables, the log
of notifications and what people decided are single values.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final, TypeVar

from kc_otel.contract.model import Contract
from kc_otel.judge.decisions.table import DecisionTable, apply, forget
from kc_otel.judge.escalation.alert_lifecycle import retire
from kc_otel.judge.escalation.escalate import EscalationState
from kc_otel.judge.escalation.message_groups import IncidentMessage, MessageGroup, last_messages
from kc_otel.judge.escalation.notices import NotificationLog
from kc_otel.judge.escalation.people import People
from kc_otel.judge.plain_json import read_json, to_json
from kc_otel.serve.store.incident_store import IncidentStore, ended
from kc_otel.serve.store.policy_store import PolicyStore

__all__ = ["EscalationStore", "KeyValueStore"]

_log: Final = logging.getLogger(__name__)
Value = TypeVar("Value")

_DECISIONS = "decision table"
_DRY_RUN_DECISIONS = "decision table of dry runs"
_DRY_RUN = "contracts that run dry"
_PEOPLE = "people"
_SERVED = "contracts that are served"


class KeyValueStore:
    """What must survive a restart and is too small for a table of its own.

    Args:
        connection: The state file; its owner owns the transactions.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        connection.execute(
            "CREATE TABLE IF NOT EXISTS key_values (name TEXT PRIMARY KEY, content TEXT NOT NULL) STRICT"
        )

    def load(self, name: str, kind: type[Value]) -> Value | None:
        """The value that was saved last; None when there is none."""
        row = self._connection.execute("SELECT content FROM key_values WHERE name = ?", (name,)).fetchone()
        return None if row is None else read_json(kind, row[0])

    def save(self, name: str, value: Any) -> None:
        """Keep a value in place of the last one; None keeps nothing."""
        if value is None:
            self._connection.execute("DELETE FROM key_values WHERE name = ?", (name,))
            return
        self._connection.execute(
            "INSERT INTO key_values (name, content) VALUES (?, ?)"
            " ON CONFLICT (name) DO UPDATE SET content = excluded.content",
            (name, to_json(value)),
        )


class EscalationStore:
    """Keeps all of it in the state file.

    Args:
        connection: The state file; its owner owns the transactions.
        events: Policies and events in the same file.

    Attributes:
        incidents: Those that last and those that are over, in the same file.
    """

    def __init__(self, connection: sqlite3.Connection, events: PolicyStore) -> None:
        self.incidents = IncidentStore(connection)
        self._events = events
        self._values = KeyValueStore(connection)

    def begin(self, contracts: Mapping[str, Contract], dry_run: frozenset[str], now: float) -> EscalationState:
        """What held when the state was written last, without what belongs to contracts that are gone.

        Args:
            contracts: Contracts that are served from now on, by name.
            dry_run: Names of those that run dry.
            now: Unix time, seconds.
        """
        loaded = self._load(contracts)
        state = self._changed_modes(self._without_the_gone(loaded, contracts, now), contracts, dry_run, now)
        self.save(loaded, state)
        self._values.save(_DRY_RUN, sorted(dry_run & contracts.keys()))
        self._values.save(_SERVED, {name: one.model_dump_json(by_alias=True) for name, one in contracts.items()})
        return state

    def last_messages(
        self, contracts: Mapping[str, Contract], dry_run: frozenset[str], now: float
    ) -> Iterator[tuple[Contract, IncidentMessage]]:
        """What is still to be said of alerts that nobody follows from now on, and of which contract; before `begin`.

        Args:
            contracts: Contracts that are served from now on, by name.
            dry_run: Names of those that run dry.
            now: Unix time, seconds.
        """
        followed = contracts.keys() - dry_run
        for name, text in (self._values.load(_SERVED, dict[str, str]) or {}).items():
            if name in followed:
                continue
            try:
                contract = Contract.model_validate_json(text)
            except ValueError:
                _log.warning("%s: its contract cannot be read any more, and webhooks do not say that it is gone", name)
                continue
            groups = self._values.load(_groups(name), tuple[MessageGroup, ...]) or ()
            _, resolved = retire(self._events.load(name), now)
            lasting = self.incidents.lasting(name)
            incidents = lasting if name in contracts else [ended(one, now) for one in lasting]
            for message in last_messages(groups, resolved, incidents):
                yield contract, message

    def save(self, before: EscalationState, after: EscalationState) -> None:
        """Write what differs."""
        for name, policy in after.policies.items():
            if policy != before.policies.get(name):
                self._events.save(policy, max((alert.seen for alert in policy.alerts), default=0.0))
        self._save_each(_notifications, before.notifications, after.notifications)
        self._save_each(_groups, before.groups, after.groups)
        if after.decisions != before.decisions:
            self._values.save(_DECISIONS, after.decisions)
        if after.dry_run_decisions != before.dry_run_decisions:
            self._values.save(_DRY_RUN_DECISIONS, after.dry_run_decisions)
        if after.people != before.people:
            self._values.save(_PEOPLE, after.people)
        for name, incidents in after.incidents.items():
            self.incidents.save(before.incidents.get(name, ()), incidents)

    def _save_each(self, key: Callable[[str], str], before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
        for name, value in after.items():
            if value != before.get(name):
                self._values.save(key(name), value)

    def _load(self, contracts: Mapping[str, Contract]) -> EscalationState:
        values = self._values
        return EscalationState(
            policies={name: self._events.load(name) for name in contracts},
            notifications={
                name: values.load(_notifications(name), NotificationLog) or NotificationLog(name) for name in contracts
            },
            decisions=values.load(_DECISIONS, DecisionTable) or DecisionTable(),
            dry_run_decisions=values.load(_DRY_RUN_DECISIONS, DecisionTable) or DecisionTable(),
            people=values.load(_PEOPLE, People) or People(),
            incidents={name: self.incidents.lasting(name) for name in contracts},
            groups={name: values.load(_groups(name), tuple[MessageGroup, ...]) or () for name in contracts},
        )

    def _ran_dry(self) -> frozenset[str]:
        return self._values.load(_DRY_RUN, frozenset[str]) or frozenset()

    def _without_the_gone(
        self, state: EscalationState, contracts: Mapping[str, Contract], now: float
    ) -> EscalationState:
        """Contracts that are no longer served leave nothing firing, routed, pinned or silenced."""
        decisions, dry_run_decisions, people = state.decisions, state.dry_run_decisions, state.people
        for name in self._events.contracts():
            if name not in contracts:
                _, transitions = retire(self._events.load(name), now)
                self._events.record(transitions, dry_run=self._ran_dry())
                self._events.forget(name)
                self._values.save(_notifications(name), None)
                self._values.save(_groups(name), None)
                decisions, dry_run_decisions = forget(decisions, name, now), forget(dry_run_decisions, name, now)
        self.incidents.end_others(contracts, now)
        people = People(
            tuple(one for one in people.silences if one.contract in contracts),
            tuple(one for one in people.acknowledgements if one.contract in contracts),
        )
        return replace(state, decisions=decisions, dry_run_decisions=dry_run_decisions, people=people)

    def _changed_modes(
        self, state: EscalationState, contracts: Mapping[str, Contract], dry_run: frozenset[str], now: float
    ) -> EscalationState:
        """A contract that begins or ceases to run dry starts over: what it asked for until now ends, but for routes.

        Routes stay because only a person gives traffic back to a kernel that was found broken.
        """
        ran_dry = self._ran_dry()
        for name in sorted((ran_dry ^ dry_run) & contracts.keys()):
            policy, transitions = retire(state.policies[name], now)
            self._events.record(transitions, dry_run=ran_dry)
            begins = name in dry_run
            message = "the contract runs dry from now on" if begins else "the contract no longer runs dry"
            self._events.record_event(name, "dry-run", {"on": begins, "message": message}, now)
            state = replace(
                state,
                policies={**state.policies, name: policy},
                notifications={**state.notifications, name: NotificationLog(name)},
                groups={**state.groups, name: ()},
                decisions=apply(state.decisions, transitions if begins else (), contracts[name], now),
                dry_run_decisions=forget(state.dry_run_decisions, name, now),
            )
        return state


def _notifications(contract: str) -> str:
    return f"notifications of {contract}"


def _groups(contract: str) -> str:
    return f"message groups of {contract}"
