"""Alerts, routes, incidents and messages between two evaluations, in SQLite. Nothing here commits.

What is of one contract is saved apart from the others', which stay while it changes.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from kc_otel.contract.model import Contract
from kc_otel.contract.words import listed, place
from kc_otel.judge.decisions import DecisionTable, apply, parted, with_contract
from kc_otel.judge.escalation.alerts import People, PolicyState, Silence, retire
from kc_otel.judge.escalation.escalate import EscalationState, IncidentMessage, MessageGroup, last_messages
from kc_otel.judge.incidents.incident import Incident, IncidentState
from kc_otel.judge.incidents.incident_lifecycle import by_urgency
from kc_otel.judge.plain_json import read_json, to_json
from kc_otel.serve.history import EventLog
from kc_otel.serve.listeners import RouterReport
from kc_otel.serve.store.values import Values

_log: Final = logging.getLogger(__name__)

_DECISIONS = "decision table"
_DRY_RUN = "contracts that run dry"
_PEOPLE = "people"
_ASIDE = "orders of contracts that are not served"
_SERVED = "contracts that are served"
_ROUTERS = "routers"
_MAX_ORDERS: Final = 20
"""Orders of a contract that the message of its removal and of its return names."""
_ALERTS, _GROUPS = "alerts", "message groups"


class EscalationStore:
    """Keeps all of it in the state file: incidents in tables, the rest as values by their names."""

    def __init__(self, connection: sqlite3.Connection, events: EventLog) -> None:
        self.incidents = IncidentStore(connection)
        self._values, self._events = Values(connection), events

    def begin(self, contracts: Mapping[str, Contract], dry_run: frozenset[str], now: float) -> EscalationState:
        """Return the state that was last written, as it is of these contracts.

        Routes, pins and silences of a contract that is not served wait until it is served again; nothing else of it is
        left. One whose dry-run mode changes starts over, except for routes: only a person gives traffic back to a
        kernel that was found broken.
        """
        ran_dry = self._values.load(_DRY_RUN, frozenset[str], frozenset())
        gone, changed = self._served().keys() - contracts.keys(), (ran_dry ^ dry_run) & contracts.keys()
        decisions, people = self._orders(contracts, gone, now)
        for name in [*sorted(gone), *sorted(changed)]:
            edges = retire(self._policy(name), now)
            for edge in edges:
                self._events.transition(edge, dry_run=name in ran_dry)
            for kind in (_ALERTS, _GROUPS):
                self._values.write(name, kind, {"": None})
            if name in gone:
                continue
            begins = name in dry_run
            message = "the contract runs dry from now on" if begins else "the contract no longer runs dry"
            self._events.record(name, "dry-run", {"on": begins, "message": message}, now)
            decisions = apply(decisions, edges if begins else (), contracts[name], now)
        self.incidents.end_others(contracts, now)
        for contract in contracts.values():
            decisions = with_contract(decisions, contract, now)
        state = EscalationState(
            policies={name: self._policy(name) for name in contracts},
            decisions=decisions,
            people=people,
            incidents={name: self.incidents.lasting(name) for name in contracts},
            groups={name: self._groups(name) for name in contracts},
        )
        self.save(EscalationState(incidents=state.incidents), state)
        self._values.save(_DRY_RUN, sorted(dry_run & contracts.keys()))
        self._values.save(_SERVED, {name: served.model_dump_json(by_alias=True) for name, served in contracts.items()})
        return state

    def _orders(self, contracts: Collection[str], gone: Collection[str], now: float) -> tuple[DecisionTable, People]:
        """Return what was ordered of the contracts that are served; say what waits, and what is in force again."""
        people = self._values.load(_PEOPLE, People, People())
        decisions = self._values.load(_DECISIONS, DecisionTable, DecisionTable())
        aside, silences_aside = self._values.load(
            _ASIDE, tuple[DecisionTable, tuple[Silence, ...]], (DecisionTable(), ())
        )
        pins = tuple(pin for pin in aside.pins if pin.until is None or now < pin.until)
        before = replace(aside, pins=pins), tuple(silence for silence in silences_aside if now < silence.until)
        decisions, waiting = parted(decisions, before[0], contracts, now)
        silences = (*people.silences, *before[1])
        silent = tuple(silence for silence in silences if silence.contract not in contracts)
        self._values.save(_ASIDE, (waiting, silent))
        for (table, quiet), names, said in (
            ((waiting, silent), gone, "the contract is not served any more: until it is, {} out of force"),
            (before, contracts, "the contract is served again: {} in force again"),
        ):
            for name in sorted(names):
                orders = [f"the route of {place(route.slice)}" for route in table.routes if route.contract == name]
                orders += [f"the pin of {place(pin.slice)}" for pin in table.pins if pin.contract == name]
                orders += [f"the silence of {silence.where}" for silence in quiet if silence.contract == name]
                if orders:
                    verb = "are" if len(orders) > 1 else "is"
                    message = said.format(f"{listed(orders, _MAX_ORDERS)} {verb}")
                    self._events.record(name, "served", {"message": message}, now)
                    _log.warning("%s: %s", name, message)
        people = People(
            tuple(silence for silence in silences if silence.contract in contracts),
            tuple(ack for ack in people.acknowledgements if ack.contract in contracts),
        )
        self._values.save(_PEOPLE, people)  # also where nothing is left of it
        return decisions, people

    def last_messages(
        self, contracts: Mapping[str, Contract], dry_run: frozenset[str], now: float
    ) -> Iterator[tuple[Contract, IncidentMessage]]:
        """Yield the last messages of alerts no longer followed, with their contract; call before `begin`."""
        for name, text in self._served().items():
            if name in contracts.keys() - dry_run:
                continue
            try:
                contract = Contract.model_validate_json(text)
            except ValueError:
                _log.warning("%s: its contract cannot be read any more, and webhooks do not say that it is gone", name)
                continue
            lasting = self.incidents.lasting(name)
            incidents = lasting if name in contracts else [ended(incident, now) for incident in lasting]
            for message in last_messages(self._groups(name), retire(self._policy(name), now), incidents):
                yield contract, message

    def routers(self, contracts: Collection[str]) -> dict[str, dict[str, RouterReport]]:
        """Return the routers of these contracts that were written last, by contract and id."""
        found = self._values.load(_ROUTERS, dict[str, dict[str, RouterReport]], {})
        return {name: known for name, known in found.items() if name in contracts}

    def save_routers(self, routers: Mapping[str, Mapping[str, RouterReport]]) -> None:
        """Write what routers last said."""
        self._values.save(_ROUTERS, routers)

    def save(self, before: EscalationState, after: EscalationState) -> None:
        """Write what differs."""
        known = _values_of(before)
        for (kind, contract), value in _values_of(after).items():
            if value != known.get((kind, contract)):
                self._values.save(kind, value, contract)
        for name, incidents in after.incidents.items():
            self.incidents.save(before.incidents.get(name, ()), incidents)

    def _policy(self, contract: str) -> PolicyState:
        return self._values.load(_ALERTS, PolicyState, PolicyState(contract), contract)

    def _groups(self, contract: str) -> tuple[MessageGroup, ...]:
        return self._values.load(_GROUPS, tuple[MessageGroup, ...], (), contract)

    def _served(self) -> dict[str, str]:
        return self._values.load(_SERVED, dict[str, str], {})


def _values_of(state: EscalationState) -> dict[tuple[str, str], Any]:
    """Values by kind and contract."""
    return {
        (_DECISIONS, ""): state.decisions,
        (_PEOPLE, ""): state.people,
        **{(_ALERTS, name): policy for name, policy in state.policies.items()},
        **{(_GROUPS, name): groups for name, groups in state.groups.items()},
    }


def ended(incident: Incident, now: float) -> Incident:
    """An incident that is over because nobody follows it any more."""
    return replace(incident.ended(now), state=IncidentState.RESOLVED, resolved_at=now)


class IncidentStore:
    """Incidents by id; of those that are over the last `keep`."""

    def __init__(self, connection: sqlite3.Connection, *, keep: int = 1000) -> None:
        self._connection = connection
        self._keep = keep
        connection.execute(
            "CREATE TABLE IF NOT EXISTS incidents (id TEXT PRIMARY KEY, contract TEXT NOT NULL, resolved REAL, "
            "content TEXT NOT NULL) STRICT"
        )
        connection.execute("CREATE INDEX IF NOT EXISTS incidents_resolved ON incidents (resolved)")
        connection.execute(
            "CREATE TABLE IF NOT EXISTS diagnoses (incident TEXT NOT NULL, digest TEXT NOT NULL, "
            "evidence TEXT NOT NULL, PRIMARY KEY (incident, digest)) STRICT"
        )

    def save(self, before: Sequence[Incident], after: Sequence[Incident]) -> None:
        """Write those that are not what they were."""
        known = {incident.id: incident.outline for incident in before}
        self._write(incident for incident in after if known.get(incident.id) != incident.outline)

    def close(self, over: Sequence[Incident]) -> None:
        """Write those that are over."""
        self._write(over)
        if over:
            self._connection.execute(
                "DELETE FROM incidents WHERE resolved <= "
                "(SELECT resolved FROM incidents WHERE resolved IS NOT NULL ORDER BY resolved DESC LIMIT 1 OFFSET ?)",
                (self._keep,),
            )
            self._connection.execute("DELETE FROM diagnoses WHERE incident NOT IN (SELECT id FROM incidents)")

    def end_others(self, contracts: Collection[str], now: float) -> None:
        """End the open incidents of contracts that are no longer served."""
        open_ones = self._read("resolved IS NULL")
        self.close([ended(incident, now) for incident in open_ones if incident.contract not in contracts])

    def lasting(self, contract: str) -> tuple[Incident, ...]:
        """A contract's incidents that are not over, as they were written last."""
        return tuple(sorted(self._read("resolved IS NULL AND contract = ?", contract), key=by_urgency))

    def over(self, contract: str | None, since: float, limit: int) -> tuple[Incident, ...]:
        """Those that ended at or after a Unix time, newest first; of one contract, or of all for None."""
        where = "resolved >= ? AND contract = coalesce(?, contract) ORDER BY resolved DESC LIMIT ?"
        return self._read(where, since, contract, limit)

    def find(self, id: str) -> Incident | None:
        """Return an incident by its id, as last written; None if there is none."""
        return next(iter(self._read("id = ?", id)), None)

    def diagnosed(self, incident: Incident, digest: str, evidence: str) -> None:
        """Write an incident that has a new diagnosis, and its evidence; that of diagnoses that it lost is dropped."""
        self._write([incident])
        self._connection.execute("INSERT OR REPLACE INTO diagnoses VALUES (?, ?, ?)", (incident.id, digest, evidence))
        known = [diagnosis.evidence for diagnosis in incident.diagnoses]
        self._connection.execute(
            f"DELETE FROM diagnoses WHERE incident = ? AND digest NOT IN ({', '.join('?' * len(known))})",  # noqa: S608 - marks only
            (incident.id, *known),
        )

    def evidence(self, id: str, digest: str) -> str | None:
        """The evidence of one of an incident's diagnoses, JSON; None when there is none."""
        row = self._connection.execute(
            "SELECT evidence FROM diagnoses WHERE incident = ? AND digest = ?", (id, digest)
        ).fetchone()
        return None if row is None else str(row[0])

    def _read(self, where: str, *parameters: Any) -> tuple[Incident, ...]:
        rows = self._connection.execute(f"SELECT content FROM incidents WHERE {where}", parameters)  # noqa: S608 - our own
        return tuple(read_json(Incident, text) for (text,) in rows)

    def _write(self, incidents: Iterable[Incident]) -> None:
        self._connection.executemany(
            "INSERT OR REPLACE INTO incidents (id, contract, resolved, content) VALUES (?, ?, ?, ?)",
            [(incident.id, incident.contract, incident.resolved_at, to_json(incident)) for incident in incidents],
        )
