"""Nobody outside is told anything of the state that the disk does not have yet."""

import asyncio
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from kc_otel.contract.model import Contract
from kc_otel.serve.core import Core
from kc_otel.serve.self_metrics import read
from kc_otel.serve.store.state_file import StateError, UnitOfWork, unit_of_work
from kc_otel.serve.webhooks.deliver import Dispatcher
from kc_otel.serve.webhooks.endpoints import WebhookEndpoint
from tests.tools.api import api_of

pytestmark = pytest.mark.anyio

_COMMIT = UnitOfWork.commit
STILL = 0.1
"""Seconds in which what does not wait is there."""


class Disk:
    """Takes what it is given when it is told to."""

    def __init__(self) -> None:
        self.asked, self.takes = threading.Event(), threading.Event()
        self.error: sqlite3.OperationalError | None = None

    def commit(self, unit: UnitOfWork, connection: sqlite3.Connection) -> None:
        self.asked.set()
        assert self.takes.wait(20)
        if self.error is not None:
            connection.execute("ROLLBACK")
            raise self.error
        _COMMIT(unit, connection)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    made = Disk()

    def commit(unit: UnitOfWork, connection: sqlite3.Connection) -> None:
        made.commit(unit, connection)

    monkeypatch.setattr(UnitOfWork, "commit", commit)
    return made


@pytest.fixture
def core(make_core: Callable[..., Core], open_file: Callable, drift: Callable, tmp_path: Path) -> Core:
    made = make_core(open_file(tmp_path / "state"))
    made.metrics(drift(0.3))
    made.tick(time.time())
    assert made.decisions.routes
    return made


@asynccontextmanager
async def site(core: Core) -> AsyncIterator[httpx.AsyncClient]:
    api = api_of(core)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(api), base_url="http://evaluator") as client:
        yield client


def silence(contract: str) -> dict[str, Any]:
    return {"contract": contract, "until": time.time() + 60, "by": "ann", "why": "known"}


async def still_waits(task: asyncio.Task[Any]) -> bool:
    await asyncio.sleep(STILL)
    return not task.done()


async def test_an_order_is_answered_and_holds_once_it_is_on_the_disk(core, disk, contract):
    """Meanwhile everything is shown as it was; an order waits for the one before; a refused one changes nothing."""
    async with site(core) as client:
        ordered = asyncio.create_task(client.post("/api/v1/silences", json=silence(contract.name)))
        assert await still_waits(ordered)
        refused = asyncio.create_task(client.post("/api/v1/silences", json=silence("another")))
        for path in ("verdicts", "decisions", "silences", "events"):
            assert (await asyncio.wait_for(client.get(f"/api/v1/{path}"), 5)).status_code == 200
        assert not core.people.silences
        assert not ordered.done()
        assert not refused.done()
        disk.takes.set()
        assert (await ordered).status_code == 200
        assert len(core.people.silences) == 1
        assert (await refused).status_code in {404, 422}


@pytest.mark.slow
async def test_decisions_are_told_once_they_are_on_the_disk(core: Core, disk: Disk, contract: Contract) -> None:
    """A version that a crash takes back would be given to another table; routers that wait for one wait until then."""
    before = core.decisions.version
    async with site(core) as client:
        said = {"contract": contract.name, "by": "ann", "why": "mended"}
        resuming = asyncio.create_task(client.post("/api/v1/decisions/resume", json=said))
        following = asyncio.create_task(
            client.get("/api/v1/decisions", params={"after": before, "wait": 20, "tag": core.decisions.tag})
        )
        assert await still_waits(resuming)
        assert await still_waits(following)
        assert (await client.get("/api/v1/decisions")).json()["version"] == before
        disk.takes.set()
        assert (await resuming).json()["version"] == before + 1
        assert (await following).json()["version"] == before + 1


async def test_an_order_that_the_disk_does_not_take_does_not_hold(core: Core, disk: Disk, contract: Contract) -> None:
    """With 503, and nothing of it is in force; the next one is taken."""
    disk.takes.set()
    disk.error = sqlite3.OperationalError("disk I/O error")
    async with site(core) as client:
        answer = await client.post("/api/v1/silences", json=silence(contract.name))
        assert answer.status_code == 503
        assert answer.headers["content-type"] == "application/problem+json"
        assert "disk I/O error" in answer.json()["detail"]
        assert not core.people.silences
        assert (await client.get("/api/v1/decisions")).status_code == 200
        disk.error = None
        assert (await client.post("/api/v1/silences", json=silence(contract.name))).status_code == 200
        assert len(core.people.silences) == 1


async def test_an_evaluation_is_at_an_end_when_the_disk_has_it(core: Core, disk: Disk) -> None:
    """And not before; one that the disk does not take leaves everything as it was, and is said."""
    before, now = core.evaluated_at, time.time()
    evaluating = asyncio.create_task(core.evaluate(now))
    assert await asyncio.to_thread(disk.asked.wait, 20)
    assert await still_waits(evaluating)
    assert core.evaluated_at == before
    disk.takes.set()
    await evaluating
    assert core.evaluated_at == now
    [(took,)] = read(core, Counter(), Counter())["kc.evaluator.sync.duration"]
    assert STILL / 2 < took < 20
    disk.error = sqlite3.OperationalError("disk I/O error")
    with pytest.raises(StateError, match="disk I/O error"):
        await core.evaluate(time.time())
    assert core.evaluated_at == now


def test_without_a_state_file_nothing_waits(make_core: Callable[..., Core]) -> None:
    core = make_core()
    asyncio.run(core.evaluate(time.time()))
    assert read(core, Counter(), Counter())["kc.evaluator.sync.duration"] == []


async def test_a_webhook_is_sent_once_the_disk_has_what_it_says(core: Core, disk: Disk) -> None:
    """After a crash nobody has been told of what nobody decided."""
    arrived, body = asyncio.Event(), core.outbox.messages()[0].body

    def client() -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.MockTransport(lambda _: (arrived.set(), httpx.Response(204))[1]))

    endpoints = {"another": WebhookEndpoint("another", "http://pager/", format="slack", allow_private=True)}
    dispatcher = Dispatcher(core.outbox, endpoints, client_factory=client, poll=0.02, turn=core.turn)
    delivering = asyncio.create_task(dispatcher.run())

    async def enqueue() -> None:
        async with core.turn():
            with unit_of_work(core.connection):
                core.outbox.enqueue("another", "policy", body, time.time())

    enqueuing = asyncio.create_task(enqueue())
    assert await still_waits(delivering)
    assert not arrived.is_set()
    disk.takes.set()
    await asyncio.wait_for(arrived.wait(), 10)
    await enqueuing
    delivering.cancel()
    await asyncio.gather(delivering, return_exceptions=True)
