"""The evaluator's state in SQLite: changes since the last save are written, and all of it is read at the start.

Later requests are in the inbox, and are applied at the start. The store never begins or commits a transaction; the
owner of the connection does. Changes during the commit belong to the next save.
"""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Final

import numpy as np

from kc_otel.contract.slices import ALL, PLACES, UNJUDGED
from kc_otel.judge.contract_state import ContractState
from kc_otel.judge.evaluator import Evaluator
from kc_otel.judge.fail_evidence import HeldEvidence, whole_side
from kc_otel.judge.plain_json import read_json, to_json
from kc_otel.judge.point_streams import PointStream, RefusedSender
from kc_otel.judge.points import INVALID, metric_of
from kc_otel.judge.recorders import KernelInfo, LastReport
from kc_otel.judge.series import LONG, SHORT, Heard, Pair, SeriesKey
from kc_otel.judge.verdict import Cell
from kc_otel.serve.store.codecs import decode_histogram, decode_rows, encode_histograms, encode_rows
from kc_otel.serve.store.state_file import StateError, UnitOfWork
from kc_otel.serve.store.values import Values
from kc_otel.stats.histogram import Histogram

SCHEMA_VERSION: Final = 17
_LAST_OF_META: Final = 16
"""Version of the files whose schema version is in a table of its own, or a later one than theirs."""

_STREAMS, _ROWS, _EVIDENCE, _FACTS = "streams", "rows", "evidence", "facts"
"""Kinds of values: streams by their digests, rows of streams by block, evidence by cell, facts of a contract."""
_MEASURED: Final = "measured"
"""Times at which each sender measured series, by sender."""
_JUDGED_AT, _SCHEMA = "judged at", "schema version"
_TABLES: Final = {
    "evaluator_series": """id INTEGER PRIMARY KEY AUTOINCREMENT, contract TEXT NOT NULL, metric TEXT NOT NULL,
        slice TEXT NOT NULL, kernel_train TEXT NOT NULL, kernel_inference TEXT NOT NULL, newest REAL NOT NULL,
        UNIQUE (contract, metric, slice, kernel_train, kernel_inference)""",
    "evaluator_panes": """series INTEGER, length INTEGER, pane INTEGER, width REAL NOT NULL, data BLOB NOT NULL,
        PRIMARY KEY (series, length, pane)""",
}


@dataclass(frozen=True, slots=True)
class _Facts:
    """Facts of a contract beside its numbers; `slices` and `clauses` are digests of what these measure."""

    heard: list[tuple[Pair, Heard]]
    recorders: dict[str, dict[str, LastReport]]
    gone: dict[str, dict[str, LastReport]]
    owed: list[tuple[SeriesKey, dict[str, float]]]
    slices: Mapping[str, str]
    clauses: dict[str, str]
    refused: list[RefusedSender]
    newest: dict[str, list[tuple[Pair, float]]]
    kernels: list[KernelInfo]
    most_cells: int


class EvaluatorStore:
    """Saves and restores evaluators; a StateError if another schema version wrote the state."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection, self.values = connection, Values(connection)
        self._ids: dict[tuple[str, SeriesKey], int] = {}
        self._heads: dict[tuple[str, int], int] = {}
        for table, columns in _TABLES.items():
            connection.execute(f"CREATE TABLE IF NOT EXISTS {table} ({columns})")
        before = connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'evaluator_meta'").fetchone()
        version = self.values.load(_SCHEMA, int, SCHEMA_VERSION if before is None else _LAST_OF_META)
        if version != SCHEMA_VERSION:
            msg = (
                f"the evaluator's state has schema version {version}, this program reads {SCHEMA_VERSION}; use the "
                "program that wrote it, or move the state file away and start again. First note the routes, pins and "
                "promotions that `kc-otel status` shows with that program, and give them again after the start: a "
                "kernel that requests are kept away from is not measured, so nothing else keeps them away again"
            )
            raise StateError(msg)
        self.values.save(_SCHEMA, version)

    def save(
        self, evaluator: Evaluator, unit: UnitOfWork, alone: Callable[[str], AbstractContextManager[None]] | None = None
    ) -> None:
        """Write what changed since the last save that lasted; `alone` gives the context of what is of one contract."""
        unit.on_rollback(self._rolled_back)
        evaluator.settle()
        self.values.save(_JUDGED_AT, evaluator.judged_at)
        for name, state in evaluator.states.items():
            with alone(name) if alone is not None else nullcontext():
                unit.on_rollback(self._rolled_back)
                self._save_rows(name, state)
                self._save_streams(name, state)
                self._save_panes(name, state)
                self._forget_panes(name, state)
                self._save_evidence(name, state)
                self._save_facts(name, evaluator)
                self._save_measured(name, state)
                unit.on_rollback(state.saved())

    def _rolled_back(self) -> None:
        """The next save writes the same again, together with what changes until then."""
        rows = self._connection.execute(
            "SELECT id, contract, metric, slice, kernel_train, kernel_inference FROM evaluator_series"
        )
        self._ids = {(name, SeriesKey(*key)): id for id, name, *key in rows}
        self._heads.clear()

    def restore(self, evaluator: Evaluator) -> None:
        """Read everything into an evaluator that has taken nothing yet; any error means that the database is damaged.

        Contracts, slices and metrics that are no longer there are left out, and deleted; so are redefined slices.
        """
        self._connection.execute(
            "DELETE FROM evaluator_series WHERE contract NOT IN (SELECT value FROM json_each(?))",
            (json.dumps([*evaluator.states]),),
        )
        self.values.forget_others((_STREAMS, _ROWS, _EVIDENCE, _FACTS, _MEASURED), evaluator.states)
        evaluator.listened(self.values.load(_JUDGED_AT, float, -math.inf))
        redefined, changed = self._restore_facts(evaluator)
        self._restore_series(evaluator, redefined)
        self._restore_measured(evaluator)
        self._restore_rows(evaluator)
        self._restore_streams(evaluator)
        self._restore_evidence(evaluator, redefined, changed)

    def _save_streams(self, name: str, state: ContractState) -> None:
        found: dict[bytes, str | None] = {}
        for key in state.streams.changed:
            stream = state.streams.alone.get(key) or state.streams.others.get(key)
            found[key] = None if stream is None else to_json(stream)
        self.values.write(name, _STREAMS, found)

    def _save_rows(self, name: str, state: ContractState) -> None:
        gone = set(self.values.keys(name, _ROWS)).difference(state.streams.blocks)
        values: dict[int, bytes | None] = dict.fromkeys(gone)
        blocks, rows = state.streams.unsaved()
        if blocks.size:
            content = state.streams.content(rows)
            numbers, of = np.unique(content.records["series"], return_inverse=True)
            content.records["series"] = np.array([self._id(name, key) for key in state.keys(numbers)], np.int64)[of]
            encoded = encode_rows(blocks, rows, content)
            values |= {block: data or None for block, data in zip(blocks.tolist(), encoded, strict=True)}
        self.values.write(name, _ROWS, values)

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
        cells = state.evidence.cells
        found = {json.dumps(cell): to_json(cells[cell]) if cell in cells else None for cell in state.evidence.changed}
        self.values.write(name, _EVIDENCE, found)

    def _save_facts(self, name: str, evaluator: Evaluator) -> None:
        state = evaluator.states[name]
        quantities = state.contract.quantity_digests
        data = to_json(
            _Facts(
                heard=[*state.heard.items()],
                recorders=state.recorders.by_version,
                gone=state.recorders.gone,
                owed=[*state.recorders.owed.items()],
                slices=state.contract.slice_digests,
                clauses={id: digest for (id, slice), digest in quantities.items() if slice == ALL},
                refused=[*state.refused.found.values()],
                newest={metric: [*pairs.items()] for metric, pairs in state.newest.items()},
                kernels=[*state.kernels.values()],
                most_cells=state.evidence.most,
            )
        )
        self.values.write(name, _FACTS, {"": data})

    def _save_measured(self, name: str, state: ContractState) -> None:
        """Write when recorders measured each series that there is."""
        recorders = state.recorders
        values: dict[str, str | None] = dict.fromkeys(recorders.unsaved)
        for sender in recorders.unsaved & recorders.measured.keys():
            times: dict[float, list[int]] = {}
            for key, at in recorders.measured[sender].items():
                if key in state.series:
                    times.setdefault(at, []).append(self._id(name, key))
            values[sender] = json.dumps([*times.items()])
        self.values.write(name, _MEASURED, values)

    def _restore_measured(self, evaluator: Evaluator) -> None:
        keys = {id: key for (_, key), id in self._ids.items()}
        for name, sender, data in self.values.read(_MEASURED):
            seen = {keys[id]: at for at, ids in json.loads(data) for id in ids if id in keys}
            evaluator.states[name].recorders.measured[sender] = seen

    def _restore_streams(self, evaluator: Evaluator) -> None:
        for name, key, data in self.values.read(_STREAMS):
            streams, stream = evaluator.states[name].streams, read_json(PointStream, data)
            if key in streams.row_of:
                streams.others[key] = stream
            elif (known := streams.alone.get(key)) is not None:  # it was in a row, and has none now
                known.writers[:0], known.times, known.forgotten = stream.writers, stream.times, stream.forgotten
            else:
                streams.alone[key] = stream

    def _restore_rows(self, evaluator: Evaluator) -> None:
        keys = {id: key for (_, key), id in self._ids.items()}
        for name, _, data in self.values.read(_ROWS):
            content = decode_rows(data)
            evaluator.states[name].restore_rows(content, map(keys.get, content.records["series"].tolist()))

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
        for name, key, data in self.values.read(_EVIDENCE):
            cell, held = Cell(*json.loads(key)), read_json(HeldEvidence, data)
            recovery = None if held.fault is None else held.fault.recovery
            if math.isnan(held.peak) or (recovery is not None and not recovery.cap > recovery.level > 0.0):
                raise ValueError("not evidence: a number is missing, or is none")
            other = (name, cell.slice) in redefined or (name, whole_side(cell).clause) in changed
            if other or not evaluator.states[name].evidence.restore(cell, held):
                self.values.write(name, _EVIDENCE, {key: None})

    def _restore_facts(self, evaluator: Evaluator) -> tuple[set[tuple[str, str]], set[tuple[str, str]]]:
        """Restore what is beside the numbers; return (contract, slice) and (contract, clause) redefined since."""
        redefined: set[tuple[str, str]] = set()
        changed: set[tuple[str, str]] = set()
        for name, _, data in self.values.read(_FACTS):
            state = evaluator.states[name]
            facts = read_json(_Facts, data)
            own, measured = state.contract.slice_digests, state.contract.quantity_digests
            redefined |= {(name, slice) for slice, digest in facts.slices.items() if own.get(slice) != digest}
            changed |= {(name, id) for id, digest in facts.clauses.items() if measured.get((id, ALL)) != digest}
            state.heard = dict(facts.heard)
            recorders = state.recorders
            recorders.by_version, recorders.gone = facts.recorders, facts.gone
            recorders.owed = dict(facts.owed)
            state.refused.found = {
                (refused.outcome, refused.pair, refused.sender): refused for refused in facts.refused
            }
            state.newest.update({metric: dict(pairs) for metric, pairs in facts.newest.items()})
            state.kernels.update({(info.role, info.version): info for info in facts.kernels})
            state.evidence.most = facts.most_cells
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
