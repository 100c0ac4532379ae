from __future__ import annotations

from typing import Any

import pytest

from kc_otel.contract.model import Contract
from kc_otel.contract.policy import Action
from kc_otel.judge.escalation.alerts import Transition, What
from kc_otel.judge.verdict import Cell, Status, Verdict
from tests.tools.contracts import contract_of


def contract_named(name: str = "policy-7b") -> Contract:
    return contract_of(
        name,
        slices={"long-context": {"where": {"prompt_tokens": ">= 8192"}}, "code": {"where": {"task": "code"}}},
        statistical=[{"id": "token-tv", "metric": "tv_token", "unit": "token", "limit": 0.004}],
    )


def transition_of(what: str = "firing", *, do: tuple[Any, ...] = (), at: float = 100.0, **changes: Any) -> Transition:
    where = {"slice": "code", "train": "trainA", "inference": "inferB", "contract": "policy-7b"} | changes
    cell = Cell(where["contract"], "token-tv", where["slice"], where["train"], where["inference"])
    verdict = Verdict(
        cell=cell, status=Status.FAIL, at=at, limit=0.004, estimate=0.01, lower=0.008, upper=0.012, samples=5000,
        window="short", method="m", reason="0.008 is above 0.004", contract_version=1, contract_hash="0" * 64,
        about="population",
    )  # fmt: skip
    return Transition(
        contract=cell.contract, step="s", on="fail", cell=cell, what=What(what), at=at, started_at=at,
        severity="critical", actions=tuple(Action.model_validate(item) for item in do or ({"route": "train-kernel"},)),
        verdict=verdict, fingerprint=f"{cell.slice}/{cell.kernel_train}/{cell.kernel_inference}",
    )  # fmt: skip


@pytest.fixture(scope="session")
def contract() -> Contract:
    return contract_named()


@pytest.fixture(scope="session")
def make_contract() -> Any:
    return contract_named


@pytest.fixture(scope="session")
def make_transition() -> Any:
    return transition_of
