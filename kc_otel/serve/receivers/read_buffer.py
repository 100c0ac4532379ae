"""Where bytes come in, of any connection of a thread's event loop: they are taken out before the next are read."""

from __future__ import annotations

import threading
from typing import Final

__all__ = ["READ_BUFFER"]


class _ReadBuffer(threading.local):
    def __init__(self) -> None:
        self.memory = memoryview(bytearray(256 * 1024))


READ_BUFFER: Final = _ReadBuffer()
"""`memory` is the buffer of the thread that asks."""
