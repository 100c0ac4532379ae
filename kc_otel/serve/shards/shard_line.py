"""What waits for one shard: what arrives while it is busy goes together, and what is too much stays with senders."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Iterable, Sequence
from typing import Final, NamedTuple, Protocol

from kc_otel.judge.otlp import request_errors
from kc_otel.judge.otlp.request_errors import ReceiveError, ThrottledError
from kc_otel.judge.otlp.sink import ExportResult
from kc_otel.serve.durable_sink import NotKeptError
from kc_otel.serve.shards.shard import Refused, ShardReport, Stream

__all__ = ["ShardHandle", "ShardLine"]

_WAITING: Final = 32 * 1024 * 1024
"""Bytes that may wait for a shard; one export may always."""
_GROUP, _GROUP_BYTES = 16, 1024 * 1024
"""Exports that go together: less than a second's work, also point by point."""
_IN_FLIGHT: Final = 2
"""Groups that are on their way: while one is answered the next is read."""
_ANSWER: Final = 8.0
"""Seconds within which a group has to be on the shard's disk; senders wait 10 s themselves."""


class ShardHandle(Protocol):
    """A `Shard`, wherever it runs. Whatever a call raises, it may have been done."""

    def take(self, exports: Sequence[tuple[bytes, float]]) -> Awaitable[list[ExportResult | Refused]]: ...  # noqa: D102
    def report(self, settled: int, now: float) -> Awaitable[ShardReport]: ...  # noqa: D102
    def streams(self) -> Awaitable[list[Stream]]: ...  # noqa: D102
    def adopt(self, streams: Iterable[Stream], settled: int) -> Awaitable[None]: ...  # noqa: D102
    def stop(self) -> None: ...  # noqa: D102


class _Waiting(NamedTuple):
    body: bytes
    at: float
    done: asyncio.Future[ExportResult]


class ShardLine:
    """Exports on their way to one shard. Use it from one event loop.

    Args:
        number: Of the shard.
        handle: The shard.

    Attributes:
        waiting: Bytes that wait or are on their way.
        closed: Why nothing is to be sent to it; empty while it is.
    """

    def __init__(self, number: int, handle: ShardHandle, answer: float = _ANSWER) -> None:
        self.number, self.handle = number, handle
        self.waiting = 0
        self.closed = ""
        self._answer = answer
        self._queue: deque[_Waiting] = deque()
        self._flying: set[asyncio.Task[None]] = set()
        self._trouble = ""

    async def take(self, body: bytes, at: float) -> ExportResult:
        """Give an export that arrived at `at`, Unix seconds, to the shard; it is on its disk when this returns.

        Raises:
            ReceiveError: If it is not taken.
        """
        if self.closed:
            raise NotKeptError(f"shard {self.number} {self.closed}")
        if self._trouble and self._flying:
            raise NotKeptError(f"shard {self.number} {self._trouble}")  # one group at a time asks whether it is back
        if self.waiting and self.waiting + len(body) > _WAITING:
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
                answers = await self.handle.take([(each.body, each.at) for each in group])
        except Exception as error:  # noqa: BLE001 - whatever it is, the senders keep what they have
            late = isinstance(error, TimeoutError)
            self._trouble = "does not answer" if late else f"is not there ({type(error).__name__}); it is started again"
            for each in group:
                _refuse(each, NotKeptError(f"shard {self.number} {self._trouble}"))
        else:
            self._trouble = ""
            for each, answer in zip(group, answers, strict=True):
                if isinstance(answer, Refused):
                    _refuse(each, getattr(request_errors, answer.kind)(answer.message))
                elif not each.done.done():
                    each.done.set_result(answer)
        finally:
            self.waiting -= size


def _refuse(waiting: _Waiting, error: ReceiveError) -> None:
    if not waiting.done.done():
        waiting.done.set_exception(error)
