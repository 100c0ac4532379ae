"""The judge in front of its shards: exports go to the shard that owns their sender, and each tick asks all shards.

    OTLP -> by sender -> shard (log, streams) -- batches, each tick --> one judge -> verdicts, incidents, webhooks

One judge has the windows of every contract and what is held against each limit, so what a contract promises about false
alarms is promised once, however many shards there are. The number of a shard's last batch is written in the transaction
that has what it led to: a batch is taken once, whoever crashes when.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kc_otel.judge.otlp import requests
from kc_otel.judge.otlp.requests import ColumnSink, ExportResult, Limits, ReceiveError, ThrottledError
from kc_otel.judge.otlp.traffic_entries import judged_metrics
from kc_otel.judge.shard_state import ShardBatch, merge
from kc_otel.serve.core import Core
from kc_otel.serve.durable_sink import NotKeptError
from kc_otel.serve.shards.sender_routing import SenderRouting
from kc_otel.serve.shards.shard import Refused, ShardHealth, ShardReport, ShardSeen

if TYPE_CHECKING:
    from kc_otel.serve.shards.ray_shards import RayShard

_log: Final = logging.getLogger(__name__)
_SHARD_WAIT_SECONDS: Final = 1.0
"""Seconds that an evaluation waits for shards; one that is later is in the next."""
_RESIZE_SECONDS: Final = 60.0
"""Seconds within which every shard has to answer before the number of shards is changed."""
_SHARDS: Final = "shards"
"""Beside the names of shards in what is merged: how many there are."""


class ShardError(Exception):
    """Shards cannot be started or moved; the message says why. All is as it was."""


@dataclass(slots=True)
class _Shard:
    line: ShardLine
    health: ShardHealth | None = None
    answered: float = 0.0
    trouble: str = ""
    asked: asyncio.Task[ShardReport] | None = None


class ShardedSink(ColumnSink):
    """Takes what arrives for the core, metrics by way of shards. Use it from one event loop."""

    def __init__(self, core: Core, start: Callable[[int], RayShard]) -> None:
        self._core, self._start = core, start
        self._routing = SenderRouting()
        self._shards: list[_Shard] = []
        self._open = False
        self._one = asyncio.Lock()
        core.resize = self.resize
        core.evaluator.listen(time.time())  # while nobody listened, nobody was silent

    def columns(self, body: bytes, limits: Limits) -> dict[int, bytes] | None:  # noqa: ARG002 - shards hold them against it
        """Split a serialized ExportMetricsServiceRequest by shard; the shards decode the points."""
        return self._routing.split(body, len(self._shards)) if self._open else None

    async def metrics(self, request: Any) -> ExportResult:
        """Take an ExportMetricsServiceRequest, or its parts by shards.

        If a shard does not take its part all of it is to be sent again, and what another shard took of it is known
        there.
        """
        if not isinstance(request, dict):
            request = self._routing.split(judged_metrics(request).SerializeToString(), max(len(self._shards), 1))
        at = time.time()
        if len(request) == 1:
            [(shard, body)] = request.items()
            return await self._take(shard, body, at)
        parts = (self._take(shard, body, at) for shard, body in request.items())
        taken = await asyncio.gather(*parts, return_exceptions=True)
        failed = [result for result in taken if isinstance(result, BaseException)]
        for error in sorted(failed, key=lambda error: not isinstance(error, ThrottledError)):
            raise error
        results = [result for result in taken if isinstance(result, ExportResult)]
        messages = dict.fromkeys(result.message for result in results if result.message)
        return ExportResult(sum(result.rejected for result in results), "; ".join(messages))

    async def _take(self, shard: int, body: bytes, at: float) -> ExportResult:
        if not self._open:
            raise ThrottledError("streams are moved between shards")
        return await self._shards[shard].line.take(body, at)

    def traces(self, request: Any) -> ExportResult:
        """Take an ExportTraceServiceRequest."""
        return self._core.traces(request)

    async def tick(self) -> None:
        """Ask the shards, and evaluate every cell with what they tell."""
        async with self._one:
            await self._evaluated(_SHARD_WAIT_SECONDS)

    async def resize(self, count: int) -> None:
        """Change the number of shards. Senders retry meanwhile; no stream loses data.

        All streams are copied to shards that come, or from those that go; of a stream that a shard has already, it
        keeps what is later. Shards forget unsent counts after a long window. If a shard does not answer (ShardError)
        the number is what it was.
        """
        async with self._one:
            self._open = False
            began = time.monotonic()
            before = len(self._shards) or int(self._core.merged.get(_SHARDS, count))
            try:
                self._begin(before)
                await asyncio.gather(*(shard.line.empty() for shard in self._shards))
                await self._all_told()
                self._begin(count)
                await self._all_told()
                await self._move(before, count)
                self._core.merged[_SHARDS] = count
                await self._evaluated(_RESIZE_SECONDS)
                self._end(count)
            except Exception:
                if self._core.settled.get(_SHARDS) != count:
                    self._core.merged[_SHARDS] = before
                    self._end(before)
                raise
            finally:
                self._open = bool(self._shards)
        if before != count:
            _log.info("%d shards instead of %d, after %.1f s", count, before, time.monotonic() - began)

    def close(self) -> None:
        """Stop the shards."""
        self._open = False
        self._end(0)

    def _begin(self, count: int) -> None:
        for number in range(len(self._shards), count):
            self._shards.append(_Shard(ShardLine(number, self._start(number))))

    def _end(self, count: int) -> None:
        for shard in self._shards[count:]:
            if shard.asked is not None:
                shard.asked.cancel()
            shard.line.handle.stop()
        del self._shards[count:]

    async def _all_told(self) -> None:
        """Evaluate until the judge has written everything from the shards."""
        until = time.monotonic() + _RESIZE_SECONDS
        while await self._evaluated(until - time.monotonic()):
            for shard in self._shards:
                if shard.line.closed:
                    raise ShardError(f"shard {shard.line.number} {shard.line.closed}")
            if time.monotonic() > until:
                late = ", ".join(
                    f"shard {shard.line.number} {shard.trouble}" for shard in self._shards if shard.trouble
                )
                if not late:
                    raise ShardError("shards have more to tell each time; send less for a minute, and try again")
                raise ShardError(
                    f"not every shard answers: {late}; where the cluster has no cores left (`ray status`), add nodes, "
                    "have fewer --shards, or give each less with --shard-cpus"
                )

    async def _move(self, before: int, count: int) -> None:
        if before == count:
            return
        handles = [shard.line.handle for shard in self._shards]
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
                shard.asked = asyncio.ensure_future(shard.line.handle.report(self._settled(shard), now))
        if asked := [shard.asked for shard in self._shards if shard.asked is not None]:
            await asyncio.wait(asked, timeout=max(patience, 0.0))
        told = [batch for shard in self._shards if (batch := self._told(shard, now)) is not None]
        core, now = self._core, self._core.clock()
        merge(core.evaluator, told, now)
        core.shards = tuple(
            ShardSeen(
                **asdict(shard.health or ShardHealth()),
                number=shard.line.number,
                answered=shard.answered,
                waiting=shard.line.waiting,
                trouble=shard.trouble,
            )
            for shard in self._shards
        )
        await core.evaluate(now)
        return bool(told) or any(shard.trouble for shard in self._shards)

    def _told(self, shard: _Shard, now: float) -> ShardBatch | None:
        """Return a shard's report that the judge has not taken yet; record its trouble if it sent none."""
        assert shard.asked is not None
        where = f"shard {shard.line.number}"
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
        shard.line.closed = self._of_others(shard, report)
        if shard.line.closed:
            shard.trouble = shard.line.closed
            self._core.evaluator.faults.report("", where, {"its folder": ShardError(shard.trouble)})
            return None
        self._core.evaluator.faults.report("", where, {})
        shard.health, shard.answered, shard.trouble = report.health, now, ""
        merged, name = self._core.merged, report.health.name
        if name in merged and report.batch.number <= merged[name]:
            return None
        merged[name] = report.batch.number
        return report.batch

    def _of_others(self, shard: _Shard, report: ShardReport) -> str:
        """Return the reason why a shard belongs to another state; its sums would count twice, or be lost."""
        name = report.health.name
        known = name == shard.health.name if shard.health else name in self._core.merged
        if known:
            return ""
        if shard.health or shard.line.number < self._core.settled.get(_SHARDS, 0):
            return (
                "has not the folder that this state file knows; give --shard-folder what it was, on storage that every "
                "node reaches, or begin with another --state as well"
            )
        if report.batch.number or report.health.streams or report.health.recovered:
            return "has a folder of another state file; give --state what it was, or --shard-folder an empty folder"
        return ""

    def _settled(self, shard: _Shard) -> int:
        """Number of a shard's last batch that is in the state; -1 while nothing is known of it."""
        return -1 if shard.health is None else self._core.settled.get(shard.health.name, -1)


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
    """Exports on their way to one shard. Use it from one event loop.

    `waiting` are bytes that wait or are on their way; `closed` is why nothing is to be sent to it, empty while it is.
    """

    def __init__(self, number: int, handle: RayShard, answer: float = _ANSWER_SECONDS) -> None:
        self.number, self.handle = number, handle
        self.waiting = 0
        self.closed = ""
        self._answer = answer
        self._queue: deque[_Waiting] = deque()
        self._flying: set[asyncio.Task[None]] = set()
        self._trouble = ""

    async def take(self, body: bytes, at: float) -> ExportResult:
        """Give an export that arrived at `at`, Unix seconds, to the shard; it is on its disk when this returns."""
        if self.closed:
            raise NotKeptError(f"shard {self.number} {self.closed}")
        if self._trouble and self._flying:
            raise NotKeptError(f"shard {self.number} {self._trouble}")  # one group at a time asks whether it is back
        if self.waiting and self.waiting + len(body) > _MAX_WAITING_BYTES:
            raise ThrottledError(f"more arrives than shard {self.number} takes")
        done: asyncio.Future[ExportResult] = asyncio.get_running_loop().create_future()
        self._queue.append(_Waiting(body, at, done))
        self.waiting += len(body)
        self._fly()
        return await done

    async def empty(self) -> None:
        """Wait until nothing is on its way."""
        while self._flying:
            await asyncio.wait(self._flying)

    def _fly(self) -> None:
        while self._queue and len(self._flying) < (1 if self._trouble else _IN_FLIGHT):
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
            self._trouble = "does not answer" if late else f"is not there ({type(error).__name__}); it is started again"
            for request in group:
                _refuse(request, NotKeptError(f"shard {self.number} {self._trouble}"))
        else:
            self._trouble = ""
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
