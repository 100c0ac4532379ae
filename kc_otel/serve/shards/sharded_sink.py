"""The judge in front of its shards: exports go to the shard that owns their sender, and each tick asks all shards.

One judge has every window and what is held against each limit, so a promise about false alarms is made once, however
many shards there are. The number of a shard's last batch is written in the transaction that has what it led to: a batch
is taken once, whoever crashes when.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from kc_otel.judge.otlp import requests
from kc_otel.judge.otlp.requests import ColumnSink, ExportResult, Limits, ReceiveError, ThrottledError
from kc_otel.judge.otlp.traffic_entries import judged_metrics
from kc_otel.judge.shard_state import ShardBatch, merge
from kc_otel.serve.core import Core
from kc_otel.serve.durable_sink import NotKeptError
from kc_otel.serve.shards.shard import Refused, ShardHealth, ShardReport, ShardSeen

if TYPE_CHECKING:
    from kc_otel.serve.stream_places import RayShard

_log: Final = logging.getLogger(__name__)
_SHARD_WAIT_SECONDS: Final = 1.0
"""Seconds that an evaluation waits for shards; one that is later is in the next."""
_START_SECONDS: Final = 60.0
"""Seconds within which every shard has to answer at the start."""
_SEEN: Final = ("number", "answered", "waiting", "trouble")
_SHORT_BYTES: Final = 256 * 1024
"""Longest request that is split on the event loop; longer ones are decoded on a thread, and cut."""
_SHARDS: Final = "shards"
"""Beside the names of shards in what is merged: how many there are."""


class ShardError(Exception):
    """Shards cannot be started or moved; the message says why. All is as it was."""


class ShardedSink(ColumnSink):
    """Takes what arrives for the core, metrics by way of shards. Use it from one event loop."""

    def __init__(self, core: Core, start: Callable[[int], RayShard]) -> None:
        self._core, self._begin = core, start
        self._shards: list[ShardLine] = []
        core.evaluator.listening(time.time())  # while nobody listened, nobody was silent

    def columns(self, body: bytes, limits: Limits) -> dict[int, bytes] | None:  # noqa: ARG002 - shards hold it against it
        """Split a short serialized ExportMetricsServiceRequest by shard; None for others."""
        try:
            return split(body, len(self._shards)) if len(body) <= _SHORT_BYTES else None
        except DecodeError:
            return None

    async def metrics(self, request: Any) -> ExportResult:
        """Take an ExportMetricsServiceRequest, or its parts by shards.

        If a shard does not take its part all of it is to be sent again, and what another shard took of it is known
        there.
        """
        if not isinstance(request, dict):
            request = split(judged_metrics(request).SerializeToString(), len(self._shards))
        at = time.time()
        parts = (self._shards[shard].take(body, at) for shard, body in request.items())
        taken = await asyncio.gather(*parts, return_exceptions=True)
        failed = [result for result in taken if isinstance(result, BaseException)]
        for error in sorted(failed, key=lambda error: not isinstance(error, ThrottledError)):
            raise error
        results = [result for result in taken if isinstance(result, ExportResult)]
        messages = dict.fromkeys(result.message for result in results if result.message)
        return ExportResult(sum(result.rejected for result in results), "; ".join(messages))

    async def tick(self) -> None:
        """Ask the shards, and evaluate every cell with what they tell."""
        await self._evaluated(_SHARD_WAIT_SECONDS)

    async def start(self, count: int) -> None:
        """Start shards; before the first export, streams of another number of them move.

        All streams are copied to shards that come, or from those that go; of a stream that a shard has already, it
        keeps what is later. Shards forget unsent counts after a long window. A ShardError if a shard does not answer.
        """
        began, before = time.monotonic(), int(self._core.merged.get(_SHARDS, count))
        self._shards = [ShardLine(number, self._begin(number)) for number in range(max(before, count))]
        await self._all_told()
        await self._move(before, count)
        self._core.merged[_SHARDS] = count
        await self._evaluated(_START_SECONDS)
        self._end(count)
        if before != count:
            _log.info("%d shards instead of %d, after %.1f s", count, before, time.monotonic() - began)

    def close(self) -> None:
        """Stop the shards."""
        self._end(0)

    def _end(self, count: int) -> None:
        for shard in self._shards[count:]:
            if shard.asked is not None:
                shard.asked.cancel()
            shard.handle.stop()
        del self._shards[count:]

    async def _all_told(self) -> None:
        """Evaluate until the judge has written everything from the shards."""
        until = time.monotonic() + _START_SECONDS
        while await self._evaluated(until - time.monotonic()):
            for shard in self._shards:
                if shard.closed:
                    raise ShardError(f"shard {shard.number} {shard.closed}")
            if time.monotonic() > until:
                late = ", ".join(f"shard {shard.number} {shard.trouble}" for shard in self._shards if shard.trouble)
                raise ShardError(
                    f"not every shard answers: {late}; where the cluster has no cores left (`ray status`), add nodes, "
                    "have fewer --shards, or give each less with --shard-cpus"
                )

    async def _move(self, before: int, count: int) -> None:
        if before == count:
            return
        handles = [shard.handle for shard in self._shards]
        known = [
            stream for own in await asyncio.gather(*(handle.streams() for handle in handles[:before])) for stream in own
        ]
        into = range(before, count) if count > before else range(count)
        await asyncio.gather(*(handles[number].adopt(known, self._settled(self._shards[number])) for number in into))

    async def _evaluated(self, patience: float) -> bool:
        """Ask all shards and evaluate. Returns whether there is anything that they have not told, or may not have."""
        now = time.time()
        for shard in self._shards:
            if shard.asked is None:
                shard.asked = asyncio.ensure_future(shard.handle.report(self._settled(shard), now))
        if asked := [shard.asked for shard in self._shards if shard.asked is not None]:
            await asyncio.wait(asked, timeout=max(patience, 0.0))
        told = [batch for shard in self._shards if (batch := self._told(shard, now)) is not None]
        core, now = self._core, self._core.clock()
        merge(core.evaluator, told, now)
        core.shards = tuple(
            ShardSeen(**asdict(of.health or ShardHealth()), **{name: getattr(of, name) for name in _SEEN})
            for of in self._shards
        )
        await core.evaluate(now)
        return bool(told) or any(shard.trouble for shard in self._shards)

    def _told(self, shard: ShardLine, now: float) -> ShardBatch | None:
        """Return a shard's report that the judge has not taken yet; record its trouble if it sent none."""
        assert shard.asked is not None
        where = f"shard {shard.number}"
        if not shard.asked.done():
            shard.trouble = f"has not answered for {time.time() - (shard.answered or self._core.started_at):.0f} s"
            error = TimeoutError("what it was sent is judged when it answers")
            self._core.evaluator.faults.report("", where, {"its reports": error})
            return None
        asked, shard.asked = shard.asked, None
        try:
            report = asked.result()
        except Exception as failed:  # noqa: BLE001 - whatever it is, what others told is judged
            shard.trouble = f"is not there ({type(failed).__name__})"
            self._core.evaluator.faults.report("", where, {"its reports": failed})
            return None
        shard.closed = self._of_others(shard, report)
        if shard.closed:
            shard.trouble = shard.closed
            self._core.evaluator.faults.report("", where, {"its folder": ShardError(shard.trouble)})
            return None
        self._core.evaluator.faults.report("", where, {})
        shard.health, shard.answered, shard.trouble = report.health, now, ""
        merged, name = self._core.merged, report.health.name
        if name in merged and report.batch.number <= merged[name]:
            return None
        merged[name] = report.batch.number
        return report.batch

    def _of_others(self, shard: ShardLine, report: ShardReport) -> str:
        """Return the reason why a shard belongs to another state; its sums would count twice, or be lost."""
        name = report.health.name
        known = name == shard.health.name if shard.health else name in self._core.merged
        if known:
            return ""
        if shard.health or shard.number < self._core.settled.get(_SHARDS, 0):
            return (
                "has not the folder that this state file knows; give --shard-folder what it was, on storage that every "
                "node reaches, or begin with another --state as well"
            )
        if report.batch.number or report.health.streams or report.health.recovered:
            return "has a folder of another state file; give --state what it was, or --shard-folder an empty folder"
        return ""

    def _settled(self, shard: ShardLine) -> int:
        """Number of a shard's last batch that is in the state; -1 while nothing is known of it."""
        return -1 if shard.health is None else self._core.settled.get(shard.health.name, -1)


def split(body: bytes, shards: int) -> dict[int, bytes]:
    """Parts of a serialized ExportMetricsServiceRequest by the shard that owns them; together they are all.

    A resource is one process that sends: all its series, of every contract, have one owner. As streams are told apart,
    it is a set of attributes. A DecodeError if it is no request.
    """
    parts: dict[int, ExportMetricsServiceRequest] = {}
    for resource in ExportMetricsServiceRequest.FromString(body).resource_metrics:
        attributes = sorted(pair.SerializeToString() for pair in resource.resource.attributes)
        key = int.from_bytes(blake2b(b"\0".join(attributes), digest_size=8).digest(), "little")
        parts.setdefault(owner(key, shards), ExportMetricsServiceRequest()).resource_metrics.append(resource)
    return {shard: part.SerializeToString() for shard, part in parts.items()}


def owner(key: int, shards: int) -> int:
    """Number of the shard that owns a key of 64 bits: jump consistent hashing moves none between those that stay.

    Source: Lamping and Veach, A Fast, Minimal Memory, Consistent Hash Algorithm, 2014 (arXiv:1406.2294).
    """
    chosen, jump = -1, 0
    while jump < shards:
        chosen = jump
        key = (key * 2862933555777941757 + 1) & (2**64 - 1)
        jump = int((chosen + 1) * (2**31 / ((key >> 33) + 1)))
    return chosen


_MAX_WAITING_BYTES: Final = 32 * 1024 * 1024
"""Bytes that may wait for a shard; one export may always."""
_GROUP, _GROUP_BYTES = 16, 1024 * 1024
"""Exports that go together: less than a second's work, also point by point."""
_IN_FLIGHT: Final = 2
"""Groups that are on their way: while one is answered the next is read."""
_ANSWER_SECONDS: Final = 8.0
"""Seconds within which a group has to be on the shard's disk; senders wait 10 s themselves."""


class _Waiting(NamedTuple):
    body: bytes
    at: float
    done: asyncio.Future[ExportResult]


class ShardLine:
    """One shard as the judge sees it, and exports on their way to it. Use it from one event loop.

    `waiting` are bytes that wait or are on their way; `closed` is why nothing is to be sent to it, empty while it is.
    `asked` is the report that is awaited; `answered` when the last one came; `trouble` why none does.
    """

    def __init__(self, number: int, handle: RayShard, answer: float = _ANSWER_SECONDS) -> None:
        self.number, self.handle = number, handle
        self.waiting = 0
        self.closed = ""
        self.health: ShardHealth | None = None
        self.asked: asyncio.Task[ShardReport] | None = None
        self.answered = 0.0
        self.trouble = ""
        self._answer = answer
        self._queue: deque[_Waiting] = deque()
        self._flying: set[asyncio.Task[None]] = set()
        self._lost = ""

    async def take(self, body: bytes, at: float) -> ExportResult:
        """Give an export that arrived at `at`, Unix seconds, to the shard; it is on its disk when this returns."""
        if self.closed:
            raise NotKeptError(f"shard {self.number} {self.closed}")
        if self._lost and self._flying:
            raise NotKeptError(f"shard {self.number} {self._lost}")  # one group at a time asks whether it is back
        if self.waiting and self.waiting + len(body) > _MAX_WAITING_BYTES:
            raise ThrottledError(f"more arrives than shard {self.number} takes")
        done: asyncio.Future[ExportResult] = asyncio.get_running_loop().create_future()
        self._queue.append(_Waiting(body, at, done))
        self.waiting += len(body)
        self._fly()
        return await done

    def _fly(self) -> None:
        while self._queue and len(self._flying) < (1 if self._lost else _IN_FLIGHT):
            group: list[_Waiting] = []
            size = 0
            while self._queue and len(group) < _GROUP and (not group or size + len(self._queue[0].body) < _GROUP_BYTES):
                group.append(self._queue.popleft())
                size += len(group[-1].body)
            task = asyncio.create_task(self._send(group, size))
            self._flying.add(task)
            task.add_done_callback(self._landed)

    def _landed(self, task: asyncio.Task[None]) -> None:
        self._flying.discard(task)
        self._fly()

    async def _send(self, group: Sequence[_Waiting], size: int) -> None:
        try:
            async with asyncio.timeout(self._answer):
                answers = await self.handle.take([(request.body, request.at) for request in group])
        except Exception as error:  # noqa: BLE001 - whatever it is, the senders keep what they have
            late = isinstance(error, TimeoutError)
            self._lost = "does not answer" if late else f"is not there ({type(error).__name__}); it is started again"
            for request in group:
                _refuse(request, NotKeptError(f"shard {self.number} {self._lost}"))
        else:
            self._lost = ""
            for request, answer in zip(group, answers, strict=True):
                if isinstance(answer, Refused):
                    _refuse(request, getattr(requests, answer.kind)(answer.message))
                elif not request.done.done():
                    request.done.set_result(answer)
        finally:
            self.waiting -= size


def _refuse(waiting: _Waiting, error: ReceiveError) -> None:
    if not waiting.done.done():
        waiting.done.set_exception(error)
