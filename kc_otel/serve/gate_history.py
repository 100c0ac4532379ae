"""Evaluations that promotion gates look back on: thinned, bounded, and gone with the process.

A gate that has lost its past waits for a new one, which is the safe side.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from kc_otel.judge.verdict import Cell, Evaluation, Status

__all__ = ["GateHistory"]

_KEPT: Final = 2000
_EVERY: Final = 5.0


class GateHistory:
    """Per contract, an evaluation every few seconds, and each one whose statuses differ from the one before."""

    def __init__(self) -> None:
        self._evaluations: dict[str, deque[Evaluation]] = {}

    def add(self, contract: str, evaluation: Evaluation) -> None:
        """Take in an evaluation."""
        kept = self._evaluations.setdefault(contract, deque(maxlen=_KEPT))
        recent = kept and evaluation.at - kept[-1].at < _EVERY
        if not (recent and _statuses(kept[-1]) == _statuses(evaluation)):
            kept.append(evaluation)

    def since(self, contract: str, at: float) -> tuple[Evaluation, ...]:
        """Evaluations at or after a unix time, oldest first."""
        return tuple(one for one in self._evaluations.get(contract, ()) if one.at >= at)


def _statuses(evaluation: Evaluation) -> set[tuple[Cell, Status]]:
    return {(verdict.cell, verdict.status) for verdict in evaluation.verdicts}
