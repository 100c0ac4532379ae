"""The router against real evaluators that are killed, come back, and have lost what they knew."""

from __future__ import annotations

import socket
import sqlite3

import pytest

from kc_otel.client.router import Router
from kc_otel.contract.load import load
from kc_otel.judge.decisions import DecisionTable, Route
from kc_otel.judge.escalation.escalate import EscalationState
from kc_otel.serve.history import EventLog
from kc_otel.serve.store.escalation_store import EscalationStore
from tests.integration.conftest import CONTRACT, Evaluator
from tests.tools.waiting import eventually

pytestmark = pytest.mark.slow

SOON = 60.0


def table_of(version, *slices):
    """A table of a version that routes these slices away."""
    return DecisionTable(
        version,
        1.0,
        tuple(Route("policy", part, "inferB", "trainA", "train-kernel", "token-tv", "broken", 1.0) for part in slices),
    )


@pytest.fixture
def evaluator(tmp_path):
    """A function that starts an evaluator, always on the same port, with a table in its state; one at a time."""
    contract = tmp_path / "policy.yaml"
    contract.write_text(CONTRACT.partition("escalation:")[0] + "escalation: [{on: fail, do: [notify]}]\n")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    started = []

    def start(table):
        state = tmp_path / f"state-{len(started)}.sqlite"
        connection = sqlite3.connect(state, isolation_level=None)
        EscalationStore(connection, EventLog(connection)).save(EscalationState(), EscalationState(decisions=table))
        connection.close()
        started.append(Evaluator(contract, state, {}, "--api-port", port, "--no-webhooks"))
        return started[-1]

    start.contract = contract
    yield start
    for process in started:
        if process.process.poll() is None:
            process.kill()


def test_a_killed_evaluator_and_one_that_lost_its_state(evaluator, tmp_path):
    first = evaluator(table_of(7, "code"))
    kept = tmp_path / "decisions.json"
    options = {
        "contracts": [load(evaluator.contract)], "refresh": 0.05, "wait": 2.0, "stale_after": 1.5, "keep": kept,
    }  # fmt: skip

    def kernels(router):
        return [router.choose("policy", {"task": task}, "inferB")[0] for task in ("code", "prose", "tables")]

    with Router(first.api, **options) as router:
        assert router.wait_for_table(SOON)
        assert router.table.version == 7
        assert kernels(router) == ["t", "i", "i"]

        first.kill()
        assert kernels(router) == ["t", "i", "i"]
        eventually(lambda: router.stale)
        assert kernels(router) == ["t", "t", "t"]
        assert router.table.version == 7

        second = evaluator(table_of(3, "prose"))
        eventually(lambda: router.table.version == 3)
        assert not router.stale
        assert kernels(router) == ["i", "t", "i"]

        second.kill()
        third = evaluator(table_of(3, "code", "prose"))
        eventually(lambda: len(router.table.routes) == 2)
        assert kernels(router) == ["t", "t", "i"]

        third.kill()
        evaluator(table_of(9))
        eventually(lambda: router.table.version == 9)
        assert kernels(router) == ["i", "i", "i"]
