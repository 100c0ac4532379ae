"""The bounded queue between the caller's thread, which must never wait, and the thread that measures."""

from __future__ import annotations

import threading
from collections import deque
from typing import Generic, TypeVar

__all__ = ["WorkQueue"]

T = TypeVar("T")


class WorkQueue(Generic[T]):
    """A first-in-first-out queue for one worker, bounded by the bytes of what waits and of what is being worked on.

    Room is reserved before anything is copied, so that a full queue costs its caller a comparison of two numbers.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._items: deque[tuple[T, int]] = deque()
        self._bytes = 0
        self._reserved = 0
        self._put = 0
        self._done = 0
        self._open = True
        self._changed = threading.Condition()

    def reserve(self, size: int) -> bool:
        """Take room for `size` bytes, to be filled by `put` or given back by `release`; False when there is none."""
        with self._changed:
            if not self._open or self._bytes + size > self.max_bytes:
                return False
            self._bytes += size
            self._reserved += 1
            return True

    def release(self, size: int) -> None:
        """Give back reserved room that is not used."""
        with self._changed:
            self._bytes -= size
            self._reserved -= 1
            self._changed.notify_all()

    def put(self, item: T, size: int) -> None:
        """Add an item of reserved `size` bytes."""
        with self._changed:
            self._reserved -= 1
            self._items.append((item, size))
            self._put += 1
            self._changed.notify_all()

    def get(self, timeout: float | None) -> tuple[T, int] | None:
        """The next item and its size, to be answered by `done`; None after `timeout` seconds or when it is finished."""
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._finished(), timeout)
            return self._items.popleft() if self._items else None

    def done(self, size: int) -> None:
        """An item from `get` is finished with."""
        with self._changed:
            self._done += 1
            self._bytes -= size
            self._changed.notify_all()

    def drain(self, timeout: float) -> bool:
        """Wait at most `timeout` seconds until what is queued now is finished; whether it is."""
        with self._changed:
            target = self._put
            return self._changed.wait_for(lambda: self._done >= target, max(timeout, 0.0))

    def close(self) -> None:
        """Accept no more; what is queued can still be taken."""
        with self._changed:
            self._open = False
            self._changed.notify_all()

    @property
    def open(self) -> bool:
        """Whether it still accepts."""
        with self._changed:
            return self._open

    @property
    def finished(self) -> bool:
        """Whether nothing is left to take and nothing can come."""
        with self._changed:
            return self._finished()

    def depth(self) -> tuple[int, int]:
        """Items waiting or being worked on, and their bytes."""
        with self._changed:
            return self._put - self._done, self._bytes

    def _finished(self) -> bool:
        return not (self._open or self._items or self._reserved)
