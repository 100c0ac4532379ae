"""Since when every cell has its status, and its recent past for a glance; the first survives a restart."""

from __future__ import annotations

import sqlite3
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from kc_otel.evaluator.verdict import Cell, Status, Verdict
from kc_otel.service.models import finite

__all__ = ["CellHistory", "Change", "Glance"]

_GLANCES: Final = 120

Glance = tuple[float, float | None, float | None, float | None, int]
"""(time, estimate, lower, upper, status code) of one evaluation."""


@dataclass(frozen=True, slots=True)
class Change:
    """A cell whose status is not what it was."""

    verdict: Verdict
    before: Status | None


@dataclass(slots=True)
class _Line:
    verdict: Verdict
    since: float
    glances: deque[Glance] = field(default_factory=lambda: deque(maxlen=_GLANCES))


class CellHistory:
    """The newest verdict of every cell and how long it has stood."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        connection.execute(
            "CREATE TABLE IF NOT EXISTS cell_status (contract TEXT, clause TEXT, slice TEXT, kernel_train TEXT, "
            "kernel_inference TEXT, status TEXT NOT NULL, since REAL NOT NULL, "
            "PRIMARY KEY (contract, clause, slice, kernel_train, kernel_inference)) WITHOUT ROWID"
        )
        rows = connection.execute(
            "SELECT contract, clause, slice, kernel_train, kernel_inference, status, since FROM cell_status"
        )
        self._remembered = {Cell(*row[:5]): (Status(row[5]), float(row[6])) for row in rows}
        self._lines: dict[Cell, _Line] = {}

    def update(self, verdicts: Iterable[Verdict]) -> list[Change]:
        """Take in an evaluation of every cell; cells that are gone are forgotten. Returns what changed."""
        changes, lines = [], {}
        for verdict in verdicts:
            line = self._lines.get(verdict.cell)
            if line is None:
                status, since = self._remembered.get(verdict.cell, (None, verdict.at))
            else:
                status, since = line.verdict.status, line.since
            if status is not verdict.status:
                changes.append(Change(verdict, status))
                since = verdict.at
                self._save(verdict.cell, verdict.status, since)
            fresh = line or _Line(verdict, since)
            fresh.verdict, fresh.since = verdict, since
            fresh.glances.append(
                (
                    verdict.at,
                    finite(verdict.estimate),
                    finite(verdict.lower),
                    finite(verdict.upper),
                    verdict.status.code,
                )
            )
            lines[verdict.cell] = fresh
        for cell in (self._lines.keys() | self._remembered.keys()) - lines.keys():
            self._forget(cell)
        self._lines, self._remembered = lines, {}
        return changes

    def cells(self) -> list[tuple[Verdict, float, list[Glance]]]:
        """(verdict, since, glances) of every cell, in the cells' order."""
        return [(line.verdict, line.since, list(line.glances)) for _, line in sorted(self._lines.items())]

    def _save(self, cell: Cell, status: Status, since: float) -> None:
        self._connection.execute(
            "INSERT OR REPLACE INTO cell_status VALUES (?, ?, ?, ?, ?, ?, ?)", (*_key(cell), status.value, since)
        )

    def _forget(self, cell: Cell) -> None:
        self._connection.execute(
            "DELETE FROM cell_status WHERE contract = ? AND clause = ? AND slice = ? AND kernel_train = ? "
            "AND kernel_inference = ?",
            _key(cell),
        )


def _key(cell: Cell) -> tuple[str, str, str, str, str]:
    return cell.contract, cell.clause, cell.slice, cell.kernel_train, cell.kernel_inference
