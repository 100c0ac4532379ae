from __future__ import annotations

import pytest

from kc_otel.judge.escalation.alerts import PolicyState, advance
from kc_otel.serve.event_log import EventLog


def test_events_are_read_in_order(connection, make_contract, make_verdict):
    contract = make_contract([{"on": "fail", "do": ["notify", {"webhook": "pager"}]}])
    _, edges = advance(contract, PolicyState(contract.name), [make_verdict("FAIL")], {}, 5)
    store = EventLog(connection)
    store.transition(edges[0])
    store.record("other", "resumed", {"by": "ada", "why": "fixed"}, 6)
    assert [event.kind for event in store.newest()] == ["firing", "resumed"]
    assert [event.kind for event in store.newest(limit=1)] == ["resumed"]
    (event,) = store.newest(contract.name)
    assert (event.kind, event.at, event.data["slice"]) == ("firing", 5, "code")
    assert event.data["actions"] == ["notify", {"webhook": "pager"}]
    assert event.data["verdict"]["status"] == "FAIL"


def test_log_of_events_is_bounded(connection):
    store = EventLog(connection, max_events=10)
    for number in range(25):
        store.record("c", "note", {"n": number}, number)
    assert [event.data["n"] for event in store.newest()] == list(range(15, 25))


@pytest.mark.parametrize("data", ["'{'", "'[1]'", "'null'", "CAST(x'7bff7d' AS TEXT)", "CAST(x'00' AS TEXT)"])
def test_an_event_that_is_damaged_keeps_no_other_back(connection, data):
    store = EventLog(connection)
    for number in range(3):
        store.record("policy", "resumed", {"message": f"word {number}"}, 5.0)
    connection.execute(f"UPDATE events SET data = {data} WHERE id = 2")
    for found in (store.newest(), store.newest("policy", verdicts=False)):
        assert [event.kind for event in found] == ["resumed", "damaged", "resumed"]
        assert [event.message for event in found][::2] == ["word 0", "word 2"]
        assert (found[1].data, "damaged" in found[1].message) == ({}, True)
