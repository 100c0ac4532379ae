"""Incidents in the state file: those that last, and what is over, long after its events are dropped. Nothing commits.

An incident is written when it changes, not when its numbers do: a clause far above its limit is another number at every
evaluation. What is in memory has the newest ones, and what is over was written with its last.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from kc_otel.judge.incidents.incident import Incident, IncidentState
from kc_otel.judge.incidents.incident_lifecycle import by_urgency
from kc_otel.judge.plain_json import read_json, to_json

__all__ = ["IncidentStore", "ended"]


def ended(one: Incident, now: float) -> Incident:
    """An incident that is over because nobody follows it any more."""
    cells = tuple(replace(cell, until=now if cell.until is None else cell.until) for cell in one.cells)
    return replace(one, cells=cells, state=IncidentState.RESOLVED, resolved_at=now)


class IncidentStore:
    """Incidents by id.

    Args:
        connection: The state file; its owner owns the transactions.
        keep: Incidents that are over and kept; the oldest are dropped beyond.
    """

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
        known = {one.id: one.outline for one in before}
        self._write(one for one in after if known.get(one.id) != one.outline)

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
        """What lasts of contracts that are no longer served is over."""
        for (text,) in self._connection.execute("SELECT content FROM incidents WHERE resolved IS NULL").fetchall():
            one = read_json(Incident, text)
            if one.contract not in contracts:
                self.close([ended(one, now)])

    def lasting(self, contract: str) -> tuple[Incident, ...]:
        """A contract's incidents that are not over, as they were written last."""
        rows = self._connection.execute(
            "SELECT content FROM incidents WHERE resolved IS NULL AND contract = ?", (contract,)
        )
        return tuple(sorted((read_json(Incident, text) for (text,) in rows), key=by_urgency))

    def over(self, contract: str | None, since: float, limit: int) -> tuple[Incident, ...]:
        """Those that ended at or after a Unix time, newest first; of one contract, or of all for None."""
        rows = self._connection.execute(
            "SELECT content FROM incidents WHERE resolved >= :since"
            " AND (:contract IS NULL OR contract = :contract) ORDER BY resolved DESC LIMIT :limit",
            {"since": since, "contract": contract, "limit": limit},
        )
        return tuple(read_json(Incident, text) for (text,) in rows)

    def find(self, id: str) -> Incident | None:
        """One by its id, as it was written last; None when there is none."""
        row = self._connection.execute("SELECT content FROM incidents WHERE id = ?", (id,)).fetchone()
        return None if row is None else read_json(Incident, row[0])

    def diagnosed(self, one: Incident, digest: str, evidence: str) -> None:
        """Write an incident that has a new diagnosis, and its evidence; that of diagnoses that it lost is dropped."""
        self._write([one])
        self._connection.execute("INSERT OR REPLACE INTO diagnoses VALUES (?, ?, ?)", (one.id, digest, evidence))
        known = [each.evidence for each in one.diagnoses]
        self._connection.execute(
            f"DELETE FROM diagnoses WHERE incident = ? AND digest NOT IN ({', '.join('?' * len(known))})",  # noqa: S608 - marks only
            (one.id, *known),
        )

    def evidence(self, id: str, digest: str) -> str | None:
        """The evidence of one of an incident's diagnoses, JSON; None when there is none."""
        row = self._connection.execute(
            "SELECT evidence FROM diagnoses WHERE incident = ? AND digest = ?", (id, digest)
        ).fetchone()
        return None if row is None else str(row[0])

    def _write(self, incidents: Iterable[Incident]) -> None:
        self._connection.executemany(
            "INSERT OR REPLACE INTO incidents (id, contract, resolved, content) VALUES (?, ?, ?, ?)",
            [(one.id, one.contract, one.resolved_at, to_json(one)) for one in incidents],
        )
