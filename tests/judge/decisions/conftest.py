from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kc_otel.contract.model import Contract
from kc_otel.contract.policy import Action
from kc_otel.judge.escalation.alerts import Alert, Phase
from tests.tools.contracts import contract_of
from tests.tools.verdicts import verdict_of


def contract_named(name: str = "policy-7b") -> Contract:
    return contract_of(
        name,
        slices={"long-context": {"where": {"prompt_tokens": ">= 8192"}}, "code": {"where": {"task": "code"}}},
        statistical=[{"id": "token-tv", "metric": "tv_token", "unit": "token", "limit": 0.004}],
    )


def transition_of(phase: str = "firing", *, do: tuple[Any, ...] = (), at: float = 100.0, **changes: Any) -> Alert:
    where = {"train": "trainA", "inference": "inferB"} | changes
    verdict = verdict_of("FAIL", at=at, reason="0.008 is above 0.004", **where)
    actions = tuple(Action.model_validate(item) for item in do or ({"route": "train-kernel"},))
    of = "/".join(verdict.cell[2:])
    alert = Alert("s", "fail", "critical", actions, verdict.cell, verdict, at, of)
    return replace(alert, phase=Phase(phase), started_at=at, at=at)


@pytest.fixture(scope="session")
def contract() -> Contract:
    return contract_named()


@pytest.fixture(scope="session")
def make_contract() -> Any:
    return contract_named


@pytest.fixture(scope="session")
def make_transition() -> Any:
    return transition_of
