"""Who may be read from at a time, so that a few senders that stay silent keep nobody else out.

A request that has begun and does not arrive holds a place. While places are free it may hold it for the read timeout;
once all are taken, whoever has held one longest gives it up to the next.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kc_otel.judge.otlp.request_errors import ReceiveError, ThrottledError
from kc_otel.judge.otlp.request_limits import Limits

__all__ = ["ReadingPlaces", "TooSlowError"]


class TooSlowError(ReceiveError):
    """A request did not arrive in time."""

    http_status = 408
    code = 4
    outcome = "too_slow"


class DisplacedError(ThrottledError):
    """A request that had not arrived yet made room for another; its sender keeps it and tries again."""

    outcome = TooSlowError.outcome


class ReadingPlaces:
    """Bounds how many requests of one transport are read at the same time. Use it from one event loop.

    Args:
        limits: `max_concurrent`, `read_timeout`, `patience` and `retry_after` of them.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._held: dict[asyncio.Timeout, float] = {}
        self._displaced: set[asyncio.Timeout] = set()

    @asynccontextmanager
    async def taken(self) -> AsyncIterator[None]:
        """Hold a place while a request is read.

        Raises:
            ThrottledError: If all places are held by requests that may yet arrive.
            TooSlowError: If what is done in the context takes too long.
            DisplacedError: If another needs the place, and nobody has held one longer.
        """
        self._make_room()
        try:
            async with (deadline := asyncio.timeout(self._limits.read_timeout)):
                self._held[deadline] = asyncio.get_running_loop().time()
                try:
                    yield
                finally:
                    self._held.pop(deadline, None)
        except TimeoutError:
            if deadline in self._displaced:
                raise DisplacedError("too many requests arrive at the same time", self._limits.retry_after) from None
            raise TooSlowError("the request did not arrive in time") from None
        finally:
            self._displaced.discard(deadline)

    def _make_room(self) -> None:
        if len(self._held) < self._limits.max_concurrent:
            return
        now = asyncio.get_running_loop().time()
        longest, since = next(iter(self._held.items()))
        if now - since < self._limits.patience:
            raise ThrottledError("too many requests at the same time", self._limits.retry_after)
        del self._held[longest]
        self._displaced.add(longest)
        longest.reschedule(now)
