"""What evidence of a promotion's step holds beyond verdicts: from where to where, on which terms, who decided."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from kc_otel.contract.promotion import PromotionTerms
from kc_otel.judge.plain_json import read_plain, to_plain
from kc_otel.judge.promotion.promotion_state import MoveKind, Position, Promotion, PromotionMove
from kc_otel.judge.promotion.stages import GateOutcome, Stage

__all__ = ["step_problems", "step_section"]

_FIELDS: Final = {"kind", "attempt", "from", "to", "terms", "failed_windows", "by", "why"}


def step_section(terms: PromotionTerms, promotion: Promotion, move: PromotionMove) -> dict[str, Any]:
    """The section of a step, a JSON object.

    Args:
        terms: What the contract asks for.
        promotion: The promotion, before the step.
        move: The step.
    """
    return {
        "kind": move.kind.value,
        "attempt": promotion.attempt,
        "from": to_plain(move.before),
        "to": to_plain(move.after),
        "terms": {"windows": terms.windows, "failure_limit": terms.failure_limit},
        "failed_windows": move.failed,
        "by": move.by or None,
        "why": move.why or None,
    }


def step_problems(record: Mapping[str, Any]) -> list[str]:
    """What does not follow in a record with such a section.

    Raises:
        LookupError, TypeError, ValueError, AttributeError: If the section has another shape.
    """
    step = record["step"]
    if set(step) != _FIELDS:
        raise ValueError(f"step has the fields {', '.join(sorted(step))}")
    kind, before, after = MoveKind(step["kind"]), read_plain(Position, step["from"]), read_plain(Position, step["to"])
    outcome = GateOutcome(record["decision"]["outcome"])
    problems = []
    if before.stage != record["stage"]:
        problems.append(f"the step leaves {before}, and the record is of stage {record['stage']}")
    if kind is MoveKind.ADVANCE:
        problems += _advanced(record, step, after)
    elif kind is MoveKind.ROLLBACK:
        problems += _rolled_back(outcome, step, after)
    elif kind is not MoveKind.FORCE:
        problems.append(f"{kind} is not a step that evidence is written of")
    if kind is not MoveKind.ROLLBACK and after.rank <= before.rank:
        problems.append(f"the step goes from {before} to {after}, which is not onward")
    if (kind is MoveKind.FORCE or step["by"]) and not (step["by"] and step["why"]):
        problems.append("a person decided the step, and the record does not say who and why")
    return problems


def _rolled_back(outcome: GateOutcome, step: Mapping[str, Any], after: Position) -> list[str]:
    problems = [] if after.stage is Stage.OFFLINE_CI else [f"the step rolls back to {after}"]
    if not step["by"] and outcome is not GateOutcome.ROLLBACK:
        problems.append("the step rolls back, but neither the decision nor a person does")
    if not step["by"] and step["failed_windows"] < step["terms"]["failure_limit"]:
        problems.append("the step rolls back after fewer failing windows than its terms say")
    return problems


def _advanced(record: Mapping[str, Any], step: Mapping[str, Any], after: Position) -> list[str]:
    problems, decision = [], record["decision"]
    if decision["outcome"] != GateOutcome.ADVANCE or decision["stage"] != after.stage:
        problems.append("the step goes on, but the decision is another")
    if decision["windows"] < step["terms"]["windows"]:
        problems.append(f"the step goes on after {decision['windows']} windows; its terms ask for more")
    return problems
