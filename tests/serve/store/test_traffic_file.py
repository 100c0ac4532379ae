"""Recording beside serving: bounded, continued after a crash, and harmless whatever the disk does."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kc_otel.offline.replay.traffic_entries import evaluated_frame, received_frame
from kc_otel.offline.replay.traffic_reading import TrafficFileError, read_recordings
from kc_otel.serve.store.traffic_file import RecordingFile

START = 1_800_000_000.0
LIMIT = 64 * 1024 * 1024


@pytest.fixture
def record() -> Iterator[Callable[..., RecordingFile]]:
    """Opens recordings, and closes them after the test."""
    opened: list[RecordingFile] = []

    def make(path: Path, limit: int = LIMIT) -> RecordingFile:
        opened.append(RecordingFile(path, limit))
        return opened[-1]

    yield make
    for one in opened:
        one.close()


def times(*paths: Path) -> list[float]:
    damage: list[str] = []
    found = [entry.at for entry in read_recordings(paths, damage)]
    assert damage == []
    return found


def test_what_arrives_and_when_it_is_judged_is_kept_in_order(
    record: Callable[..., RecordingFile], traffic: Callable, tmp_path: Path
) -> None:
    """Everything is there when the recording is closed."""
    path = tmp_path / "recording"
    recording = record(path)
    for at, request in traffic(minutes=1):
        recording.received(request, at)
        recording.evaluated(at + 1)
    recording.close()
    assert times(path) == [START + 10 * index + shift for index in range(1, 7) for shift in (0, 1)]
    assert recording.counts == {"written": 12}


@pytest.mark.parametrize("torn", [b"\0", b"\0\0\0", b"\0\0\0\x20", b"\0\0\0\x20half of a message"])
def test_a_recording_goes_on_after_a_crash(torn: bytes, record: Callable[..., RecordingFile], tmp_path: Path) -> None:
    """What a killed process left of its last message is taken away, so that the next one can be found."""
    path = tmp_path / "recording"
    path.write_bytes(evaluated_frame(START) + evaluated_frame(START + 1) + torn)
    recording = record(path)
    recording.evaluated(START + 2)
    recording.close()
    assert times(path) == [START, START + 1, START + 2]


def test_the_oldest_goes_first(record: Callable[..., RecordingFile], tmp_path: Path) -> None:
    """The two files together stay within the limit, and hold the newest without a gap."""
    path, size = tmp_path / "recording", len(evaluated_frame(START))
    recording = record(path, limit=20 * size + 1)
    for index in range(47):
        recording.evaluated(START + index)
    recording.close()
    older = tmp_path / "recording.1"
    assert path.stat().st_size + older.stat().st_size <= 20 * size
    assert times(path, older) == [START + index for index in range(30, 47)]
    assert recording.counts == {"written": 47}


def test_a_disk_that_fills_up_costs_the_recording_only(
    record: Callable[..., RecordingFile], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """It is counted, said once, and goes on when there is room, without a torn message in between."""
    path = tmp_path / "recording"
    recording = record(path)
    recording.evaluated(START)
    assert recording._worker.flush(5)
    opened, full = recording._opened, [True]

    def half_full() -> Any:
        file = opened()

        class Half:
            def write(self, frame: bytes) -> int:
                return file.write(frame[:7] if full[0] else frame)

            def close(self) -> None:
                file.close()

        return Half()

    monkeypatch.setattr(recording, "_opened", half_full)
    recording._file.close()
    recording._file = None
    with caplog.at_level(logging.WARNING):
        for index in range(1, 4):
            recording.evaluated(START + index)
        assert recording._worker.flush(5)
    assert [one.getMessage() for one in caplog.records] == [
        f"{path}: what arrives is judged, but not recorded: {os.strerror(errno.ENOSPC)}"
    ]
    full[0] = False
    recording.evaluated(START + 9)
    recording.close()
    assert times(path) == [START, START + 9]
    assert recording.counts == {"written": 2, "failed": 3}


def test_a_recording_that_is_taken_away_is_begun_anew(record: Callable[..., RecordingFile], tmp_path: Path) -> None:
    """At the latest when the file would have been full."""
    path, size = tmp_path / "recording", len(evaluated_frame(START))
    recording = record(path, limit=6 * size)
    recording.evaluated(START)
    assert recording._worker.flush(5)
    path.unlink()
    for index in range(1, 5):
        recording.evaluated(START + index)
    recording.close()
    assert times(path) == [START + 3, START + 4]


def test_what_waits_for_the_disk_is_bounded(
    record: Callable[..., RecordingFile], traffic: Callable, tmp_path: Path
) -> None:
    """A disk that is too slow, or a request that is too large, loses what cannot be kept, and says how much."""
    recording = record(tmp_path / "recording", limit=1000)
    (_, request), *_ = traffic(minutes=1)
    assert len(received_frame(request, START)) < 500
    recording.received(request, START)
    for _ in range(4):
        request.MergeFrom(request)
    recording.received(request, START)
    recording.close()
    recording.evaluated(START)
    assert recording.counts == {"written": 1, "dropped": 2}


def test_nothing_raises_into_the_evaluator(record: Callable[..., RecordingFile], tmp_path: Path) -> None:
    """Not even what is no request at all."""
    recording = record(tmp_path / "recording")
    recording.received("not a request", START)
    recording.close()
    assert recording.counts == {"failed": 1}


@pytest.mark.parametrize("content", [b"apiVersion: kernel-contract/v1\n", b"SQLite format 3\0" * 10])
def test_another_file_is_not_touched(content: bytes, tmp_path: Path) -> None:
    """A recording is never appended to a contract or to a state file."""
    path = tmp_path / "policy.yaml"
    path.write_bytes(content)
    with pytest.raises(TrafficFileError, match="is there and is no recording; name another file"):
        RecordingFile(path, LIMIT)
    assert path.read_bytes() == content


def test_a_folder_that_is_not_there_is_named_at_the_start(tmp_path: Path) -> None:
    """A recording that cannot begin is refused, not merely counted."""
    with pytest.raises(TrafficFileError, match=r"recording: cannot be written \(No such file"):
        RecordingFile(tmp_path / "nowhere" / "recording", LIMIT)
    with pytest.raises(ValueError, match="limit: 0 is not a number of bytes above 0"):
        RecordingFile(tmp_path / "recording", 0)
