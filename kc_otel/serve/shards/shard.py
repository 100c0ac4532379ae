"""A shard: some senders' streams, with a log and a state file of its own. It knows nothing of Ray.

    export -> write-ahead log -> streams -> what was counted -> batch (in the state file) -> judge

What is acknowledged is in the log. A batch is written in one transaction with the streams and the position in the log
that it goes up to, stays until the judge says that it has it in its own state, and is given again until then. So a
shard that ends anywhere, and is started again on another machine, gives the judge all that was acknowledged, once.

Who begins on a folder begins a new segment of the log and holds the lock of the state file: what a process that was
thought dead may yet write changes nothing that is read.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sqlite3
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from kc_otel.contract.model import Contract
from kc_otel.judge.evaluator import Evaluator
from kc_otel.judge.otlp.decode import quickly
from kc_otel.judge.otlp.request_errors import ReceiveError, ThrottledError
from kc_otel.judge.otlp.request_limits import Limits
from kc_otel.judge.otlp.signals import METRICS
from kc_otel.judge.otlp.sink import ExportResult
from kc_otel.judge.series import SeriesKey
from kc_otel.judge.shards.shard_batch import Counted, ShardBatch
from kc_otel.judge.shards.shard_state import ShardState, mark_sent, unsent_batch
from kc_otel.serve.config import Sync
from kc_otel.serve.durable_sink import DurableSink, recover
from kc_otel.serve.shards.shard_health import ShardHealth
from kc_otel.serve.store.evaluator_store import EvaluatorStore
from kc_otel.serve.store.histogram_codec import decode_histogram, encode_histogram
from kc_otel.serve.store.state_file import StateError, open_state
from kc_otel.serve.store.stream_codec import decode_stream, encode_stream
from kc_otel.serve.store.unit_of_work import unit_of_work
from kc_otel.serve.store.write_ahead_log import WriteAheadLog

__all__ = ["Refused", "Shard", "ShardReport", "Stream"]

_log: Final = logging.getLogger(__name__)
_PATIENCE: Final = 20.0
"""Seconds that the shard waits for the lock of the process before it."""
_TABLES: Final = {
    "shard_meta": "key TEXT PRIMARY KEY, value TEXT NOT NULL",
    "shard_counted": """contract TEXT, metric TEXT, slice TEXT, kernel_train TEXT, kernel_inference TEXT, time REAL,
        arrived REAL, data BLOB""",
}

Stream = tuple[str, bytes, bytes]
"""Contract, digest and encoding of a stream."""


class Refused(NamedTuple):
    """Why an export was not taken, in a form that travels.

    Attributes:
        kind: Name of the class of `kc_otel.judge.otlp.request_errors` that says so to the sender.
        message: For the sender.
    """

    kind: str
    message: str


@dataclass(frozen=True, slots=True)
class ShardReport:
    """A batch, and how the shard is."""

    batch: ShardBatch
    health: ShardHealth


class Shard:
    """Takes exports for some senders. Use it from one event loop.

    Args:
        contracts: Contracts that are judged.
        folder: Where its log and its state are: `log`, `state`. It has to outlive the machine.
        limits: What an export may be.
        sync: When what was received is forced to the disk.

    Raises:
        StateError: If another process holds the folder, or it cannot be written.
    """

    def __init__(self, contracts: Sequence[Contract], folder: Path, limits: Limits, sync: Sync) -> None:
        self.evaluator = Evaluator(contracts, remember=ShardState)
        self.evaluator.use_columns()
        self._limits = limits
        self._connection = open_state(folder / "state", patience=_PATIENCE)
        with unit_of_work(self._connection):
            self._store = EvaluatorStore(self._connection)
            self._store.restore(self.evaluator)
            for table, columns in _TABLES.items():
                self._connection.execute(f"CREATE TABLE IF NOT EXISTS {table} ({columns})")
            self._name = self._meta("name") or uuid.uuid4().hex
            self._save_meta("name", self._name)
        self.position = self._saved = self._store.position
        self.forget: Callable[[int], None] = lambda _position: None
        self._batch = self._read_batch()
        self._points: dict[str, int] = {}
        self._kernels_sent = 0.0
        self._started = time.time()
        self._log = WriteAheadLog(folder / "log", sync=sync, begin=self.position)
        self._recovered = recover(self, self._log)
        self._sink = DurableSink(self, self._log)

    def metrics(self, request: Any, at: float | None = None) -> ExportResult:
        """Take an ExportMetricsServiceRequest, or its columns, that is in the log."""
        return self.evaluator.ingest_metrics(request, time.time() if at is None else at)

    def traces(self, request: Any) -> ExportResult:
        """Take an ExportTraceServiceRequest; the judge has its own."""
        return self.evaluator.ingest_traces(request, time.time())

    def logs(self, request: Any) -> ExportResult:  # noqa: ARG002 - the log's interface
        """Logs are not ours."""
        return ExportResult()

    async def take(self, exports: Sequence[tuple[bytes, float]]) -> list[ExportResult | Refused]:
        """Take exports in their order; what is answered with an ExportResult is on disk.

        Args:
            exports: Serialized ExportMetricsServiceRequests, and when each arrived, Unix seconds.
        """
        return list(await asyncio.gather(*(self._take(body, at) for body, at in exports)))

    def report(self, settled: int, now: float) -> ShardReport:
        """What the judge has not been told; the batch before again, if the judge has not written it.

        Args:
            settled: Number of the last batch that the judge has in its state.
            now: The judge's Unix time in seconds.

        Raises:
            StateError: If it cannot be written. The next call tells all of it.
        """
        if self._batch.number <= settled:
            for state in self.evaluator.states.values():
                self.evaluator.forget_silent(state, now)
            self.evaluator.settle()
            if self.position != self._saved or any(state.changed_streams for state in self.evaluator.states.values()):
                self._save_batch(settled + 1)
        return ShardReport(self._batch, self._health())

    def streams(self) -> list[Stream]:
        """All streams, to be remembered elsewhere."""
        self.evaluator.settle()
        return [
            (name, key, encode_stream(stream))
            for name, state in self.evaluator.states.items()
            for key, stream in state.streams.items()
        ]

    def adopt(self, streams: Iterable[Stream], settled: int) -> None:
        """Remember streams, unless something later is known of them here; it is on disk when this returns.

        Args:
            streams: What other shards gave.
            settled: Number of the last batch that the judge has in its state: the last one.

        Raises:
            StateError: If it cannot be written.
            ValueError: If the judge has not written the last batch.
        """
        if self._batch.number > settled:
            raise ValueError("the judge has to write what this shard told it before streams are moved here")
        self.evaluator.relearn()
        for name, key, data in streams:
            state, stream = self.evaluator.states.get(name), decode_stream(data)
            if state is not None and (key not in state.streams or state.streams[key].heard < stream.heard):
                state.streams[key] = stream
                state.changed_streams.add(key)
        self._save_batch(settled + 1)

    def close(self) -> None:
        """Let go of the folder."""
        self._log.close()
        self._connection.close()

    async def _take(self, body: bytes, at: float) -> ExportResult | Refused:
        try:
            return await self._sink.metrics(quickly(self._sink, body, METRICS, self._limits), at)
        except ThrottledError as error:
            return Refused("ThrottledError", str(error))
        except ReceiveError as error:
            return Refused(type(error).__name__, str(error))
        except Exception:  # noqa: BLE001 - one export must not keep back those that came with it
            _log.exception("an export that arrived at %.3f could not be taken", at)
            return Refused("InternalError", "the shard failed on this request; its log has the cause")

    def _save_batch(self, number: int) -> None:
        """Write streams, the position in the log, and what the judge was not told until there, in one transaction."""
        evaluator = self.evaluator
        batch = unsent_batch(evaluator, number, self._points, self._kernels_sent)
        with unit_of_work(self._connection) as unit:
            self._store.save(evaluator, unit)
            self._store.save_position(self.position)
            self._write_batch(batch)
        try:
            self._connection.settle()
        except (sqlite3.Error, OSError) as error:
            raise StateError(f"the state cannot be forced to the disk: {error}") from error
        self._batch, self._saved = batch, self.position
        mark_sent(evaluator, self._points)
        seen = (one.last_seen for name in evaluator.facts for one in evaluator.kernels(name))
        self._kernels_sent = max(seen, default=0.0)
        self.forget(self.position)

    def _health(self) -> ShardHealth:
        used = os.times()
        return ShardHealth(
            name=self._name,
            node=os.uname().nodename,
            pid=os.getpid(),
            started=self._started,
            recovered=self._recovered,
            streams=self.evaluator.stream_count,
            taken=self.evaluator.counters.total(),
            lag=self._log.waiting + max(self._log.end - self._saved, 0),
            cpu=used.user + used.system,
        )

    def _write_batch(self, batch: ShardBatch) -> None:
        self._connection.execute("DELETE FROM shard_counted")
        self._connection.executemany(
            "INSERT INTO shard_counted VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            [(one.contract, *one.key, one.time, one.now, encode_histogram(one.histogram)) for one in batch.counted],
        )
        self._save_meta("batch", json.dumps([batch.number, batch.notes, batch.points]))

    def _read_batch(self) -> ShardBatch:
        said = self._meta("batch")
        if said is None:
            return ShardBatch(0)
        number, notes, points = json.loads(said)
        rows = self._connection.execute("SELECT * FROM shard_counted").fetchall()
        counted = [
            Counted(contract, SeriesKey(*key), at, arrived, decode_histogram(data))
            for contract, *key, at, arrived, data in rows
        ]
        return ShardBatch(number, counted, notes, points)

    def _meta(self, key: str) -> str | None:
        row = self._connection.execute("SELECT value FROM shard_meta WHERE key = ?", (key,)).fetchone()
        return None if row is None else str(row[0])

    def _save_meta(self, key: str, value: str) -> None:
        self._connection.execute("INSERT OR REPLACE INTO shard_meta VALUES (?, ?)", (key, value))
