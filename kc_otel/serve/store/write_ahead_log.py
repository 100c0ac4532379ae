"""The write-ahead log: what a sender is told has been taken is on disk before it is told so.

An append-only folder of segments, each in the Collector's own file format `proto` (see `traffic_entries`), so that
whatever reads the Collector's files reads these. A message ends with a mark that says when it arrived and has its
checksum: what a crash tore is found and cut off. Positions are bytes since the log began; a segment's name is the
position of its first byte. What is kept is applied in the order of the log, whoever waits for it or no longer does.

Requests that arrive while the disk is busy, or one right after the other, are written together and synced once (group
commit), so that the cost of a sync, and of a thread that is woken, is shared by as many as there are. `Sync` says when
that is:

| policy | acknowledged is lost | costs |
| --- | --- | --- |
| `always` | never, as far as the disk keeps its word | one sync for each group |
| `never` | when the machine goes down, not when the process does | what writing costs |
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from kc_otel.offline.replay.traffic_entries import MOST_BYTES, RECEIVED, SEAL_BYTES, sealed_parts
from kc_otel.record.worker import BoundedWorker
from kc_otel.serve.config import Sync
from kc_otel.serve.store.log_segments import LogRecord, Segment

__all__ = ["LogError", "MessageTooLongError", "WriteAheadLog"]

T = TypeVar("T")

_log: Final = logging.getLogger(__name__)
_SEGMENT_BYTES: Final = 64 * 1024 * 1024
_WAITING_BYTES: Final = MOST_BYTES + 1024
"""Bytes that may wait for the disk before more is refused; one message as long as it may be has room."""
_GROUP: Final = 256
"""Most messages that are written at once; a third of what one call of writev takes, in three parts each."""
_STILL: Final = 6
"""Turns of the event loop without another message, after which those that are there are written."""
_ENOUGH: Final = 16
"""Messages that are not kept waiting for more: they share a sync already, and the next is gathered meanwhile."""
_LONGEST: Final = 0.002
"""Seconds after which those that are there are written in any case."""
_AT_A_TIME: Final = 3
"""Messages that are applied before ports and ticks have the event loop again, if they take no longer than this:"""
_SECONDS: Final = 0.002
_NAME: Final = re.compile(r"(\d{20})\.otlp")


class LogError(OSError):
    """The log cannot be written or read; the message says why and what to do."""


class MessageTooLongError(LogError):
    """A request is longer than a message of the log may be, on any disk."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    parts: tuple[bytes, bytes, bytes]
    size: int
    apply: Callable[[int], Any]
    done: asyncio.Future[Any]


class WriteAheadLog:
    """Appends requests and tells when they are on disk. Use it from one event loop.

    Args:
        folder: Where the segments are; made if it is not there.
        sync: When what was written is forced to the disk.
        begin: Position at which a log begins that is not there, or that ends before it because it was taken away.
        segment: Bytes after which a new segment begins.
        keep: Bytes, as whole segments, that stay for whoever wants to replay them although the state has them.

    Raises:
        LogError: If the folder cannot be written.
    """

    def __init__(
        self,
        folder: Path,
        *,
        sync: Sync = Sync.ALWAYS,
        begin: int = 0,
        segment: int = _SEGMENT_BYTES,
        keep: int = 0,
    ) -> None:
        self.folder = folder
        self._sync, self._keep = sync, keep
        self._segment = min(segment, keep // 4 or segment)
        self._file: int | None = None
        self._trouble = ""
        self._arrived: deque[_Waiting] = deque()
        self._arrived_bytes = 0
        self._busy = False  # with a group that is gathered or written
        self._kept: deque[tuple[_Waiting, int]] = deque()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._starts = sorted(map(_start, filter(_is_segment, folder.iterdir())))
            self._end = max(self._mended() if self._starts else 0, begin)
        except OSError as error:
            raise LogError(f"{folder}: cannot be written ({_said(error)}); name a folder that can be") from None
        self._worker: BoundedWorker[Sequence[_Waiting]] = BoundedWorker(
            self._write, self._dropped, name="kc-otel-log", max_bytes=_WAITING_BYTES
        )

    @property
    def end(self) -> int:
        """Position after the newest message that was written."""
        return self._end

    @property
    def first(self) -> int:
        """Position of the oldest message that is kept."""
        return self._starts[0] if self._starts else self._end

    @property
    def waiting(self) -> int:
        """Bytes that wait for the disk."""
        return self._arrived_bytes + self._worker.depth()[1]

    async def append(self, message: bytes, at: float, apply: Callable[[int], T], what: str = RECEIVED) -> T:
        """Keep a request, and apply it once it is kept.

        Args:
            message: A serialized ExportMetricsServiceRequest; empty for an evaluation.
            at: When it arrived, or is evaluated, Unix seconds.
            what: RECEIVED or EVALUATED.
            apply: Called on the event loop with the position after the message, in the order of the log, also when
                whoever appended does not wait any more.

        Returns:
            What `apply` returned; what it raises is raised.

        Raises:
            LogError: If it cannot be kept: nothing of it is in the log, nor applied.
        """
        if len(message) + SEAL_BYTES > MOST_BYTES:
            raise MessageTooLongError(
                errno.EFBIG, f"a message of {len(message)} bytes is more than a log's message may have"
            )
        if self.waiting + len(message) + SEAL_BYTES + 4 > _WAITING_BYTES or not self._worker.open:
            raise LogError(errno.EAGAIN, f"{self.folder}: more arrives than the disk takes")
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()
        parts = sealed_parts(message, at, what)
        waiting = _Waiting(parts, sum(map(len, parts)), apply, done)
        self._arrived.append(waiting)
        self._arrived_bytes += waiting.size
        if not self._busy:
            self._next_group(loop)
        return await done

    def records(self, since: int) -> Iterator[LogRecord]:
        """Messages after a position, oldest first. What is damaged is left out, and said in the log."""
        for start, until in zip(
            self._starts, [*self._starts[1:], self._end], strict=False
        ):  # at first there is no segment
            if until <= since:
                continue
            at = start
            segment = Segment(self._path(start).read_bytes()[: until - start], start)
            for record in segment.records():
                if record.start > max(at, since):
                    _log.error("%s: damaged from byte %d to %d", self._path(start), at - start, record.start - start)
                if record.end > since:
                    yield record
                at = record.end
            if at < until:
                more = "; what follows was not searched to its end" if segment.given_up else ""
                _log.error("%s: damaged from byte %d to its end%s", self._path(start), at - start, more)

    def forget(self, before: int) -> None:
        """Everything before a position is in the state: segments that only hold such are removed, if not to be kept."""
        while len(self._starts) > 1 and self._starts[1] <= before and self._end - self._starts[0] > self._keep:
            with suppress(OSError):  # one that stays is tried again after the next start
                self._path(self._starts[0]).unlink()
            del self._starts[0]

    def close(self, timeout: float = 3.0) -> None:
        """Write what waits, for at most `timeout` seconds."""
        while self._arrived:
            self._write_group()
        self._worker.close(timeout)
        self._shut()

    def _next_group(self, loop: asyncio.AbstractEventLoop) -> None:
        """Gather what is written next, if anything has arrived."""
        self._busy = bool(self._arrived)
        if self._busy:
            self._gather(loop, 0, 0, time.monotonic() + _LONGEST)

    def _gather(self, loop: asyncio.AbstractEventLoop, known: int, still: int, until: float) -> None:
        """Wait while more arrives: a few turns of the event loop, which pass at once where nothing else happens."""
        arrived = len(self._arrived)
        still = still + 1 if arrived == known else 0
        if still >= _STILL or arrived >= _ENOUGH or time.monotonic() >= until:
            self._write_group()
        else:
            loop.call_soon(self._gather, loop, arrived, still, until)

    def _write_group(self) -> None:
        """Let the thread write what has arrived, as one group."""
        group = [self._arrived.popleft() for _ in range(min(len(self._arrived), _GROUP))]
        self._busy = bool(group)
        if group:
            size = sum(each.size for each in group)
            self._arrived_bytes -= size
            if not self._worker.put(lambda: group, size):
                _refuse([*group, *self._arrived], LogError(errno.EAGAIN, f"{self.folder}: nothing is written any more"))
                self._arrived.clear()

    def _write(self, groups: Sequence[Sequence[_Waiting]]) -> None:
        [group] = groups
        try:
            if self._file is None or self._end - self._starts[-1] >= self._segment:
                self._open()
            assert self._file is not None
            _write_all(self._file, [part for each in group for part in each.parts])
            if self._sync is Sync.ALWAYS:
                os.fdatasync(self._file)
        except Exception as error:  # noqa: BLE001 - whatever it is, the senders are told
            self._failed(group, error)
            return
        if self._trouble:
            _log.warning("%s: can be written again", self.folder)
            self._trouble = ""
        ends = []
        for each in group:
            self._end += each.size
            ends.append(self._end)
        group[0].done.get_loop().call_soon_threadsafe(self._take_over, group, ends)

    def _take_over(self, group: Sequence[_Waiting], ends: Sequence[int]) -> None:
        self._next_group(group[0].done.get_loop())
        idle = not self._kept
        self._kept.extend(zip(group, ends, strict=True))
        if idle:
            self._apply_next()

    def _apply_next(self) -> None:
        """Apply the oldest that are kept: a few at a time, so that ports and ticks come in between."""
        loop, until = self._kept[0][0].done.get_loop(), time.monotonic() + _SECONDS
        for _ in range(_AT_A_TIME):
            waiting, end = self._kept[0]
            try:
                result = waiting.apply(end)
            except Exception as error:  # noqa: BLE001 - it is raised to whoever appended
                if not waiting.done.done():
                    waiting.done.set_exception(error)
            else:
                if not waiting.done.done():
                    waiting.done.set_result(result)
            self._kept.popleft()
            if not self._kept:
                return
            if time.monotonic() > until:
                break
        loop.call_soon(self._apply_next)

    def _open(self) -> None:
        self._shut()
        if not self._starts or self._end > self._starts[-1]:
            self._starts.append(self._end)
        self._file = os.open(self._path(self._starts[-1]), os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        # What an attempt that failed has left behind goes, and the name of a new file is made to last.
        os.ftruncate(self._file, self._end - self._starts[-1])
        folder = os.open(self.folder, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _shut(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            os.close(file)

    def _failed(self, group: Sequence[_Waiting], error: Exception) -> None:
        with suppress(OSError):
            if self._file is not None:  # nothing of what is refused may be read back
                os.ftruncate(self._file, self._end - self._starts[-1])
        with suppress(OSError):
            self._shut()
        if _said(error) != self._trouble:
            self._trouble = _said(error)
            _log.error("%s: nothing is taken until it can be written: %s", self.folder, self._trouble)
        why = LogError(getattr(error, "errno", None) or errno.EIO, f"{self.folder}: {_said(error)}")
        group[0].done.get_loop().call_soon_threadsafe(self._refused, group, why)

    def _refused(self, group: Sequence[_Waiting], why: LogError) -> None:
        self._next_group(group[0].done.get_loop())
        _refuse(group, why)

    def _dropped(self, reason: str, why: object, _count: int) -> None:
        _log.warning("%s: %s: %s", self.folder, reason, why)

    def _mended(self) -> int:
        """Position after the last whole message; what a crash left of another one is cut off."""
        start = self._starts[-1]
        path = self._path(start)
        content = path.read_bytes()
        segment, end = Segment(content, start), start
        for record in segment.records():
            end = record.end
        if segment.given_up:  # there may be more that was acknowledged: nothing goes, a new segment begins
            return start + len(content)
        if end - start < len(content):
            os.truncate(path, end - start)
            _log.warning("%s: %d bytes of a message that was never acknowledged", path, start + len(content) - end)
        return end

    def _path(self, start: int) -> Path:
        return self.folder / f"{start:020d}.otlp"


def _write_all(file: int, parts: Sequence[bytes]) -> None:
    if os.writev(file, parts) < sum(map(len, parts)):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _refuse(group: Sequence[_Waiting], why: LogError) -> None:
    for each in group:
        if not each.done.done():
            each.done.set_exception(why)


def _is_segment(path: Path) -> bool:
    return _NAME.fullmatch(path.name) is not None


def _start(path: Path) -> int:
    return int(path.name[:20])


def _said(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
