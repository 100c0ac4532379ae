"""Recording while serving: what arrives is appended to a file by a thread of its own, and a trouble is only counted.

The file is bounded: past half of the limit it becomes FILE.1, in place of the FILE.1 before, and a new one begins.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final

from kc_otel.offline.replay.traffic_entries import MOST_BYTES, evaluated_frame, received_frame
from kc_otel.offline.replay.traffic_reading import TrafficFileError
from kc_otel.record.worker import BoundedWorker

__all__ = ["RecordingFile"]

_log: Final = logging.getLogger(__name__)
_QUEUED: Final = 64 * 1024 * 1024
"""Bytes that may wait for the disk before what arrives is no longer recorded."""
_LENGTH: Final = struct.Struct(">I")


class RecordingFile:
    """Appends requests and evaluations to a recording.

    Args:
        path: The file; one that is there is continued, without what a crash left of its last message.
        limit: Bytes that FILE and FILE.1 may have together.

    Raises:
        RecordingError: If the file cannot be written, or is there and is no recording.
        ValueError: If the limit is not positive.
    """

    def __init__(self, path: Path, limit: int) -> None:
        if limit <= 0:
            raise ValueError(f"limit: {limit} is not a number of bytes above 0")
        self.path = path
        self._most = limit // 2
        self._counts: Counter[str] = Counter()
        self._trouble = ""
        try:
            self._size = _whole(path)
            self._file: IO[bytes] | None = self._opened()
        except OSError as error:
            raise TrafficFileError(
                f"{path}: cannot be written ({error.strerror or error}); name a file in a folder that can be"
            ) from None
        self._worker: BoundedWorker[bytes] = BoundedWorker(
            self._append, self._dropped, name="kc-otel-recording", max_bytes=_QUEUED
        )

    @property
    def counts(self) -> Mapping[str, int]:
        """Messages by what became of them: `written`, `dropped` for want of room, `failed` for the disk's reasons."""
        return dict(self._counts)

    def received(self, request: Any, at: float) -> None:
        """Keep what `received_frame` takes, and that it arrived at `at`, Unix seconds; at once, never raises."""
        try:
            self._put(received_frame(request, at))
        except Exception:  # noqa: BLE001 - whatever is wrong with the recording, the request has been taken
            self._counts["failed"] += 1

    def evaluated(self, at: float) -> None:
        """Keep when the evaluator judged, Unix seconds."""
        self._put(evaluated_frame(at))

    def close(self, timeout: float = 3.0) -> None:
        """Write what waits, for at most `timeout` seconds."""
        if self._worker.close(timeout) and self._file is not None:
            self._file.close()
            self._file = None

    def _put(self, frame: bytes) -> None:
        if not frame:
            return
        if len(frame) > min(MOST_BYTES, self._most):
            self._counts["dropped"] += 1
        else:
            self._worker.put(lambda: frame, len(frame))

    def _dropped(self, reason: str, why: object, count: int) -> None:
        if reason == "failed":
            self._failed(why)
        else:
            self._counts["dropped"] += count

    def _append(self, frames: Sequence[bytes]) -> None:
        for frame in frames:
            self._write(frame)
            self._counts["written"] += 1
            self._trouble = ""

    def _write(self, frame: bytes) -> None:
        if self._size + len(frame) > self._most and self._size:
            if self._file is not None:
                self._file.close()
                self._file = None
            with contextlib.suppress(FileNotFoundError):  # somebody has taken it away
                self.path.replace(self.path.with_name(f"{self.path.name}.1"))
            self._size = 0
        if self._file is None:
            self._file = self._opened()
        if self._file.write(frame) < len(frame):  # not buffered; a disk that fills up takes a part
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._size += len(frame)

    def _opened(self) -> IO[bytes]:
        file = self.path.open("ab", buffering=0)
        self._size = min(self._size, file.tell())
        file.truncate(self._size)  # nothing may follow on a part of a message
        return file

    def _failed(self, why: object) -> None:
        self._counts["failed"] += 1
        if self._file is not None:
            self._file.close()
            self._file = None
        said = getattr(why, "strerror", None) or str(why)
        if said != self._trouble:
            self._trouble = said
            _log.warning("%s: what arrives is judged, but not recorded: %s", self.path, said)


def _whole(path: Path) -> int:
    """Bytes of the file that are whole messages; 0 when there is no file.

    Raises:
        RecordingError: If the file is no recording.
    """
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return 0
    at = 0
    with path.open("rb") as file:
        while at < size:
            head = file.read(_LENGTH.size)
            length = _LENGTH.unpack(head)[0] if len(head) == _LENGTH.size else 0
            if length > MOST_BYTES:
                raise TrafficFileError(f"{path}: is there and is no recording; name another file, or move it away")
            if at + len(head) + length > size or len(head) < _LENGTH.size:
                break
            at = file.seek(length, os.SEEK_CUR)
    return at
