"""The promise: what two kernels of one policy may differ by, and what happens when they do."""

from kc_otel.contract.clause import Clause
from kc_otel.contract.diff import ContractChange, diff
from kc_otel.contract.errors import ContractError, ContractProblem, LintFinding
from kc_otel.contract.lint import lint
from kc_otel.contract.load import load, load_all, load_text
from kc_otel.contract.model import Contract
from kc_otel.contract.schema import json_schema

__all__ = [
    "Clause",
    "Contract",
    "ContractChange",
    "ContractError",
    "ContractProblem",
    "LintFinding",
    "diff",
    "json_schema",
    "lint",
    "load",
    "load_all",
    "load_text",
]
