"""What a kernel version has shown in its stage so far: consecutive windows of PASS, and windows with a FAIL.

A verdict rests on a window of data, and evaluations come every second. Two of them count as two windows only where
they share no data, or one good minute would open a gate of three.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

__all__ = ["Tally"]


@dataclass(frozen=True, slots=True)
class Tally:
    """Windows counted so far, and from when on data count.

    Attributes:
        passed: Consecutive windows of PASS.
        failed: Windows with a FAIL.
        pass_from: Unix time; only windows of later data count towards `passed`. None for any data.
        fail_from: The same for `failed`.
        seen: Unix time of the latest evaluation; None before the first.
    """

    passed: int = 0
    failed: int = 0
    pass_from: float | None = None
    fail_from: float | None = None
    seen: float | None = None

    def after_pass(self, at: float, span: float, most_silence: float) -> Tally:
        """An evaluation in which everything that is asked for was PASS.

        Args:
            at: Its unix time, seconds.
            span: Length of the window that it rests on, seconds.
            most_silence: Longest time in which nobody looked that does not end a streak, seconds; 0 for any.
        """
        before = self._restarted(at, most_silence)
        if before.pass_from is not None and at - span < before.pass_from:
            return replace(before, seen=at)
        return replace(before, passed=before.passed + 1, pass_from=at, seen=at)

    def after_doubt(self, at: float) -> Tally:
        """An evaluation in which something that is asked for was not PASS."""
        return replace(self, passed=0, seen=at)

    def after_fail(self, at: float, span: float) -> Tally:
        """An evaluation with a FAIL on a window of `span` seconds."""
        if self.fail_from is not None and at - span < self.fail_from:
            return replace(self, passed=0, seen=at)
        return replace(self, passed=0, failed=self.failed + 1, fail_from=at, seen=at)

    def _restarted(self, at: float, most_silence: float) -> Tally:
        """Silence ends a streak; so does a clock that was set back, after which nobody knows what is new."""
        if self.seen is None:
            return self
        if at < self.seen:
            return replace(self, passed=0, pass_from=at)
        return replace(self, passed=0) if 0 < most_silence < at - self.seen else self
