"""Nobody outside is told anything of the state that the disk does not have yet."""

from __future__ import annotations

import asyncio
import errno
import json
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
from kc_otel.judge.otlp import RequestCounts
from kc_otel.serve.access.tenant_view import TenantView
from kc_otel.serve.api.app import make_api
from kc_otel.serve.api.changes import Changes
from kc_otel.serve.core import Core
from kc_otel.serve.self_metrics import read
from kc_otel.serve.store.state_connection import StateConnection
from kc_otel.serve.store.state_file import StateError
from kc_otel.serve.webhooks.deliver import Dispatcher
from kc_otel.serve.webhooks.endpoints import WebhookEndpoint
from kc_otel.serve.webhooks.formats import Format
from tests.serve.conftest import contract, drift, make_core, open_file

__all__ = ["contract", "drift", "make_core", "open_file"]

STILL = 0.1
"""Seconds in which what does not wait is there."""


class Disk:
    """Takes what it is given when it is told to."""

    def __init__(self) -> None:
        self.takes = threading.Event()
        self.error: OSError | None = None

    def sync(self) -> bool:
        assert self.takes.wait(20)
        if self.error is not None:
            raise self.error
        return True


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    made = Disk()
    monkeypatch.setattr(StateConnection, "sync", lambda _connection: made.sync())
    return made


@pytest.fixture
def core(make_core: Callable[..., Core], open_file: Callable, drift: Callable, tmp_path: Path) -> Core:
    """One that has decided something."""
    made = make_core(open_file(tmp_path / "state"))
    made.metrics(drift(0.3))
    made.tick(time.time())
    assert made.decisions.routes
    return made


@asynccontextmanager
async def site(core: Core) -> AsyncIterator[httpx.AsyncClient]:
    api = make_api(core, lambda: read(core, RequestCounts(), Counter()), Changes(), "0")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(api), base_url="http://evaluator") as client:
        yield client


def silence(contract: str) -> dict[str, Any]:
    return {"contract": contract, "until": time.time() + 60, "by": "ann", "why": "known"}


async def still_waits(task: asyncio.Task[Any]) -> bool:
    await asyncio.sleep(STILL)
    return not task.done()


@pytest.mark.parametrize("whose", ["everybody's", "a tenant's"])
def test_an_order_is_answered_and_decisions_are_told_once_they_are_on_the_disk(
    core: Core, disk: Disk, contract: Contract, whose: str
) -> None:
    """What is only looked at is not waited for; an order that is refused has nothing to wait for."""

    async def ask() -> None:
        async with site(core if whose == "everybody's" else TenantView(core, [contract.name])) as client:
            asked = {
                "order": asyncio.create_task(client.post("/api/v1/silences", json=silence(contract.name))),
                "decisions": asyncio.create_task(client.get("/api/v1/decisions")),
            }
            assert (await asyncio.wait_for(client.get("/api/v1/cells"), 5)).status_code == 200
            refused = await asyncio.wait_for(client.post("/api/v1/silences", json=silence("another")), 5)
            assert refused.status_code in {404, 422}
            for one in asked.values():
                assert await still_waits(one)
            assert core.people.silences  # it holds, and the page shows it
            disk.takes.set()
            for one in asked.values():
                assert (await one).status_code == 200

    asyncio.run(ask())


def test_what_is_told_of_decisions_is_what_was_waited_for(core: Core, disk: Disk, contract: Contract) -> None:
    """What is decided meanwhile is not on the disk with it."""
    before = core.decisions.version

    async def ask() -> None:
        async with site(core) as client:
            asked = asyncio.create_task(client.get("/api/v1/decisions"))
            assert await still_waits(asked)
            core.resume(contract.name, None, "ann", "mended", time.time())
            disk.takes.set()
            assert (await asked).json()["version"] == before < core.decisions.version

    asyncio.run(ask())


def test_who_ordered_is_told_when_the_evaluator_stops_before_the_disk_has_it(
    core: Core, disk: Disk, contract: Contract
) -> None:
    """It holds, and closing will write it; nobody knows when."""
    api = make_api(core, lambda: read(core, RequestCounts(), Counter()), Changes(), "0")
    body, sent = json.dumps(silence(contract.name)).encode(), list[Any]()
    scope = {
        "type": "http", "http_version": "1.1", "method": "POST", "path": "/api/v1/silences", "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())],
    }  # fmt: skip

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body}

    async def send(message: Any) -> None:
        sent.append(message)

    async def stop() -> None:
        answering = asyncio.create_task(api(scope, receive, send))
        assert await still_waits(answering)
        answering.cancel()
        await asyncio.gather(answering, return_exceptions=True)
        disk.takes.set()

    asyncio.run(stop())
    assert sent[0]["status"] == 503
    assert b"the evaluator stops" in sent[1]["body"]


def test_an_order_that_the_disk_does_not_take_is_said_to_be_in_danger(
    core: Core, disk: Disk, contract: Contract
) -> None:
    """With 503, as for a state that cannot be written; what is told of the decisions is refused as well."""
    disk.takes.set()
    disk.error = OSError(errno.EIO, "Input/output error")

    async def ask() -> None:
        async with site(core) as client:
            answer = await client.post("/api/v1/silences", json=silence(contract.name))
            assert answer.status_code == 503
            assert answer.headers["content-type"] == "application/problem+json"
            assert "may be forgotten when the machine goes down" in answer.json()["detail"]
            assert "Input/output error" in answer.json()["detail"]
            assert (await client.get("/api/v1/decisions")).status_code == 503

    asyncio.run(ask())


def test_a_log_lets_go_of_what_the_disk_has(core: Core, disk: Disk) -> None:
    """An evaluation is at an end when the disk has it, and not before; nor does a failing disk end it."""
    forgot: list[int] = []
    core.forget, core.position = forgot.append, 7

    async def evaluate() -> None:
        evaluating = asyncio.create_task(core.evaluate(time.time()))
        assert await still_waits(evaluating)
        assert (forgot, core.saved_position) == ([], 0)
        core.position = 8  # which arrived meanwhile
        disk.takes.set()
        await evaluating
        assert (forgot, core.saved_position) == ([7], 7)
        [(_, took)] = read(core, RequestCounts(), Counter())["kc.evaluator.sync.duration"]
        assert STILL / 2 < took < 20
        core.position, disk.error = 9, OSError(errno.EIO, "Input/output error")
        with pytest.raises(StateError, match="Input/output error"):
            await core.evaluate(time.time())
        assert (forgot, core.saved_position) == ([7], 7)

    asyncio.run(evaluate())


def test_without_a_state_file_nothing_waits(make_core: Callable[..., Core]) -> None:
    """And no metric says how long."""
    core = make_core()
    core.tick(time.time())
    asyncio.run(core.on_disk())
    assert read(core, RequestCounts(), Counter())["kc.evaluator.sync.duration"] == []


def test_a_webhook_is_sent_once_the_disk_has_what_it_says(
    core: Core, disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    """After a crash nobody has been told of what nobody decided; a disk that fails is asked again."""
    arrived = asyncio.Event()
    core.outbox.enqueue("pager", "policy", b"{}", time.time())

    def client() -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.MockTransport(lambda _: (arrived.set(), httpx.Response(204))[1]))

    async def deliver() -> None:
        endpoints = {"pager": WebhookEndpoint("pager", "http://pager/", format=Format.SLACK, allow_private=True)}
        dispatcher = Dispatcher(core.outbox, endpoints, client_factory=client, poll=0.02, disk=core.disk)
        delivering = asyncio.create_task(dispatcher.run())
        disk.error = OSError(errno.EIO, "Input/output error")
        assert await still_waits(delivering)
        disk.takes.set()
        assert await still_waits(delivering)
        assert not arrived.is_set()
        assert "waits: the state cannot be forced to the disk" in caplog.text
        disk.error = None
        await asyncio.wait_for(arrived.wait(), 10)
        delivering.cancel()
        await asyncio.gather(delivering, return_exceptions=True)

    asyncio.run(deliver())
