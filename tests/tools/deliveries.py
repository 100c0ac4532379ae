"""Webhooks delivered at a moment of the test's choosing."""

import asyncio

from kc_otel.serve.webhooks.deliver import Dispatcher

__all__ = ["drain"]


async def drain(dispatcher: Dispatcher) -> None:
    """Try everything that is due now, and what becomes due by it, once."""
    while await dispatcher._start_due() or dispatcher._lanes:
        await asyncio.gather(*dispatcher._lanes.values())
