"""A shard: some senders' streams, in a state file of its own. It knows nothing of Ray.

    export -> inbox -> streams -> what was counted -> batch -> judge

A batch is written in one transaction with the streams, which takes what it is of out of the inbox; it is given again
until the judge has it in its own state. So a shard that ends anywhere, and is started again on another machine, gives
the judge all that was acknowledged, once. The lock of the state file waits for a process presumed dead.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
import uuid
from base64 import b64decode, b64encode
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from kc_otel.contract.model import Contract
from kc_otel.judge.evaluator import Evaluator
from kc_otel.judge.otlp.requests import METRICS, ExportResult, Limits, ReceiveError, ThrottledError, quickly
from kc_otel.judge.series import SeriesKey
from kc_otel.judge.shard_state import Counted, ShardBatch, ShardState, mark_sent, unsent_batch
from kc_otel.serve.durable_sink import DurableSink, Inbox, recover
from kc_otel.serve.store.codecs import decode_histogram, decode_stream, encode_histogram, encode_stream
from kc_otel.serve.store.evaluator_store import EvaluatorStore
from kc_otel.serve.store.state_file import open_state, unit_of_work

_log: Final = logging.getLogger(__name__)
_LOCK_WAIT_SECONDS: Final = 20.0
"""Seconds that the shard waits for the lock of the process before it."""

Stream = tuple[str, bytes, bytes]
"""Contract, digest and encoding of a stream."""


class Refused(NamedTuple):
    """Reason why an export was refused, in a form that can be serialised; `kind` is a class of `request_errors`."""

    kind: str
    message: str


@dataclass(frozen=True, slots=True)
class ShardHealth:
    """A shard's own report; a shard owns the streams of its share of senders.

    `name` is of its folder: another folder begins with numbers of its own. `started` is later than the evaluator's
    where it was started again; `recovered` exports were taken from its log then. `points` count since then. `lag` are
    bytes that wait for the disk, or are in its log and in no batch.
    """

    name: str = ""
    node: str = ""
    pid: int = 0
    started: float = 0.0
    recovered: int = 0
    streams: int = 0
    points: int = 0
    lag: int = 0
    cpu_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class ShardSeen(ShardHealth):
    """The judge's view of a shard: its last report, as the API shows it.

    Senders are divided over the numbers by their resource attributes. `answered` is the Unix time of that report, 0
    before the first; `waiting` are bytes that wait for it in the evaluator; `trouble` is why it does not answer.
    """

    number: int = 0
    answered: float = 0.0
    waiting: int = 0
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class ShardReport:
    """A batch, and how the shard is."""

    batch: ShardBatch
    health: ShardHealth


class Shard:
    """Takes exports for some senders. Use it from one event loop. `folder` has to outlive the machine."""

    def __init__(self, contracts: Sequence[Contract], folder: Path, limits: Limits) -> None:
        self.evaluator = Evaluator(contracts, remember=ShardState)
        self.evaluator.use_columns()
        self._limits = limits
        self._connection = open_state(folder / "state", patience=_LOCK_WAIT_SECONDS)
        with unit_of_work(self._connection):
            self._store = EvaluatorStore(self._connection)
            self._store.restore(self.evaluator)
            self._name = self._store.meta("shard") or uuid.uuid4().hex
            self._store.save_meta("shard", self._name)
            self.inbox = Inbox(self._connection)
        self._batch = self._read_batch()
        self._points: dict[str, int] = {}
        self._kernels_sent = 0.0
        self._started = time.time()
        self._recovered = recover(self)
        self._sink = DurableSink(self)

    def metrics(self, request: Any, at: float | None = None) -> ExportResult:
        """Take an ExportMetricsServiceRequest, or its columns, that is in the inbox."""
        return self.evaluator.ingest_metrics(request, time.time() if at is None else at)

    async def take(self, exports: Sequence[tuple[bytes, float]]) -> list[ExportResult | Refused]:
        """Take serialized exports, each with its arrival in Unix seconds; one that gets an ExportResult is on disk."""
        return list(await asyncio.gather(*(self._take(body, at) for body, at in exports)))

    async def report(self, settled: int, now: float) -> ShardReport:
        """Return the batch that the judge has not been sent, or the previous one if the judge has not stored it.

        `settled` is the number of the last batch that the judge has in its state. If it cannot be written (StateError),
        the next call tells all of it.
        """
        if self._batch.number <= settled:
            for state in self.evaluator.states.values():
                self.evaluator.forget_silent(state, now)
            if self.inbox.bytes or any(state.changed_streams for state in self.evaluator.states.values()):
                await self._save_batch(settled + 1)
        return ShardReport(self._batch, self._health())

    def streams(self) -> list[Stream]:
        """Return all streams, to move them elsewhere."""
        return [(name, key, encode_stream(stream)) for name, key, stream in self.evaluator.streams()]

    async def adopt(self, streams: Iterable[Stream], settled: int) -> None:
        """Remember streams of other shards, unless something later is known of them here; on disk when this returns.

        A ValueError if the judge has not written the last batch of this shard.
        """
        if self._batch.number > settled:
            raise ValueError("the judge has to write what this shard told it before streams are moved here")
        for name, key, data in streams:
            self.evaluator.adopt(name, key, decode_stream(data))
        await self._save_batch(settled + 1)

    def close(self) -> None:
        """Release the folder."""
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
            return Refused("InternalError", "the shard failed on this request; what it logs has the cause")

    async def _save_batch(self, number: int) -> None:
        """Write streams, and what the judge was not told until now, in one transaction."""
        evaluator = self.evaluator
        async with self._connection.turn():
            if self._batch.number >= number:  # another call has written it
                return
            evaluator.settle()  # also what came while this waited: it is taken out of the inbox
            batch = unsent_batch(evaluator, number, self._points, self._kernels_sent)
            seen = [kernel.last_seen for name in evaluator.states for kernel in evaluator.kernels(name)]
            with unit_of_work(self._connection) as unit:
                self._store.save(evaluator, unit)
                self._write_batch(batch)
                self.inbox.take_out(unit)
                unit.on_rollback(mark_sent(evaluator, self._points))

                def adopt() -> None:
                    self._batch, self._kernels_sent = batch, max(seen, default=0.0)

                unit.on_commit(adopt)

    def _health(self) -> ShardHealth:
        used = os.times()
        return ShardHealth(
            name=self._name,
            node=os.uname().nodename,
            pid=os.getpid(),
            started=self._started,
            recovered=self._recovered,
            streams=self.evaluator.stream_count,
            points=self.evaluator.counters.total(),
            lag=self.inbox.bytes,
            cpu_seconds=used.user + used.system,
        )

    def _write_batch(self, batch: ShardBatch) -> None:
        counted = [
            (row.contract, row.key, row.time, row.now, b64encode(encode_histogram(row.histogram)).decode())
            for row in batch.counted
        ]
        self._store.save_meta("batch", json.dumps([batch.number, counted, batch.notes, batch.points]))

    def _read_batch(self) -> ShardBatch:
        number, rows, notes, points = json.loads(self._store.meta("batch") or "[0, [], {}, {}]")
        counted = [
            Counted(contract, SeriesKey(*key), at, arrived, decode_histogram(b64decode(data)))
            for contract, key, at, arrived, data in rows
        ]
        return ShardBatch(number, counted, notes, points)
