"""Waiting for what another thread or process does."""

import time
from collections.abc import Callable

NOT_HUNG = 30.0
"""What hangs in tests hangs until it is let go; all else is done by then, on a busy machine too."""


def eventually(
    condition: Callable[[], object], seconds: float = 120.0, every: float = 0.005,
    otherwise: Callable[[], object] = lambda: "it did not happen",
) -> None:  # fmt: skip
    """Return once the condition holds, which is looked at every so many seconds; AssertionError if not in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, otherwise()
        time.sleep(every)
