"""Who is read from when more arrive than can be: what would be there in time gets there."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

import pytest

from kc_otel.judge.otlp import Limits
from kc_otel.judge.otlp.request_errors import ThrottledError
from kc_otel.serve.receivers.reading import LONG, Body, DisplacedError, ReadingPlaces, Room

SIZE = 2 * LONG


class Sender:
    """A body of which so many bytes arrive in a second."""

    def __init__(self, pace: float, size: int = SIZE) -> None:
        self._pace, self._began = pace, asyncio.get_running_loop().time()
        self.body = Body(size, self.arrived, self.read)

    def arrived(self) -> int:
        return min(round((asyncio.get_running_loop().time() - self._began) * self._pace), self.body.size)

    async def read(self) -> bytes:
        await asyncio.sleep((self.body.size - self.arrived()) / self._pace if self._pace else 60.0)
        return b""


async def outcome(of: Callable[[], Awaitable[None]]) -> str:
    try:
        await of()
    except ThrottledError as error:
        return type(error).__name__
    return "read"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pace", "said"),
    [(3.0 * SIZE, ["read", "ThrottledError"]), (0.1 * SIZE, ["DisplacedError", "read"])],
    ids=["in time", "too slow"],
)
def test_only_what_would_not_be_in_time_gives_its_place_up(pace: float, said: list[str]) -> None:
    """Else a hundred who send long requests would displace each other for ever, and nobody would be read to the end."""

    async def scenario() -> list[str]:
        limits = Limits(max_concurrent=1, patience=0.1, read_timeout=1.0)
        places = ReadingPlaces(limits, Room())

        async def read(pace: float) -> None:
            sender = Sender(pace)
            async with places.taken(sender, sender.body):
                await sender.body.read()

        first = asyncio.create_task(outcome(lambda: read(pace)))
        await asyncio.sleep(0.2)
        second = await outcome(lambda: read(1000.0 * SIZE))
        return [await first, second]

    assert asyncio.run(scenario()) == said


def test_long_requests_wait_for_room_before_they_are_read() -> None:
    """So many bytes are in memory at a time, from before they are read until they are answered; then the next come."""

    async def scenario() -> int:
        room, most, now = Room(most=3 * SIZE, patience=5.0), 0, 0

        async def take() -> None:
            nonlocal most, now
            async with room.kept(SIZE, object()):
                now += 1
                most = max(most, now)
                await asyncio.sleep(0.01)
                now -= 1

        await asyncio.gather(*(take() for _ in range(20)))
        return most

    assert asyncio.run(scenario()) == 3


def test_who_waits_for_room_too_long_is_told_to_come_again() -> None:
    """As is who comes when too many wait; what is in memory already is held in any case."""

    async def scenario() -> list[str]:
        room = Room(most=SIZE, patience=0.05)

        async def take() -> None:
            async with room.kept(SIZE, object()):
                pass

        async with room.kept(SIZE, "first"):
            many = await asyncio.gather(*(outcome(take) for _ in range(300)))
        return [*sorted(set(many)), await outcome(take)]

    assert asyncio.run(scenario()) == ["ThrottledError", "read"]


def test_who_gives_up_waiting_takes_no_room_along() -> None:
    """Neither before there was room for it, nor in the moment that there is."""

    async def scenario() -> None:
        room = Room(most=SIZE)

        async def take() -> None:
            async with room.kept(SIZE, object()):
                pass

        async with AsyncExitStack() as held:
            await held.enter_async_context(room.kept(SIZE, object()))
            early, late = asyncio.create_task(take()), asyncio.create_task(take())
            await asyncio.sleep(0)
            early.cancel()
            await asyncio.sleep(0.01)
        late.cancel()
        await asyncio.gather(early, late, return_exceptions=True)
        await asyncio.wait_for(take(), 1.0)

    asyncio.run(scenario())


@pytest.mark.slow
def test_who_has_room_and_sends_nothing_gives_it_up() -> None:
    """Also where ten who announce long requests and stay silent came first: they end four at a time."""

    async def scenario() -> list[str]:
        room = Room(most=4 * SIZE, patience=2.5)
        places = ReadingPlaces(Limits(patience=0.1, read_timeout=20.0), room)

        async def read(pace: float) -> None:
            sender = Sender(pace)
            async with room.kept(SIZE, object()), places.taken(sender, sender.body):
                await sender.body.read()

        silent = [asyncio.create_task(outcome(lambda: read(0.0))) for _ in range(10)]
        await asyncio.sleep(0.2)
        honest = await outcome(lambda: read(1000.0 * SIZE))
        for one in silent:
            one.cancel()
        return [*sorted({one.result() for one in silent if one.done()}), honest]

    assert asyncio.run(scenario()) == [DisplacedError.__name__, "read"]


def test_who_has_least_room_is_next() -> None:
    """A sender of many requests waits for one of few; of those that have as much who asked first is first."""

    async def scenario() -> list[str]:
        room, order = Room(most=2 * SIZE), list[str]()

        async def take(peer: str) -> None:
            async with room.kept(SIZE, peer):
                order.append(peer)
                await asyncio.sleep(0.01)

        async with room.kept(SIZE, "many"):
            async with room.kept(SIZE, "many"):
                tasks = [asyncio.create_task(take(peer)) for peer in ("many", "few", "third", "few")]
                await asyncio.sleep(0.01)
            await asyncio.gather(*tasks)
        return order

    assert asyncio.run(scenario()) == ["few", "third", "few", "many"]


@pytest.mark.slow
@pytest.mark.parametrize(("peers", "most"), [(["many"] * 5, 2), ([object() for _ in range(5)], 0)], ids=["one", "five"])
def test_who_reads_several_gives_one_up_to_who_reads_none(peers: list[object], most: int) -> None:
    """However quick it is, and no more than until another has as many; where everybody has one, nobody does."""

    async def scenario() -> int:
        room = Room(most=4 * SIZE, patience=2.5)
        places = ReadingPlaces(Limits(patience=60.0, read_timeout=60.0), room)

        async def read(peer: object) -> None:
            sender = Sender(SIZE / 30)
            async with room.kept(SIZE, peer), places.taken(peer, sender.body):
                await sender.body.read()

        there = [asyncio.create_task(outcome(lambda peer=peer: read(peer))) for peer in peers[:4]]
        await asyncio.sleep(0.05)
        late = [asyncio.create_task(outcome(lambda: read("few"))) for _ in range(3)]
        await asyncio.sleep(2.2)
        given_up = sum(one.done() for one in there)
        for one in (*there, *late):
            one.cancel()
        await asyncio.gather(*there, *late, return_exceptions=True)
        return given_up

    assert asyncio.run(scenario()) == most


@pytest.mark.slow
def test_one_peer_takes_no_place_from_another() -> None:
    """It may have all of them while nobody else needs one; then its oldest give way, until both have as many."""

    async def scenario() -> list[str]:
        places = ReadingPlaces(Limits(max_concurrent=8, patience=4.0, read_timeout=60.0), Room())

        async def read(peer: str) -> None:
            async with places.taken(peer):
                await asyncio.sleep(60.0)

        many = [asyncio.create_task(outcome(lambda: read("many"))) for _ in range(8)]
        await asyncio.sleep(1.1)
        few = []
        for _ in range(6):
            few.append(asyncio.create_task(outcome(lambda: read("few"))))
            await asyncio.sleep(0.01)
        said = ["".join("-x"[not one.done()] for one in tasks) for tasks in (many, few)]
        for one in (*many, *few):
            one.cancel()
        await asyncio.gather(*many, *few, return_exceptions=True)
        return said

    assert asyncio.run(scenario()) == ["----xxxx", "xxxx--"]


def test_many_of_one_peer_fill_no_line_for_others() -> None:
    """Where as many wait as may, the newest of who waits with several is told to come again, and who comes may wait."""

    async def scenario() -> tuple[int, str]:
        room = Room(most=SIZE, patience=5.0)

        async def take(peer: str) -> None:
            async with room.kept(SIZE, peer):
                pass

        first = room.kept(SIZE, "first")
        await first.__aenter__()
        many = [asyncio.create_task(outcome(lambda: take("many"))) for _ in range(256)]
        await asyncio.sleep(0.01)
        few = asyncio.create_task(outcome(lambda: take("few")))
        await asyncio.sleep(0.01)
        refused = sum(one.done() for one in many)
        await first.__aexit__(None, None, None)
        await asyncio.gather(*many)
        return refused, await few

    assert asyncio.run(scenario()) == (1, "read")
