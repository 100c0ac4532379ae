"""How much of what costs us and brings nothing a client may send: resets, settings, pings, frames without content.

Each of these is allowed, and a few of them are usual; thousands are an attack (CVE-2019-9511 to -9518, CVE-2023-44487,
CVE-2024-27316). A connection has so much of our patience, which grows again with time and with each request that is
taken, and ends when there is none left.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kc_otel.serve.receivers.http2_frames import ConnectionFaultError, ErrorCode

__all__ = ["RESET", "Patience"]

_MOST: Final = 1000
_A_SECOND: Final = 50
_AN_ANSWER: Final = 10
RESET: Final = 5
"""What a request costs whose work is thrown away."""


class Patience:
    """That of one connection.

    Args:
        clock: Seconds.
    """

    __slots__ = ("_clock", "_left", "_seen")

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._left, self._seen = clock, float(_MOST), clock()

    def answered(self) -> None:
        """A request was taken."""
        self._left = min(self._left + _AN_ANSWER, _MOST)

    def spend(self, cost: int = 1) -> None:
        """Something came that brings nothing.

        Raises:
            ConnectionFaultError: If that was too much.
        """
        self._left -= cost
        if self._left < 0:
            now = self._clock()
            self._left = min(self._left + (now - self._seen) * _A_SECOND, _MOST)
            self._seen = now
            if self._left < 0:
                raise ConnectionFaultError(ErrorCode.ENHANCE_YOUR_CALM, "too many frames that bring nothing")
