"""An active evaluator and a standby: whoever holds the state file acts, the other waits for it.

There is no election, no lease that runs out and no clock in it. The lock is the operating system's, on the file that
everything decided is written to; so two never act at once, and a holder that is killed is followed within a second. The
standby has opened no port: that one listens is how others find the one that acts.

That is right where the lock is: among processes of one machine, or of machines of which one at a time has the disk
(a ReadWriteOnce volume). Network file systems differ in what becomes of a lock when a machine loses touch; do not put
the file on one.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from pathlib import Path
from typing import Final

from kc_otel.serve.store.state_connection import StateConnection
from kc_otel.serve.store.state_file import StateHeldError, open_state

__all__ = ["active"]

_log: Final = logging.getLogger(__name__)
_EVERY: Final = 0.5


async def active(path: Path | None, stop: asyncio.Event, *, standby: bool) -> StateConnection | None:
    """The state file, open and held; with `standby`, as soon as nobody else holds it.

    Args:
        path: The file; None for one in memory.
        stop: Ends the wait.
        standby: Whether to wait at all.

    Returns:
        The connection; None when it was told to stop first.

    Raises:
        StateHeldError: If another evaluator holds it, without `standby`.
        StateError: If the file cannot be used.
    """
    if not standby:
        return open_state(path)
    waited = False
    while not stop.is_set():
        try:
            connection = open_state(path, patience=0.0)
        except StateHeldError:
            if not waited:
                _log.info("standing by: another evaluator holds %s", path)
            waited = True
        else:
            if waited:
                _log.info("taking over: %s is free", path)
            return connection
        with suppress(TimeoutError):
            async with asyncio.timeout(_EVERY):
                await stop.wait()
    return None
