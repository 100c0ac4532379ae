"""What holds between two evaluations, and how it survives a restart. Nothing here commits.

The decision table in SQLite: one row, in the transaction of the evaluator's tick. Nothing here commits.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from dataclasses import replace

from kc_otel.contract.model import Contract
from kc_otel.judge.decisions.table import DecisionTable, apply, forget
from kc_otel.judge.escalation.notices import NotificationLog
from kc_otel.judge.escalation.people import People
from kc_otel.judge.escalation.policies import EscalationState
from kc_otel.judge.escalation.policy import retire
from kc_otel.serve.store.key_values import KeyValueStore
from kc_otel.serve.store.policy_store import PolicyStore

__all__ = ["DecisionStore", "EscalationStore"]


class EscalationStore:
    """Keeps all of it in the state file.

    Args:
        connection: The state file; its owner owns the transactions.
        events: Policies and events in the same file.
    """

    def __init__(self, connection: sqlite3.Connection, events: PolicyStore) -> None:
        self._events = events
        self._decisions = DecisionStore(connection)
        self._kept = KeyValueStore(connection)

    def begin(self, contracts: Mapping[str, Contract], dry_run: frozenset[str], now: float) -> EscalationState:
        """What held when the state was written last, without what belongs to contracts that are gone.

        Args:
            contracts: Contracts that are served from now on, by name.
            dry_run: Names of those that run dry.
            now: Unix time, seconds.
        """
        loaded = self._load(contracts)
        standing = self._changed_modes(self._without_the_gone(loaded, contracts, now), contracts, dry_run, now)
        # Books in any case: one that is missing later means that there were none yet, and that everything was said.
        self.save(replace(loaded, books={}), standing)
        self._kept.save("dry run", sorted(dry_run & contracts.keys()))
        return standing

    def save(self, before: EscalationState, after: EscalationState) -> None:
        """Write what differs."""
        for name, state in after.policies.items():
            if state != before.policies.get(name):
                self._events.save(state, max((alert.seen for alert in state.alerts), default=0.0))
        for name, book in after.books.items():
            if book != before.books.get(name):
                self._kept.save(f"book of {name}", book.to_json())
        if after.decisions != before.decisions:
            self._decisions.save(after.decisions)
        if after.would != before.would:
            self._kept.save("dry-run table", after.would.to_json())
        if after.people != before.people:
            self._kept.save("people", after.people.to_json())

    def _load(self, contracts: Mapping[str, Contract]) -> EscalationState:
        policies = {name: self._events.load(name) for name in contracts}
        books = {name: self._kept.load(f"book of {name}") for name in contracts}
        would, people = self._kept.load("dry-run table"), self._kept.load("people")
        return EscalationState(
            policies=policies,
            # A state from before there were reminders has no books: everything that fires was said then.
            books={
                name: NotificationLog.of(name, policies[name].firing)
                if book is None
                else NotificationLog.from_json(book)
                for name, book in books.items()
            },
            decisions=self._decisions.load(),
            would=DecisionTable() if would is None else DecisionTable.from_json(would),
            people=People() if people is None else People.from_json(people),
        )

    def _ran_dry(self) -> frozenset[str]:
        return frozenset(self._kept.load("dry run") or ())

    def _without_the_gone(
        self, standing: EscalationState, contracts: Mapping[str, Contract], now: float
    ) -> EscalationState:
        """Contracts that are no longer served leave nothing firing, routed, pinned or silenced."""
        decisions, would, people = standing.decisions, standing.would, standing.people
        for name in self._events.contracts():
            if name not in contracts:
                _, transitions = retire(self._events.load(name), now)
                self._events.record(transitions, dry_run=self._ran_dry())
                self._events.forget(name)
                self._kept.save(f"book of {name}", None)
                decisions, would = forget(decisions, name, now), forget(would, name, now)
        people = People(
            tuple(one for one in people.silences if one.contract in contracts),
            tuple(one for one in people.acknowledgements if one.contract in contracts),
        )
        return replace(standing, decisions=decisions, would=would, people=people)

    def _changed_modes(
        self, standing: EscalationState, contracts: Mapping[str, Contract], dry_run: frozenset[str], now: float
    ) -> EscalationState:
        """A contract that begins or ceases to run dry starts over: what it asked for until now ends, but for routes.

        Routes stay because only a person gives traffic back to a kernel that was found broken. Nobody is told of the
        alerts that end so: what broke is not mended.
        """
        ran_dry = self._ran_dry()
        for name in sorted((ran_dry ^ dry_run) & contracts.keys()):
            state, transitions = retire(standing.policies[name], now)
            self._events.record(transitions, dry_run=ran_dry)
            begins = name in dry_run
            message = "the contract runs dry from now on" if begins else "the contract no longer runs dry"
            self._events.record_event(name, "dry-run", {"on": begins, "message": message}, now)
            standing = replace(
                standing,
                policies={**standing.policies, name: state},
                books={**standing.books, name: NotificationLog(name)},
                decisions=apply(standing.decisions, transitions if begins else (), contracts[name], now),
                would=forget(standing.would, name, now),
            )
        return standing


class DecisionStore:
    """Keeps the decision table over restarts.

    Args:
        connection: The evaluator's connection; it owns the transactions.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        connection.execute(
            "CREATE TABLE IF NOT EXISTS decision_table ("
            " only INTEGER PRIMARY KEY CHECK (only = 1), version INTEGER NOT NULL, content TEXT NOT NULL) STRICT"
        )

    def load(self) -> DecisionTable:
        """The table that was saved last; an empty one of version 0 when there is none."""
        row = self._connection.execute("SELECT content FROM decision_table").fetchone()
        return DecisionTable() if row is None else DecisionTable.from_json(json.loads(row[0]))

    def save(self, table: DecisionTable) -> None:
        """Keep the table in place of the last one."""
        self._connection.execute(
            "INSERT INTO decision_table (only, version, content) VALUES (1, ?, ?)"
            " ON CONFLICT (only) DO UPDATE SET version = excluded.version, content = excluded.content",
            (table.version, json.dumps(table.to_json(), separators=(",", ":"), allow_nan=False)),
        )
