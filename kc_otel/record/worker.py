"""One bounded worker for all that must not hold up a kernel: a queue, a daemon thread, and counts of what was left out.

The recorder measures on one, served requests wait for their disk on one, and so does the evaluator's recording.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any, Final, Generic, TypeVar
from weakref import WeakSet

_alive: Final[WeakSet[PerProcess]] = WeakSet()
_inherited: Final[list[dict[str, Any]]] = []


class PerProcess:
    """Base of classes with a state for each process: `_begin` makes it, here and in each forked child.

    What the parent had is kept in a child and left alone: a tensor on a device, an open database or a gRPC channel must
    not be let go of by a process that did not make it.
    """

    def __init__(self) -> None:
        self._begin()
        _alive.add(self)

    def _begin(self) -> None:
        """Make the state of this process; runs again in a child before anything else does."""
        raise NotImplementedError


def _in_child() -> None:
    for worker in list(_alive):
        _inherited.append(dict(vars(worker)))
        worker._begin()  # noqa: SLF001 - an object of this module


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


_log: Final = logging.getLogger("kc_otel")
_EXIT_SECONDS: Final = 5.0
_MAX_ITEMS: Final = 1_000_000

T = TypeVar("T")


class ReasonCounts(PerProcess):
    """Counts by reason, of this process and any thread; the first of each is logged as `message`, %s the reason."""

    def __init__(self, message: str) -> None:
        self._message = message
        super().__init__()

    def add(self, reason: str, why: object, count: int = 1) -> None:
        """Count `count` of a reason; `why` is a sentence or the exception that caused it."""
        if not count:
            return
        with self._lock:
            first = not self._counts[reason]
            self._counts[reason] += count
        if first:
            exc = why if isinstance(why, BaseException) else None
            cause = f"{type(why).__name__}: {why}" if exc else why
            _log.warning(
                f"{self._message}: %s; further ones are only counted", reason, cause,
                exc_info=exc if _log.isEnabledFor(logging.DEBUG) else None,
            )  # fmt: skip

    def clear(self, reason: str) -> None:
        """Begin again with a reason: its next one is logged."""
        with self._lock:
            self._counts.pop(reason, None)

    def values(self) -> dict[str, int]:
        """Return the current counts."""
        with self._lock:
            return dict(self._counts)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()


class BoundedWorker(PerProcess, Generic[T]):
    """Queue that gives items to a handler on a daemon thread; the caller never waits nor sees an exception.

    What waits and what is being handled is bounded in bytes and in number, but for messages of 0 bytes, and room is
    reserved before an item is made, so that a full queue costs its caller a comparison of two numbers. The thread
    starts with the first item. A forked child begins with an empty queue and a thread of its own. When the interpreter
    exits, what waits has 5 s.

    `handle` gets the oldest items, one as a rule and at most `batch`, or none when `wake` asks for it: the seconds
    after which it is called although nothing came, asked before each wait; None for never. `drop` gets a reason, why,
    and how many items, from any thread: `queue-full`; `too-large`, an item larger than the queue; `closed`, put after
    closing or not handled before; `capture-failed`, it could not be made; `failed`, the handler raised, which ends
    nothing.
    """

    _waiting: deque[tuple[T, int]]
    _thread: threading.Thread | None
    _open: bool
    _bytes: int
    _reserved: int
    _put: int
    _done: int

    def __init__(
        self,
        handle: Callable[[Sequence[T]], object],
        drop: Callable[[str, object, int], None],
        *,
        name: str,
        max_bytes: int,
        batch: int = 1,
        wake: Callable[[], float | None] = lambda: None,
    ) -> None:
        self.max_bytes: Final = max_bytes
        self._handle = handle
        self._drop = drop
        self._name = name
        self._batch = batch
        self._wake = wake
        super().__init__()
        atexit.register(self.close)

    def put(self, make: Callable[[], T], size: int) -> bool:
        """Call `make` if there is room for `size` bytes, and queue its result; return True if it was queued.

        Never raises, apart from what is no `Exception`.
        """
        if refused := self._reserve(size):
            self._drop(*refused, 1)
            return False
        try:
            item = make()
        except BaseException as error:
            self._release(size)
            if not isinstance(error, Exception):
                raise
            self._drop("capture-failed", error, 1)
            return False
        with self._changed:
            self._reserved -= 1
            self._waiting.append((item, size))
            self._put += 1
            failed = self._started()
            self._changed.notify_all()
        if failed is not None:
            self._drop("failed", failed, 1)
        return failed is None

    def flush(self, timeout: float) -> bool:
        """Wait at most `timeout` seconds until the queue is handled; return True if it is."""
        with self._changed:
            target = self._put
            return self._changed.wait_for(lambda: self._done >= target, max(timeout, 0.0))

    def close(self, timeout: float = _EXIT_SECONDS) -> bool:
        """Close the queue, and wait at most `timeout` seconds for its items; return True if all were handled.

        Other items are dropped and counted, including the one being handled at this moment.
        """
        atexit.unregister(self.close)
        deadline = time.monotonic() + timeout
        with self._changed:
            first, self._open = self._open, False
            self._changed.notify_all()
            done = self._changed.wait_for(lambda: not self._reserved and self._done == self._put, max(timeout, 0.0))
            left = self._put - self._done
            while self._waiting:
                self._finish([self._waiting.popleft()])
            thread = self._thread
        if done and thread is not None:
            thread.join(max(deadline - time.monotonic(), 0.0))
        if first and left:
            self._drop("closed", f"the queue was not empty after the {timeout:g} s that it had to be closed", left)
        return done

    @property
    def open(self) -> bool:
        """True if the worker takes items."""
        with self._changed:
            return self._open

    def depth(self) -> tuple[int, int]:
        """Items that wait or are being handled, and the bytes reserved for them."""
        with self._changed:
            return self._put - self._done, self._bytes

    def _begin(self) -> None:
        self._changed = threading.Condition()
        self._waiting = deque()
        self._thread = None
        self._open = True
        self._bytes = self._reserved = self._put = self._done = 0

    def _reserve(self, size: int) -> tuple[str, str] | None:
        """Take room for an item; or why there is none."""
        with self._changed:
            if not self._open:
                return "closed", "nothing is taken any more"
            if size > self.max_bytes:
                return "too-large", f"{size} bytes are more than the {self.max_bytes} that may wait"
            waiting = self._put - self._done + self._reserved
            if size and (self._bytes + size > self.max_bytes or waiting >= _MAX_ITEMS):
                return "queue-full", "items come faster than they are handled"
            self._bytes += size
            self._reserved += 1
            return None

    def _release(self, size: int) -> None:
        with self._changed:
            self._bytes -= size
            self._reserved -= 1
            self._changed.notify_all()

    def _started(self) -> RuntimeError | None:
        """Start the thread if there is none; why it cannot be, as when the interpreter exits."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                self._finish([self._waiting.pop()])
                return error
            self._thread = thread
        return None

    def _run(self) -> None:
        while (taken := self._take()) is not None:
            try:
                self._handle([item for item, _ in taken])
            except Exception as error:  # noqa: BLE001 - one bad item must not stop the others
                self._drop("failed", error, max(len(taken), 1))
            finally:
                with self._changed:
                    self._finish(taken)
                    self._changed.notify_all()
                del taken  # a batch is not held while the next is waited for

    def _take(self) -> list[tuple[T, int]] | None:
        """Take the oldest items; empty if it is time to wake, None if the queue is closed and empty."""
        seconds = self._wake()
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or not (self._open or self._reserved), seconds)
            if not (self._waiting or self._open or self._reserved):
                return None
            return [self._waiting.popleft() for _ in range(min(len(self._waiting), self._batch))]

    def _finish(self, taken: Sequence[tuple[T, int]]) -> None:
        self._done += len(taken)
        self._bytes -= sum(size for _, size in taken)
