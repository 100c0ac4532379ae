"""Waiting until what was committed is on the disk, without holding anybody else up."""

from __future__ import annotations

import asyncio
import sqlite3
import time

from kc_otel.serve.store.state_connection import StateConnection
from kc_otel.serve.store.state_file import StateError

__all__ = ["StateDisk"]


class StateDisk:
    """The disk under a state file. Use it from the event loop that the connection is used on.

    Args:
        connection: The state file.

    Attributes:
        seconds: How long the last sync took, a checkpoint not counted; None before the first, and in memory.
    """

    def __init__(self, connection: StateConnection) -> None:
        self._connection = connection
        self.seconds: float | None = None
        self._synced = 0
        self._syncing: asyncio.Task[None] | None = None

    async def synced(self) -> None:
        """Wait until all that has been committed is on the disk; those who wait at the same time wait for one sync.

        Raises:
            StateError: If the disk does not take it.
        """
        committed = self._connection.total_changes
        while self._synced < committed:
            if self._syncing is None:
                self._syncing = asyncio.create_task(self._sync())
            try:
                await asyncio.shield(self._syncing)
            except (sqlite3.Error, OSError) as error:
                raise StateError(f"the state cannot be forced to the disk: {error}") from error

    async def close(self) -> None:
        """Close the file, once nothing is under way."""
        if self._syncing is not None:
            await asyncio.gather(self._syncing, return_exceptions=True)
        self._connection.close()

    async def _sync(self) -> None:
        connection, changes = self._connection, self._connection.total_changes
        try:
            began = time.monotonic()
            if await asyncio.to_thread(connection.sync):
                self.seconds = time.monotonic() - began
            self._synced = changes
            if connection.is_long:
                changes = connection.total_changes
                copied = await asyncio.to_thread(connection.checkpoint)
                if copied and connection.total_changes == changes:
                    connection.begin_anew()
        finally:
            self._syncing = None
