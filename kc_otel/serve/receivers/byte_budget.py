"""Limit on the bytes of requests in memory at a time, over all ports together.

Short requests are counted as they come. A long one is counted whole before it is read, and a part of the budget is left
to short ones: a sender that announces much and sends nothing delays only other long requests, and only until its own
request times out. A request without room is rejected with a retry delay: the exporter keeps its data and retries, so
nothing is lost.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import ClassVar, Final, Self

from kc_otel.judge.otlp.request_errors import ThrottledError
from kc_otel.judge.otlp.request_limits import Limits

_MAX_IN_FLIGHT_BYTES: Final = 64 * 1024 * 1024
_LARGEST_REQUESTS: Final = 4
"""Requests of the largest allowed size that the budget holds at least; one of them is left to short ones."""
_WAIT_SECONDS: Final = 5.0
"""Time a request waits for room before it is read; exporters time out after ten seconds."""


class BusyError(ThrottledError):
    """The process holds as much as it may; gRPC's RESOURCE_EXHAUSTED is retried because RetryInfo is beside it."""

    code: ClassVar[int] = 8


class ByteBudget:
    """Counts bytes of requests from their arrival to their answer. Use it from one event loop, for all of its ports.

    Args:
        limits: Their largest request fits several times.
        most: Bytes; None for 64 MiB, or four of the largest requests if that is more.

    Attributes:
        in_flight: Bytes that are held now.
    """

    def __init__(self, limits: Limits, most: int | None = None) -> None:
        self.in_flight = 0
        self._most = max(_MAX_IN_FLIGHT_BYTES, _LARGEST_REQUESTS * limits.max_bytes) if most is None else most
        self._most_with_long = self._most - limits.max_bytes
        self._retry_after = limits.retry_after
        self._freed, self._next_long = asyncio.Event(), asyncio.Lock()

    def held(self) -> HeldBytes:
        """A context in which a request's bytes are counted."""
        return HeldBytes(self)

    def busy(self, message: str) -> BusyError:
        """The refusal, with the time after which to come back."""
        return BusyError(message, self._retry_after)

    def add(self, size: int) -> None:
        """Hold bytes that have arrived.

        Raises:
            BusyError: If there is no room for them.
        """
        self._take(size, self._most)

    def reserve(self, size: int) -> None:
        """Hold bytes of a long request that may arrive.

        Raises:
            BusyError: If there is no room for them.
        """
        self._take(size, self._most_with_long)

    async def reserve_soon(self, size: int) -> None:
        """Wait for room for a long request, in the order in which they came, and hold it.

        Raises:
            BusyError: If there is none in time.
        """
        try:
            async with asyncio.timeout(_WAIT_SECONDS), self._next_long:
                while self.in_flight + size > self._most_with_long:
                    self._freed.clear()
                    await self._freed.wait()
                self.in_flight += size
        except TimeoutError:
            raise self.busy("there was no room for a request of this length; send again") from None

    def give_back(self, size: int) -> None:
        """Give bytes back to the budget."""
        self.in_flight -= size
        self._freed.set()

    def _take(self, size: int, most: int) -> None:
        if self.in_flight + size > most:
            raise self.busy("the evaluator's limit on bytes in flight is reached; send again")
        self.in_flight += size


class HeldBytes:
    """Bytes held by one request; all are released at the end of the context."""

    __slots__ = ("_budget", "_size")

    def __init__(self, budget: ByteBudget) -> None:
        self._budget, self._size = budget, 0

    def add(self, size: int) -> None:
        """Add to the budget and to these bytes."""
        self._budget.add(size)
        self._size += size

    def reserve(self, size: int) -> None:
        """Reserve in the budget and add to these bytes."""
        self._budget.reserve(size)
        self._size += size

    async def reserve_soon(self, size: int) -> None:
        """Wait for room in the budget and add to these bytes."""
        await self._budget.reserve_soon(size)
        self._size += size

    def give_back(self, size: int) -> None:
        """Hold less."""
        self._size -= size
        self._budget.give_back(size)

    def __enter__(self) -> Self:
        """Begin without bytes."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Give all of it back."""
        self.give_back(self._size)
