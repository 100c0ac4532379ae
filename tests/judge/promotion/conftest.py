from __future__ import annotations

from typing import Any

import pytest

from kc_otel.contract.model import Contract
from kc_otel.judge.verdict import Evaluation, Verdict
from tests.tools.contracts import contract_of
from tests.tools.verdicts import verdict_of

CONTRACT = contract_of(
    "policy-7b",
    version=3,
    slices={"code": {"where": {"task": "code"}}},
    statistical=[{"id": "token-tv", "metric": "tv_token", "unit": "token", "limit": 0.004}],
    observability={"window": "5m", "long_window": "1h", "min_samples": 2000},
)


@pytest.fixture(scope="session")
def contract() -> Contract:
    return CONTRACT


@pytest.fixture(scope="session")
def make_verdict() -> Any:
    def make(status: str = "PASS", *, version: str = "inferB", **changes: Any) -> Verdict:
        ours = {"train": "trainA", "inference": version, "samples": 5000, "reason": "numbers"}
        return verdict_of(status, **ours | {"contract_hash": CONTRACT.hash} | changes)

    return make


@pytest.fixture(scope="session")
def round_of(make_verdict: Any) -> Any:
    """Verdicts of both slices in one evaluation, the second one's status as given."""

    def make(contract: Contract, now: float, status: str = "PASS", **changes: Any) -> Evaluation:
        verdicts = (
            make_verdict(own, slice=slice, at=now, contract_hash=contract.hash, **changes)
            for slice, own in (("all", "PASS"), ("code", status))
        )
        return Evaluation(now, tuple(verdicts))

    return make
