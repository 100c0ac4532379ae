"""Promotions and the evidence of their steps, in SQLite. Nothing here commits."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from kc_otel.judge.plain_json import read_json, to_json
from kc_otel.judge.promotion.stages import Promotion

_TABLES: Final = (
    """CREATE TABLE IF NOT EXISTS promotions (
        contract TEXT,
        version TEXT,
        started REAL NOT NULL,
        state TEXT NOT NULL,
        PRIMARY KEY (contract, version)
    ) STRICT""",
    """CREATE TABLE IF NOT EXISTS promotion_evidence (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        at REAL NOT NULL,
        contract TEXT NOT NULL,
        version TEXT NOT NULL,
        what TEXT NOT NULL,
        record TEXT NOT NULL
    ) STRICT""",
    "CREATE INDEX IF NOT EXISTS promotion_evidence_of ON promotion_evidence (contract, id)",
)
_MAX_EVIDENCE_RECORDS: Final = 1000
"""Pieces of evidence of a contract that are kept; the oldest go first."""


@dataclass(frozen=True, slots=True)
class EvidenceRecord:
    """A piece of evidence: the step in words, when it was, and a record that `kc-otel gate verify` checks."""

    id: int
    at: float
    what: str
    record: dict[str, Any]


class PromotionStore:
    """Keeps promotions over restarts."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        for statement in _TABLES:
            connection.execute(statement)

    def load(self) -> list[Promotion]:
        """Every promotion that was saved."""
        rows = self._connection.execute("SELECT state FROM promotions ORDER BY contract, version")
        return [read_json(Promotion, state) for (state,) in rows]

    def save(self, promotion: Promotion) -> None:
        """Keep a promotion in place of what it was."""
        state = to_json(promotion)
        self._connection.execute(
            "INSERT OR REPLACE INTO promotions (contract, version, started, state) VALUES (?, ?, ?, ?)",
            (promotion.contract, promotion.version, promotion.started, state),
        )

    def forget(self, promotion: Promotion) -> None:
        """Drop a promotion; its evidence stays."""
        self._connection.execute(
            "DELETE FROM promotions WHERE contract = ? AND version = ?", (promotion.contract, promotion.version)
        )

    def keep(self, contract: str, version: str, what: str, record: Mapping[str, Any], now: float) -> int:
        """Keep a piece of evidence; returns its id."""
        cursor = self._connection.execute(
            "INSERT INTO promotion_evidence (at, contract, version, what, record) VALUES (?, ?, ?, ?, ?)",
            (now, contract, version, what, json.dumps(record, sort_keys=True, allow_nan=False)),
        )
        self._connection.execute(
            "DELETE FROM promotion_evidence WHERE contract = ? AND id NOT IN "
            "(SELECT id FROM promotion_evidence WHERE contract = ? ORDER BY id DESC LIMIT ?)",
            (contract, contract, _MAX_EVIDENCE_RECORDS),
        )
        assert cursor.lastrowid is not None
        return cursor.lastrowid

    def evidence(self, contract: str, version: str) -> list[EvidenceRecord]:
        """Records of a version's steps, oldest first."""
        rows = self._connection.execute(
            "SELECT id, at, what, record FROM promotion_evidence WHERE contract = ? AND version = ? ORDER BY id",
            (contract, version),
        )
        return [EvidenceRecord(id, at, what, json.loads(record)) for id, at, what, record in rows]
