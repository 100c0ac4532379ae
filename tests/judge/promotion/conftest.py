from __future__ import annotations

import math
from typing import Any

import pytest

from kc_otel.contract.model import Contract
from kc_otel.judge.verdict import Cell, Status, Verdict
from tests.tools.contracts import contract_of

CONTRACT = contract_of(
    "policy-7b",
    version=3,
    slices={"code": {"where": {"task": "code"}}},
    statistical=[{"id": "token-tv", "metric": "tv_token", "unit": "token", "limit": 0.004}],
    observability={"window": "5m", "long_window": "1h", "min_samples": 2000},
)


def verdict_of(status: str = "PASS", *, slice: str = "code", at: float = 0.0, **changes: Any) -> Verdict:
    estimate, lower, upper = {
        "PASS": (0.002, 0.001, 0.003),
        "INCONCLUSIVE": (0.004, 0.003, 0.005),
        "FAIL": (0.012, 0.010, 0.014),
        "NO_DATA": (math.nan, math.nan, math.nan),
    }[status]
    cell = Cell("policy-7b", changes.pop("clause", "token-tv"), slice, "trainA", changes.pop("version", "inferB"))
    return Verdict(
        **{
            "cell": cell, "status": Status(status), "at": at, "limit": 0.004, "estimate": estimate, "lower": lower,
            "upper": upper, "samples": 5000, "window": "short", "method": "mixture betting", "reason": "numbers",
            "contract_version": 3, "contract_hash": CONTRACT.hash, "about": "population",
        }
        | changes
    )  # fmt: skip


@pytest.fixture(scope="session")
def contract() -> Contract:
    return CONTRACT


@pytest.fixture(scope="session")
def make_verdict() -> Any:
    return verdict_of
