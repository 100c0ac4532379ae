"""Operators side by side: two callables or modules on the same inputs."""

from kc_otel.integrations.operators.callables import CaseReport, compare_callables
from kc_otel.integrations.operators.cases import Case, OperatorPair, cases_over

__all__ = ["Case", "CaseReport", "OperatorPair", "cases_over", "compare_callables"]
