"""What real file systems do to an evaluator: full, read-only, torn. It says so, the rest goes on, nothing is lost."""

import resource
import shutil
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from kc_otel.contract.load import load_text
from kc_otel.serve.config import ServeConfig
from kc_otel.serve.core import Core
from kc_otel.serve.durable_sink import DurableSink, TrafficRecording, TrafficRecordingError, recover
from kc_otel.serve.server import ServiceError, run
from kc_otel.serve.store.state_file import StateError
from tests.serve.conftest import POLICY
from tests.tools.receivers import http_app
from tests.tools.small_disk import fill, read_only, small_disk
from tests.tools.verdicts import windows_of

pytestmark = pytest.mark.anyio


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk") as folder:
        yield folder


def totals(core: Core) -> dict[Any, int]:
    return {series: window.total for series, window in windows_of(core.evaluator, time.time()).items()}


@asynccontextmanager
async def sending(core: Core, counts: Counter[tuple[str, str]]) -> AsyncIterator[Callable[[Any], Any]]:
    """A function that sends over HTTP to a core behind its inbox."""
    transport = httpx.ASGITransport(http_app(DurableSink(core), counts=counts))
    async with httpx.AsyncClient(transport=transport, base_url="http://evaluator") as client:
        headers = {"content-type": "application/x-protobuf"}
        yield lambda request: client.post("/v1/metrics", content=request.SerializeToString(), headers=headers)


async def test_a_disk_that_is_full_refuses_until_there_is_room(disk, make_core, open_file, drift):
    """503 and when to try again; verdicts that were given stay; after it all that was acknowledged is there, once."""
    connection = open_file(disk / "state.sqlite")
    core, counts, request = make_core(connection), Counter(), drift(0.3)

    async def ticks() -> None:
        for _ in range(20):  # the file has a little room of its own
            await core.evaluate(time.time())

    async with sending(core, counts) as send:
        assert (await send(request)).status_code == 200
        await core.evaluate(time.time())
        ballast = fill(disk)
        for _ in range(100):  # what is left of the file's last page may take some
            answer = await send(request)
            if answer.status_code != 200:
                break
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert b"database or disk is full" in answer.content
        assert "database or disk is full" in core.evaluator.faults.present[""], "before any evaluation fails"
        with pytest.raises(StateError, match="full"):
            await ticks()
        assert {verdict.status for verdict, _ in core.history.cells()} == {"FAIL"}
        ballast.unlink()
        assert (await send(request)).status_code == 200
        assert core.evaluator.faults.present == {}
        await core.evaluate(time.time())

    assert counts["http", "not_kept"] == 1
    connection.close()
    again = make_core(open_file(disk / "state.sqlite"))
    assert recover(again) == 0
    assert totals(again) == totals(core)


def test_a_disk_that_nobody_may_write_ends_the_start_with_what_to_do(disk: Path) -> None:
    """Of the state file and of a recording: a sentence with the path, and no traceback."""
    read_only(disk)
    with pytest.raises(TrafficRecordingError, match=r"disk/log: not writable \(Read-only file system\); start"):
        TrafficRecording(disk / "log", 1 << 20)
    contract = load_text(POLICY, "policy.yaml")
    config = ServeConfig(state=disk / "state.sqlite", grpc_port=0, http_port=0, api_port=0, webhooks=False)
    with pytest.raises(
        ServiceError, match=r"state.sqlite: cannot open the state file .*in a folder that can be written"
    ):
        run([contract], config)


@pytest.mark.slow
async def test_a_state_that_is_torn_anywhere_is_one_that_was(tmp_path, make_core, open_file, drift):
    """SQLite's own log, cut at any page or between: snapshot and inbox together are what was taken up to a time."""
    path = tmp_path / "state.sqlite"
    core, past = make_core(open_file(path)), [{}]
    async with sending(core, Counter()) as send:
        for sigma in (0.3, 0.4, 0.5):
            assert (await send(drift(sigma))).status_code == 200
            past.append(totals(core))
            await core.evaluate(time.time())

    size = path.with_name("state.sqlite-wal").stat().st_size
    assert size > 40_000
    found = []
    for number, cut in enumerate([*range(0, size, size // 24), size - 1, size - 4097, size]):
        torn = tmp_path / str(number) / "state.sqlite"
        torn.parent.mkdir()
        shutil.copy(path, torn)
        wal = torn.with_name("state.sqlite-wal")
        shutil.copy(path.with_name("state.sqlite-wal"), wal)
        with wal.open("r+b") as file:
            file.truncate(cut)
        again = make_core(open_file(torn))
        recover(again)
        found.append(past.index(totals(again)))
    assert found[:-3] == sorted(found[:-3])
    assert {*found} == {0, 1, 2, 3}
    assert found[-1] == 3


@pytest.mark.parametrize("fault", ["too large", "read-only"])
async def test_a_file_that_may_not_grow_is_no_fault_of_the_sender(tmp_path, make_core, open_file, drift, fault):
    """`ulimit -f`, or a file system that went read-only: the sender keeps the request, and is not refused for good."""
    connection = open_file(tmp_path / "state")
    core, counts, request = make_core(connection), Counter(), drift(0.3)
    async with sending(core, counts) as send:
        assert (await send(request)).status_code == 200
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        if fault == "too large":
            resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "state-wal").stat().st_size, before[1]))
        else:
            connection.execute("PRAGMA query_only=ON")
        try:
            answer = await send(request)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            connection.execute("PRAGMA query_only=OFF")
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert (await send(request)).status_code == 200

    connection.close()
    assert recover(make_core(open_file(tmp_path / "state"))) == 2
