from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from kc_otel.contract.model import Contract
from kc_otel.judge.verdict import Verdict
from tests.tools.contracts import contract_of
from tests.tools.servers import Answer, answering
from tests.tools.verdicts import verdict_of

LADDER = [
    {"on": "fail", "severity": "warning", "do": ["notify", "sample-more"]},
    {"on": "fail", "for": "2m", "clear_for": "10m", "severity": "critical",
     "do": [{"route": "train-kernel"}, {"webhook": "pager"}]},
    {"on": "no-data", "for": "3m", "do": ["notify", "hold-promotion"]},
]  # fmt: skip


def contract_with(escalation: list[dict[str, Any]] | None = None, **changes: Any) -> Contract:
    parts = {
        "metadata": {"name": "policy-7b", "version": 3, "owner": "rl-infra", "runbook": "https://runbooks/kc"},
        "slices": {"code": {"where": {"task": "code"}}},
        "statistical": [{"id": "token-tv", "metric": "tv_token", "unit": "token", "limit": 0.004}],
        "observability": {"window": "5m"},
        "escalation": LADDER if escalation is None else escalation,
    }
    return contract_of(**parts | changes)


@pytest.fixture(scope="session")
def make_contract() -> Callable[..., Contract]:
    return contract_with


@pytest.fixture(scope="session")
def make_verdict() -> Callable[..., Verdict]:
    return verdict_of


@pytest.fixture
def connection() -> Iterator[sqlite3.Connection]:
    opened = sqlite3.connect(":memory:", isolation_level=None)
    yield opened
    opened.close()


class Receiver:
    """A real HTTP server that remembers requests and answers as told."""

    def __init__(self) -> None:
        self.url = ""
        self.requests: list[tuple[str, Mapping[str, str], bytes]] = []
        self.answers: dict[str, list[tuple[int, dict[str, str]]]] = {}
        self.release = threading.Event()
        self.delay = 0.0
        """Seconds before each answer."""

    def respond(self, path: str, headers: Mapping[str, str], body: bytes) -> Answer:
        self.requests.append((path, headers, body))
        if path.startswith("/hang"):
            self.release.wait(30)
        time.sleep(self.delay)
        waiting = self.answers.get(path, [])
        status, extra = waiting.pop(0) if waiting else (204, {})
        return status, extra, b""


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    with answering(made.respond) as made.url:
        yield made
        made.release.set()
