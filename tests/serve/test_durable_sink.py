"""What was acknowledged is judged after a crash, once; what cannot be kept is refused so that its sender keeps it."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2_grpc import MetricsServiceStub

from kc_otel import machine_code
from kc_otel.judge.otlp.sink import RequestCounts
from kc_otel.judge.verdict import Status
from kc_otel.offline.replay.traffic_reading import evaluations_recorded, read_recordings
from kc_otel.serve import durable_sink
from kc_otel.serve.core import Core
from kc_otel.serve.durable_sink import DurableSink, recover, tick_on_record
from kc_otel.serve.receivers.grpc_server import start_grpc
from kc_otel.serve.receivers.http_server import http_app
from kc_otel.serve.self_metrics import read
from kc_otel.serve.store import write_ahead_log
from kc_otel.serve.store.state_file import StateError
from kc_otel.serve.store.write_ahead_log import WriteAheadLog
from tests.tools.full_disk import refuse_commits, relieve


def taken(core: Core, folder: Path, *requests: Any) -> None:
    """Requests, acknowledged one after the other."""

    async def send() -> None:
        log = WriteAheadLog(folder, begin=core.position)
        sink = DurableSink(core, log)
        for request in requests:
            await sink.metrics(request)
        log.close()

    asyncio.run(send())


def content(core: Core) -> dict[Any, tuple[int, float]]:
    now = time.time()
    found = {one: core.evaluator.distribution(one, 300.0, now) for one in core.evaluator.series()}
    return {one: (binned.total, binned.sum) for one, binned in found.items()}


@pytest.mark.parametrize("ticks", [0, 1, 2])
def test_a_crash_loses_nothing_that_was_taken_and_counts_nothing_twice(
    make_core: Callable[..., Core], open_file: Callable, drift: Callable, tmp_path: Path, ticks: int
) -> None:
    """Whatever was saved by the last tick, the rest is applied from the log: the same content, the same verdicts."""
    path, log = tmp_path / "state", tmp_path / "log"
    connection = open_file(path)
    core = make_core(connection)
    for number, sigma in enumerate((0.3, 0.4)):
        taken(core, log, drift(sigma))
        if number < ticks:
            core.tick(time.time())
    before = content(core)
    assert before
    connection.close()

    again = make_core(open_file(path))
    assert recover(again, WriteAheadLog(log, begin=again.position)) == 2 - ticks
    assert content(again) == before
    again.tick(time.time())
    assert {verdict.status for verdict, _, _ in again.history.cells()} == {Status.FAIL}
    assert recover(again, WriteAheadLog(log, begin=again.position)) == 0


def test_a_tick_that_cannot_be_written_leaves_the_log_as_it_is(
    make_core: Callable[..., Core],
    open_file: Callable[..., sqlite3.Connection],
    drift: Callable,
    tmp_path: Path,
) -> None:
    """Position and panes are of one transaction: after a refused commit all is still applied from the log."""
    connection = open_file(tmp_path / "state")
    core = make_core(connection)
    taken(core, tmp_path / "log", drift(0.3))
    refuse_commits(connection)
    with pytest.raises(StateError):
        core.tick(time.time())
    relieve(connection)
    connection.close()
    again = make_core(open_file(tmp_path / "state"))
    assert recover(again, WriteAheadLog(tmp_path / "log", begin=again.position)) == 1


def test_the_logs_lag_is_what_the_state_has_not(
    make_core: Callable[..., Core],
    open_file: Callable[..., sqlite3.Connection],
    drift: Callable,
    tmp_path: Path,
) -> None:
    """It grows with what arrives, stays while the state cannot be written, and is nothing once it was."""
    connection = open_file(tmp_path / "state")
    core = make_core(connection)

    def said(name: str) -> float:
        return read(core, RequestCounts(), Counter())[name][0][1]

    assert read(core, RequestCounts(), Counter())["kc.evaluator.log.lag"] == []
    core.log = WriteAheadLog(tmp_path / "log", begin=core.position)
    assert (said("kc.evaluator.log.size"), said("kc.evaluator.log.lag")) == (0, 0)
    assert said("kc.evaluator.disk.free") == pytest.approx(shutil.disk_usage(tmp_path).free, abs=2**30)
    core.log.close()
    taken(core, tmp_path / "log", drift(0.3))
    core.log = WriteAheadLog(tmp_path / "log", begin=core.position)
    size = sum(path.stat().st_size for path in (tmp_path / "log").iterdir())
    assert said("kc.evaluator.log.lag") == said("kc.evaluator.log.size") == size > 0
    refuse_commits(connection)
    with pytest.raises(StateError):
        core.tick(time.time())
    assert said("kc.evaluator.log.lag") == size
    relieve(connection)
    asyncio.run(core.evaluate(time.time()))
    assert said("kc.evaluator.log.lag") == 0
    core.log.close()


@pytest.mark.slow
def test_a_record_is_judged_again_as_it_was(
    make_core: Callable[..., Core], drift: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What arrived and when it was judged are in one order, as it happened, however much waits for the disk."""
    core, happened = make_core(), list[float | None]()
    taking, judging = core.metrics, core.tick
    monkeypatch.setattr(core, "metrics", lambda *of: (happened.append(None), taking(*of))[1])
    monkeypatch.setattr(core, "tick", lambda now: (happened.append(now), judging(now))[1])

    async def serve() -> None:
        log = WriteAheadLog(tmp_path / "log", keep=1 << 30)
        sink = DurableSink(core, log)
        for _ in range(3):
            await asyncio.gather(*(sink.metrics(drift(0.3)) for _ in range(3)), tick_on_record(core, log))
        assert core.saved_position > 0
        await sink.metrics(drift(0.3))
        log.close()

    asyncio.run(serve())
    damage: list[str] = []
    entries = list(read_recordings([tmp_path / "log"], damage))
    assert [entry.at if entry.is_evaluation else None for entry in entries] == happened
    assert len([one for one in happened if one is not None]) == 3
    assert evaluations_recorded([tmp_path / "log"])
    assert damage == []
    again = make_core()
    assert recover(again, WriteAheadLog(tmp_path / "log")) == 10
    assert {one: total for one, (total, _) in content(again).items()} == {
        one: total for one, (total, _) in content(core).items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("disk", ["full", "stuck"])
def test_a_disk_that_takes_nothing_holds_no_evaluation_up(
    make_core: Callable[..., Core], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk: str
) -> None:
    """With --record an evaluation waits for its place in the log, but not for long, and it is done once."""
    core, released, ticks = make_core(), threading.Event(), list[float]()
    monkeypatch.setattr(core, "tick", ticks.append)
    monkeypatch.setattr(durable_sink, "_PATIENCE", 0.1)

    def write(*_: Any) -> None:
        if disk == "full":
            raise OSError(errno.ENOSPC, "No space left on device")
        released.wait(10)

    monkeypatch.setattr(write_ahead_log, "_write_all", write)

    async def serve() -> None:
        log = WriteAheadLog(tmp_path / "log", keep=1 << 30)
        began = time.monotonic()
        await tick_on_record(core, log)
        assert time.monotonic() - began < 5
        assert len(ticks) == 1
        released.set()
        await asyncio.sleep(0.2)
        log.close()

    asyncio.run(serve())
    assert len(ticks) == 1


def test_nobody_was_silent_while_nobody_listened(
    make_core: Callable[..., Core],
    open_file: Callable,
    drift: Callable,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A start long after the crash does not call the kernels silent because of when their last report arrived."""
    connection = open_file(tmp_path / "state")
    core, now = make_core(connection), time.time()
    taken(core, tmp_path / "log", drift(0.3))
    connection.close()
    again = make_core(open_file(tmp_path / "state"))
    monkeypatch.setattr(time, "time", lambda: now + 200.0)
    recover(again, WriteAheadLog(tmp_path / "log", begin=again.position))
    again.tick(now + 201.0)
    assert {verdict.status for verdict, _, _ in again.history.cells()} == {Status.FAIL}


def test_a_full_disk_is_said_to_the_sender_who_may_try_again(
    make_core: Callable[..., Core], drift: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """503 with Retry-After, counted as `not_kept`, nothing judged; 200 once there is room."""
    core, counts, real = make_core(), RequestCounts(), os.writev

    async def send() -> list[httpx.Response]:
        log = WriteAheadLog(tmp_path)
        transport = httpx.ASGITransport(http_app(DurableSink(core, log), None, counts))
        async with httpx.AsyncClient(transport=transport, base_url="http://evaluator") as client:
            body, headers = drift(0.3).SerializeToString(), {"content-type": "application/x-protobuf"}
            monkeypatch.setattr(write_ahead_log.os, "writev", lambda file, frames: real(file, [frames[0][:9]]))
            refused = await client.post("/v1/metrics", content=body, headers=headers)
            series = core.evaluator.series_count
            monkeypatch.setattr(write_ahead_log.os, "writev", real)
            accepted = await client.post("/v1/metrics", content=body, headers=headers)
        log.close()
        assert series == 0
        return [refused, accepted]

    refused, accepted = asyncio.run(send())
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert b"No space left on device" in refused.content
    assert accepted.status_code == 200
    assert counts.snapshot() == {("http", "not_kept"): 1, ("http", "accepted"): 1}
    assert core.evaluator.series_count > 0
    assert core.position == WriteAheadLog(tmp_path).end


def growing(request: Any, reports: int) -> list[Any]:
    """The same cumulative histograms, reported again and again while they grow."""
    found = []
    for number in range(1, reports + 1):
        later = ExportMetricsServiceRequest()
        later.CopyFrom(request)
        for metric in later.resource_metrics[0].scope_metrics[0].metrics:
            for point in metric.exponential_histogram.data_points:
                point.time_unix_nano += number * 1_000_000
                point.count, point.sum, point.zero_count = (
                    point.count * number,
                    point.sum * number,
                    point.zero_count * number,
                )
                for side in (point.positive, point.negative):
                    side.bucket_counts[:] = [count * number for count in side.bucket_counts]
        found.append(later)
    return found


@pytest.mark.slow
@pytest.mark.skipif(not machine_code.is_available(), reason="needs a C compiler")
def test_much_traffic_is_read_as_columns_and_says_the_same(
    make_core: Callable[..., Core],
    open_file: Callable,
    drift: Callable,
    tmp_path: Path,
) -> None:
    """Over HTTP and gRPC, before and after the change, and from the log: nothing differs from single points."""
    core, plain = make_core(open_file(tmp_path / "state")), make_core()
    core.evaluator.use_columns()
    requests = growing(drift(0.3), 6)

    async def send() -> None:
        log = WriteAheadLog(tmp_path / "log")
        sink = DurableSink(core, log)
        server = await start_grpc(sink, port=0)
        transport = httpx.ASGITransport(http_app(sink))
        async with (
            httpx.AsyncClient(transport=transport, base_url="http://evaluator") as client,
            grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel,
        ):
            export = MetricsServiceStub(channel).Export
            for number, request in enumerate(requests):
                if number % 2:
                    assert not (await export(request)).partial_success.rejected_data_points
                else:
                    headers = {"content-type": "application/x-protobuf"}
                    answer = await client.post("/v1/metrics", content=request.SerializeToString(), headers=headers)
                    assert answer.status_code == 200
        await server.stop()
        log.close()

    asyncio.run(send())
    for request in requests:
        plain.metrics(request)
    assert core.evaluator._columns.taken > 0
    assert content(core) == content(plain)
    for columns in (True, False):
        again = make_core()
        if columns:
            again.evaluator.use_columns()
        assert recover(again, WriteAheadLog(tmp_path / "log")) == len(requests)
        assert content(again) == content(plain)
