"""Lets requests wait until something has changed, and lets go of them when the process stops."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

__all__ = ["Changes"]


class Changes:
    """A condition with an end."""

    def __init__(self) -> None:
        self._condition = asyncio.Condition()
        self._closed = False

    async def wait_for(self, happened: Callable[[], bool], seconds: float) -> bool:
        """Wait until it has happened, at most so long, and not beyond the end; returns whether it has."""
        try:
            async with asyncio.timeout(seconds), self._condition:
                await self._condition.wait_for(lambda: self._closed or happened())
        except TimeoutError:
            pass
        return happened()

    async def notify(self) -> None:
        """Something may have changed: look again."""
        async with self._condition:
            self._condition.notify_all()

    async def close(self) -> None:
        """Nobody waits any longer."""
        self._closed = True
        await self.notify()
