"""How fast rescoring may go, so that it lives beside what it must not disturb."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["TokenBudget"]


class TokenBudget:
    """A token bucket: on average `rate` tokens a second, with at most `burst_seconds` of them saved up.

    Args:
        rate: Tokens a second.
        clock: Monotonic seconds.
        burst_seconds: How long unused budget is kept.

    Raises:
        ValueError: If the rate is not a positive number.
    """

    def __init__(self, rate: float, clock: Callable[[], float], burst_seconds: float = 10.0) -> None:
        if not rate > 0.0:
            raise ValueError(f"tokens per second: {rate!r} is not above 0; leave it out for no limit")
        self._rate = rate
        self._burst = rate * burst_seconds
        self._clock = clock
        self._saved = 0.0
        self._seen = clock()

    def spend(self, tokens: int) -> float:
        """Take tokens; returns the seconds to wait before using them. Debt is allowed, or a large batch never ran."""
        now = self._clock()
        self._saved = min(self._burst, self._saved + (now - self._seen) * self._rate)
        self._seen = now
        self._saved -= tokens
        return max(0.0, -self._saved / self._rate)
