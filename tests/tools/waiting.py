"""Waiting for what another thread or process does."""

import time
from collections.abc import Callable

NOT_HUNG = 30.0
"""What hangs in tests hangs until it is let go; all else is done by then, on a busy machine too."""


def eventually(condition: Callable[[], object], seconds: float = 120.0) -> None:
    """Return once the condition holds; AssertionError if it does not in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)
