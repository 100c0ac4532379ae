"""Whose request is next when more arrives than can be taken."""

from __future__ import annotations

import asyncio
import time

import httpx
import pytest

from kc_otel.judge.otlp.request_errors import ThrottledError
from kc_otel.serve.listening import listen
from kc_otel.serve.receivers.fair_turns import FairTurns
from kc_otel.serve.receivers.http_listener import serving_http

LARGE, SMALL = 100_000, 500


class OneByOne(FairTurns):
    """As where each request takes longer than a tenth of a second."""

    def _room(self) -> float:
        return 0.0


class Traffic:
    """Senders that ask for turns, and who had theirs, in order."""

    def __init__(self, turns: FairTurns) -> None:
        self.turns = turns
        self.served: list[str] = []

    async def ask(self, sender: str, size: int) -> None:
        async with self.turns.turn(sender, size):
            await asyncio.sleep(0)
            self.served.append(sender)

    async def flood(self, sender: str, size: int, times: int) -> None:
        for _ in range(times):
            await self.ask(sender, size)


def test_who_asks_for_little_is_next_beside_forty_who_flood():
    """Each of its requests comes after at most two of the others'; of these each has as many turns as the next."""

    async def sent() -> list[str]:
        traffic = Traffic(OneByOne())
        floods = [asyncio.create_task(traffic.flood(f"flood {number}", LARGE, 10)) for number in range(40)]
        between = []
        for _ in range(20):
            for _ in range(5):
                await asyncio.sleep(0)
            before = len(traffic.served)
            await traffic.ask("honest", SMALL)
            between.append(len(traffic.served) - before - 1)
        assert max(between) <= 2
        half = traffic.served[: len(traffic.served) // 2]
        counts = {half.count(f"flood {number}") for number in range(40)}
        assert max(counts) - min(counts) <= 1
        await asyncio.gather(*floods)
        return traffic.served

    assert len(asyncio.run(sent())) == 420


def test_what_turns_out_to_be_larger_counts_as_that():
    """Sixteen kilobytes of gzip may be sixteen megabytes: whoever sent them waits for those who sent them plain."""

    async def sent() -> list[str]:
        traffic = Traffic(OneByOne())
        async with traffic.turns.turn("first", LARGE):
            traffic.turns.charge("packed", 50 * LARGE)
            waiting = [asyncio.create_task(traffic.ask("packed", SMALL))]
            await asyncio.sleep(0)
            waiting += [asyncio.create_task(traffic.ask(f"plain {number}", LARGE)) for number in range(5)]
            await asyncio.sleep(0)
        await asyncio.gather(*waiting)
        return traffic.served

    assert asyncio.run(sent()) == [*(f"plain {number}" for number in range(5)), "packed"]


def test_what_is_asked_for_at_once_counts_as_what_the_first_of_it_cost():
    """A connection of gRPC has a hundred calls under way: what one took is known before the next has its turn."""

    async def sent() -> list[str]:
        traffic = Traffic(OneByOne())

        async def dear(number: int) -> None:
            async with traffic.turns.turn("dear", SMALL):
                traffic.turns.charge("dear", 50 * LARGE)
                traffic.served.append(f"dear {number}")

        async with traffic.turns.turn("first", LARGE):
            waiting = [asyncio.create_task(dear(number)) for number in range(3)]
            await asyncio.sleep(0)
            waiting += [asyncio.create_task(traffic.ask("plain", LARGE)) for _ in range(5)]
            await asyncio.sleep(0)
        await asyncio.gather(*waiting)
        return traffic.served

    assert asyncio.run(sent()) == ["dear 0", *["plain"] * 5, "dear 1", "dear 2"]


@pytest.mark.slow
def test_those_who_leave_together_hold_nobody_up():
    """Twenty thousand who wait, of two hundred connections that end: leaving takes no longer than coming did."""

    async def sent() -> tuple[float, float, int]:
        turns, began = OneByOne(), time.process_time()

        async def wait(number: int) -> None:
            async with turns.turn(number % 200, 1):
                pass

        async with turns.turn("busy", LARGE):
            waiting = [asyncio.create_task(wait(number)) for number in range(20_000)]
            await asyncio.sleep(0)
            came = time.process_time()
            for one in waiting:
                one.cancel()
            await asyncio.wait(waiting)
        return came - began, time.process_time() - came, turns.waiting

    came, left, waiting = asyncio.run(sent())
    assert left < 10 * came
    assert waiting == 0


@pytest.mark.slow
def test_over_the_bound_who_has_most_there_is_refused_without_a_search():
    """As quickly as they came: sixty thousand small ones of a few hundred connections fill what may wait."""

    async def sent() -> tuple[float, float, int]:
        turns, began = OneByOne(most=20_000 * 1025), time.process_time()

        async def wait(number: int) -> None:
            async with turns.turn(number % 200, 1):
                pass

        async with turns.turn("busy", LARGE):
            waiting = [asyncio.create_task(wait(number)) for number in range(20_000)]
            await asyncio.sleep(0)
            came = time.process_time()
            refused = [asyncio.create_task(wait(number)) for number in range(20_000)]
            await asyncio.sleep(0)
            took = time.process_time() - came
            errors = sum(one.done() and one.exception() is not None for one in refused)
            for one in waiting:
                one.cancel()
        await asyncio.gather(*waiting, *refused, return_exceptions=True)
        return came - began, took, errors

    came, took, errors = asyncio.run(sent())
    assert took < 10 * came
    assert errors == 20_000


def test_who_is_alone_waits_for_nobody():
    """Nor does anybody while there is less than a tenth of a second's work."""

    async def sent() -> int:
        turns = OneByOne()
        for _ in range(3):
            async with turns.turn("alone", 10**9):
                pass
        quick = FairTurns()
        async with quick.turn("one", LARGE), quick.turn("two", LARGE), quick.turn("three", LARGE):
            return turns.waiting + quick.waiting

    assert asyncio.run(sent()) == 0


def test_over_the_bound_what_would_come_last_is_refused():
    """It is told to come again; a small request finds room in its place."""

    async def sent() -> tuple[list[str], list[str]]:
        traffic = Traffic(OneByOne(most=2 * LARGE + 3000))
        async with traffic.turns.turn("busy", LARGE):
            waiting = {name: asyncio.create_task(traffic.ask(name, LARGE)) for name in ("a", "b")}
            await asyncio.sleep(0)
            waiting |= {name: asyncio.create_task(traffic.ask(name, LARGE)) for name in ("a again", "c")}
            waiting["small"] = asyncio.create_task(traffic.ask("small", LARGE // 2))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        done = await asyncio.gather(*waiting.values(), return_exceptions=True)
        refused = [name for name, one in zip(waiting, done, strict=True) if isinstance(one, ThrottledError)]
        assert traffic.turns.waiting == 0
        return traffic.served, refused

    served, refused = asyncio.run(sent())
    assert served[0] == "small"
    assert len(refused) == 3
    assert len(served) == 2


@pytest.mark.slow
def test_nobody_is_another_sender_by_saying_so():
    """A header that names another address changes nothing: turns are shared by connections."""
    seen = []

    async def app(scope, _receive, send):
        if scope["type"] == "http":
            seen.append(scope["client"])
            await send({"type": "http.response.start", "status": 204, "headers": []})
            await send({"type": "http.response.body", "body": b""})

    async def asked() -> None:
        sock = listen("127.0.0.1", 0, "tests", 16)
        async with serving_http(app, sock), httpx.AsyncClient() as client:
            for name in ("192.0.2.1", "192.0.2.2"):
                url = f"http://127.0.0.1:{sock.getsockname()[1]}/"
                assert (await client.get(url, headers={"x-forwarded-for": name})).status_code == 204

    asyncio.run(asked())
    assert len(seen) == 2
    assert len(set(seen)) == 1


@pytest.mark.parametrize("late", [False, True])
def test_who_hangs_up_gives_its_turn_to_the_next(late):
    """While it waits, and in the moment in which its turn comes."""

    async def sent() -> list[str]:
        traffic = Traffic(OneByOne())
        async with traffic.turns.turn("busy", LARGE):
            gone = asyncio.create_task(traffic.ask("gone", SMALL))
            there = asyncio.create_task(traffic.ask("there", LARGE))
            await asyncio.sleep(0)
            if not late:
                gone.cancel()
                await asyncio.sleep(0)
        if late:
            gone.cancel()
        await asyncio.wait_for(there, 1)
        assert traffic.turns.waiting == 0
        return traffic.served

    assert asyncio.run(sent()) == ["there"]


def test_who_hangs_up_while_it_still_stands_in_the_queue_takes_nobody_with_it():
    """A turn ends, or another is refused, before who hung up has run again: nothing raises, and nothing is lost."""

    async def sent() -> FairTurns:
        traffic = Traffic(OneByOne())
        async with traffic.turns.turn("busy", LARGE):
            gone = asyncio.create_task(traffic.ask("gone", SMALL))
            await asyncio.sleep(0)
            there = asyncio.create_task(traffic.ask("there", LARGE))
            await asyncio.sleep(0)
            gone.cancel()
        await asyncio.wait_for(there, 1)
        full = Traffic(OneByOne(most=2500))
        async with full.turns.turn("busy", LARGE):
            refused = asyncio.create_task(full.ask("refused", 2 * SMALL - 1))
            await asyncio.sleep(0)
            nearer = asyncio.create_task(full.ask("nearer", 1))
            refused.cancel()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        await asyncio.wait_for(nearer, 1)
        for turns in (traffic.turns, full.turns):
            assert (turns.waiting, turns._taken) == (0, 0)
        assert await asyncio.gather(gone, refused, return_exceptions=True)
        return traffic.turns

    asyncio.run(sent())
