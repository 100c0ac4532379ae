"""Whose request is taken next when more arrives than can be: who asks for little does not wait for who floods.

What has arrived waits here before it is decoded, until what is being decoded, kept and applied is less than a tenth of
a second's work. Then it is due by fair queueing: when all that its connection asked for before, and this, would have
been done had those who wait been served a byte at a time. Forty connections that send without pause share what there
is; one that reports a small message now and then is next.

Source: Goyal, Vin and Cheng 1996, Start-time Fair Queueing, SIGCOMM, for the clock: where what was begun last began.
Who is due first comes first, so that a small request does not wait for large ones that began with it.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections import deque
from collections.abc import AsyncIterator, Hashable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Final

from kc_otel.judge.otlp.request_errors import ThrottledError

__all__ = ["FairTurns"]

_WORK: Final = 0.1
"""Seconds of work that requests may have their turn with at a time; one always may."""
_WAITING: Final = 64 * 1024 * 1024
"""Bytes that may wait; what would come last is refused."""
_LOOK: Final = 0.02
"""Seconds after which it is seen anew what work takes."""
_FADING: Final = 0.9
"""Weight of what it took until then."""
_PACE: Final = 16 * 1024 * 1024
"""Bytes that are taken for a second's work before anything is known."""
_PLACES: Final = 2
"""Requests that may be between two turns."""
_PATIENCE: Final = 5.0
"""Seconds that others wait to be one of them; senders give up after ten."""
_SENDERS: Final = 8192
_AT_ONCE: Final = 2
"""Requests whose turn comes when one ends: inflating one may take what thousands of its bytes would."""
_OVERHEAD: Final = 1024
"""Bytes that a request counts for beside its own."""


class _Line:
    """Who waits of one sender, in the order in which they came: when each did by the clock, its bytes, and the word."""

    __slots__ = ("bytes", "waiting")

    def __init__(self) -> None:
        self.waiting = deque[tuple[float, int, asyncio.Future[None]]]()
        self.bytes = 0


class _Turn(AbstractAsyncContextManager[None]):
    """One turn; a generator would take three times as long, with every request."""

    __slots__ = ("_sender", "_size", "_turns")

    def __init__(self, turns: FairTurns, sender: Hashable, size: int) -> None:
        self._turns, self._sender, self._size = turns, sender, size

    async def __aenter__(self) -> None:
        await self._turns.begin(self._sender, self._size)

    async def __aexit__(self, *_: object) -> None:
        self._turns.end(self._size)


class FairTurns:
    """Turns to decode, keep and apply a request. Use it from one event loop, for all of its ports.

    Args:
        most: Bytes that may wait.
        retry_after: Seconds after which who is refused shall try again.
    """

    def __init__(self, most: int = _WAITING, retry_after: float = 1.0) -> None:
        self._most, self._retry_after = most, retry_after
        self._lines: dict[Hashable, _Line] = {}
        self._next: list[tuple[float, int, Hashable]] = []
        self._due: dict[Hashable, float] = {}
        self._clock, self._number, self._remembered = 0.0, 0, _SENDERS
        self._waiting = self._taken = 0
        self._seconds, self._bytes, self._worked = 1.0, float(_PACE), time.thread_time()
        self._done, self._next_look = 0, 0.0
        self._places = asyncio.Semaphore(_PLACES)

    @property
    def waiting(self) -> int:
        """Bytes that wait."""
        return self._waiting

    def turn(self, sender: Hashable, size: int) -> AbstractAsyncContextManager[None]:
        """Wait for a turn, and have it.

        Args:
            sender: Whoever shares with others.
            size: Bytes of the request.

        Raises:
            ThrottledError: If more waits than may, and this, or what was to come last, is refused for it.
        """
        return _Turn(self, sender, size + _OVERHEAD)

    @asynccontextmanager
    async def place(self, size: int) -> AsyncIterator[None]:
        """Hold one of the few places of requests that take many turns: what is made of their bytes takes memory.

        Args:
            size: Bytes that wait for it.

        Raises:
            ThrottledError: If more waits than may, or none is free in time.
        """
        if self._waiting + size > self._most:
            raise self._refused()
        self._waiting += size
        try:
            async with asyncio.timeout(_PATIENCE):
                await self._places.acquire()
        except TimeoutError:
            raise self._refused() from None
        finally:
            self._waiting -= size
        try:
            yield
        finally:
            self._places.release()

    def cost(self, sender: Hashable, size: int, seconds: float) -> None:
        """A sender's turn, asked for with so many bytes, has taken so much work: it counts as what that is in bytes."""
        self.charge(sender, round(seconds * self._pace()) - size)

    def charge(self, sender: Hashable, more: int) -> None:
        """A sender's request turns out to be so many bytes more, or less."""
        self._due[sender] = self._due.get(sender, self._clock) + more

    def elsewhere(self, seconds: float) -> None:
        """So much work was done for who had its turn by another thread than this."""
        self._seconds += seconds

    async def begin(self, sender: Hashable, size: int) -> None:
        """Wait for a turn of so many bytes; see `turn`."""
        if self._taken and (self._lines or self._taken + size > self._room()):
            await self._wait(sender, size)
        else:
            self._begin(sender, max(self._clock, self._due.get(sender, 0.0)), size)

    def end(self, size: int) -> None:
        """Let the next have theirs."""
        self._taken -= size
        self._done += size
        if time.monotonic() > self._next_look:
            self._look()
        self._begin_next()

    async def _wait(self, sender: Hashable, size: int) -> None:
        while self._waiting + size > self._most:
            self._refuse_last(sender, size)
        line = self._lines.get(sender)
        if line is None:
            line = self._lines[sender] = _Line()
            self._number += 1
            heapq.heappush(self._next, (self._starts(sender) + size, self._number, sender))
        come: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        one = (self._clock, size, come)
        line.waiting.append(one)
        line.bytes += size
        self._waiting += size
        try:
            await come
        except asyncio.CancelledError:
            if one in line.waiting:
                line.waiting.remove(one)
                self._gone(line, size)
            elif not come.cancelled() and come.exception() is None:  # its turn had come
                self.end(size)
            raise

    def _refuse_last(self, sender: Hashable, size: int) -> None:
        """Refuse what would come last, of whichever sender; raises if that is who asks."""
        own = self._lines.get(sender)
        if own is None or own.bytes * len(self._lines) < self._waiting:  # else it has more there than others have
            last, due = None, self._starts(sender) + size + (own.bytes if own else 0)
            for other, line in self._lines.items():
                if line.waiting and (until := self._starts(other) + line.bytes) > due:
                    last, due = line, until
            if last is not None:
                _, dropped, come = last.waiting.pop()
                self._gone(last, dropped)
                if not come.done():  # who hung up is not told
                    come.set_exception(self._refused())
                return
        raise self._refused()

    def _starts(self, sender: Hashable) -> float:
        return max(self._clock, self._due.get(sender, 0.0))

    def _gone(self, line: _Line, size: int) -> None:
        line.bytes -= size
        self._waiting -= size

    def _begin(self, sender: Hashable, start: float, size: int) -> None:
        self._clock = max(self._clock, start)
        self._due[sender] = start + size
        self._taken += size
        if len(self._due) > self._remembered:
            self._due = {one: until for one, until in self._due.items() if until > self._clock}
            self._remembered = max(_SENDERS, 2 * len(self._due))

    def _begin_next(self) -> None:
        begun = 0
        while self._next and begun < _AT_ONCE:
            due, number, sender = self._next[0]
            line = self._lines[sender]
            if not line.waiting:
                heapq.heappop(self._next)
                del self._lines[sender]
                continue
            since, size, come = line.waiting[0]
            start = max(since, self._due.get(sender, 0.0))
            if not come.done():  # else who waited has hung up, and has not been told yet
                if start + size > due:  # what it asked for before has cost more than was known
                    heapq.heapreplace(self._next, (start + size, number, sender))
                    continue
                if self._taken and self._taken + size > self._room():
                    return
                self._begin(sender, start, size)
                come.set_result(None)
                begun += 1
            line.waiting.popleft()
            self._gone(line, size)

    def _look(self) -> None:
        """See what work took; not each time, for asking how long this thread has worked is work."""
        now = time.thread_time()
        self._seconds = _FADING * self._seconds + now - self._worked
        self._bytes = _FADING * self._bytes + self._done
        self._worked, self._done, self._next_look = now, 0, time.monotonic() + _LOOK

    def _room(self) -> float:
        """Bytes that are a tenth of a second's work, by what this thread took for those before."""
        return _WORK * self._pace()

    def _pace(self) -> float:
        """Bytes that are a second's work."""
        return self._bytes / max(self._seconds, 1e-9)

    def _refused(self) -> ThrottledError:
        return ThrottledError("more arrives than can be taken", self._retry_after)
