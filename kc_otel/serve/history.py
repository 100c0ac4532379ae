"""Since when every cell has its status, its recent past, and a longer one, thinned; all but the recent is kept.

The longer one is in SQLite. A step is a twentieth of the contract's long window, 480 of them are kept: a day for a long
window of an hour. A step is remembered by its worst evaluation, the first among equals, so that thinning hides no
breach and shows where it began. The first evaluation of a step is written, and each that is worse than all before: a
restart leaves no gap either.
"""

from __future__ import annotations

import json
import sqlite3
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from kc_otel.judge.plain_json import finite_or_none
from kc_otel.judge.verdict import Cell, Evaluation, Status, Verdict
from kc_otel.serve.store.state_file import UnitOfWork

KEPT_STEPS: Final = 480
_STEPS_PER_WINDOW: Final = 20
_MIN_STEP_SECONDS: Final = 5.0
_COLUMNS: Final = ("at", "estimate", "lower", "upper", "bound", "samples", "status", "evidence", "train_step")
_VALUES: Final = ", ".join("?" for _ in _COLUMNS)
_OVERWRITTEN: Final = ", ".join(f"{name} = excluded.{name}" for name in _COLUMNS)


class HistoryPoint(NamedTuple):
    """An evaluation of a cell; None where there is no number.

    `evidence` is in 0..1 of an alarm; `train_step` the trainer's newest step at that time.
    """

    at: float
    estimate: float | None
    lower: float | None
    upper: float | None
    limit: float
    samples: int
    status: int
    evidence: float | None
    train_step: int | None = None


def point_of(verdict: Verdict, train_step: int | None = None) -> HistoryPoint:
    """A verdict's numbers, and the trainer's step that it was judged at."""
    numbers = verdict.estimate, verdict.lower, verdict.upper, verdict.evidence
    estimate, lower, upper, evidence = map(finite_or_none, numbers)
    code, limit, samples = verdict.status.code, verdict.limit, verdict.samples
    return HistoryPoint(verdict.at, estimate, lower, upper, limit, samples, code, evidence, train_step)


_KEPT_RECENT: Final = 120
"""Evaluations of a cell that are kept whole."""


@dataclass(frozen=True, slots=True)
class StatusChange:
    """A cell whose status is not what it was."""

    verdict: Verdict
    before: Status | None


@dataclass(frozen=True, slots=True)
class _Line:
    """A cell as of its last evaluation; without a verdict, as of a process before."""

    status: Status
    since: float
    worst: int
    """Code of the worst status in the running step."""
    recent: deque[HistoryPoint]
    verdict: Verdict | None


class CellHistory:
    """The newest verdict of every cell, how long it has stood, and what came before.

    `windows` has the long window in seconds by the contract's name: it says how far the past reaches.
    """

    def __init__(self, connection: sqlite3.Connection, windows: Mapping[str, float]) -> None:
        self._connection = connection
        self._steps = {name: max(window / _STEPS_PER_WINDOW, _MIN_STEP_SECONDS) for name, window in windows.items()}
        self._slot: dict[str, int] = {}
        connection.execute(
            "CREATE TABLE IF NOT EXISTS cell_line (id INTEGER PRIMARY KEY, cell TEXT UNIQUE NOT NULL, newest REAL, "
            "current TEXT, since REAL)"
        )
        connection.execute(
            "CREATE TABLE IF NOT EXISTS cell_point (line INTEGER, slot INTEGER, at REAL, estimate REAL, lower REAL, "
            "upper REAL, bound REAL, samples INTEGER, status INTEGER, evidence REAL, train_step INTEGER, "
            "PRIMARY KEY (line, slot)) WITHOUT ROWID"
        )
        # A damaged definition of a table is told at the start.
        connection.execute(f"SELECT line, slot, newest, {', '.join(_COLUMNS)} FROM cell_point, cell_line LIMIT 0")  # noqa: S608
        self._lines: dict[str, dict[Cell, _Line]] = {}
        rows = connection.execute("SELECT cell, current, since FROM cell_line WHERE current IS NOT NULL").fetchall()
        for name, status, since in rows:
            cell = Cell(*json.loads(name))
            if cell.contract in windows:
                self._lines.setdefault(cell.contract, {})[cell] = _Line(
                    Status(status), since, -1, deque(maxlen=_KEPT_RECENT), None
                )
            else:
                self._forget(cell)

    def write(self, name: str, evaluation: Evaluation, unit: UnitOfWork) -> list[StatusChange]:
        """Write an evaluation of every cell of a contract, and say what it changes; forget cells that are gone."""
        before, slot = self._lines.get(name, {}), self._index(name, evaluation.at)
        begun = slot != self._slot.get(name)
        changes: list[StatusChange] = []
        lines: dict[Cell, _Line] = {}
        points: dict[Cell, HistoryPoint] = {}
        worse: dict[Cell, HistoryPoint] = {}
        for verdict in evaluation.verdicts:
            cell, line = verdict.cell, before.get(verdict.cell)
            since, worst = verdict.at, -1 if begun or line is None else line.worst
            if line is not None and line.status is verdict.status:
                since = line.since
            else:
                changes.append(StatusChange(verdict, None if line is None else line.status))
                self._connection.execute(
                    "INSERT INTO cell_line (cell, newest, current, since) VALUES (?, ?, ?, ?) ON CONFLICT (cell) "
                    "DO UPDATE SET newest = excluded.newest, current = excluded.current, since = excluded.since",
                    (json.dumps(cell), verdict.at, verdict.status.value, verdict.at),
                )
            points[cell] = point = point_of(verdict, evaluation.step_of(cell))
            if point.status > worst:
                worse[cell] = point
            recent = deque[HistoryPoint](maxlen=_KEPT_RECENT) if line is None else line.recent
            lines[cell] = _Line(verdict.status, since, max(worst, point.status), recent, verdict)
        for cell in before.keys() - lines.keys():
            self._forget(cell)
        self._put(name, worse)
        if begun:
            self._forget_old(evaluation.at)

        def adopt() -> None:
            for cell, point in points.items():
                lines[cell].recent.append(point)
            self._lines[name], self._slot[name] = lines, slot

        unit.on_commit(adopt)
        return changes

    def cells(self, contract: str | None = None) -> list[tuple[Verdict, float]]:
        """(verdict, since) of every cell, or those of one contract, in the cells' order."""
        names = sorted(self._lines) if contract is None else [contract]
        return [
            (line.verdict, line.since)
            for name in names
            for _, line in sorted(self._lines.get(name, {}).items())
            if line.verdict is not None
        ]

    def step(self, contract: str) -> float:
        """Seconds between two evaluations of the thinned past."""
        return self._steps.get(contract, _MIN_STEP_SECONDS)

    def past(self, contract: str, clause: str, slice: str, start: float, end: float) -> dict[Cell, list[HistoryPoint]]:
        """Evaluations of a clause on a slice by pair of kernels, oldest first.

        The last two minutes or so are whole, what is older is thinned.
        """
        kept = self._kept(contract, clause, slice)
        for cell, line in self._lines.get(contract, {}).items():
            if (cell.clause, cell.slice) == (clause, slice) and line.recent:
                first = line.recent[0].at
                kept[cell] = [point for point in kept.get(cell, []) if point.at < first] + list(line.recent)
        start = max(start, end - KEPT_STEPS * self.step(contract))
        within = {cell: [point for point in points if start <= point.at <= end] for cell, points in kept.items()}
        return {cell: points for cell, points in sorted(within.items()) if points}

    def _kept(self, contract: str, clause: str, slice: str) -> dict[Cell, list[HistoryPoint]]:
        """Return the stored history of a clause on a slice, for every pair of kernels, oldest first."""
        found: dict[Cell, list[HistoryPoint]] = {}
        prefix = json.dumps([contract, clause, slice])[:-1] + ", "
        rows = self._connection.execute(
            f"SELECT cell, {', '.join(_COLUMNS)} FROM cell_line JOIN cell_point ON line = id "  # noqa: S608 - our own
            "WHERE substr(cell, 1, ?) = ? ORDER BY id, at",
            (len(prefix), prefix),
        )
        for cell, *numbers in rows:
            found.setdefault(Cell(*json.loads(cell)), []).append(HistoryPoint(*numbers))
        return found

    def _index(self, contract: str, at: float) -> int:
        return int(at // self.step(contract))

    def _put(self, contract: str, points: Mapping[Cell, HistoryPoint]) -> None:
        """Write points, each in the place of its step, but not over one of the same step that is worse."""
        own = [(json.dumps(cell), point) for cell, point in points.items()]
        self._connection.executemany(
            "INSERT INTO cell_line (cell, newest) VALUES (?, ?) "
            "ON CONFLICT (cell) DO UPDATE SET newest = excluded.newest",
            [(name, point.at) for name, point in own],
        )
        self._connection.executemany(
            f"INSERT INTO cell_point SELECT id, ?, {_VALUES} FROM cell_line WHERE cell = ? "  # noqa: S608 - our own
            f"ON CONFLICT (line, slot) DO UPDATE SET {_OVERWRITTEN} "
            "WHERE excluded.status > status OR abs(excluded.at - at) > ?",
            [(self._index(contract, point.at) % KEPT_STEPS, *point, name, self.step(contract)) for name, point in own],
        )

    def _forget_old(self, now: float) -> None:
        longest = KEPT_STEPS * max(self._steps.values(), default=_MIN_STEP_SECONDS)
        gone = self._connection.execute("SELECT id FROM cell_line WHERE newest < ?", (now - longest,)).fetchall()
        self._connection.executemany("DELETE FROM cell_point WHERE line = ?", gone)
        self._connection.executemany("DELETE FROM cell_line WHERE id = ?", gone)

    def _forget(self, cell: Cell) -> None:
        self._connection.execute("UPDATE cell_line SET current = NULL WHERE cell = ?", (json.dumps(cell),))
