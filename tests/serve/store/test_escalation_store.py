"""What the escalation remembers survives a restart, and is only written with the caller's transaction."""

from __future__ import annotations

import sqlite3

from kc_otel.judge.decisions.entries import INFERENCE_KERNEL, DecisionTable, Pin
from kc_otel.judge.decisions.table import pin
from kc_otel.judge.escalation.escalate import EscalationState
from kc_otel.serve.store.escalation_store import EscalationStore
from kc_otel.serve.store.policy_store import PolicyStore


def store_of(connection):
    return EscalationStore(connection, PolicyStore(connection))


def test_table_survives_a_restart(tmp_path):
    """The store keeps the last table, and only with the caller's transaction."""
    connection = sqlite3.connect(tmp_path / "kc.db", isolation_level=None)
    store = store_of(connection)
    before = store.begin({}, frozenset(), 0.0)
    assert before == EscalationState()
    table = pin(DecisionTable(), Pin("policy", "code", INFERENCE_KERNEL, "ada", "drill", 100.0))
    connection.execute("BEGIN IMMEDIATE")
    store.save(before, EscalationState(decisions=table))
    connection.execute("ROLLBACK")
    assert store_of(connection).begin({}, frozenset(), 0.0) == before
    store.save(before, EscalationState(decisions=table))
    assert store_of(connection).begin({}, frozenset(), 0.0).decisions == table
    connection.close()
