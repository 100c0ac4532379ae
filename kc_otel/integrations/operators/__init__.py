"""Operators side by side: two callables or modules on the same inputs."""

from kc_otel.integrations.operators.callables import Case, CaseReport, OperatorPair, cases_over, compare_callables

__all__ = ["Case", "CaseReport", "OperatorPair", "cases_over", "compare_callables"]
