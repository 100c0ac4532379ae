"""Recording of arrivals and evaluations as files for `kc-otel replay` and any OTLP reader (`serve --record`).

The recording is best effort: a thread of its own writes it in the evaluator's order, never blocks the evaluator, and
logs each gap.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from kc_otel.judge.otlp.traffic_entries import EVALUATED, RECEIVED, marked_frame
from kc_otel.record.worker import BoundedWorker, ReasonCounts

_log: Final = logging.getLogger(__name__)
_FILE_BYTES: Final = 64 * 1024 * 1024
_MAX_WAITING_BYTES: Final = 64 * 1024 * 1024
_MAX_BATCH: Final = 256


class TrafficRecordingError(Exception):
    """The recording cannot be written; the message says what to do."""


class TrafficRecording:
    """Writes a recording, as files of which the oldest go.

    Args:
        folder: Where the files are; made if it is not there.
        limit: Bytes of all files together.

    Raises:
        TrafficRecordingError: If the folder cannot be written.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise TrafficRecordingError(f"{folder}: not writable ({error.strerror}); start without --record") from None
        self._folder, self._limit = folder, limit
        self._file_bytes = min(_FILE_BYTES, max(limit // 4, 1))
        self._file: int | None = None
        self._size = 0
        self._gaps = ReasonCounts(f"{folder}: the recording has a gap: %s")
        self._worker: BoundedWorker[bytes] = BoundedWorker(
            self._write, self._gaps.add, name="kc-otel-recording", max_bytes=_MAX_WAITING_BYTES, batch=_MAX_BATCH
        )

    def received(self, body: bytes, at: float) -> None:
        """A serialized ExportMetricsServiceRequest that arrived at a Unix time, seconds, is taken."""
        self._worker.put(lambda: marked_frame(body, at, RECEIVED), len(body) + 1)

    def evaluated(self, at: float) -> None:
        """Record that all cells were judged at a Unix time, seconds."""
        self._worker.put(lambda: marked_frame(b"", at, EVALUATED), 1)

    def close(self, timeout: float = 3.0) -> None:
        """Write what waits, for at most `timeout` seconds."""
        self._worker.close(timeout)
        self._end_file()

    def _write(self, frames: Sequence[bytes]) -> None:
        content = b"".join(frames)
        try:
            if self._file is None or self._size >= self._file_bytes:
                self._begin_file(len(content))
            assert self._file is not None
            _write_whole(self._file, content)
        except OSError:
            self._end_file()  # data after half a message cannot be read
            raise
        self._size += len(content)

    def _begin_file(self, needed: int) -> None:
        self._end_file()
        files = sorted(self._folder.glob("*.otlp"))
        sizes = [file.stat().st_size for file in files]
        while files and sum(sizes) + max(needed, self._file_bytes) > self._limit:
            with suppress(OSError):
                files[0].unlink()
            del files[0], sizes[0]
        self._file = os.open(self._folder / f"{time.time_ns():020d}.otlp", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        self._size = 0

    def _end_file(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            os.close(file)


def _write_whole(file: int, content: bytes) -> None:
    if os.write(file, content) < len(content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
