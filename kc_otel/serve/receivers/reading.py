"""Who may be read from at a time, so that a few senders that stay silent keep nobody else out.

A request that has begun and does not arrive holds a place. While places are free it may hold it for the read timeout;
once all are taken, one that would not have arrived in time gives way to the next; sooner, and in any case, one of
whoever has several more than the next. What arrives in time keeps its place: where a hundred senders of long requests
displace each other, nobody ever gets to the end of one.

Long requests need room besides, on all ports together, until they are answered. Without it they wait before they are
read, where they take no memory of this process; to read them and then to refuse them would take the time of those that
could be taken meanwhile. Who has least room is next.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from kc_otel.judge.otlp.request_errors import ReceiveError, ThrottledError
from kc_otel.judge.otlp.request_limits import Limits

__all__ = ["LONG", "Body", "ReadingPlaces", "Room", "TooSlowError"]

LONG: Final = 256 * 1024
"""Bytes of a body that needs room; one that is shorter may have come with its headers."""
_ROOM: Final = 64 * 1024 * 1024
"""Bytes of long requests that are read, wait and are taken at a time; the last may go beyond."""
_WAITING: Final = 256
"""Long requests that may wait for room."""
_PATIENCE: Final = 5.0
"""Seconds that they wait; senders give up after ten."""
_IDLE: Final = 0.1
"""Share of the pace that would have it in time, below which nobody means it."""
_LOOK: Final = 1.0
"""Seconds after which it is seen anew who does not arrive in time."""


@dataclass(frozen=True, slots=True)
class Body:
    """A request's body that has not come yet.

    Attributes:
        size: Bytes that it will have at most.
        arrived: Says how many have come.
        read: Waits for all of them.
    """

    size: int
    arrived: Callable[[], int]
    read: Callable[[], Awaitable[bytes]]


class TooSlowError(ReceiveError):
    """A request did not arrive in time."""

    http_status = 408
    code = 4
    outcome = "too_slow"


class DisplacedError(ThrottledError):
    """A request that had not arrived yet made room for another; its sender keeps it and tries again."""

    outcome = TooSlowError.outcome


@dataclass(slots=True, eq=False)
class _Reading:
    """A request that is being read; of one whose size nobody knows, `body` is None."""

    peer: Hashable
    deadline: asyncio.Timeout
    since: float
    limits: Limits
    body: Body | None
    displaced: bool = False

    def pace(self, now: float) -> float:
        """Share of its bytes that has come, by the share of the time that it has; below 1 it will not be in time."""
        if self.body is None:
            return 0.0
        there = self.body.arrived() / max(self.body.size, 1)
        return there * self.limits.read_timeout / max(now - self.since, 1e-9)

    def displace(self, now: float) -> None:
        self.displaced = True
        self.deadline.reschedule(now)


@dataclass(slots=True, eq=False)
class _Waiting:
    """A long request that waits for room."""

    peer: Hashable
    size: int
    room: asyncio.Future[None]


class Room:
    """Memory for long requests. Use it from one event loop, for all of its ports.

    Args:
        most: Bytes that are held before others wait.
        patience: Seconds that they wait.
        retry_after: Seconds after which who is refused shall try again.
    """

    def __init__(self, most: int = _ROOM, patience: float = _PATIENCE, retry_after: float = 1.0) -> None:
        self._most, self._patience, self._retry_after = most, patience, retry_after
        self._held = Counter[Hashable]()
        self._waiting: dict[_Waiting, None] = {}
        self.reading: dict[_Reading, None] = {}
        """Long requests that hold room and have not come yet, in the order in which they began."""

    @asynccontextmanager
    async def kept(self, size: int, peer: Hashable) -> AsyncIterator[None]:
        """Wait for room, and hold it.

        Args:
            size: Bytes.
            peer: Who sends them.

        Raises:
            ThrottledError: If there is none in time.
        """
        if self._waiting or self._held.total() >= self._most:
            await self._wait(size, peer)
        else:
            self._held[peer] += size
        try:
            yield
        finally:
            self._release(size, peer)

    async def _wait(self, size: int, peer: Hashable) -> None:
        if len(self._waiting) >= _WAITING:
            self._give_way(peer)
        mine = _Waiting(peer, size, asyncio.get_running_loop().create_future())
        self._waiting[mine] = None
        try:
            async with asyncio.timeout(self._patience):
                while not mine.room.done():
                    self._displace()
                    await asyncio.wait([mine.room], timeout=_LOOK)
                mine.room.result()
        except BaseException as error:
            given = mine.room.done() and mine.room.exception() is None
            self._waiting.pop(mine, None)
            if isinstance(error, TimeoutError):
                if not given:
                    raise self._refused() from None
                return
            if given:
                self._release(size, peer)
            raise

    def _give_way(self, peer: Hashable) -> None:
        """Refuse the newest of whoever waits with several more than who comes, or who comes."""
        waiting = Counter(one.peer for one in self._waiting)
        greedy, most = waiting.most_common(1)[0]
        if most <= waiting[peer] + 1:
            raise self._refused()
        newest = next(one for one in reversed(self._waiting) if one.peer == greedy)
        del self._waiting[newest]
        newest.room.set_exception(self._refused())

    def _displace(self) -> None:
        """End what has room and will not be in time: all that hardly move, and of the others the slowest.

        Where all are in time, who has several gives one up to who would have less.
        """
        now = asyncio.get_running_loop().time()
        paces = {one: one.pace(now) for one in self.reading if now - one.since >= one.limits.patience}
        slowest = min(paces, key=lambda one: paces[one], default=None)
        late = [one for one, pace in paces.items() if pace < _IDLE or (one is slowest and pace < 1.0)]
        for one in late or self._of_several():
            if not one.displaced:
                one.displace(now)

    def _of_several(self) -> list[_Reading]:
        """The newest of who has most, if that is several, and more than who is next would have; one at a time."""
        following = self._next()
        peer, most = self._held.most_common(1)[0]
        theirs = [one for one in self.reading if one.peer == peer]
        fair = len(theirs) < 2 or most <= self._held[following.peer] + following.size
        return [] if fair or any(one.displaced for one in self.reading) else theirs[-1:]

    def _next(self) -> _Waiting:
        """Of those that wait for whom least is held, the first."""
        return min(self._waiting, key=lambda one: self._held[one.peer])

    def _release(self, size: int, peer: Hashable) -> None:
        self._held[peer] -= size
        if not self._held[peer]:
            del self._held[peer]
        while self._waiting and self._held.total() < self._most:
            following = self._next()
            del self._waiting[following]
            self._held[following.peer] += following.size
            following.room.set_result(None)

    def _refused(self) -> ThrottledError:
        return ThrottledError("too many long requests at the same time", self._retry_after)


class ReadingPlaces:
    """Bounds how many requests of one transport are read at the same time. Use it from one event loop.

    Args:
        limits: `max_concurrent`, `read_timeout`, `patience` and `retry_after` of them.
        room: Shared with other ports.
    """

    def __init__(self, limits: Limits, room: Room) -> None:
        self._limits, self._room = limits, room
        self._held: dict[_Reading, None] = {}

    @asynccontextmanager
    async def taken(self, peer: Hashable, body: Body | None = None) -> AsyncIterator[None]:
        """Hold a place while a request is read.

        Args:
            peer: Who sends it.
            body: What is read; None where nobody knows how much has come.

        Raises:
            ThrottledError: If all places are held by requests that may yet arrive.
            TooSlowError: If what is done in the context takes too long.
            DisplacedError: If another needs the place, and this will not have arrived in time.
        """
        self._make_room(peer)
        limits = self._limits
        deadline = asyncio.timeout(limits.read_timeout)
        mine = _Reading(peer, deadline, asyncio.get_running_loop().time(), limits, body)
        try:
            async with deadline:
                self._held[mine] = None
                if body is not None and body.size > LONG:
                    self._room.reading[mine] = None
                try:
                    yield
                finally:
                    self._held.pop(mine, None)
                    self._room.reading.pop(mine, None)
        except TimeoutError:
            if mine.displaced:
                raise DisplacedError("too many requests arrive at the same time", limits.retry_after) from None
            raise TooSlowError("the request did not arrive in time") from None

    def _make_room(self, peer: Hashable) -> None:
        if len(self._held) < self._limits.max_concurrent:
            return
        now = asyncio.get_running_loop().time()
        places = Counter(one.peer for one in self._held)
        greedy, most = places.most_common(1)[0]
        if most > places[peer] + 1:
            soon = now - self._limits.patience / 4
            displaced = next((one for one in self._held if one.peer == greedy and one.since <= soon), None)
        else:
            late = [one for one in self._held if now - one.since >= self._limits.patience]
            slowest = min(late, key=lambda one: one.pace(now), default=None)  # of those that are as slow, the oldest
            displaced = None if slowest is None or slowest.pace(now) >= 1.0 else slowest
        if displaced is None:
            raise ThrottledError("too many requests at the same time", self._limits.retry_after)
        del self._held[displaced]
        displaced.displace(now)
