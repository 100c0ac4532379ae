"""Webhooks: one about an incident, one when it grows, one when it is over, and nothing lost."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kc_otel.judge.decisions.entries import DecisionTable
from kc_otel.judge.decisions.table import apply
from kc_otel.judge.escalation.alerts import PolicyState, What, advance
from kc_otel.judge.escalation.notices import (
    AT_ONCE,
    GroupTiming,
    MessageGroup,
    NotificationLog,
    People,
    Silence,
    acknowledge,
    group_messages,
    notices,
)
from kc_otel.judge.incidents.incident import IncidentState
from kc_otel.judge.incidents.incident_lifecycle import follow
from kc_otel.judge.plain_json import read_json, to_json

PAGER = [{"on": "fail", "severity": "critical", "repeat": "1h", "do": [{"webhook": "pager"}]}]


class Fleet:
    """Policy, notices, incidents and messages of one contract, an evaluation at a time."""

    def __init__(self, contract, make_verdict, timing):
        self.contract, self.make_verdict, self.timing = contract, make_verdict, timing
        self.state, self.log, self.people = PolicyState(contract.name), NotificationLog(contract.name), People()
        self.groups, self.lasting, self.now, self.table = (), (), 1000.0, DecisionTable()

    def tick(self, seconds, **statuses):
        """(endpoint, reason, how many fire, how many end, how many last) of every webhook after so many seconds."""
        return [
            (message.endpoint, str(message.reason), *self.counts(message), message.lasting)
            for message in self.messages(seconds, **statuses)
        ]

    def messages(self, seconds, **statuses):
        self.now += seconds
        verdicts = [self.make_verdict(status, slice=slice) for slice, status in statuses.items()]
        self.state, edges = advance(self.contract, self.state, verdicts, {}, self.now)
        self.log, said = notices(self.contract, self.log, self.state.firing, edges, self.people, self.now)
        self.table = apply(self.table, edges, self.contract, self.now)
        found = follow(self.contract.name, self.lasting, verdicts, self.state.firing, self.table, self.now)
        self.lasting = tuple(incident for incident in found if incident.state is not IncidentState.RESOLVED)
        groups = read_json(tuple[MessageGroup, ...], to_json(self.groups))
        self.groups, sent = group_messages(groups, said, found, self.people, self.timing, 300.0, self.now)
        return sent

    @staticmethod
    def counts(message):
        kinds = Counter(transition.what for transition in message.alerts)
        return kinds[What.FIRING], kinds[What.RESOLVED]


@pytest.fixture
def fleet(make_contract, make_verdict):
    """Makes one, with the steps and the timing given."""
    return lambda steps=PAGER, timing=GroupTiming(): Fleet(make_contract(steps), make_verdict, timing)  # noqa: B008


def test_an_incident_is_one_message_after_the_wait_an_update_and_an_end(fleet):
    """However many slices break within the wait, and however many follow before the interval has passed."""
    escalation = fleet()
    slices = {f"s{index}": "FAIL" for index in range(45)}
    assert escalation.tick(0, s0="FAIL", s1="FAIL") == []
    assert escalation.tick(20, **dict(list(slices.items())[:20])) == []
    assert escalation.tick(10, **dict(list(slices.items())[:20])) == [("pager", "firing", 20, 0, 20)]
    assert [escalation.tick(60, **slices) for _ in range(4)] == [[]] * 4
    assert escalation.tick(60, **slices) == [("pager", "update", 25, 0, 45)]
    assert [escalation.tick(60, **slices) for _ in range(20)] == [[]] * 20, "nothing has changed"
    assert escalation.tick(1, **dict.fromkeys(slices, "PASS")) == [("pager", "resolved", 0, 45, 0)]
    assert escalation.groups == ()


@pytest.mark.parametrize("actions", [[], [{"route": "train-kernel"}]])
def test_that_a_breach_went_away_is_not_told_as_its_end(fleet, actions):
    """Another kernel is measured in its place: that nothing is proven is said once, the end once it is known."""
    escalation = fleet([{**PAGER[0], "do": [*PAGER[0]["do"], *actions]}], timing=AT_ONCE)
    healthy, make = "c" * 12, escalation.make_verdict
    assert escalation.tick(0, a="FAIL") == [("pager", "firing", 1, 0, 1)]
    escalation.make_verdict = lambda status, **where: make(status, inference=healthy, **where)
    told = [escalation.tick(60, a="PASS") for _ in range(200)]
    assert told == [*[[]] * 5, [("pager", "unproven", 1, 0, 1)], *[[]] * 194], "a window later"
    state = IncidentState.BROKEN if actions else IncidentState.UNPROVEN  # the route outlives its cause, and is untaken
    assert [incident.state for incident in escalation.lasting] == [state]
    escalation.make_verdict = make
    assert escalation.tick(60, a="FAIL") == [("pager", "update", 1, 0, 1)], "it is back"
    (message,) = escalation.messages(60, a="PASS")
    assert (message.reason, message.incident.refuted) == ("resolved", True)


def test_that_a_breach_went_away_is_told_by_the_rules_of_other_messages(fleet):
    """After a window, not during a silence, with what changed in between, and no more than two in an interval."""
    escalation = fleet()
    make = escalation.make_verdict

    def here(slices, seconds=10):
        escalation.make_verdict = make
        return escalation.tick(seconds, **dict.fromkeys(slices, "FAIL"))

    def gone(seconds):
        escalation.make_verdict = lambda status, **where: make(status, inference="c" * 12, **where)
        return escalation.tick(seconds, a="PASS")

    assert [here("ab"), here("ab", 30)] == [[], [("pager", "firing", 2, 0, 2)]]
    assert [gone(10), here("ab"), gone(10)] == [[]] * 3, "it was back within the wait"
    escalation.people = People(
        (Silence("1", escalation.contract.name, None, "a", "ada", "planned", escalation.now, escalation.now + 1000),)
    )
    assert [gone(100) for _ in range(5)] == [[], [], [("pager", "unproven", 1, 0, 2)], [], []], "b alone"
    escalation.people = People()
    assert [gone(10), gone(10)] == [[("pager", "unproven", 1, 0, 2)], []]
    assert [here("ab"), gone(10), here("ab"), gone(10)] == [[]] * 4, "the pager still has it as unproven"
    assert [gone(60) for _ in range(9)] == [[]] * 9
    assert here("a") == [("pager", "update", 1, 0, 2)]
    assert [gone(150) for _ in range(3)] == [[], [], [("pager", "unproven", 1, 0, 2)]]
    escalation.make_verdict = make
    assert escalation.tick(10, a="PASS", b="PASS") == [("pager", "resolved", 0, 2, 0)]


def test_a_breach_that_went_away_and_is_back_is_not_told_as_its_end(fleet):
    """Neither while its step waits to fire again nor when it does, of which the pager is told."""
    escalation = fleet([{**PAGER[0], "for": "2m"}], timing=AT_ONCE)
    make = escalation.make_verdict
    assert [escalation.tick(60, a="FAIL") for _ in range(3)] == [[], [], [("pager", "firing", 1, 0, 1)]]
    escalation.make_verdict = lambda status, **where: make(status, inference="c" * 12, **where)
    told = [escalation.tick(60, a="PASS") for _ in range(20)]
    assert told == [*[[]] * 5, [("pager", "unproven", 1, 0, 1)], *[[]] * 14]
    escalation.make_verdict = make
    assert escalation.state.firing == ()
    told = [message for _ in range(8) for message in escalation.tick(30, a="FAIL")]
    assert told == [("pager", "update", 1, 0, 1)]
    assert escalation.state.firing
    assert [message.reason for _ in range(9) for message in escalation.messages(60, a="PASS")] == ["resolved"]


def test_every_message_of_an_incident_is_about_it(fleet):
    """The id of the first is that of the last."""
    escalation = fleet(timing=AT_ONCE)
    ids = {
        message.incident.id
        for statuses in ({"a": "FAIL"}, {"a": "FAIL", "b": "FAIL"}, {"a": "PASS", "b": "PASS"})
        for message in escalation.messages(30, **statuses)
    }
    assert len(ids) == 1


def test_what_begins_and_ends_within_the_wait_is_not_said(fleet):
    """And what ends and begins again between two messages is no news either."""
    escalation = fleet()
    escalation.tick(0, a="FAIL")
    assert escalation.tick(10, a="PASS") == []
    assert escalation.groups == ()
    escalation.tick(0, a="FAIL", b="FAIL")
    assert escalation.tick(30, a="FAIL", b="FAIL") == [("pager", "firing", 2, 0, 2)]
    assert escalation.tick(10, a="PASS", b="FAIL") == []
    assert escalation.tick(10, a="FAIL", b="FAIL") == []
    assert escalation.tick(300, a="FAIL", b="FAIL") == []


def test_a_part_that_recovers_is_in_the_next_update(fleet):
    """Which says how much lasts."""
    escalation = fleet()
    escalation.tick(0, a="FAIL", b="FAIL")
    escalation.tick(30, a="FAIL", b="FAIL")
    assert escalation.tick(10, a="PASS", b="FAIL") == []
    assert escalation.tick(290, a="PASS", b="FAIL") == [("pager", "update", 0, 1, 1)]


def test_a_step_that_was_not_told_waits_for_the_short_time_only(fleet):
    """What is graver now is not held back for an interval."""
    escalation = fleet(
        [
            {"on": "fail", "severity": "warning", "do": [{"webhook": "desk"}]},
            {"on": "fail", "for": "1m", "severity": "critical", "do": [{"webhook": "desk"}, {"webhook": "pager"}]},
        ]
    )
    escalation.tick(0, a="FAIL")
    assert escalation.tick(30, a="FAIL") == [("desk", "firing", 1, 0, 1)]
    assert escalation.tick(30, a="FAIL") == []
    assert escalation.tick(30, a="FAIL") == [("desk", "update", 1, 0, 2), ("pager", "firing", 1, 0, 1)]


def test_what_is_silenced_while_it_waits_does_not_speak(fleet):
    """It is said when the silence has ended; the others are said in time."""
    escalation = fleet()
    escalation.tick(0, a="FAIL", b="FAIL")
    escalation.people = People(
        (Silence("1", escalation.contract.name, None, "a", "ada", "planned", escalation.now, escalation.now + 1000),)
    )
    assert escalation.tick(30, a="FAIL", b="FAIL") == [("pager", "firing", 1, 0, 1)]
    assert escalation.tick(300, a="FAIL", b="FAIL") == []
    escalation.people = People()
    assert escalation.tick(10, a="FAIL", b="FAIL") == [("pager", "update", 1, 0, 2)]


def test_an_incident_reminds_in_one_message_until_somebody_acknowledges_it(fleet):
    """Of all its alerts."""
    escalation = fleet()
    escalation.tick(0, a="FAIL", b="FAIL")
    said = [message for _ in range(12) for message in escalation.tick(300, a="FAIL", b="FAIL")]
    assert said == [("pager", "firing", 2, 0, 2), ("pager", "reminder", 2, 0, 2)]
    escalation.people = acknowledge(escalation.people, escalation.state.firing, "ada", "looking", escalation.now)
    assert [escalation.tick(300, a="FAIL", b="FAIL") for _ in range(30)] == [[]] * 30


STATUS = st.sampled_from(["FAIL", "FAIL", "PASS", "INCONCLUSIVE"])


@given(
    ticks=st.lists(st.tuples(st.integers(0, 200), STATUS, STATUS, STATUS), max_size=40),
    timing=st.sampled_from([AT_ONCE, GroupTiming(), GroupTiming(0.0, 60.0)]),
)
def test_nothing_is_lost_and_nothing_is_said_twice(make_contract, make_verdict, ticks, timing):
    """A receiver that adds up its messages knows what fires, once both waits are over."""
    escalation = Fleet(make_contract(PAGER), make_verdict, timing)
    known = set()

    def hear(seconds, **statuses):
        for message in escalation.messages(seconds, **statuses):
            for alert in message.alerts:
                if alert.what is What.FIRING:
                    assert str(message.reason) == "reminder" or alert.fingerprint not in known
                    known.add(alert.fingerprint)
                else:
                    known.remove(alert.fingerprint)
            assert (message.lasting == 0) == (str(message.reason) == "resolved")

    last = {}
    for seconds, a, b, c in ticks:
        last = {"a": a, "b": b, "c": c}
        hear(seconds, **last)
    for _ in range(2):
        hear(300, **last)
    assert known == {alert.fingerprint for alert in escalation.state.firing}
