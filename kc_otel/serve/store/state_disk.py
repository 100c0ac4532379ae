"""Waiting until what was committed is on the disk, without holding anybody else up."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from kc_otel.serve.store.state_connection import StateConnection
from kc_otel.serve.store.state_file import StateError

__all__ = ["StateDisk"]

_log: Final = logging.getLogger(__name__)


class StateDisk:
    """The disk under a state file. Use it from the event loop that the connection is used on.

    Args:
        connection: The state file.

    Attributes:
        seconds: How long the last sync took; None before the first, and in memory.
    """

    def __init__(self, connection: StateConnection) -> None:
        self._connection = connection
        self.seconds: float | None = None
        self._synced = -1  # what was there before may not be
        self._syncing: asyncio.Task[None] | None = None
        self._emptying: asyncio.Task[None] | None = None
        self._trouble = ""
        self._closed = False
        self._unsaid: Exception | None = None
        self._threads = ThreadPoolExecutor(2, "kc-otel-state")  # others' work keeps no disk waiting

    async def synced(self) -> None:
        """Wait until all that has been committed is on the disk; those who wait at the same time wait for one sync.

        Raises:
            StateError: If the disk does not take it.
        """
        committed = self._connection.changes if not self._closed else self._synced
        while self._synced < committed and not self._closed:
            if self._syncing is None:
                self._syncing = _begun(self._sync())
            try:
                await asyncio.shield(self._syncing)
            except (OSError, sqlite3.Error) as error:
                raise StateError(f"the state cannot be forced to the disk: {error}") from error
        if self._closed and self._unsaid is not None:
            raise StateError(f"the state could not be forced to the disk: {self._unsaid}")

    async def room(self) -> None:
        """Wait while SQLite's log is copied: whoever writes much or often asks before, or it would never be emptied."""
        while self._emptying is not None:
            await asyncio.wait([self._emptying])

    async def close(self) -> None:
        """Close the file, once nothing is under way. What is not on the disk yet is waited for."""
        while under_way := [task for task in (self._syncing, self._emptying) if task is not None]:
            await asyncio.wait(under_way)
        self._closed = True  # from here on nobody else has a turn
        try:
            self._connection.settle()
        except (OSError, sqlite3.Error) as error:
            self._unsaid = error
        self._connection.close()
        self._threads.shutdown(wait=False)

    async def _sync(self) -> None:
        connection = self._connection
        try:
            failed, began = connection.failed, time.monotonic()
            if failed != connection.mended:
                for _ in connection.write_again():
                    await asyncio.sleep(0)
            changes = connection.changes
            if await asyncio.get_running_loop().run_in_executor(self._threads, connection.sync):
                self.seconds = time.monotonic() - began
            self._synced, connection.mended = changes, failed
            if self._emptying is None and connection.is_long:
                self._emptying = _begun(self._empty())
        finally:
            self._syncing = None

    async def _empty(self) -> None:
        """Copy what is in the log into the file, and empty it if nothing has come since."""
        connection = self._connection
        try:
            connection.hold()
            changes = connection.changes
            copied = await asyncio.get_running_loop().run_in_executor(self._threads, connection.checkpoint)
            while self._syncing is not None:
                await asyncio.wait([self._syncing])
            if (copied and connection.changes == changes) or connection.is_far_too_long:
                connection.begin_anew()
            self._trouble = ""
        except Exception as error:  # noqa: BLE001 - what was committed is in the log, and stays there
            if self._trouble != str(error):
                _log.error("the state file's log cannot be copied into it, and grows: %s", error)
            self._trouble = str(error)
        finally:
            self._emptying = None


def _begun(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """A task whose failure is known, also where nobody waits for it any more."""
    task = asyncio.create_task(work)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return task
