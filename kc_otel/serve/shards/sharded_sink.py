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
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from kc_otel.judge.otlp.request_errors import ThrottledError
from kc_otel.judge.otlp.request_limits import Limits
from kc_otel.judge.otlp.sink import ColumnSink, ExportResult
from kc_otel.judge.shards.shard_batch import ShardBatch, merge
from kc_otel.offline.replay.traffic_entries import ours
from kc_otel.serve.core import Core
from kc_otel.serve.shards.sender_routing import SenderRouting
from kc_otel.serve.shards.shard import ShardReport
from kc_otel.serve.shards.shard_health import ShardHealth, ShardSeen
from kc_otel.serve.shards.shard_line import ShardHandle, ShardLine

__all__ = ["ShardError", "ShardedSink"]

_log: Final = logging.getLogger(__name__)
_PATIENCE: Final = 1.0
"""Seconds that an evaluation waits for shards; one that is later is in the next."""
_BEGIN: Final = 60.0
"""Seconds within which every shard has to answer before the number of shards is changed."""
_SHARDS: Final = "shards"
"""Beside the names of shards in what is merged: how many there are."""


class ShardError(Exception):
    """Shards cannot be started or moved; the message says why. All is as it was."""


@dataclass(frozen=True, slots=True)
class _Routed:
    """An export by the shards that own its senders."""

    parts: dict[int, bytes]


@dataclass(slots=True)
class _Shard:
    line: ShardLine
    health: ShardHealth | None = None
    answered: float = 0.0
    trouble: str = ""
    asked: asyncio.Task[ShardReport] | None = None


class ShardedSink(ColumnSink):
    """Takes what arrives for the core, metrics by way of shards. Use it from one event loop.

    Args:
        core: Judges it.
        start: Starts the shard of a number.
    """

    def __init__(self, core: Core, start: Callable[[int], ShardHandle]) -> None:
        self._core, self._start = core, start
        self._routing = SenderRouting()
        self._shards: list[_Shard] = []
        self._open = False
        self._one = asyncio.Lock()
        core.resize = self.resize
        core.evaluator.listen(time.time())  # while nobody listened, nobody was silent

    def columns(self, body: bytes, limits: Limits) -> _Routed | None:  # noqa: ARG002 - shards hold them against it
        """A serialized ExportMetricsServiceRequest by shards; what it says they read themselves."""
        return _Routed(self._routing.split(body, len(self._shards))) if self._open else None

    async def metrics(self, request: Any) -> ExportResult:
        """Take an ExportMetricsServiceRequest, or its parts by shards.

        Raises:
            ReceiveError: If a shard does not take its part: all of it is to be sent again, and what another shard took
                of it is known there.
        """
        if not isinstance(request, _Routed):
            request = _Routed(self._routing.split(ours(request).SerializeToString(), max(len(self._shards), 1)))
        at = time.time()
        if len(request.parts) == 1:
            [(shard, body)] = request.parts.items()
            return await self._take(shard, body, at)
        parts = (self._take(shard, body, at) for shard, body in request.parts.items())
        taken = await asyncio.gather(*parts, return_exceptions=True)
        failed = [one for one in taken if isinstance(one, BaseException)]
        for one in sorted(failed, key=lambda one: not isinstance(one, ThrottledError)):
            raise one
        results = [one for one in taken if isinstance(one, ExportResult)]
        messages = dict.fromkeys(one.message for one in results if one.message)
        return ExportResult(sum(one.rejected for one in results), "; ".join(messages))

    async def _take(self, shard: int, body: bytes, at: float) -> ExportResult:
        if not self._open:
            raise ThrottledError("streams are moved between shards")
        return await self._shards[shard].line.take(body, at)

    def traces(self, request: Any) -> ExportResult:
        """Take an ExportTraceServiceRequest."""
        return self._core.traces(request)

    def logs(self, request: Any) -> ExportResult:
        """Take an ExportLogsServiceRequest."""
        return self._core.logs(request)

    async def tick(self) -> None:
        """Ask the shards, and evaluate every cell with what they tell.

        Raises:
            StateError: If the state cannot be written.
        """
        async with self._one:
            await self._evaluated(_PATIENCE)

    async def resize(self, count: int) -> None:
        """Have another number of shards. Senders are asked to wait meanwhile; no stream loses what it knew.

        All streams are copied to shards that come, or from those that go; of a stream that a shard has already, it
        keeps what is later. What is not sent to it is forgotten after a long window.

        Raises:
            ShardError: If a shard does not answer; the number is what it was.
            StateError: If the state cannot be written.
        """
        async with self._one:
            self._open = False
            began = time.monotonic()
            before = len(self._shards) or int(self._core.merged.get(_SHARDS, count))
            try:
                self._begin(before)
                await asyncio.gather(*(one.line.empty() for one in self._shards))
                await self._all_told()
                self._begin(count)
                await self._all_told()
                await self._move(before, count)
                self._core.merged[_SHARDS] = count
                await self._evaluated(_BEGIN)
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
        for one in self._shards[count:]:
            if one.asked is not None:
                one.asked.cancel()
            one.line.handle.stop()
        del self._shards[count:]

    async def _all_told(self) -> None:
        """Evaluate until the judge has written all that shards know."""
        until = time.monotonic() + _BEGIN
        while await self._evaluated(until - time.monotonic()):
            for one in self._shards:
                if one.line.closed:
                    raise ShardError(f"shard {one.line.number} {one.line.closed}")
            if time.monotonic() > until:
                late = ", ".join(f"shard {one.line.number} {one.trouble}" for one in self._shards if one.trouble)
                if not late:
                    raise ShardError("shards have more to tell each time; send less for a minute, and try again")
                raise ShardError(
                    f"not every shard answers: {late}; where the cluster has no cores left (`ray status`), add nodes, "
                    "have fewer --shards, or give each less with --shard-cpus"
                )

    async def _move(self, before: int, count: int) -> None:
        if before == count:
            return
        handles = [one.line.handle for one in self._shards]
        known = [stream for one in await asyncio.gather(*(one.streams() for one in handles[:before])) for stream in one]
        into = range(before, count) if count > before else range(count)
        await asyncio.gather(*(handles[number].adopt(known, self._settled(self._shards[number])) for number in into))

    async def _evaluated(self, patience: float) -> bool:
        """Ask all shards and evaluate. Returns whether there is anything that they have not told, or may not have."""
        now = time.time()
        for one in self._shards:
            if one.asked is None:
                one.asked = asyncio.ensure_future(one.line.handle.report(self._settled(one), now))
        if asked := [one.asked for one in self._shards if one.asked is not None]:
            await asyncio.wait(asked, timeout=max(patience, 0.0))
        told = [batch for one in self._shards if (batch := self._told(one, now)) is not None]
        core, now = self._core, time.time()
        merge(core.evaluator, told, now)
        core.shards = tuple(
            ShardSeen(one.line.number, one.health, one.answered, one.line.waiting, one.trouble) for one in self._shards
        )
        await core.evaluate(now)
        return bool(told) or any(one.trouble for one in self._shards)

    def _told(self, one: _Shard, now: float) -> ShardBatch | None:
        """What a shard told that the judge has not taken yet; its trouble, if it does not."""
        assert one.asked is not None
        where = f"shard {one.line.number}"
        if not one.asked.done():
            one.trouble = f"has not answered for {time.time() - (one.answered or self._core.started_at):.0f} s"
            error = TimeoutError("what it was sent is judged when it answers")
            self._core.evaluator.faults.report("", where, {"its reports": error})
            return None
        asked, one.asked = one.asked, None
        try:
            report = asked.result()
        except Exception as failed:  # noqa: BLE001 - whatever it is, what others told is judged
            one.trouble = f"is not there ({type(failed).__name__})"
            self._core.evaluator.faults.report("", where, {"its reports": failed})
            return None
        one.line.closed = self._of_others(one, report)
        if one.line.closed:
            one.trouble = one.line.closed
            self._core.evaluator.faults.report("", where, {"its folder": ShardError(one.trouble)})
            return None
        self._core.evaluator.faults.report("", where, {})
        one.health, one.answered, one.trouble = report.health, now, ""
        merged, name = self._core.merged, report.health.name
        if name in merged and report.batch.number <= merged[name]:
            return None
        merged[name] = report.batch.number
        return report.batch

    def _of_others(self, one: _Shard, report: ShardReport) -> str:
        """Why a shard is not the one that this state knows; with it, senders' sums would count twice, or be lost."""
        name = report.health.name
        known = name == one.health.name if one.health else name in self._core.merged
        if known:
            return ""
        if one.health or one.line.number < self._core.settled.get(_SHARDS, 0):
            return (
                "has not the folder that this state file knows; give --shard-folder what it was, on storage that every "
                "node reaches, or begin with another --state as well"
            )
        if report.batch.number or report.health.streams or report.health.recovered:
            return "has a folder of another state file; give --state what it was, or --shard-folder an empty folder"
        return ""

    def _settled(self, one: _Shard) -> int:
        """Number of a shard's last batch that is in the state; -1 while nothing is known of it."""
        return -1 if one.health is None else self._core.settled.get(one.health.name, -1)
