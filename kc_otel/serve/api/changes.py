"""Lets requests wait until something has changed, and lets go of them when the process stops."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Changes:
    """A condition with an end."""

    def __init__(self) -> None:
        self._condition = asyncio.Condition()
        self._closed = False

    async def wait_for(self, happened: Callable[[], bool], seconds: float) -> bool:
        """Wait for a change, at most so long and not beyond shutdown; return True if there was one."""
        try:
            async with asyncio.timeout(seconds), self._condition:
                await self._condition.wait_for(lambda: self._closed or happened())
        except TimeoutError:
            pass
        return happened()

    async def notify(self) -> None:
        """Wake the waiting requests."""
        async with self._condition:
            self._condition.notify_all()

    async def close(self) -> None:
        """Nobody waits any longer."""
        self._closed = True
        await self.notify()
