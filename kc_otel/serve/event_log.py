"""Log of events: each a row of the state file, and an announcement for whoever reads the log. Nothing commits.

A verdict that changes is a `gen_ai.evaluation.result` of OpenTelemetry's semantic conventions for generative AI, so
that tools that show evaluations show it; everything else is a `kc.transition`. Source: semantic-conventions-genai,
model/gen-ai/events.yaml.
"""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from kc_otel.judge.escalation.alerts import Transition, What
from kc_otel.judge.escalation.notices import Notice, NoticeReason
from kc_otel.judge.escalation.webhook_body import summary
from kc_otel.judge.incidents.incident import Incident
from kc_otel.judge.plain_json import to_json
from kc_otel.judge.recorders import pair_name
from kc_otel.judge.verdict import Cell, Status, Verdict
from kc_otel.serve.history import StatusChange

Names = Mapping[tuple[str, str], str]
"""`kernel_names` of a contract."""
NOTIFYING: Final = frozenset({"notify", "webhook"})
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
    `verdict`, `promotion`, what a person did, or `damaged` where it cannot be read any more.
    """

    id: int
    at: float
    contract: str
    kind: str
    message: str
    data: dict[str, Any]


class EventLog:
    """The last `max_events` events."""

    def __init__(self, connection: sqlite3.Connection, *, max_events: int = 100_000) -> None:
        self._connection = connection
        self._max_events = max_events
        for statement in _TABLES:
            connection.execute(statement)

    def record(
        self, contract: str, kind: str, data: Mapping[str, Any], at: float, severity: str = "info"
    ) -> Announcement:
        """Write an event of a contract, whose sentence is `message`, and return its announcement."""
        cursor = self._connection.execute(
            "INSERT INTO events (at, contract, kind, data) VALUES (?, ?, ?, ?)", (at, contract, kind, to_json(data))
        )
        assert cursor.lastrowid is not None  # an INSERT has just run on this cursor
        self._connection.execute("DELETE FROM events WHERE id <= ?", (cursor.lastrowid - self._max_events,))
        version = data.get("kernel_inference")
        attributes = {"kc.contract": contract} | ({"kc.kernel.inference": version} if version else {})
        return Announcement(severity, f"{contract}: {data.get('message', '')}", attributes)

    def transition(
        self,
        edge: Transition,
        names: Names = _NO_NAMES,
        incident: Incident | None = None,
        *,
        dry_run: bool = False,
        silenced: Collection[str] = (),
    ) -> Announcement:
        """Write that an alert fires, or has resolved; `silenced` are the ids of the silences that mute it."""
        fires = edge.what is What.FIRING
        kind, message, severity = edge.what.value, summary(edge, names, incident), edge.severity if fires else "info"
        data: dict[str, Any] = {}
        if dry_run:
            kind, severity = "would-fire" if fires else "would-resolve", "info"
            message = f"dry run: {message}" + f"; it would {', '.join(map(str, edge.actions))}" * fires
            data["dry_run"] = True
        elif silenced:
            data["silenced"] = [*silenced]
        data |= {
            "message": message,
            **_cell_fields(edge.cell),
            "on": edge.on,
            "severity": edge.severity,
            "started_at": edge.started_at,
            "actions": [action.written for action in edge.actions],
            "fingerprint": edge.fingerprint,
            "verdict": edge.verdict,
        }
        self.record(edge.contract, kind, data, edge.at)
        return Announcement(severity, message, {**_attributes(edge.verdict), "kc.severity": edge.severity})

    def repeated(self, notice: Notice, names: Names, now: float) -> Announcement:
        """Write that an alert which fires still is said again."""
        edge = notice.transition
        why = "a reminder" if notice.reason is NoticeReason.REMINDER else "a silence has ended"
        data = {
            **_cell_fields(edge.cell),
            "fingerprint": edge.fingerprint,
            "actions": [action.written for action in edge.actions if action.kind in NOTIFYING],
            "message": f"{summary(edge, names)} still: {why}",
        }
        self.record(edge.contract, notice.reason.value, data, now)
        return Announcement(edge.severity, data["message"], _attributes(edge.verdict))

    def changed(self, change: StatusChange, names: Names, now: float) -> Announcement:
        """Write that a cell has another status."""
        verdict, cell = change.verdict, change.verdict.cell
        status, before = verdict.status.value, change.before.value if change.before else None
        of = pair_name(names, cell.kernel_train, cell.kernel_inference)
        message = f"{cell.clause} on {cell.slice}{of}: {before or 'new'} -> {status}: {verdict.reason}"
        data = {**_cell_fields(cell), "status": status, "before": before, "message": message}
        self.record(cell.contract, "verdict", data, now)
        attributes = {
            **_attributes(verdict),
            "gen_ai.evaluation.name": cell.clause,
            "gen_ai.evaluation.score.label": status.lower(),
            "gen_ai.evaluation.explanation": verdict.reason,
        }
        if math.isfinite(verdict.estimate):
            attributes["gen_ai.evaluation.score.value"] = verdict.estimate
        severity = "warning" if verdict.status is Status.FAIL else "info"
        return Announcement(severity, message, attributes, "gen_ai.evaluation.result")

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
