"""Policy state and the log of events, in SQLite.

Nothing here commits: the evaluator wraps a tick in one transaction, so that a state, the events it caused and the
webhooks it enqueued are kept together or not at all.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from kc_otel.judge.escalation.alerts import PolicyState, Transition, What
from kc_otel.judge.escalation.notices import People
from kc_otel.judge.escalation.webhook_body import summary
from kc_otel.judge.incidents.incident import Incident
from kc_otel.judge.plain_json import read_json, to_json

_DRY_RUN_KINDS: Final = {What.FIRING: "would-fire", What.RESOLVED: "would-resolve"}
_TABLES = (
    """CREATE TABLE IF NOT EXISTS policy_state (
        contract TEXT PRIMARY KEY,
        at REAL NOT NULL,
        state TEXT NOT NULL
    ) STRICT""",
    """CREATE TABLE IF NOT EXISTS events (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        at REAL NOT NULL,
        contract TEXT NOT NULL,
        kind TEXT NOT NULL,
        data TEXT NOT NULL
    ) STRICT""",
    "CREATE INDEX IF NOT EXISTS events_contract ON events (contract, id)",
    "CREATE INDEX IF NOT EXISTS events_rare ON events (id) WHERE kind <> 'verdict'",
)
# As bytes: text that is damaged cannot be read as text.
_EVENTS: Final = "SELECT id, at, CAST(contract AS BLOB), CAST(kind AS BLOB), CAST(data AS BLOB) FROM events"
_OF_CONTRACT: Final = "(:contract IS NULL OR contract = :contract)"


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened.

    `kind` is `firing` or `resolved` for alerts, `would-fire` or `would-resolve` for those of a contract that runs dry,
    `damaged` where it cannot be read any more; other boxes record kinds of their own. Ids count up; gaps are possible.
    """

    id: int
    at: float
    contract: str
    kind: str
    message: str
    data: dict[str, Any]


class PolicyStore:
    """Policy states by contract, and the log of the last `max_events` events."""

    def __init__(self, connection: sqlite3.Connection, *, max_events: int = 100_000) -> None:
        self._connection = connection
        self._max_events = max_events
        for statement in _TABLES:
            connection.execute(statement)

    def load(self, contract: str) -> PolicyState:
        """The contract's last saved state; an empty one for a contract that has none."""
        row = self._connection.execute("SELECT state FROM policy_state WHERE contract = ?", (contract,)).fetchone()
        return PolicyState(contract) if row is None else read_json(PolicyState, row[0])

    def contracts(self) -> tuple[str, ...]:
        """Names of contracts with a saved state; one that is no longer served should be retired and forgotten."""
        return tuple(
            name for (name,) in self._connection.execute("SELECT contract FROM policy_state ORDER BY contract")
        )

    def save(self, state: PolicyState, now: float) -> None:
        """Keep the state at a Unix time."""
        self._connection.execute(
            "INSERT INTO policy_state (contract, at, state) VALUES (?, ?, ?)"
            " ON CONFLICT (contract) DO UPDATE SET at = excluded.at, state = excluded.state",
            (state.contract, now, to_json(state)),
        )

    def forget(self, contract: str) -> None:
        """Drop the state of a contract that is no longer served; its events stay."""
        self._connection.execute("DELETE FROM policy_state WHERE contract = ?", (contract,))

    def record(
        self,
        transitions: Sequence[Transition],
        *,
        names: Mapping[tuple[str, str], str] | None = None,
        incidents: Mapping[tuple[str, str, str], Incident] = MappingProxyType({}),
        dry_run: Collection[str] = (),
        people: People | None = None,
    ) -> tuple[int, ...]:
        """Log what fired and resolved; returns the ids of the events.

        Args:
            transitions: In order.
            names: `kernel_names` of their contract; kernels without one are named by their fingerprints.
            incidents: Those of their contract, by `Incident.key`.
            dry_run: Names of the contracts that run dry: their actions are logged as `would-fire` and `would-resolve`.
            people: Silences in force; those that mute a transition are logged with it.
        """
        ids = []
        for transition in transitions:
            data = _details(transition, names or {}, incidents.get(transition.incident))
            kind = transition.what.value
            if transition.contract in dry_run:
                kind = _DRY_RUN_KINDS[transition.what]
                doing = (
                    f"; it would {', '.join(map(str, transition.actions))}" if transition.what is What.FIRING else ""
                )
                data |= {"dry_run": True, "message": f"dry run: {data['message']}{doing}"}
            elif people is not None and (muting := people.silencing(transition.cell, transition.at)):
                data["silenced"] = [silence.id for silence in muting]
            ids.append(self.record_event(transition.contract, kind, data, transition.at))
        return tuple(ids)

    def record_event(self, contract: str, kind: str, data: Mapping[str, Any], at: float) -> int:
        """Log anything else that belongs to a contract's history; returns the id of the event."""
        cursor = self._connection.execute(
            "INSERT INTO events (at, contract, kind, data) VALUES (?, ?, ?, ?)",
            (at, contract, kind, to_json(data)),
        )
        event_id = cursor.lastrowid
        assert event_id is not None  # an INSERT has just run on this cursor
        self._connection.execute("DELETE FROM events WHERE id <= ?", (event_id - self._max_events,))
        return event_id

    def events(self, contract: str | None = None, after_id: int = 0, limit: int = 100) -> tuple[Event, ...]:
        """Events with ids above `after_id`, oldest first; of one contract, or of all when None."""
        rows = self._connection.execute(
            f"{_EVENTS} WHERE id > :after AND {_OF_CONTRACT} ORDER BY id LIMIT :limit",
            {"after": after_id, "contract": contract, "limit": limit},
        )
        return tuple(map(_event, rows))

    def newest(self, contract: str | None = None, limit: int = 100, *, verdicts: bool = True) -> tuple[Event, ...]:
        """The last events, oldest first; of one contract, or of all when None; with or without changes of verdicts.

        Verdicts near a limit change often, and would push actions out of the list.
        """
        where = "WHERE" if verdicts else "INDEXED BY events_rare WHERE kind <> 'verdict' AND"
        rows = self._connection.execute(
            f"{_EVENTS} {where} {_OF_CONTRACT} ORDER BY id DESC LIMIT :limit", {"contract": contract, "limit": limit}
        )
        return tuple(map(_event, rows))[::-1]


def _event(row: tuple[int, float, bytes, bytes, bytes]) -> Event:
    """An event; nothing is decided by the past, so that one which is damaged is said to be and keeps no other back."""
    id, at, contract, kind, text = row
    try:
        data = json.loads(text)
        return Event(id, at, contract.decode(), kind.decode(), str(data.get("message", "")), data)
    except (ValueError, AttributeError, RecursionError):
        said = "what happened cannot be read any more: its row in the state file is damaged"
        return Event(id, at, contract.decode(errors="replace"), "damaged", said, {})


def _details(transition: Transition, names: Mapping[tuple[str, str], str], incident: Incident | None) -> dict[str, Any]:
    cell = transition.cell
    return {
        "message": summary(transition, names, incident),
        "clause": cell.clause,
        "slice": cell.slice,
        "kernel_train": cell.kernel_train,
        "kernel_inference": cell.kernel_inference,
        "on": transition.on,
        "severity": transition.severity,
        "started_at": transition.started_at,
        "actions": [action.written for action in transition.actions],
        "fingerprint": transition.fingerprint,
        "verdict": transition.verdict,
    }
