from __future__ import annotations

from kc_otel.judge.escalation.alerts import PolicyState, advance
from kc_otel.serve.event_log import EventLog


def test_events_are_read_in_order_from_where_a_reader_left_off(connection, make_contract, make_verdict):
    contract = make_contract([{"on": "fail", "do": ["notify", {"webhook": "pager"}]}])
    _, edges = advance(contract, PolicyState(contract.name), [make_verdict("FAIL")], {}, 5)
    store = EventLog(connection)
    store.transition(edges[0])
    store.record("other", "resumed", {"by": "ada", "why": "fixed"}, 6)
    assert [event.kind for event in store.events()] == ["firing", "resumed"]
    assert [event.kind for event in store.events(after_id=store.events()[0].id)] == ["resumed"]
    (event,) = store.events(contract.name, limit=1)
    assert (event.kind, event.at, event.data["slice"]) == ("firing", 5, "code")
    assert event.data["actions"] == ["notify", {"webhook": "pager"}]
    assert event.data["verdict"]["status"] == "FAIL"


def test_log_of_events_is_bounded(connection):
    store = EventLog(connection, max_events=10)
    for number in range(25):
        store.record("c", "note", {"n": number}, number)
    assert [event.data["n"] for event in store.events()] == list(range(15, 25))
