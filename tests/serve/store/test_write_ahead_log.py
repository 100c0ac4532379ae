"""The log before the acknowledgement: what was acknowledged is read back, whatever ended the process."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from functools import partial
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from kc_otel.offline.replay.traffic_entries import SEAL_BYTES, entry_of, is_sealed
from kc_otel.offline.replay.traffic_reading import read_recordings
from kc_otel.serve.config import Sync
from kc_otel.serve.store import log_segments, write_ahead_log
from kc_otel.serve.store.log_segments import Segment
from kc_otel.serve.store.write_ahead_log import LogError, WriteAheadLog


def request_of(number: int) -> bytes:
    """A serialized request that can be told from others."""
    request = ExportMetricsServiceRequest()
    metric = request.resource_metrics.add().scope_metrics.add().metrics.add(name="kc.drift.tv_token")
    metric.gauge.data_points.add(as_int=number, time_unix_nano=10**18)
    return request.SerializeToString()


async def keep(log: WriteAheadLog, number: int, at: float) -> int:
    """Position after what was kept."""
    return await log.append(request_of(number), at, lambda position: position)


def numbers_of(log: WriteAheadLog, since: int = 0) -> list[int]:
    """What `request_of` was given, as read back."""
    found = []
    for record in log.records(since):
        entry = entry_of(ExportMetricsServiceRequest.FromString(record.message))
        assert entry is not None
        metric = entry.request.resource_metrics[0].scope_metrics[0].metrics[0]
        found.append(metric.gauge.data_points[0].as_int)
    return found


class Opened:
    """Stands for `is_sealed`, and knows what it was asked about."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, message: bytes) -> bool:
        self.sizes.append(len(message))
        return is_sealed(message)


def written(folder: Path, count: int, **options: Any) -> list[int]:
    """Positions after each of `count` messages, appended all at once."""

    async def append() -> list[int]:
        log = WriteAheadLog(folder, **options)
        ends: list[int] = []
        for first in range(0, count, 4):
            group = range(first, min(first + 4, count))
            ends += await asyncio.gather(*(keep(log, number, 100.0 + number) for number in group))
        log.close()
        return ends

    return asyncio.run(append())


@pytest.mark.parametrize("sync", Sync)
def test_what_was_acknowledged_is_read_back_in_order(tmp_path: Path, sync: Sync) -> None:
    """Every message with its time, in the order of the acknowledgements, over segments and a restart."""
    assert numbers_of(WriteAheadLog(tmp_path)) == []
    ends = written(tmp_path, 50, sync=sync, segment=1_000)
    assert len(list(tmp_path.iterdir())) > 3
    log = WriteAheadLog(tmp_path)
    assert numbers_of(log) == list(range(50))
    assert numbers_of(log, ends[29]) == list(range(30, 50))
    assert log.end == ends[-1]
    first = entry_of(ExportMetricsServiceRequest.FromString(next(log.records(0)).message))
    assert first is not None
    assert first.at == 100.0


def test_the_collectors_tools_and_replay_read_it(tmp_path: Path) -> None:
    """A segment is a recording: `kc-otel replay` takes it as it is."""
    written(tmp_path, 3)
    (segment,) = tmp_path.iterdir()
    damage: list[str] = []
    assert [entry.at for entry in read_recordings([segment], damage)] == [100.0, 101.0, 102.0]
    assert damage == []


def test_a_torn_tail_is_cut_off_wherever_it_is_torn(tmp_path: Path) -> None:
    """For every byte at which the last write may have ended: all whole messages are there, and the log goes on."""
    ends = written(tmp_path, 3)
    (segment,) = tmp_path.iterdir()
    content = segment.read_bytes()
    for size in range(ends[1], len(content)):
        segment.write_bytes(content[:size])
        log = WriteAheadLog(tmp_path)
        assert numbers_of(log) == [0, 1]
        assert log.end == ends[1]
    assert written(tmp_path, 1)[0] > ends[1]
    assert numbers_of(WriteAheadLog(tmp_path)) == [0, 1, 0]


def test_a_damaged_byte_is_found(tmp_path: Path) -> None:
    """No byte of a message can change unnoticed, and no other message is lost with it."""
    ends = written(tmp_path, 3)
    (segment,) = tmp_path.iterdir()
    content = bytearray(segment.read_bytes())
    for at in range(ends[0]):
        damaged = bytearray(content)
        damaged[at] ^= 0x40
        segment.write_bytes(damaged)
        assert numbers_of(WriteAheadLog(tmp_path)) == [1, 2]


def test_a_damaged_segment_does_not_take_the_others_with_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The messages of every other segment are there, and the log says where the damage is."""
    written(tmp_path, 60, segment=1_000)
    segment = sorted(tmp_path.iterdir())[1]
    content = bytearray(segment.read_bytes())
    content[10] ^= 1
    segment.write_bytes(content)
    found = numbers_of(WriteAheadLog(tmp_path))
    assert found == sorted(set(found))
    assert len(found) == 59
    assert f"{segment}: damaged from byte 0 to " in caplog.text


def test_what_a_sender_made_up_does_not_hold_up_a_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A torn message full of beginnings and ends of messages that are none: the search ends, and nothing is cut off."""
    ends = written(tmp_path, 3)
    (segment,) = tmp_path.iterdir()
    content = segment.read_bytes()
    whole = content[ends[0] : ends[1]]
    seal = whole[-SEAL_BYTES:]
    # Every four bytes the length of a message that would end with the mark at the end.
    size = 400_000
    made_up = (size - np.arange(4, size + 4, 4) + SEAL_BYTES).astype(">u4").tobytes() + seal
    segment.write_bytes(content[: ends[1]] + b"\xff" + made_up + content[ends[1] :])
    opened = Opened()
    monkeypatch.setattr(log_segments, "is_sealed", opened)
    read = Segment(segment.read_bytes(), 0, checked=50 * size)
    assert [record.end for record in read.records()] == ends[:2]
    assert read.given_up
    assert len(opened.sizes) < 200
    monkeypatch.setattr(write_ahead_log, "Segment", partial(Segment, checked=50 * size))
    before = segment.stat().st_size
    assert WriteAheadLog(tmp_path).end >= before
    assert segment.stat().st_size == before


def test_what_comes_after_a_search_that_ended_early_is_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is written behind damage that was not searched to its end: a new segment takes it, however often."""
    ends = written(tmp_path, 3)
    (segment,) = tmp_path.iterdir()
    damaged = bytearray(segment.read_bytes())
    damaged[ends[0] + 10] ^= 1
    segment.write_bytes(damaged)
    monkeypatch.setattr(write_ahead_log, "Segment", partial(Segment, checked=0))
    for number in (7, 8):
        log = WriteAheadLog(tmp_path)
        asyncio.run(keep(log, number, 0.0))
        log.close()
    assert segment.read_bytes() == damaged
    monkeypatch.undo()  # with the search as long as it is, what was behind the damage is found, too
    assert numbers_of(WriteAheadLog(tmp_path)) == [0, 2, 7, 8]


def test_messages_after_damage_are_found_whatever_lies_between(tmp_path: Path) -> None:
    """Beginnings and marks without a message, also where the search goes from one part of the segment to the next."""
    ends = written(tmp_path, 3)
    (segment,) = tmp_path.iterdir()
    content = segment.read_bytes()
    seal = content[ends[0] - SEAL_BYTES : ends[0]]
    noise = np.random.default_rng(3)
    for size in (1, 3, 4, 1024**2 - 5, 1024**2, 1024**2 + 1):
        middle = noise.bytes(size) + seal + (SEAL_BYTES + 4).to_bytes(4, "big") + b"four" + seal
        read = Segment(content[: ends[0]] + middle + content[ends[0] :], 0)
        assert [record.message for record in read.records()] == [
            content[first + 4 : last] for first, last in pairwise([0, *ends])
        ]


def test_a_long_queue_leaves_room_for_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of messages that were written together a few are applied at a time: whatever else is ready comes in between."""
    order: list[object] = []
    write, together = write_ahead_log._write_all, threading.Event()

    def waiting(*of: Any) -> None:
        assert together.wait(10)
        write(*of)

    monkeypatch.setattr(write_ahead_log, "_write_all", waiting)

    async def scenario() -> None:
        log = WriteAheadLog(tmp_path)
        loop = asyncio.get_running_loop()

        def applying(number: int) -> Any:
            def apply(_position: int) -> None:
                order.append(number)
                loop.call_soon(order.append, "port")

            return apply

        tasks = [asyncio.create_task(log.append(request_of(n), 1.0, applying(n))) for n in range(100)]
        await asyncio.sleep(0)  # all of them are queued, behind the first
        together.set()
        await asyncio.gather(*tasks)
        log.close()

    asyncio.run(scenario())
    assert [one for one in order if one != "port"] == list(range(100))
    assert max(len(list(run)) for what, run in groupby(order, lambda one: one == "port") if not what) <= 3


def test_what_arrives_one_after_the_other_is_written_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten senders over gRPC, which reads a message in some turns of the event loop, cost one sync and not ten."""
    groups: list[int] = []
    write = write_ahead_log._write_all
    monkeypatch.setattr(write_ahead_log, "_LONGEST", 60.0)  # however slow this machine is
    monkeypatch.setattr(
        write_ahead_log, "_write_all", lambda file, frames: (groups.append(len(frames) // 3), write(file, frames))
    )

    async def scenario() -> None:
        log, waiting = WriteAheadLog(tmp_path), []
        for number in range(10):
            waiting.append(asyncio.ensure_future(keep(log, number, 1.0)))
            for _ in range(3):
                await asyncio.sleep(0)
        await asyncio.gather(*waiting)
        await keep(log, 10, 1.0)
        log.close()

    asyncio.run(scenario())
    assert groups == [10, 1]


def test_what_comes_without_end_keeps_nobody_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group is written in the end, though there is another message in each turn of the event loop."""
    monkeypatch.setattr(write_ahead_log, "_ENOUGH", 10**9)

    async def scenario() -> None:
        log = WriteAheadLog(tmp_path)
        first, others = asyncio.ensure_future(keep(log, 0, 1.0)), []
        async with asyncio.timeout(10):
            while not first.done():
                others.append(asyncio.ensure_future(keep(log, len(others) + 1, 1.0)))
                await asyncio.sleep(0)
        await asyncio.gather(*others)
        log.close()

    asyncio.run(scenario())


def test_what_nobody_thought_of_is_said_to_the_senders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever goes wrong while a message is written, its sender hears of it, and the log goes on."""

    async def scenario() -> list[int]:
        log = WriteAheadLog(tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr(write_ahead_log, "_write_all", lambda *_: 1 / 0)
            with pytest.raises(LogError, match="division by zero"):
                await asyncio.wait_for(keep(log, 0, 1.0), 10)
        await keep(log, 1, 1.0)
        log.close()
        return numbers_of(WriteAheadLog(tmp_path))

    assert asyncio.run(scenario()) == [1]


def test_segments_go_once_the_state_holds_them(tmp_path: Path) -> None:
    """Only segments of which all lies before the given position are removed."""
    ends = written(tmp_path, 60, segment=1_000)
    log = WriteAheadLog(tmp_path)
    log.forget(ends[30])
    assert numbers_of(log, ends[30]) == list(range(31, 60))
    assert ends[30] - 1_500 < log.first <= ends[30]


def test_a_record_stays_as_long_as_its_limit_has_room(tmp_path: Path) -> None:
    """Of what the state has the newest is kept, and nothing goes that the state has not."""
    ends = written(tmp_path, 60, segment=1_000)
    log = WriteAheadLog(tmp_path, segment=1_000, keep=2_500)
    log.forget(ends[-1])
    assert ends[-1] - 2_500 <= log.first < ends[-1] - 1_000
    assert numbers_of(log) == list(range(min(numbers_of(log)), 60))
    log.close()
    other = WriteAheadLog(tmp_path, segment=1_000, keep=1)
    other.forget(0)
    assert other.first == log.first


def test_a_log_that_was_taken_away_goes_on_where_the_state_is(tmp_path: Path) -> None:
    """What is appended after that is after the state's position, so that it is applied after a crash."""
    ends = written(tmp_path / "log", 10)
    (tmp_path / "log").rename(tmp_path / "elsewhere")
    written(tmp_path / "log", 3, begin=ends[-1])
    assert numbers_of(WriteAheadLog(tmp_path / "log", begin=ends[-1]), ends[-1]) == [0, 1, 2]


def test_what_is_kept_is_applied_in_order_though_nobody_waits(tmp_path: Path) -> None:
    """A sender that hangs up leaves no hole; what fails to apply is raised to its own sender only."""
    applied: list[int] = []

    def applying(number: int) -> Any:
        def apply(position: int) -> int:
            applied.append(number)
            if number == 3:
                raise ValueError("three")
            return position

        return apply

    async def scenario() -> list[Any]:
        log = WriteAheadLog(tmp_path)
        tasks = [asyncio.create_task(log.append(request_of(n), 1.0, applying(n))) for n in range(6)]
        await asyncio.sleep(0)
        tasks[2].cancel()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        log.close()
        return found

    found = asyncio.run(scenario())
    assert applied == [0, 1, 2, 3, 4, 5]
    assert isinstance(found[2], asyncio.CancelledError)
    assert isinstance(found[3], ValueError)
    assert [one for one in found if isinstance(one, int)] == sorted(one for one in found if isinstance(one, int))
    assert numbers_of(WriteAheadLog(tmp_path)) == [0, 1, 2, 3, 4, 5]


def test_a_full_disk_is_said_and_the_log_goes_on_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What could not be written whole is refused, leaves nothing behind, and is said once."""
    real, full = os.writev, [False]

    def writev(file: int, frames: Any) -> int:
        whole = b"".join(frames)
        # A whole message of a group, and a part of the next: none of them is acknowledged, none may come back.
        return os.write(file, whole + whole[:20]) - len(whole) if full[0] else real(file, frames)

    monkeypatch.setattr(write_ahead_log.os, "writev", writev)

    async def scenario() -> list[int]:
        log = WriteAheadLog(tmp_path)
        await keep(log, 0, 1.0)
        full[0] = True
        for number in (1, 2):
            with pytest.raises(LogError, match="No space left on device") as caught:
                await keep(log, number, 1.0)
            assert caught.value.errno == errno.ENOSPC
        full[0] = False
        await keep(log, 3, 1.0)
        log.close()
        return numbers_of(WriteAheadLog(tmp_path))

    assert asyncio.run(scenario()) == [0, 3]
    assert caplog.text.count("nothing is taken until it can be written") == 1
    assert caplog.text.count("can be written again") == 1


def test_a_folder_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    """The error names the folder and what to do."""
    (tmp_path / "file").write_text("")
    with pytest.raises(LogError, match=r"file.*name a folder that can be"):
        WriteAheadLog(tmp_path / "file")
