"""The past of every cell, thinned: steps in SQLite, of which the newest are kept, so that its size is bounded.

A step is a twentieth of the contract's long window, 480 of them are kept: a day for a long window of an hour. A step is
remembered by its worst evaluation, the first among equals, so that thinning hides no breach and shows where it began.
The first evaluation of a step is written, and each that is worse than all before: a restart leaves no gap either.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Collection, Mapping
from dataclasses import astuple, dataclass
from typing import Final

from kc_otel.judge.plain_json import finite_or_none
from kc_otel.judge.verdict import Cell, Verdict
from kc_otel.serve.store.unit_of_work import UnitOfWork

__all__ = ["KEPT", "HistoryPoint", "ThinnedHistory", "point_of"]

KEPT: Final = 480
_STEPS_PER_WINDOW: Final = 20
_SHORTEST: Final = 5.0
_COLUMNS: Final = ("at", "estimate", "lower", "upper", "bound", "samples", "status", "evidence", "train_step")
_VALUES: Final = ", ".join("?" for _ in _COLUMNS)
_OVERWRITTEN: Final = ", ".join(f"{name} = excluded.{name}" for name in _COLUMNS)


@dataclass(frozen=True, slots=True)
class HistoryPoint:
    """An evaluation of a cell.

    Attributes:
        at: Unix time, seconds.
        estimate: Point estimate; None without data.
        lower: Lower confidence bound; None where there is none.
        upper: Upper confidence bound; None where there is none.
        limit: Limit then in force.
        samples: Observations in the deciding window.
        status: Code of the status.
        evidence: What is held against the limit, in 0..1 of an alarm; None where nothing can be held.
        train_step: The trainer's newest step at that time; None where nobody told it.
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
    return HistoryPoint(
        verdict.at,
        finite_or_none(verdict.estimate),
        finite_or_none(verdict.lower),
        finite_or_none(verdict.upper),
        verdict.limit,
        verdict.samples,
        verdict.status.code,
        finite_or_none(verdict.evidence),
        train_step,
    )


class ThinnedHistory:
    """Steps of every cell.

    Args:
        connection: The state file.
        windows: The long window in seconds, by the contract's name.
    """

    def __init__(self, connection: sqlite3.Connection, windows: Mapping[str, float]) -> None:
        self._connection = connection
        self._steps = {name: max(window / _STEPS_PER_WINDOW, _SHORTEST) for name, window in windows.items()}
        self._worst: dict[str, dict[Cell, int]] = {}
        self._slot: dict[str, int] = {}
        connection.execute(
            "CREATE TABLE IF NOT EXISTS cell_line (id INTEGER PRIMARY KEY, cell TEXT UNIQUE NOT NULL, newest REAL)"
        )
        connection.execute(
            "CREATE TABLE IF NOT EXISTS cell_point (line INTEGER, slot INTEGER, at REAL, estimate REAL, lower REAL, "
            "upper REAL, bound REAL, samples INTEGER, status INTEGER, evidence REAL, train_step INTEGER, "
            "PRIMARY KEY (line, slot)) WITHOUT ROWID"
        )

    def step(self, contract: str) -> float:
        """Seconds between two kept evaluations."""
        return self._steps.get(contract, _SHORTEST)

    def write(self, points: Mapping[str, Mapping[Cell, HistoryPoint]], now: float, unit: UnitOfWork) -> None:
        """Write what an evaluation begins, and what it makes worse, of the running step.

        Args:
            points: The evaluation, by the contract's name.
            now: Its unix time, seconds.
            unit: The transaction.
        """
        worse: dict[str, dict[Cell, HistoryPoint]] = {}
        begun = {contract for contract in points if self._index(contract, now) != self._slot.get(contract)}
        for contract, found in points.items():
            before = {} if contract in begun else self._worst.get(contract, {})
            worse[contract] = {cell: one for cell, one in found.items() if one.status > before.get(cell, -1)}
            self._put(contract, worse[contract])
        if begun:
            self._forget(now)
        unit.on_commit(lambda: self._adopt(worse, now, begun))

    def _adopt(self, worse: Mapping[str, Mapping[Cell, HistoryPoint]], now: float, begun: Collection[str]) -> None:
        for contract, found in worse.items():
            self._slot[contract] = self._index(contract, now)
            before = {} if contract in begun else self._worst.get(contract, {})
            self._worst[contract] = before | {cell: point.status for cell, point in found.items()}

    def of(self, contract: str, clause: str, slice: str) -> dict[Cell, list[HistoryPoint]]:
        """What is kept of a clause on a slice, for every pair of kernels, oldest first."""
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
            [
                (self._index(contract, point.at) % KEPT, *astuple(point), name, self.step(contract))
                for name, point in own
            ],
        )

    def _forget(self, now: float) -> None:
        """Forget cells of which nothing came for as long as anything is kept."""
        longest = KEPT * max(self._steps.values(), default=_SHORTEST)
        gone = self._connection.execute("SELECT id FROM cell_line WHERE newest < ?", (now - longest,)).fetchall()
        self._connection.executemany("DELETE FROM cell_point WHERE line = ?", gone)
        self._connection.executemany("DELETE FROM cell_line WHERE id = ?", gone)
