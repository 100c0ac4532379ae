"""Operators side by side: two callables or modules on the same inputs, or two models watched while they run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kc_otel.integrations.operators.callables import CaseReport, compare_callables
from kc_otel.integrations.operators.cases import Case, OperatorPair, cases_over

if TYPE_CHECKING:
    from kc_otel.integrations.operators.modules import OperatorWatch, watch_modules

__all__ = [
    "Case",
    "CaseReport",
    "OperatorPair",
    "OperatorWatch",
    "cases_over",
    "compare_callables",
    "watch_modules",
]


def __getattr__(name: str) -> Any:
    # Watching modules needs torch; comparing functions of NumPy arrays does not.
    if name in {"OperatorWatch", "watch_modules"}:
        from kc_otel.integrations.operators import modules as watch  # noqa: PLC0415 - it imports torch

        return getattr(watch, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
