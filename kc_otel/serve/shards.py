"""Shards on a Ray cluster, in front of the process that judges, for one contract that outgrows a process.

    export -> judge's process -> its sender's shard: inbox -> streams -> what was counted -> batch -> judge

A shard has some senders' streams, in a state file of its own. A batch is written there in one transaction with the
streams, and is given again until the judge has it in its own state. So a shard that ends anywhere, and is started again
on another machine, gives the judge all that was acknowledged, once. The lock of its file waits for a process presumed
dead. One judge has every window and what is held against each limit, so a promise about false alarms is made once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from kc_otel._extras import extra
from kc_otel.contract.model import Contract
from kc_otel.judge.evaluator import Evaluator
from kc_otel.judge.otlp import requests
from kc_otel.judge.otlp.requests import ExportResult, Limits, MetricsSink, ReceiveError, ThrottledError
from kc_otel.judge.otlp.traffic_entries import judged_metrics
from kc_otel.judge.points import resource_identity
from kc_otel.judge.shard_state import ShardBatch, ShardState, mark_sent, merge, unsent_batch
from kc_otel.serve.config import ServeConfig
from kc_otel.serve.durable_sink import DurableSink, Inbox, NotKeptError, recover
from kc_otel.serve.store.evaluator_store import EvaluatorStore
from kc_otel.serve.store.state_file import open_state, unit_of_work

if TYPE_CHECKING:
    from kc_otel.serve.core import Core

_log: Final = logging.getLogger(__name__)
_LOCAL_STORE_BYTES: Final = 80 * 1024 * 1024
_LOCK_WAIT_SECONDS: Final = 20.0
"""Seconds that a shard waits for the lock of the process before it."""
_SHARD_WAIT_SECONDS: Final = 1.0
"""Seconds that an evaluation waits for shards; one that is later is in the next."""
_START_SECONDS: Final = 60.0
"""Seconds within which every shard has to answer at the start."""
_ANSWER_SECONDS: Final = 8.0
"""Seconds within which an export has to be on the shard's disk; senders wait 10 s themselves."""
_MAX_WAITING_BYTES: Final = 32 * 1024 * 1024
"""Bytes that may wait for a shard; one export may always."""
_SHORT_BYTES: Final = 256 * 1024
"""Longest request that is split on the event loop; longer ones are decoded on a thread, and cut."""
_SHARDS: Final = "shards"
"""Beside the names of shards in what is merged: how many there are."""


class ShardError(Exception):
    """Shards cannot be started; the message says why. All is as it was."""


class Refused(NamedTuple):
    """Reason why an export was refused, in a form that can be serialised; `kind` is a class of `requests`."""

    kind: str
    message: str


@dataclass(frozen=True, slots=True)
class ShardSeen:
    """A shard's own report, and from `number` on the judge's view of it, as the API shows it.

    `name` is of its folder. `recovered` exports were taken from its log when it `started`; `points` count since then.
    `lag` are bytes that are in no batch yet. `answered` is the Unix time of the last report, 0 before the first;
    `waiting` are bytes that wait for the shard in the evaluator; `trouble` is why it does not answer.
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
    number: int = 0
    answered: float = 0.0
    waiting: int = 0
    trouble: str = ""


class Shard:
    """Takes exports for some senders. Use it from one event loop. `folder` has to outlive the machine."""

    def __init__(self, contracts: Sequence[Contract], folder: Path, limits: Limits) -> None:
        self.evaluator = Evaluator(contracts, remember=ShardState)
        self._limits = limits
        self._connection = open_state(folder / "state", patience=_LOCK_WAIT_SECONDS)
        with unit_of_work(self._connection):
            self._store = EvaluatorStore(self._connection)
            self._store.restore(self.evaluator)
            self._name = self._store.values.load("shard", str, "") or uuid.uuid4().hex
            self._store.values.save("shard", self._name)
            self.inbox = Inbox(self._connection)
            self._batch = self._store.values.load("batch", ShardBatch, ShardBatch(0))
        self._points: dict[str, int] = {}
        self._kernels_sent = 0.0
        self._started = time.time()
        self._recovered = recover(self)
        self._sink = DurableSink(self)

    def metrics(self, request: Any, at: float | None = None) -> ExportResult:
        """Take an ExportMetricsServiceRequest, or its columns, that is in the inbox."""
        return self.evaluator.ingest_metrics(request, time.time() if at is None else at)

    async def take(self, body: bytes, at: float) -> ExportResult | Refused:
        """Take a serialized export that arrived at `at`, Unix seconds; it is on disk where this gives a result."""
        try:
            return await self._sink.metrics(self._sink.read(body, self._limits), at)
        except ThrottledError as error:
            return Refused("ThrottledError", str(error))
        except ReceiveError as error:
            return Refused(type(error).__name__, str(error))
        except Exception:  # noqa: BLE001 - it is a fault of one export
            _log.exception("an export that arrived at %.3f could not be taken", at)
            return Refused("InternalError", "the shard failed on this request; what it logs has the cause")

    async def report(self, settled: int, now: float) -> tuple[ShardBatch, ShardSeen]:
        """Return what the judge has not been sent, or has not stored, and how the shard is.

        `settled` is the number of the last batch that the judge has in its state. If it cannot be written (StateError),
        the next call tells all of it.
        """
        if self._batch.number <= settled:
            for state in self.evaluator.states.values():
                state.evict(now)
            if self.inbox.size or any(state.streams.changed for state in self.evaluator.states.values()):
                await self._save_batch(settled + 1)
        used = os.times()
        health = ShardSeen(
            name=self._name,
            node=os.uname().nodename,
            pid=os.getpid(),
            started=self._started,
            recovered=self._recovered,
            streams=self.evaluator.stream_count,
            points=self.evaluator.counters.total(),
            lag=self.inbox.size,
            cpu_seconds=used.user + used.system,
        )
        return self._batch, health

    def close(self) -> None:
        """Release the folder."""
        self._connection.close()

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
                self._store.values.save("batch", batch)
                self.inbox.take_out(unit)
                unit.on_rollback(mark_sent(evaluator, self._points))

                def adopt() -> None:
                    self._batch, self._kernels_sent = batch, max(seen, default=0.0)

                unit.on_commit(adopt)


class RayShard:
    """A shard as an actor, which Ray starts again on another node when its own ends; it ends with who began it."""

    def __init__(self, cpus: float, *arguments: Any) -> None:
        self._cpus, self._arguments = cpus, arguments
        self._actor = self._begun()

    async def take(self, body: bytes, at: float) -> ExportResult | Refused:
        """See `Shard`."""
        return await self._asked("take", body, at)  # type: ignore[no-any-return]

    async def report(self, settled: int, now: float) -> tuple[ShardBatch, ShardSeen]:
        """See `Shard`."""
        return await self._asked("report", settled, now)  # type: ignore[no-any-return]

    def stop(self) -> None:
        """End the actor's process; its exports are on disk."""
        import ray  # noqa: PLC0415 - an extra

        ray.kill(self._actor)

    async def _asked(self, method: str, *arguments: Any) -> Any:
        from ray.exceptions import ActorDiedError, ActorUnavailableError  # noqa: PLC0415 - an extra

        actor = self._actor
        try:
            return await getattr(actor, method).remote(*arguments)
        except ActorDiedError as error:
            # Ray has given it up, as one that could not begin: its folder may still have been held by the one before.
            if isinstance(error, ActorUnavailableError) or actor is not self._actor:
                raise
            _log.warning("a shard has ended and is started anew: %s", str(error).strip().rpartition("\n")[2])
            self._actor = self._begun()
            raise

    def _begun(self) -> Any:
        import ray  # noqa: PLC0415 - an extra

        remote = ray.remote(Shard).options(
            num_cpus=self._cpus,
            max_restarts=-1,
            max_task_retries=0,  # a sender sends again, and is known
            scheduling_strategy="SPREAD",
        )
        return remote.remote(*self._arguments)


@contextlib.contextmanager
def ray_cluster(config: ServeConfig) -> Iterator[None]:
    """Be connected to the Ray cluster that streams are spread over; `local` is one that ends with this process."""
    if config.state is None or config.shard_folder is None:
        raise ShardError(
            "--engine ray counts nothing twice because judge and shards write how far they are; give --state FILE, and "
            "--shard-folder DIR on storage that every node of the cluster reaches"
        )
    if config.record:
        raise ShardError("--record keeps what one process takes, in that order; shards take each for itself")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    with extra("ray", "kc-otel serve --engine ray"):
        import ray  # noqa: PLC0415 - an extra
    address, local = config.ray_address, dict[str, Any]()
    if address == "local":
        local = {"include_dashboard": False, "object_store_memory": _LOCAL_STORE_BYTES, "configure_logging": False}
    if mine := not ray.is_initialized():
        try:
            ray.init(address=address, log_to_driver=False, **local)
        except (ConnectionError, RuntimeError, ValueError) as error:
            said = str(error).partition("\n")[0]
            raise ShardError(
                f"--ray-address {address}: no Ray cluster answers ({said}); start one with `ray start --head`, name "
                "its head as HOST:6379, or say --ray-address local for one of this machine alone"
            ) from None
    try:
        yield
    finally:
        if mine:
            ray.shutdown()


class ShardLine:
    """One shard as the judge sees it; `closed` is why nothing is sent to it, `asked` the report that is awaited."""

    def __init__(self, number: int, handle: RayShard) -> None:
        self.handle, self.seen, self.waiting, self.closed = handle, ShardSeen(number=number), 0, ""
        self.asked: asyncio.Task[tuple[ShardBatch, ShardSeen]] | None = None

    async def take(self, body: bytes, at: float) -> ExportResult:
        """Give an export that arrived at `at`, Unix seconds, to the shard; it is on its disk when this returns."""
        where = f"shard {self.seen.number}"
        if self.closed:
            raise NotKeptError(f"{where} {self.closed}")
        if self.waiting and self.waiting + len(body) > _MAX_WAITING_BYTES:
            raise ThrottledError(f"more arrives than {where} takes")
        self.waiting += len(body)
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                answer = await self.handle.take(body, at)
        except TimeoutError:
            raise NotKeptError(f"{where} does not answer") from None
        except Exception as error:  # noqa: BLE001 - whatever it is, the sender keeps what it has
            raise NotKeptError(f"{where} is not there ({type(error).__name__}); it is started again") from None
        finally:
            self.waiting -= len(body)
        if isinstance(answer, Refused):
            raise getattr(requests, answer.kind)(answer.message)
        return answer


class ShardedSink(MetricsSink):
    """Takes what arrives for the core, metrics by way of shards. Use it from one event loop."""

    def __init__(self, core: Core, start: Callable[[int], RayShard]) -> None:
        self._core, self._begin = core, start
        self._shards: list[ShardLine] = []
        core.evaluator.listening(time.time())  # while nobody listened, nobody was silent

    def columns(self, body: bytes, limits: Limits) -> dict[int, bytes] | None:  # noqa: ARG002 - shards hold it against it
        """A short serialized ExportMetricsServiceRequest, split by shard; None for others."""
        try:
            return split(body, len(self._shards)) if len(body) <= _SHORT_BYTES else None
        except DecodeError:
            return None

    async def metrics(self, request: Any) -> ExportResult:
        """Take an export, or its parts by shards. If a shard does not take its part, all of it is to be sent again."""
        if not isinstance(request, dict):
            request = split(judged_metrics(request).SerializeToString(), len(self._shards))
        at = time.time()
        parts = (self._shards[shard].take(body, at) for shard, body in request.items())
        taken = await asyncio.gather(*parts, return_exceptions=True)
        failed = [result for result in taken if isinstance(result, BaseException)]
        for error in sorted(failed, key=lambda error: not isinstance(error, ThrottledError)):
            raise error
        return ExportResult.joined([result for result in taken if isinstance(result, ExportResult)])

    async def tick(self) -> None:
        """Ask the shards, and evaluate every cell with what they tell."""
        await self._evaluated(_SHARD_WAIT_SECONDS)

    async def start(self, count: int) -> None:
        """Start shards, and evaluate until the judge has written all of theirs; a ShardError if one does not answer."""
        if (known := self._core.merged.get(_SHARDS, count)) != count:
            raise ShardError(f"the streams of this state file are on {known} shards; give --shards {known}")
        self._shards = [ShardLine(number, self._begin(number)) for number in range(count)]
        until = time.monotonic() + _START_SECONDS
        while await self._evaluated(until - time.monotonic()):
            for shard in self._shards:
                if shard.closed:
                    raise ShardError(f"shard {shard.seen.number} {shard.closed}")
            if time.monotonic() > until:
                seen = (shard.seen for shard in self._shards)
                late = ", ".join(f"shard {shard.number} {shard.trouble}" for shard in seen if shard.trouble)
                raise ShardError(
                    f"not every shard answers: {late}; where the cluster has no cores left (`ray status`), add nodes, "
                    "have fewer --shards, or give each less with --shard-cpus"
                )
        self._core.merged[_SHARDS] = count
        await self._evaluated(_START_SECONDS)

    def close(self) -> None:
        """Stop the shards."""
        for shard in self._shards:
            if shard.asked is not None:
                shard.asked.cancel()
            shard.handle.stop()
        self._shards.clear()

    async def _evaluated(self, patience: float) -> bool:
        """Ask all shards and evaluate. Returns whether there is anything that they have not told, or may not have."""
        now, core = time.time(), self._core
        for shard in self._shards:
            if shard.asked is None:
                shard.asked = asyncio.ensure_future(shard.handle.report(self._settled(shard), now))
        if asked := [shard.asked for shard in self._shards if shard.asked is not None]:
            await asyncio.wait(asked, timeout=max(patience, 0.0))
        told = [batch for shard in self._shards if (batch := self._told(shard, now)) is not None]
        now = core.clock()
        merge(core.evaluator, told, now)
        core.shards = tuple(replace(shard.seen, waiting=shard.waiting) for shard in self._shards)
        await core.evaluate(now)
        return bool(told) or any(shard.trouble for shard in core.shards)

    def _told(self, shard: ShardLine, now: float) -> ShardBatch | None:
        """Return a shard's report that the judge has not taken yet; record its trouble if it sent none."""
        assert shard.asked is not None
        faults, where, merged = self._core.evaluator.faults, f"shard {shard.seen.number}", self._core.merged
        trouble, errors = "", dict[str, Exception]()
        batch: ShardBatch | None = None
        if not shard.asked.done():
            trouble = f"has not answered for {time.time() - (shard.seen.answered or self._core.started_at):.0f} s"
            errors = {"its reports": TimeoutError("what it was sent is judged when it answers")}
        else:
            asked, shard.asked = shard.asked, None
            try:
                batch, health = asked.result()
            except Exception as failed:  # noqa: BLE001 - whatever it is, what others told is judged
                trouble, errors = f"is not there ({type(failed).__name__})", {"its reports": failed}
            else:
                if trouble := self._of_others(shard, batch, health):
                    errors = {"its folder": ShardError(trouble)}
                shard.closed = trouble
        faults.report("", where, errors)
        if batch is None or trouble:
            shard.seen = replace(shard.seen, trouble=trouble)
            return None
        shard.seen = replace(health, number=shard.seen.number, answered=now)
        if batch.number <= merged.get(shard.seen.name, -1):
            return None
        merged[shard.seen.name] = batch.number
        return batch

    def _of_others(self, shard: ShardLine, batch: ShardBatch, health: ShardSeen) -> str:
        """Return the reason why a shard belongs to another state; its sums would count twice, or be lost."""
        merged, before = self._core.merged, shard.seen.name
        if health.name == before or (not before and health.name in merged):
            return ""
        is_new = not (batch.number or health.streams or health.recovered)
        if is_new and not before and shard.seen.number >= self._core.settled.get(_SHARDS, 0):
            return ""
        return (
            "has not the folder that this state file knows; give --state and --shard-folder what they were, on storage "
            "that every node reaches, or begin with others of both"
        )

    def _settled(self, shard: ShardLine) -> int:
        """Number of a shard's last batch that is in the state; -1 while nothing is known of it."""
        return self._core.settled.get(shard.seen.name, -1)


def split(body: bytes, shards: int) -> dict[int, bytes]:
    """Parts of a serialized export by the shard that owns them; a resource, which is one sender, has one owner."""
    parts: dict[int, ExportMetricsServiceRequest] = {}
    for resource in ExportMetricsServiceRequest.FromString(body).resource_metrics:
        identity = resource_identity(resource.resource.attributes)
        owner = int.from_bytes(blake2b(identity, digest_size=8).digest(), "little") % shards
        parts.setdefault(owner, ExportMetricsServiceRequest()).resource_metrics.append(resource)
    return {shard: part.SerializeToString() for shard, part in parts.items()}
