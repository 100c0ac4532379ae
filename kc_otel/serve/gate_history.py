"""Evaluations that promotion gates look back on: thinned, bounded, and gone with the process.

A gate that has lost its past waits for a new one, which is the safe side.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

from kc_otel.judge.promotion.stages import Round
from kc_otel.judge.verdict import Verdict

__all__ = ["GateHistory"]

_KEPT: Final = 2000
_EVERY: Final = 5.0


class GateHistory:
    """Per contract, an evaluation every few seconds, and each one whose statuses differ from the one before."""

    def __init__(self) -> None:
        self._evaluations: dict[str, deque[Round]] = {}

    def add(self, contract: str, now: float, verdicts: Sequence[Verdict]) -> None:
        """Take in an evaluation."""
        evaluations = self._evaluations.setdefault(contract, deque(maxlen=_KEPT))
        if evaluations:
            last = evaluations[-1]
            if now - last.at < _EVERY and _statuses(last.verdicts) == _statuses(verdicts):
                return
        evaluations.append(Round(now, tuple(verdicts)))

    def since(self, contract: str, at: float) -> tuple[Round, ...]:
        """Evaluations at or after a unix time, oldest first."""
        return tuple(one for one in self._evaluations.get(contract, ()) if one.at >= at)


def _statuses(verdicts: Sequence[Verdict]) -> set[tuple[object, object]]:
    return {(verdict.cell, verdict.status) for verdict in verdicts}
