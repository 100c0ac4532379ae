"""Since when every cell has its status, its recent past for a glance, and a longer one, thinned.

All but the glances survive a restart.
"""

from __future__ import annotations

import sqlite3
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kc_otel.judge.verdict import Cell, Status, Verdict
from kc_otel.serve.store.thinned_history import KEPT, HistoryPoint, ThinnedHistory, moment_of

__all__ = ["GLANCES", "CellHistory", "Glance", "StatusChange"]

GLANCES: Final = 120

Glance = tuple[float, float | None, float | None, float | None, int]
"""(time, estimate, lower, upper, status code) of one evaluation."""


@dataclass(frozen=True, slots=True)
class StatusChange:
    """A cell whose status is not what it was."""

    verdict: Verdict
    before: Status | None


@dataclass(frozen=True, slots=True)
class _Line:
    verdict: Verdict
    since: float
    recent: deque[HistoryPoint]


class CellHistory:
    """The newest verdict of every cell, how long it has stood, and what came before.

    Args:
        connection: The state file.
        windows: The long window in seconds, by the contract's name: it says how far the past reaches.
    """

    def __init__(self, connection: sqlite3.Connection, windows: Mapping[str, float]) -> None:
        self._connection = connection
        self._ring = ThinnedHistory(connection, windows)
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

    def write(self, verdicts: Sequence[Verdict]) -> list[StatusChange]:
        """Write an evaluation of every cell, and say what it changes; `adopt` follows when it is committed."""
        changes, gone = [], self._standing.keys() - {verdict.cell for verdict in verdicts}
        for verdict in verdicts:
            before, _ = self._standing.get(verdict.cell, (None, 0.0))
            if before is not verdict.status:
                changes.append(StatusChange(verdict, before))
                self._save(verdict.cell, verdict.status, verdict.at)
        for cell in gone:
            self._forget(cell)
        self._ring.write(verdicts)
        return changes

    def adopt(self, verdicts: Sequence[Verdict]) -> None:
        """What was written has been committed; cells that are gone are forgotten."""
        lines = {}
        moments: dict[Cell, HistoryPoint] = {}
        for verdict in verdicts:
            status, since = self._standing.get(verdict.cell, (None, verdict.at))
            line = self._lines.get(verdict.cell)
            recent: deque[HistoryPoint] = line.recent if line else deque(maxlen=GLANCES)
            moment = moments[verdict.cell] = moment_of(verdict)
            recent.append(moment)
            lines[verdict.cell] = _Line(verdict, since if status is verdict.status else verdict.at, recent)
        self._lines = lines
        self._standing = {cell: (line.verdict.status, line.since) for cell, line in lines.items()}
        self._ring.adopt(moments)

    def cells(self, glances: int = 0) -> list[tuple[Verdict, float, list[Glance]]]:
        """(verdict, since, at most so many glances) of every cell, in the cells' order."""
        return [
            (line.verdict, line.since, [_glance(one) for one in list(line.recent)[-glances:]] if glances else [])
            for _, line in sorted(self._lines.items())
        ]

    def step(self, contract: str) -> float:
        """Seconds between two evaluations of the thinned past."""
        return self._ring.step(contract)

    def past(self, contract: str, clause: str, slice: str, start: float, end: float) -> dict[Cell, list[HistoryPoint]]:
        """Evaluations of a clause on a slice by pair of kernels, oldest first.

        The last two minutes or so are whole, what is older is thinned.
        """
        kept = self._ring.of(contract, clause, slice)
        for cell, line in self._lines.items():
            if (cell.contract, cell.clause, cell.slice) == (contract, clause, slice):
                first = line.recent[0].at
                kept[cell] = [one for one in kept.get(cell, []) if one.at < first] + list(line.recent)
        start = max(start, end - KEPT * self._ring.step(contract))
        within = {cell: [one for one in moments if start <= one.at <= end] for cell, moments in kept.items()}
        return {cell: moments for cell, moments in sorted(within.items()) if moments}

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


def _glance(moment: HistoryPoint) -> Glance:
    return moment.at, moment.estimate, moment.lower, moment.upper, moment.status


def _key(cell: Cell) -> tuple[str, str, str, str, str]:
    return cell.contract, cell.clause, cell.slice, cell.kernel_train, cell.kernel_inference
