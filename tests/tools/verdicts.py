"""The verdicts of an evaluation, of every contract in one list."""

from __future__ import annotations

from kc_otel.judge.evaluator import Evaluator
from kc_otel.judge.verdict import Verdict

__all__ = ["verdicts_of"]


def verdicts_of(evaluator: Evaluator, now: float) -> tuple[Verdict, ...]:
    return tuple(verdict for evaluation in evaluator.evaluate(now).values() for verdict in evaluation.verdicts)
