"""Cells, verdicts and actions as plain JSON values, and back. Numbers that are not finite become text."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from kc_otel.contract.policy import Action
from kc_otel.judge.verdict import Cell, Status, Verdict

__all__ = [
    "action_from_plain",
    "action_to_plain",
    "cell_from_plain",
    "cell_to_plain",
    "finite_or_none",
    "verdict_from_plain",
    "verdict_to_plain",
]

_FLOATS = ("at", "limit", "estimate", "lower", "upper")


def finite_or_none(value: float) -> float | None:
    """The number, or None for nan and infinities, which JSON for other people cannot carry."""
    return value if math.isfinite(value) else None


def cell_to_plain(cell: Cell) -> dict[str, str]:
    """A cell as a JSON object."""
    return dataclasses.asdict(cell)


def cell_from_plain(plain: Mapping[str, str]) -> Cell:
    """The cell that `cell_to_plain` wrote."""
    return Cell(**plain)


def verdict_to_plain(verdict: Verdict) -> dict[str, Any]:
    """A verdict as a JSON object; nan and infinities are written as text so that nothing is lost."""
    plain = dataclasses.asdict(verdict) | {"status": verdict.status.value}
    for name in _FLOATS:
        value = float(plain[name])
        plain[name] = value if math.isfinite(value) else str(value)
    return plain


def verdict_from_plain(plain: Mapping[str, Any]) -> Verdict:
    """The verdict that `verdict_to_plain` wrote."""
    numbers = {name: float(plain[name]) for name in _FLOATS}
    return Verdict(**{**plain, **numbers, "cell": cell_from_plain(plain["cell"]), "status": Status(plain["status"])})


def action_to_plain(action: Action) -> str | dict[str, str]:
    """An action as the contract's YAML writes it."""
    return action.kind if action.target is None else {action.kind: action.target}


def action_from_plain(plain: str | Mapping[str, str]) -> Action:
    """The action that `action_to_plain` wrote."""
    return Action.model_validate(plain if isinstance(plain, str) else dict(plain))
