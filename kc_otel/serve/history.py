"""Since when every cell has its status, its recent past for a glance, and a longer one, thinned.

All but the glances survive a restart.
"""

from __future__ import annotations

import sqlite3
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from kc_otel.judge.verdict import Cell, Evaluation, Status, Verdict
from kc_otel.serve.store.thinned_history import KEPT, HistoryPoint, ThinnedHistory, point_of
from kc_otel.serve.store.unit_of_work import UnitOfWork

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
        self._thinned = ThinnedHistory(connection, windows)
        connection.execute(
            "CREATE TABLE IF NOT EXISTS cell_status (contract TEXT, clause TEXT, slice TEXT, kernel_train TEXT, "
            "kernel_inference TEXT, status TEXT NOT NULL, since REAL NOT NULL, "
            "PRIMARY KEY (contract, clause, slice, kernel_train, kernel_inference)) WITHOUT ROWID"
        )
        rows = connection.execute(
            "SELECT contract, clause, slice, kernel_train, kernel_inference, status, since FROM cell_status"
        )
        self._known: dict[str, dict[Cell, tuple[Status, float]]] = {}
        for *fields, status, since in rows.fetchall():
            cell = Cell(*fields)
            if cell.contract in windows:
                self._known.setdefault(cell.contract, {})[cell] = (Status(status), float(since))
            else:
                self._forget(cell)
        self._lines: dict[str, dict[Cell, _Line]] = {}

    def write(self, evaluations: Mapping[str, Evaluation], unit: UnitOfWork) -> list[StatusChange]:
        """Write an evaluation of every cell of some contracts, by their names, and say what it changes."""
        changes = []
        for name, evaluation in evaluations.items():
            known = self._known.get(name, {})
            for verdict in evaluation.verdicts:
                before, _ = known.get(verdict.cell, (None, 0.0))
                if before is not verdict.status:
                    changes.append(StatusChange(verdict, before))
                    self._save(verdict.cell, verdict.status, verdict.at)
            for cell in known.keys() - {verdict.cell for verdict in evaluation.verdicts}:
                self._forget(cell)
        points = {
            name: {one.cell: point_of(one, found.step_of(one.cell)) for one in found.verdicts}
            for name, found in evaluations.items()
        }
        self._thinned.write(points, max((found.at for found in evaluations.values()), default=0.0), unit)
        unit.on_commit(lambda: self._adopt(evaluations, points))
        return changes

    def _adopt(self, evaluations: Mapping[str, Evaluation], points: Mapping[str, Mapping[Cell, HistoryPoint]]) -> None:
        """Remember an evaluation; cells that are gone are forgotten."""
        for name, evaluation in evaluations.items():
            before, lines = self._lines.get(name, {}), dict[Cell, _Line]()
            known = self._known.get(name, {})
            for verdict in evaluation.verdicts:
                status, since = known.get(verdict.cell, (None, verdict.at))
                since = since if status is verdict.status else verdict.at
                line = before.get(verdict.cell)
                recent: deque[HistoryPoint] = line.recent if line else deque(maxlen=GLANCES)
                recent.append(points[name][verdict.cell])
                lines[verdict.cell] = _Line(verdict, since, recent)
            self._lines[name] = lines
            self._known[name] = {cell: (line.verdict.status, line.since) for cell, line in lines.items()}

    def cells(self, contract: str | None = None, glances: int = 0) -> list[tuple[Verdict, float, list[Glance]]]:
        """(verdict, since, at most so many glances) of every cell, or those of one contract, in the cells' order."""
        names = sorted(self._lines) if contract is None else [contract]
        return [
            (line.verdict, line.since, [_glance(one) for one in list(line.recent)[-glances:]] if glances else [])
            for name in names
            for _, line in sorted(self._lines.get(name, {}).items())
        ]

    def step(self, contract: str) -> float:
        """Seconds between two evaluations of the thinned past."""
        return self._thinned.step(contract)

    def past(self, contract: str, clause: str, slice: str, start: float, end: float) -> dict[Cell, list[HistoryPoint]]:
        """Evaluations of a clause on a slice by pair of kernels, oldest first.

        The last two minutes or so are whole, what is older is thinned.
        """
        kept = self._thinned.of(contract, clause, slice)
        for cell, line in self._lines.get(contract, {}).items():
            if (cell.clause, cell.slice) == (clause, slice):
                first = line.recent[0].at
                kept[cell] = [one for one in kept.get(cell, []) if one.at < first] + list(line.recent)
        start = max(start, end - KEPT * self._thinned.step(contract))
        within = {cell: [one for one in points if start <= one.at <= end] for cell, points in kept.items()}
        return {cell: points for cell, points in sorted(within.items()) if points}

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


def _glance(point: HistoryPoint) -> Glance:
    return point.at, point.estimate, point.lower, point.upper, point.status


def _key(cell: Cell) -> tuple[str, str, str, str, str]:
    return cell.contract, cell.clause, cell.slice, cell.kernel_train, cell.kernel_inference
