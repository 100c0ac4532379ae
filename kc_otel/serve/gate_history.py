"""Evaluations that promotion gates look back on: thinned, bounded, and gone with the process.

A gate asks of the past only what was PASS and what was not; numbers it says only of the newest evaluation and of the
last one that failed. So these two are whole, and in all others a verdict is the first one of its cell with the same
status and window: a round costs 8 bytes a cell at most, and hardly anything where nothing changes. A gate that has lost
its past waits for a new one, which is the safe side.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import Final

from kc_otel.judge.verdict import Cell, Evaluation, Status, Verdict

_MAX_EVALUATIONS: Final = 2000
_MIN_SECONDS_BETWEEN: Final = 5.0
_MAX_KERNELS: Final = 8
"""Kernel versions whose last evaluation with a FAIL is kept whole."""
_SHARED_VERDICTS_SPARE: Final = 64
"""Verdicts that are shared beyond four for each cell, before those of cells that are gone are forgotten."""


@dataclass(slots=True)
class _Past:
    """Stored evaluations of one contract."""

    evaluations: deque[Evaluation] = field(default_factory=lambda: deque(maxlen=_MAX_EVALUATIONS))
    newest: Evaluation = field(default_factory=lambda: Evaluation(0.0))
    failed: dict[str, Evaluation] = field(default_factory=dict)
    shared: dict[tuple[Cell, Status, str], Verdict] = field(default_factory=dict)

    def add(self, evaluation: Evaluation) -> None:
        same = tuple(
            self.shared.setdefault((verdict.cell, verdict.status, verdict.window), verdict)
            for verdict in evaluation.verdicts
        )
        last = self.evaluations[-1].verdicts if self.evaluations else ()
        self.evaluations.append(replace(evaluation, verdicts=last if same == last else same))
        self.newest = evaluation
        for kernel in {
            verdict.cell.kernel_inference for verdict in evaluation.verdicts if verdict.status is Status.FAIL
        }:
            self.failed.pop(kernel, None)
            self.failed[kernel] = evaluation
        for kernel in list(self.failed)[:-_MAX_KERNELS]:
            del self.failed[kernel]
        if len(self.shared) > 4 * len(same) + _SHARED_VERDICTS_SPARE:
            self.shared = {(verdict.cell, verdict.status, verdict.window): verdict for verdict in same}


class GateHistory:
    """Per contract, an evaluation every few seconds, and each one whose statuses differ from the one before."""

    def __init__(self) -> None:
        self._past: dict[str, _Past] = {}

    def add(self, contract: str, evaluation: Evaluation) -> None:
        """Take in an evaluation."""
        past = self._past.setdefault(contract, _Past())
        recent = past.evaluations and 0 <= evaluation.at - past.newest.at < _MIN_SECONDS_BETWEEN
        if not (recent and _statuses(past.newest) == _statuses(evaluation)):
            past.add(evaluation)

    def since(self, contract: str, at: float) -> tuple[Evaluation, ...]:
        """Evaluations at or after a unix time, oldest first."""
        past = self._past.get(contract)
        if past is None:
            return ()
        whole = {evaluation.at: evaluation for evaluation in (*past.failed.values(), past.newest)}
        return tuple(whole.get(evaluation.at, evaluation) for evaluation in past.evaluations if evaluation.at >= at)


def _statuses(evaluation: Evaluation) -> set[tuple[Cell, Status]]:
    return {(verdict.cell, verdict.status) for verdict in evaluation.verdicts}
