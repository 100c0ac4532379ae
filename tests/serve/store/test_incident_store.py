"""Incidents in the state file: written when they change, found when they are over, dropped when they are old."""

from dataclasses import replace

import pytest

from kc_otel.judge.incidents.incident import BrokenCell, Incident, IncidentState
from kc_otel.serve.store.escalation_store import IncidentStore

ONE = Incident(
    "a" * 12, "policy", "fail", "t", "b", IncidentState.BROKEN, (BrokenCell("tv", "code", 1.0, None, 0.02, 0.1),)
)


@pytest.fixture
def store(connection):
    return IncidentStore(connection, keep=2)


def test_numbers_alone_are_not_written(store, connection):
    store.save((), [ONE])
    before = connection.total_changes
    louder = replace(ONE, cells=(replace(ONE.cells[0], estimate=0.5),))
    store.save([ONE], [louder])
    assert connection.total_changes == before
    ended = replace(louder, cells=(replace(louder.cells[0], until=9.0),))
    store.save([louder], [ended])
    assert store.lasting("policy") == (ended,)


def test_of_those_that_are_over_the_newest_are_kept_and_what_lasts_always(store):
    store.save((), [ONE])
    store.close(
        [replace(ONE, id=f"{index:012d}", state=IncidentState.RESOLVED, resolved_at=10.0 * index) for index in range(5)]
    )
    assert [incident.resolved_at for incident in store.over(None, 0.0, 10)] == [40.0, 30.0]
    assert [incident.resolved_at for incident in store.over("policy", 35.0, 10)] == [40.0]
    assert store.over("other", 0.0, 10) == ()
    assert store.lasting("policy") == (ONE,)


def test_what_lasts_of_a_contract_that_is_gone_is_over(store):
    store.save((), [ONE, replace(ONE, id="b" * 12, contract="gone")])
    store.end_others({"policy"}, 50.0)
    (over,) = store.over(None, 0.0, 10)
    assert (over.contract, over.state, over.resolved_at, over.cells[0].until) == (
        "gone", IncidentState.RESOLVED, 50.0, 50.0,
    )  # fmt: skip
    assert store.lasting("policy") == (ONE,)
