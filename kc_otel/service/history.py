"""Since when every cell has its status, and its recent past for a glance; the first survives a restart."""

from __future__ import annotations

import sqlite3
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class _Line:
    verdict: Verdict
    since: float
    glances: deque[Glance]


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
        remembered = {Cell(*row[:5]): (Status(row[5]), float(row[6])) for row in rows}
        self._standing: dict[Cell, tuple[Status, float]] = remembered
        self._lines: dict[Cell, _Line] = {}

    def write(self, verdicts: Sequence[Verdict]) -> list[Change]:
        """Write an evaluation of every cell, and say what it changes; `adopt` follows when it is committed."""
        changes, gone = [], self._standing.keys() - {verdict.cell for verdict in verdicts}
        for verdict in verdicts:
            before, _ = self._standing.get(verdict.cell, (None, 0.0))
            if before is not verdict.status:
                changes.append(Change(verdict, before))
                self._save(verdict.cell, verdict.status, verdict.at)
        for cell in gone:
            self._forget(cell)
        return changes

    def adopt(self, verdicts: Sequence[Verdict]) -> None:
        """What was written has been committed; cells that are gone are forgotten."""
        lines = {}
        for verdict in verdicts:
            status, since = self._standing.get(verdict.cell, (None, verdict.at))
            line = self._lines.get(verdict.cell)
            glances: deque[Glance] = line.glances if line else deque(maxlen=_GLANCES)
            glances.append(
                (
                    verdict.at,
                    finite(verdict.estimate),
                    finite(verdict.lower),
                    finite(verdict.upper),
                    verdict.status.code,
                )
            )
            lines[verdict.cell] = _Line(verdict, since if status is verdict.status else verdict.at, glances)
        self._lines = lines
        self._standing = {cell: (line.verdict.status, line.since) for cell, line in lines.items()}

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
