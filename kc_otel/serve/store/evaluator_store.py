"""The evaluator's state in SQLite: changes since the last save are written, and all of it is read at the start.

Later requests are in the inbox, and are applied at the start. The store never begins or commits a transaction; the
owner of the connection does. Changes during the commit belong to the next save.
"""

from __future__ import annotations

import json
import math
import sqlite3
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import count
from typing import Final

import numpy as np

from kc_otel.contract.slices import ALL, PLACES, UNJUDGED
from kc_otel.judge.contract_state import ContractState
from kc_otel.judge.evaluator import Evaluator
from kc_otel.judge.fail_evidence import whole_side
from kc_otel.judge.plain_json import read_json, to_json
from kc_otel.judge.points import INVALID, metric_of
from kc_otel.judge.recorders import KernelInfo, LastReport, Recorders
from kc_otel.judge.refused_points import RefusedSender
from kc_otel.judge.series import LONG, SHORT, Heard, SeriesKey
from kc_otel.judge.verdict import Cell
from kc_otel.serve.store.codecs import (
    check_observed,
    check_stream,
    decode_evidence,
    decode_histogram,
    decode_rows,
    decode_stream,
    encode_evidence,
    encode_histograms,
    encode_rows,
    encode_stream,
)
from kc_otel.serve.store.state_connection import StateError, UnitOfWork
from kc_otel.stats.histogram import Histogram

SCHEMA_VERSION: Final = 13

_TABLES: Final = {
    "evaluator_meta": "key TEXT PRIMARY KEY, value TEXT NOT NULL",
    "evaluator_streams": "contract TEXT, stream BLOB, data BLOB NOT NULL, PRIMARY KEY (contract, stream)",
    "evaluator_rows": "contract TEXT, block INTEGER, data BLOB NOT NULL, PRIMARY KEY (contract, block)",
    "evaluator_series": """id INTEGER PRIMARY KEY AUTOINCREMENT, contract TEXT NOT NULL, metric TEXT NOT NULL,
        slice TEXT NOT NULL, kernel_train TEXT NOT NULL, kernel_inference TEXT NOT NULL, newest REAL NOT NULL,
        UNIQUE (contract, metric, slice, kernel_train, kernel_inference)""",
    "evaluator_panes": """series INTEGER, length INTEGER, pane INTEGER, width REAL NOT NULL, data BLOB NOT NULL,
        PRIMARY KEY (series, length, pane)""",
    "evaluator_evidence": """contract TEXT, clause TEXT, slice TEXT, kernel_train TEXT, kernel_inference TEXT,
        data BLOB NOT NULL, PRIMARY KEY (contract, clause, slice, kernel_train, kernel_inference)""",
    "evaluator_most_cells": "contract TEXT PRIMARY KEY, cells INTEGER NOT NULL",
    "evaluator_facts": "contract TEXT PRIMARY KEY, data TEXT NOT NULL",
    "evaluator_measured": "contract TEXT, sender TEXT, data TEXT NOT NULL, PRIMARY KEY (contract, sender)",
    "evaluator_measured_series": """contract TEXT, place INTEGER, metric TEXT NOT NULL, slice TEXT NOT NULL,
        kernel_train TEXT NOT NULL, kernel_inference TEXT NOT NULL, PRIMARY KEY (contract, place)""",
}


@dataclass(frozen=True, slots=True)
class _Facts:
    """Facts of a contract beside its numbers; `slices` and `clauses` are digests of what these measure."""

    heard: list[tuple[str, str, Heard]]
    recorders: dict[str, dict[str, LastReport]]
    ended: dict[str, float]
    moved: dict[str, dict[str, float]]
    owed: list[tuple[str, str, str, str, dict[str, float]]]
    slices: Mapping[str, str]
    clauses: dict[str, str]
    refused: list[RefusedSender]
    newest: list[tuple[str, str, str, float]]
    kernels: list[KernelInfo]


class EvaluatorStore:
    """Saves and restores evaluators; a StateError if another schema version wrote the state."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._ids: dict[tuple[str, SeriesKey], int] = {}
        self._saved_streams: set[tuple[str, bytes]] = set()
        self._saved_blocks: dict[str, set[int]] = defaultdict(set)
        self._heads: dict[tuple[str, int], int] = {}
        self._facts: dict[str, str] = {}
        self._measured: dict[str, dict[SeriesKey, int]] = defaultdict(dict)
        self._judged_at = -math.inf
        for table, columns in _TABLES.items():
            connection.execute(f"CREATE TABLE IF NOT EXISTS {table} ({columns})")
        if (version := self._meta("schema_version")) is None:
            self._save_meta("schema_version", version := str(SCHEMA_VERSION))
        if version != str(SCHEMA_VERSION):
            msg = (
                f"the evaluator's state has schema version {version}, this program reads {SCHEMA_VERSION}; use the "
                "program that wrote it, or move the state file away and start again: senders of cumulative histograms "
                "fill the windows anew within one export"
            )
            raise StateError(msg)

    @property
    def merged(self) -> dict[str, int]:
        """Number of the last batch in the state of each shard, by its name; and `shards`, how many there are."""
        return dict(json.loads(self._meta("merged") or "{}"))

    def save_merged(self, merged: Mapping[str, int]) -> None:
        """Write it, in the transaction that also has `save`."""
        self._save_meta("merged", json.dumps(merged))

    def _meta(self, key: str) -> str | None:
        row = self._connection.execute("SELECT value FROM evaluator_meta WHERE key = ?", (key,)).fetchone()
        return None if row is None else row[0]

    def _save_meta(self, key: str, value: str) -> None:
        self._connection.execute("INSERT OR REPLACE INTO evaluator_meta VALUES (?, ?)", (key, value))

    def save(
        self, evaluator: Evaluator, unit: UnitOfWork, alone: Callable[[str], AbstractContextManager[None]] | None = None
    ) -> None:
        """Write what changed since the last save that lasted.

        `alone` gives, by a contract's name, the context in which only that is written, so that its fault is not the
        others'.
        """
        unit.on_rollback(self._rolled_back)
        evaluator.settle()
        if self._judged_at != evaluator.judged_at:
            self._judged_at = evaluator.judged_at
            self._save_meta("judged_at", repr(self._judged_at))
        for name, state in evaluator.states.items():
            with alone(name) if alone is not None else nullcontext():
                unit.on_rollback(self._rolled_back)
                self._save_rows(name, state, evaluator)
                self._save_streams(name, state)
                self._save_panes(name, state)
                self._forget_panes(name, state)
                self._save_evidence(name, state)
                self._save_facts(name, evaluator)
                self._save_measured(name, state.recorders)
                unit.on_rollback(state.saved())

    def _rolled_back(self) -> None:
        """The next save writes the same again, together with what changes until then."""
        rows = self._connection.execute(
            "SELECT id, contract, metric, slice, kernel_train, kernel_inference FROM evaluator_series"
        )
        self._ids = {(name, SeriesKey(*key)): id for id, name, *key in rows}
        self._saved_streams = set(self._connection.execute("SELECT contract, stream FROM evaluator_streams"))
        self._saved_blocks.clear()
        for name, block in self._connection.execute("SELECT contract, block FROM evaluator_rows"):
            self._saved_blocks[name].add(block)
        self._heads.clear()
        self._facts.clear()
        self._measured.clear()
        for name, place, *key in self._connection.execute("SELECT * FROM evaluator_measured_series"):
            self._measured[name][SeriesKey(*key)] = place
        self._judged_at = -math.inf

    def restore(self, evaluator: Evaluator) -> None:
        """Read everything into an evaluator that has taken nothing yet; any error means that the database is damaged.

        Contracts, slices and metrics that are no longer there are left out, and deleted; so are redefined slices.
        """
        served = json.dumps([*evaluator.states])
        for table in ("streams", "rows", "series", "evidence", "most_cells", "facts", "measured", "measured_series"):
            self._connection.execute(
                f"DELETE FROM evaluator_{table} WHERE contract NOT IN (SELECT value FROM json_each(?))",  # noqa: S608 - names of tables
                (served,),
            )
        evaluator.listened(float(self._meta("judged_at") or -math.inf))
        redefined, changed = self._restore_facts(evaluator)
        self._restore_measured(evaluator)
        self._restore_series(evaluator, redefined)
        self._restore_rows(evaluator)
        self._restore_streams(evaluator)
        self._restore_evidence(evaluator, redefined, changed)

    def _save_streams(self, name: str, state: ContractState) -> None:
        kept: list[tuple[str, bytes, bytes]] = []
        gone: list[tuple[str, bytes]] = []
        for key in state.changed_streams:
            stream = state.streams.get(key)
            if stream is None and state.rows is not None:
                stream = state.rows.others.get(state.rows.row_of.get(key, -1))
            if stream is not None:
                kept.append((name, key, encode_stream(stream)))
            elif (name, key) in self._saved_streams:
                gone.append((name, key))
        self._connection.executemany("INSERT OR REPLACE INTO evaluator_streams VALUES (?, ?, ?)", kept)
        self._connection.executemany("DELETE FROM evaluator_streams WHERE contract = ? AND stream = ?", gone)
        self._saved_streams.update((name, key) for _, key, _ in kept)
        self._saved_streams.difference_update(gone)

    def _save_rows(self, name: str, state: ContractState, evaluator: Evaluator) -> None:
        saved, data = self._saved_blocks[name], dict[int, bytes]()
        if state.rows is not None:
            blocks, rows = state.rows.unsaved()
            content = state.rows.content(rows)
            numbers, of = np.unique(content.records["series"], return_inverse=True)
            ids = [self._id(name, key) for key in evaluator.series_of_rows(numbers.tolist())]
            content.records["series"] = np.array(ids, np.int64)[of]
            data = dict(zip(blocks.tolist(), encode_rows(blocks, rows, content), strict=True))
        kept = {block for block in data if data[block]}
        gone = (saved & data.keys()) - kept | (saved - (state.rows.blocks if state.rows is not None else set()))
        self._connection.executemany(
            "INSERT OR REPLACE INTO evaluator_rows VALUES (?, ?, ?)", [(name, block, data[block]) for block in kept]
        )
        self._connection.executemany(
            "DELETE FROM evaluator_rows WHERE contract = ? AND block = ?", [(name, block) for block in gone]
        )
        self._saved_blocks[name] = saved - gone | kept

    def _save_panes(self, name: str, state: ContractState) -> None:
        rows: list[tuple[int, int, int, float, bytes]] = []
        gone: list[tuple[int, int, int]] = []
        changed: set[SeriesKey] = set()
        for grid, pane, keys, held in state.unsaved():
            changed.update(keys)
            ids = [self._id(name, key) for key in keys]
            if not len(held):
                gone += [(id, grid, pane) for id in ids]
                continue
            width = state.grids[grid].width
            rows += [(id, grid, pane, width, data) for id, data in zip(ids, encode_histograms(held), strict=True)]
        self._connection.executemany("INSERT OR REPLACE INTO evaluator_panes VALUES (?, ?, ?, ?, ?)", rows)
        self._connection.executemany("DELETE FROM evaluator_panes WHERE series = ? AND length = ? AND pane = ?", gone)
        self._connection.executemany(
            "UPDATE evaluator_series SET newest = ? WHERE id = ?",
            [(state.series[key].newest, self._id(name, key)) for key in changed],
        )

    def _forget_panes(self, name: str, state: ContractState) -> None:
        for key in [key for key in self._ids if key[0] == name and key[1] not in state.series]:
            id = self._ids.pop(key)
            self._connection.execute("DELETE FROM evaluator_panes WHERE series = ?", (id,))
            self._connection.execute("DELETE FROM evaluator_series WHERE id = ?", (id,))
        for number in (SHORT, LONG):
            oldest = state.grids[number].oldest(state.clock)
            if self._heads.get((name, number)) != oldest:  # once per pane, not once per save
                self._heads[name, number] = oldest
                self._connection.execute(
                    "DELETE FROM evaluator_panes WHERE length = ? AND pane < ? AND series IN "
                    "(SELECT id FROM evaluator_series WHERE contract = ?)",
                    (number, oldest, name),
                )

    def _save_evidence(self, name: str, state: ContractState) -> None:
        evidence = state.evidence
        if not evidence.changed:
            return
        kept = [cell for cell in evidence.changed if cell in evidence.cells]
        self._connection.executemany(
            "INSERT OR REPLACE INTO evaluator_evidence VALUES (?, ?, ?, ?, ?, ?)",
            [(*cell, encode_evidence(evidence.cells[cell])) for cell in kept],
        )
        self._connection.executemany(
            "DELETE FROM evaluator_evidence WHERE contract = ? AND clause = ? AND slice = ? AND kernel_train = ? "
            "AND kernel_inference = ?",
            [tuple(cell) for cell in evidence.changed if cell not in evidence.cells],
        )
        self._connection.execute("INSERT OR REPLACE INTO evaluator_most_cells VALUES (?, ?)", (name, evidence.most))

    def _save_facts(self, name: str, evaluator: Evaluator) -> None:
        state = evaluator.states[name]
        quantities = state.contract.quantity_digests
        data = to_json(
            _Facts(
                heard=[(*pair, heard) for pair, heard in state.heard.items()],
                recorders=state.recorders.by_version,
                ended=state.recorders.ended,
                moved=state.recorders.moved,
                owed=[(*key, owing) for key, owing in state.recorders.owed.items()],
                slices=state.contract.slice_digests,
                clauses={id: digest for (id, slice), digest in quantities.items() if slice == ALL},
                refused=[*state.refused.found.values()],
                newest=[(metric, *pair, at) for metric, pairs in state.newest.items() for pair, at in pairs.items()],
                kernels=[*state.kernels.known.values()],
            )
        )
        if self._facts.get(name) != data:
            self._facts[name] = data
            self._connection.execute("INSERT OR REPLACE INTO evaluator_facts VALUES (?, ?)", (name, data))

    def _save_measured(self, name: str, recorders: Recorders) -> None:
        """Write when recorders measured each series; the series' names are in a table of their own, each once."""
        places, changed = self._measured[name], recorders.unsaved & recorders.measured.keys()
        added = {key for sender in changed for key in recorders.measured[sender]} - places.keys()
        new = dict(zip(added, count(1 + max(places.values(), default=0)), strict=False))
        places |= new
        self._connection.executemany(
            "INSERT INTO evaluator_measured_series VALUES (?, ?, ?, ?, ?, ?)",
            [(name, place, *key) for key, place in new.items()],
        )
        kept: list[tuple[str, str, str]] = []
        for sender in changed:
            times: dict[float, list[int]] = {}
            for key, at in recorders.measured[sender].items():
                times.setdefault(at, []).append(places[key])
            kept.append((name, sender, json.dumps([*times.items()])))
        self._connection.executemany("INSERT OR REPLACE INTO evaluator_measured VALUES (?, ?, ?)", kept)
        self._connection.executemany(
            "DELETE FROM evaluator_measured WHERE contract = ? AND sender = ?",
            [(name, sender) for sender in recorders.unsaved - recorders.measured.keys()],
        )

    def _restore_measured(self, evaluator: Evaluator) -> None:
        for name, place, *key in self._connection.execute("SELECT * FROM evaluator_measured_series"):
            self._measured[name][SeriesKey(*key)] = place
        keys = {name: {place: key for key, place in places.items()} for name, places in self._measured.items()}
        for name, sender, data in self._connection.execute("SELECT * FROM evaluator_measured"):
            of = keys[name]
            evaluator.states[name].recorders.measured[sender] = {
                of[place]: at for at, places in json.loads(data) for place in places
            }

    def _restore_streams(self, evaluator: Evaluator) -> None:
        for name, key, data in self._connection.execute("SELECT contract, stream, data FROM evaluator_streams"):
            self._saved_streams.add((name, key))
            state, stream = evaluator.states[name], check_stream(decode_stream(data))
            row = -1 if state.rows is None else state.rows.row_of.get(key, -1)
            if row >= 0 and state.rows is not None:
                state.rows.others[row] = stream
            elif (known := state.streams.get(key)) is not None:  # it was in a row, and has none now
                known.writers[:0], known.times, known.forgotten = stream.writers, stream.times, stream.forgotten
            else:
                state.streams[key] = stream

    def _restore_rows(self, evaluator: Evaluator) -> None:
        keys = {id: key for (_, key), id in self._ids.items()}
        for name, block, data in self._connection.execute("SELECT * FROM evaluator_rows ORDER BY block").fetchall():
            content = decode_rows(data)
            series = [keys.get(id) for id in content.records["series"].tolist()]
            evaluator.restore_rows(name, content, series)
            self._saved_blocks[name].add(block)

    def _restore_series(self, evaluator: Evaluator, redefined: Collection[tuple[str, str]]) -> None:
        found: dict[int, tuple[str, SeriesKey]] = {}
        orphans = []
        for id, name, *key, newest in self._connection.execute("SELECT * FROM evaluator_series"):
            series, state = SeriesKey(*key), evaluator.states[name]
            places = (ALL, *UNJUDGED, *PLACES, *state.contract.slices)
            known = metric_of(series.metric) == INVALID or series.slice in places
            if not known or (name, series.slice) in redefined:
                orphans.append((id,))
                continue
            found[id] = (name, series)
            self._ids[name, series] = id
            state.restored(series, newest)
        self._connection.executemany("DELETE FROM evaluator_series WHERE id = ?", orphans)
        self._connection.execute("DELETE FROM evaluator_panes WHERE series NOT IN (SELECT id FROM evaluator_series)")
        rows = self._connection.execute("SELECT rowid, * FROM evaluator_panes").fetchall()
        held: dict[tuple[str, int, int], tuple[list[int], list[Histogram]]] = {}
        layouts: dict[int, tuple[float, ...] | None] = {}
        for row, id, number, pane, width, data in rows:
            name, key = found[id]
            state = evaluator.states[name]
            grid = state.grids[number]
            # A window whose length was changed has panes of another width: each goes where its middle lies.
            index = pane if width == grid.width else grid.index((pane + 0.5) * width)
            of_series, content = state.series[key], decode_histogram(data)
            check_observed(content)
            if content.layout == layouts.setdefault(id, content.layout):
                of_series.layout = content.layout
                of, parts = held.setdefault((name, number, index), ([], []))
                of.append(of_series.number)
                parts.append(content)
            if width != grid.width:
                state.panes.changed.setdefault((number, index), []).append(np.array([of_series.number]))
                self._connection.execute("DELETE FROM evaluator_panes WHERE rowid = ?", (row,))
        for (name, number, index), (of, parts) in held.items():
            evaluator.states[name].panes.put(number, index, of, parts)

    def _restore_evidence(
        self, evaluator: Evaluator, redefined: Collection[tuple[str, str]], changed: Collection[tuple[str, str]]
    ) -> None:
        """Restore the evidence against cells; delete evidence against a limit, clause or slice that has changed."""
        for name, most in self._connection.execute("SELECT * FROM evaluator_most_cells"):
            evaluator.states[name].evidence.most = most
        for row, *fields, data in self._connection.execute("SELECT rowid, * FROM evaluator_evidence").fetchall():
            cell, held = Cell(*fields), decode_evidence(data)
            other = (cell.contract, cell.slice) in redefined or (cell.contract, whole_side(cell).clause) in changed
            if other or not evaluator.states[cell.contract].evidence.restore(cell, held):
                self._connection.execute("DELETE FROM evaluator_evidence WHERE rowid = ?", (row,))

    def _restore_facts(self, evaluator: Evaluator) -> tuple[set[tuple[str, str]], set[tuple[str, str]]]:
        """Restore what is known beside the numbers.

        Returns the contracts and slices that have been redefined since, and the contracts and clauses.
        """
        redefined: set[tuple[str, str]] = set()
        changed: set[tuple[str, str]] = set()
        for name, data in self._connection.execute("SELECT contract, data FROM evaluator_facts"):
            state = evaluator.states[name]
            facts = read_json(_Facts, data)
            own, measured = state.contract.slice_digests, state.contract.quantity_digests
            redefined |= {(name, slice) for slice, digest in facts.slices.items() if own.get(slice) != digest}
            changed |= {(name, id) for id, digest in facts.clauses.items() if measured.get((id, ALL)) != digest}
            state.heard = {(train, inference): heard for train, inference, heard in facts.heard}
            recorders = state.recorders
            recorders.by_version, recorders.ended, recorders.moved = facts.recorders, facts.ended, facts.moved
            recorders.owed = {SeriesKey(*key): owing for *key, owing in facts.owed}
            state.refused.found = {
                (refused.outcome, refused.pair, refused.sender): refused for refused in facts.refused
            }
            for metric, train, inference, at in facts.newest:
                state.newest.setdefault(metric, {})[train, inference] = at
            state.kernels.known.update({(info.role, info.version): info for info in facts.kernels})
        return redefined, changed

    def _id(self, name: str, key: SeriesKey) -> int:
        id = self._ids.get((name, key))
        if id is None:
            cursor = self._connection.execute(
                "INSERT INTO evaluator_series (contract, metric, slice, kernel_train, kernel_inference, newest) "
                "VALUES (?, ?, ?, ?, ?, 0) ON CONFLICT DO UPDATE SET newest = newest RETURNING id",
                (name, *key),
            )
            id = self._ids[name, key] = int(cursor.fetchone()[0])
        return id
