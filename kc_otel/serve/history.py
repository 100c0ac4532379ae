"""What was: every cell's status, its recent past and a longer one, thinned; and the log of events. Nothing commits.

Of the longer past a step is a twentieth of the contract's long window, 480 of them are kept in SQLite: a day for a long
window of an hour. A step is remembered by its worst evaluation, the first among equals, so that thinning hides no
breach and shows where it began. The first evaluation of a step is written, and each that is worse than all before: a
restart leaves no gap either.

An event is a row of the state file, and an announcement for whoever reads the log. A verdict that changes is a
`gen_ai.evaluation.result` of OpenTelemetry's semantic conventions for generative AI, so that tools that show
evaluations show it; everything else is a `kc.transition`. Source: semantic-conventions-genai, model/gen-ai/events.yaml.
"""

from __future__ import annotations

import json
import logging
import math
import sqlite3
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from kc_otel.contract.words import NOTIFYING
from kc_otel.judge.escalation.alerts import Alert
from kc_otel.judge.escalation.escalate import MessageReason
from kc_otel.judge.escalation.webhook_body import summary
from kc_otel.judge.incidents.incident import Incident
from kc_otel.judge.plain_json import finite_or_none, to_json
from kc_otel.judge.recorders import pair_name
from kc_otel.judge.verdict import Cell, Evaluation, Status, Verdict
from kc_otel.serve.store.state_file import UnitOfWork

_log: Final = logging.getLogger(__name__)
KEPT_STEPS: Final = 480
_STEPS_PER_WINDOW: Final = 20
_MIN_STEP_SECONDS: Final = 5.0
_COLUMNS: Final = ("at", "estimate", "lower", "upper", "bound", "samples", "status", "evidence", "train_step")
_VALUES: Final = ", ".join("?" for _ in _COLUMNS)
_OVERWRITTEN: Final = ", ".join(f"{name} = excluded.{name}" for name in _COLUMNS)


class HistoryPoint(NamedTuple):
    """An evaluation of a cell; None where there is no number. `evidence` is in 0..1 of an alarm."""

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
class _Line:
    """A cell as of its last evaluation; without a verdict, as of a process before."""

    status: Status
    since: float
    worst: int
    """Code of the worst status in the running step."""
    recent: deque[HistoryPoint]
    verdict: Verdict | None


class CellHistory:
    """The newest verdict of every cell, since when, and what was before; `windows` are the long ones, in seconds."""

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

    def write(self, name: str, evaluation: Evaluation, unit: UnitOfWork) -> list[tuple[Verdict, Status | None]]:
        """Write an evaluation of a contract, and return verdicts of another status than before; forget what is gone."""
        before, slot = self._lines.get(name, {}), self._index(name, evaluation.at)
        begun = slot != self._slot.get(name)
        changes: list[tuple[Verdict, Status | None]] = []
        lines: dict[Cell, _Line] = {}
        points: dict[Cell, HistoryPoint] = {}
        worse: dict[Cell, HistoryPoint] = {}
        for verdict in evaluation.verdicts:
            cell, line = verdict.cell, before.get(verdict.cell)
            since, worst = verdict.at, -1 if begun or line is None else line.worst
            if line is not None and line.status is verdict.status:
                since = line.since
            else:
                changes.append((verdict, None if line is None else line.status))
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
        """Evaluations of a clause on a slice by pair of kernels, oldest first; the last two minutes or so are whole."""
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


Names = Mapping[tuple[str, str], str]
"""`kernel_names` of a contract."""
_NO_NAMES: Final[Names] = MappingProxyType({})
_TABLES: Final = (
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


class Announcement(NamedTuple):
    """Something to say to whoever reads the log, and its log record: info, warning or critical."""

    severity: str
    message: str
    attributes: Mapping[str, str | float]
    event: str = "kc.transition"


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened; ids count up, gaps are possible.

    `kind` is `firing` or `resolved` for alerts, `would-fire` or `would-resolve` for those of a contract that runs dry,
    `over` for the end of an incident, `verdict`, `promotion`, what a person did, or `damaged` where it cannot be
    read any more.
    """

    id: int
    at: float
    contract: str
    kind: str
    message: str
    data: dict[str, Any]


class EventLog:
    """The last `max_events` events. With a unit of work, an event is announced once that is committed."""

    def __init__(self, connection: sqlite3.Connection, *, max_events: int = 100_000) -> None:
        self.announce: Callable[[Announcement], object] = lambda _: None
        """Told of every announcement, beside the log."""
        self._connection = connection
        self._max_events = max_events
        for statement in _TABLES:
            connection.execute(statement)

    def record(
        self,
        contract: str,
        kind: str,
        data: Mapping[str, Any],
        at: float,
        unit: UnitOfWork | None = None,
        announcement: Announcement | None = None,
    ) -> None:
        """Write an event of a contract, whose sentence is `message`."""
        cursor = self._connection.execute(
            "INSERT INTO events (at, contract, kind, data) VALUES (?, ?, ?, ?)", (at, contract, kind, to_json(data))
        )
        assert cursor.lastrowid is not None  # an INSERT has just run on this cursor
        self._connection.execute("DELETE FROM events WHERE id <= ?", (cursor.lastrowid - self._max_events,))
        if unit is not None:
            told = announcement or Announcement("info", f"{contract}: {data['message']}", {"kc.contract": contract})
            unit.on_commit(partial(self._announce, told))

    def _announce(self, announcement: Announcement) -> None:
        _log.info("%s", announcement.message, extra={"attributes": announcement.attributes})
        try:
            self.announce(announcement)
        except Exception:  # noqa: BLE001 - what was written holds, whoever is told of it
            _log.exception("an event could not be exported")

    def transition(
        self,
        edge: Alert,
        names: Names = _NO_NAMES,
        incident: Incident | None = None,
        *,
        dry_run: bool = False,
        silenced: Collection[str] = (),
        unit: UnitOfWork | None = None,
    ) -> None:
        """Write that an alert fires, or has resolved; `silenced` are the ids of the silences that mute it."""
        fires = edge.fires
        kind, message, severity = edge.phase.value, summary(edge, names, incident), edge.severity if fires else "info"
        data: dict[str, Any] = {}
        if dry_run:
            kind, severity = "would-fire" if fires else "would-resolve", "info"
            would = f"; it would {', '.join(map(str, edge.actions))}" * fires
            message = message.replace(": ", ": dry run: ", 1) + would
            data["dry_run"] = True
        elif silenced:
            data["silenced"] = [*silenced]
        data |= {
            "message": message,
            **_cell_fields(edge.cell),
            "on": edge.on,
            "severity": edge.severity,
            "started_at": edge.started_at,
            "actions": [action.written for action in edge.actions if not silenced or action.kind not in NOTIFYING],
            "fingerprint": edge.fingerprint,
            "verdict": edge.verdict,
        }
        announcement = Announcement(severity, message, {**_attributes(edge.verdict), "kc.severity": edge.severity})
        self.record(edge.cell.contract, kind, data, edge.at, None if silenced else unit, announcement)

    def over(self, incident: Incident, names: Names, now: float, unit: UnitOfWork | None) -> None:
        """Write how an incident ended, which its alerts may have ended too early to say."""
        message = f"{incident.contract}: {incident.state_text}: {incident.headline}{pair_name(names, *incident.pair)}"
        data = {"incident": incident.id, "on": incident.on, "message": f"{message}; incident {incident.id}"}
        said = Announcement("info", data["message"], {"kc.contract": incident.contract})
        self.record(incident.contract, "over", data, now, unit, said)

    def repeated(self, alert: Alert, reason: MessageReason, names: Names, now: float, unit: UnitOfWork) -> None:
        """Write that an alert which fires still is said again."""
        why = "a reminder" if reason is MessageReason.REMINDER else "a silence has ended"
        data = {
            **_cell_fields(alert.cell),
            "fingerprint": alert.fingerprint,
            "actions": [action.written for action in alert.actions if action.kind in NOTIFYING],
            "message": f"{summary(alert, names)} still: {why}",
        }
        announcement = Announcement(alert.severity, data["message"], _attributes(alert.verdict))
        self.record(alert.cell.contract, reason.value, data, now, unit, announcement)

    def changed(self, verdict: Verdict, was: Status | None, names: Names, now: float, unit: UnitOfWork) -> None:
        """Write that a cell has another status."""
        cell, status, before = verdict.cell, verdict.status.value, was.value if was else None
        of = pair_name(names, cell.kernel_train, cell.kernel_inference)
        message = f"{cell.clause} on {cell.slice}{of}: {before or 'new'} -> {status}: {verdict.reason}"
        data = {**_cell_fields(cell), "status": status, "before": before, "message": message}
        attributes = {
            **_attributes(verdict),
            "gen_ai.evaluation.name": cell.clause,
            "gen_ai.evaluation.score.label": status.lower(),
            "gen_ai.evaluation.explanation": verdict.reason,
        }
        if math.isfinite(verdict.estimate):
            attributes["gen_ai.evaluation.score.value"] = verdict.estimate
        severity = "warning" if verdict.status is Status.FAIL else "info"
        announcement = Announcement(severity, message, attributes, "gen_ai.evaluation.result")
        self.record(cell.contract, "verdict", data, now, unit, announcement)

    def newest(self, contract: str | None = None, limit: int = 100, *, verdicts: bool = True) -> tuple[Event, ...]:
        """The last events, oldest first; of one contract or all. Verdicts change often and would push actions out."""
        where = "WHERE" if verdicts else "INDEXED BY events_rare WHERE kind <> 'verdict' AND"
        rows = self._connection.execute(
            f"{_EVENTS} {where} {_OF_CONTRACT} ORDER BY id DESC LIMIT :limit", {"contract": contract, "limit": limit}
        )
        return tuple(map(_event, rows))[::-1]


def cell_attributes(cell: Cell) -> dict[str, str]:
    """A cell as attributes of a metric or a log record."""
    return {
        "kc.contract": cell.contract,
        "kc.clause": cell.clause,
        "kc.slice": cell.slice,
        "kc.kernel.train": cell.kernel_train,
        "kc.kernel.inference": cell.kernel_inference,
    }


def _event(row: tuple[int, float, bytes, bytes, bytes]) -> Event:
    """An event; nothing is decided by the past, so that one which is damaged is said to be and keeps no other back."""
    id, at, contract, kind, text = row
    try:
        data = json.loads(text)
        return Event(id, at, contract.decode(), kind.decode(), str(data.get("message", "")), data)
    except (ValueError, AttributeError, RecursionError):
        said = "what happened cannot be read any more: its row in the state file is damaged"
        return Event(id, at, contract.decode(errors="replace"), "damaged", said, {})


def _cell_fields(cell: Cell) -> dict[str, Any]:
    return {name: value for name, value in cell._asdict().items() if name != "contract"}


def _attributes(verdict: Verdict) -> dict[str, str | float]:
    return {
        **cell_attributes(verdict.cell),
        "kc.contract.version": str(verdict.contract_version),
        "kc.contract.hash": verdict.contract_hash,
        "kc.verdict.status": verdict.status.value,
    }
