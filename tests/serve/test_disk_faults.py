"""What real file systems do to an evaluator: full, read-only, torn. It says so, the rest goes on, nothing is lost."""

from __future__ import annotations

import asyncio
import resource
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from kc_otel.contract import load_text
from kc_otel.judge.otlp.sink import RequestCounts
from kc_otel.serve.config import ServeConfig
from kc_otel.serve.core import Core
from kc_otel.serve.durable_sink import DurableSink, recover
from kc_otel.serve.receivers.http_server import http_app
from kc_otel.serve.server import ServiceError, run
from kc_otel.serve.store.state_file import StateError
from kc_otel.serve.store.write_ahead_log import LogError, WriteAheadLog
from tests.serve.conftest import POLICY
from tests.tools.small_disk import fill, read_only, small_disk


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk") as folder:
        yield folder


def totals(core: Core) -> dict[Any, int]:
    now = time.time()
    return {one: core.evaluator.distribution(one, 300.0, now).total for one in core.evaluator.series()}


def sending(core: Core, folder: Path, counts: RequestCounts, steps: Callable[[Callable], Any]) -> None:
    """Runs steps that send over HTTP to a core behind its log."""

    async def main() -> None:
        log = WriteAheadLog(folder, begin=core.position, keep=1 << 20)
        transport = httpx.ASGITransport(http_app(DurableSink(core, log), counts=counts))
        async with httpx.AsyncClient(transport=transport, base_url="http://evaluator") as client:

            async def send(request: Any) -> httpx.Response:
                headers = {"content-type": "application/x-protobuf"}
                return await client.post("/v1/metrics", content=request.SerializeToString(), headers=headers)

            await steps(send)
        log.close()

    asyncio.run(main())


def test_a_disk_that_is_full_refuses_until_there_is_room(
    disk: Path, make_core: Callable[..., Core], open_file: Callable, drift: Callable
) -> None:
    """503 and when to try again; verdicts that were given stay; after it all that was acknowledged is there, once."""
    core, counts = make_core(open_file(disk / "state.sqlite")), RequestCounts()
    request = drift(0.3)

    def ticks() -> None:
        for _ in range(20):  # the state file has a little room of its own
            core.tick(time.time())

    async def steps(send: Callable) -> None:
        assert (await send(request)).status_code == 200
        core.tick(time.time())
        ballast = fill(disk)
        for _ in range(100):  # what is left of the log's last page may take some
            answer = await send(request)
            if answer.status_code != 200:
                break
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert b"No space left on device" in answer.content
        with pytest.raises(StateError, match="full"):
            ticks()
        assert {verdict.status for verdict, _, _ in core.history.cells()} == {"FAIL"}
        ballast.unlink()
        assert (await send(request)).status_code == 200
        core.tick(time.time())

    sending(core, disk / "log", counts, steps)
    assert counts.snapshot()["http", "not_kept"] == 1
    again = make_core(open_file(None))
    assert recover(again, WriteAheadLog(disk / "log")) == counts.snapshot()["http", "accepted"]
    assert totals(again) == totals(core)


def test_a_disk_that_nobody_may_write_ends_the_start_with_what_to_do(disk: Path) -> None:
    """Of the state file and of the log: a sentence with the path, and no traceback."""
    read_only(disk)
    with pytest.raises(LogError, match=r"disk/log: cannot be written \(Read-only file system\); name a folder"):
        WriteAheadLog(disk / "log")
    contract = load_text(POLICY, "policy.yaml")
    config = ServeConfig(state=disk / "state.sqlite", grpc_port=0, http_port=0, api_port=0, webhooks=False)
    with pytest.raises(
        ServiceError, match=r"state.sqlite: cannot open the state file .*in a folder that can be written"
    ):
        run([contract], config)


@pytest.mark.slow
def test_a_state_that_is_torn_anywhere_is_made_up_for_by_the_log(
    tmp_path: Path, make_core: Callable[..., Core], open_file: Callable, drift: Callable
) -> None:
    """SQLite's own log, cut at any page or between: an older state, or none, and all requests are counted once."""
    path = tmp_path / "state.sqlite"
    core, request = make_core(open_file(path)), drift(0.3)

    async def steps(send: Callable) -> None:
        for _ in range(3):
            assert (await send(request)).status_code == 200
            core.tick(time.time())

    sending(core, tmp_path / "log", RequestCounts(), steps)
    wanted = totals(core)
    assert wanted
    size = path.with_name("state.sqlite-wal").stat().st_size
    assert size > 40_000
    for number, cut in enumerate([*range(0, size, size // 24), size - 1, size - 4097, size]):
        torn = tmp_path / str(number) / "state.sqlite"
        torn.parent.mkdir()
        shutil.copy(path, torn)
        wal = torn.with_name("state.sqlite-wal")
        shutil.copy(path.with_name("state.sqlite-wal"), wal)
        with wal.open("r+b") as file:
            file.truncate(cut)
        again = make_core(open_file(torn))
        recover(again, WriteAheadLog(tmp_path / "log", begin=again.position))
        assert totals(again) == wanted, cut


def test_a_file_that_may_not_grow_is_no_fault_of_the_sender(
    tmp_path: Path, make_core: Callable[..., Core], drift: Callable
) -> None:
    """`ulimit -f` and the largest file of a file system: its sender keeps the request, and is not refused for good."""
    core, counts, request = make_core(), RequestCounts(), drift(0.3)

    async def steps(send: Callable) -> None:
        assert (await send(request)).status_code == 200
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        (segment,) = (tmp_path / "log").iterdir()
        resource.setrlimit(resource.RLIMIT_FSIZE, (segment.stat().st_size, before[1]))
        try:
            answer = await send(request)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert (answer.status_code, b"File too large" in answer.content) == (503, True)
        assert (await send(request)).status_code == 200

    sending(core, tmp_path / "log", counts, steps)
    assert recover(make_core(), WriteAheadLog(tmp_path / "log")) == 2
