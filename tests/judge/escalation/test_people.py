"""Silences and acknowledgements as values: whom they concern, when they end, what is refused."""

from __future__ import annotations

import pytest

from kc_otel.judge.escalation.alerts import PolicyState, advance
from kc_otel.judge.escalation.notices import People, Silence, acknowledge, current, silence, unsilence
from kc_otel.judge.verdict import Cell


def silenced(id="one", clause=None, slice=None, at=0.0, until=100.0, by="ada", why="planned work"):
    """A silence by somebody for a reason."""
    return Silence(id, "policy-7b", clause, slice, by, why, at, until)


@pytest.fixture
def firing(make_contract, make_verdict):
    contract = make_contract([{"on": "fail", "do": ["notify"]}])
    verdicts = [make_verdict("FAIL", slice=name) for name in ("all", "code")]
    state, _ = advance(contract, PolicyState(contract.name), verdicts, {}, 10.0)
    return state.firing


@pytest.mark.parametrize(
    ("clause", "slice", "covered"),
    [
        (None, None, {("token-tv", "all"), ("token-tv", "code"), ("reward", "code")}),
        ("token-tv", None, {("token-tv", "all"), ("token-tv", "code")}),
        (None, "code", {("token-tv", "code"), ("reward", "code")}),
        ("token-tv", "all", {("token-tv", "all")}),
    ],
)
def test_a_silence_covers_what_it_names(clause, slice, covered):
    """What is left out matches everything; another contract's cells are never covered."""
    people = silence(People(), silenced(clause=clause, slice=slice))
    cells = [("token-tv", "all"), ("token-tv", "code"), ("reward", "code")]
    assert {cell for cell in cells if people.silencing(Cell("policy-7b", *cell), 50.0)} == covered
    assert not people.silencing(Cell("other", "token-tv", "all"), 50.0)


def test_a_silence_ends_by_its_time_or_by_a_person():
    """At its end it mutes nothing; ended by a person it is gone."""
    people = silence(silence(People(), silenced()), silenced("two", until=200.0))
    cell = Cell("policy-7b", "token-tv", "all")
    assert [entry.id for entry in people.silencing(cell, 99.9)] == ["one", "two"]
    assert [entry.id for entry in people.silencing(cell, 100.0)] == ["two"]
    left, ended = current(people, "policy-7b", (), 100.0)
    assert ([entry.id for entry in left.silences], [entry.id for entry in ended]) == (["two"], ["one"])
    left, taken = unsilence(people, "one")
    assert ([entry.id for entry in left.silences], taken.id) == (["two"], "one")
    with pytest.raises(LookupError, match="no silence 'nine' is in force; in force: one, two"):
        unsilence(people, "nine")


def test_an_acknowledgement_ends_with_its_alert(firing):
    """Whoever took an alert on first keeps it; when it fires again it is a new one."""
    people = acknowledge(People(), firing[:1], "ada", "looking", 20.0)
    assert people.acknowledged(firing[0].fingerprint).by == "ada"
    people = acknowledge(people, firing, "bob", "me too", 30.0)
    assert [people.acknowledged(alert.fingerprint).by for alert in firing] == ["ada", "bob"]
    with pytest.raises(LookupError, match="no such alert fires"):
        acknowledge(people, (), "eve", "late", 40.0)
    with pytest.raises(LookupError, match="acknowledged already, by ada, bob"):
        acknowledge(people, firing, "eve", "late", 40.0)
    left, _ = current(people, "policy-7b", {firing[1].fingerprint}, 50.0)
    assert left.acknowledged(firing[0].fingerprint) is None
    assert left.acknowledged(firing[1].fingerprint).by == "bob"
