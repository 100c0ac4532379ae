"""Memory for messages that are being received, shared by all connections of a port.

A message that is longer than what anybody may send unasked arrives only once there is memory for all of it: until then
its sender waits, as HTTP/2's flow control has it, and no byte is lost or sent twice. Nobody can keep the others waiting
by announcing much and sending little: while somebody waits for long, who sends slowest, and slowly, has to come again.
"""

from __future__ import annotations

import asyncio
from typing import Final, Protocol

__all__ = ["Holder", "ReadingMemory"]

_PACE: Final = 1024 * 1024
"""Bytes a second of a message that is not slow."""


class Holder(Protocol):
    """A message that needs memory."""

    def granted(self) -> None:
        """There is memory for it."""

    def arrived(self) -> int:
        """Bytes of it that have come."""

    def displace(self) -> None:
        """It has to come again; it gives its memory back."""


class ReadingMemory:
    """Lends memory, in the order in which it is asked for. Use it from one event loop.

    Args:
        most: Bytes at a time; one message may have more, if it is alone.
        patience: Seconds that one may wait before another gives way.
    """

    def __init__(self, most: int, patience: float) -> None:
        self._most, self._patience = most, patience
        self._held: dict[Holder, tuple[int, float]] = {}
        self._waiting: dict[Holder, int] = {}
        self._lent = 0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def lent(self) -> int:
        """Bytes that are lent."""
        return self._lent

    def ask(self, holder: Holder, size: int) -> None:
        """Lend so much; `granted` says when, which may be at once."""
        self._waiting[holder] = size
        self._lend()
        if self._waiting and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._patience, self._press)

    def give_back(self, holder: Holder) -> None:
        """Take back what was lent, if it was."""
        self._waiting.pop(holder, None)
        self._lent -= self._held.pop(holder, (0, 0.0))[0]
        self._lend()

    def _lend(self) -> None:
        while self._waiting:
            holder, size = next(iter(self._waiting.items()))
            if self._lent and self._lent + size > self._most:
                return
            del self._waiting[holder]
            self._lent += size
            self._held[holder] = (size, asyncio.get_running_loop().time())
            holder.granted()

    def _press(self) -> None:
        """Somebody has waited for long: the slowest gives way, if it has had as long."""
        self._timer = None
        if not self._waiting:
            return
        loop = asyncio.get_running_loop()
        now = loop.time()
        old = [(one.arrived() / (now - since), one) for one, (_, since) in self._held.items()
               if now - since >= self._patience]  # fmt: skip
        pace, slowest = min(old, key=lambda pair: pair[0], default=(_PACE, None))
        if slowest is not None and pace < _PACE:
            slowest.displace()
        self._timer = loop.call_later(self._patience, self._press)
