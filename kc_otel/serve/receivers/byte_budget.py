"""Limit on the bytes of requests in memory at a time, over all ports together.

Short requests are counted as they come. A long one is counted whole before it is read, and a part of the budget is left
to short ones: a sender that announces much and sends nothing delays only other long requests, and only until its own
request times out. A request without room is rejected with a retry delay: the exporter keeps its data and retries, so
nothing is lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar, Final

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

    `most` are 64 MiB, or four of the largest requests if that is more; `most_with_long` may be held once a long request
    is among them.
    """

    def __init__(self, limits: Limits, most: int | None = None) -> None:
        self.in_flight = 0
        self.most = max(_MAX_IN_FLIGHT_BYTES, _LARGEST_REQUESTS * limits.max_bytes) if most is None else most
        self.most_with_long = self.most - limits.max_bytes
        self.freed, self.next_long = asyncio.Event(), asyncio.Lock()
        self._retry_after = limits.retry_after

    @contextmanager
    def held(self) -> Iterator[HeldBytes]:
        """Count a request's bytes; all are given back at the end of the context."""
        held = HeldBytes(self)
        try:
            yield held
        finally:
            held.give_back(held.size)

    def busy(self, message: str) -> BusyError:
        """The refusal, with the time after which to come back."""
        return BusyError(message, self._retry_after)


class HeldBytes:
    """Bytes held by one request."""

    def __init__(self, budget: ByteBudget) -> None:
        self._budget, self.size = budget, 0

    def add(self, size: int) -> None:
        """Hold bytes that have arrived, or raise a BusyError."""
        self._take(size, self._budget.most)

    def reserve(self, size: int) -> None:
        """Hold bytes of a long request that may arrive, or raise a BusyError."""
        self._take(size, self._budget.most_with_long)

    async def reserve_soon(self, size: int) -> None:
        """Wait for room for a long request, in the order in which they came, and hold it, or raise a BusyError."""
        budget = self._budget
        try:
            async with asyncio.timeout(_WAIT_SECONDS), budget.next_long:
                while budget.in_flight + size > budget.most_with_long:
                    budget.freed.clear()
                    await budget.freed.wait()
                self._hold(size)
        except TimeoutError:
            raise budget.busy("there was no room for a request of this length; send again") from None

    def give_back(self, size: int) -> None:
        """Hold less."""
        self.size -= size
        self._budget.in_flight -= size
        self._budget.freed.set()

    def _take(self, size: int, most: int) -> None:
        if self._budget.in_flight + size > most:
            raise self._budget.busy("the evaluator's limit on bytes in flight is reached; send again")
        self._hold(size)

    def _hold(self, size: int) -> None:
        self.size += size
        self._budget.in_flight += size
