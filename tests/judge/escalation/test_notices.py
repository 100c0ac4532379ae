"""Who is told, and when: a first word, reminders, what a silence held back, and the end of whatever was said."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kc_otel.judge.escalation.alerts import PolicyState, advance
from kc_otel.judge.escalation.notices import NotificationLog, People, Silence, acknowledge, current, notices, silence
from kc_otel.judge.escalation.webhook_body import alert_body
from kc_otel.judge.plain_json import read_json, to_json


class Pager:
    """Policy and notices side by side, an evaluation at a time."""

    def __init__(self, contract, make_verdict):
        self.contract, self.make_verdict = contract, make_verdict
        self.state, self.log, self.people = PolicyState(contract.name), NotificationLog(contract.name), People()
        self.now = 1000.0

    def tick(self, seconds, status):
        """(reason, what) of everything that is said after so many seconds."""
        self.now += seconds
        self.state, edges = advance(self.contract, self.state, [self.make_verdict(status)], {}, self.now)
        self.log = read_json(NotificationLog, to_json(self.log))
        self.log, said = notices(self.contract, self.log, self.state.firing, edges, self.people, self.now)
        return [(str(notice.reason), str(notice.transition.what)) for notice in said]

    def silence(self, seconds):
        made = Silence("s", self.contract.name, None, None, "ada", "planned", self.now, self.now + seconds)
        self.people = silence(self.people, made)

    def acknowledge(self):
        self.people = acknowledge(self.people, self.state.firing, "ada", "looking", self.now)


@pytest.fixture
def pager(make_contract, make_verdict):
    step = {"on": "fail", "repeat": "10m", "severity": "critical", "do": [{"webhook": "pager"}]}
    return Pager(make_contract([step]), make_verdict)


def test_reminders_come_after_every_interval(pager):
    """And an end is said once."""
    assert pager.tick(0, "FAIL") == [("firing", "firing")]
    said = [pager.tick(60, "FAIL") for _ in range(20)]
    assert [index for index, messages in enumerate(said) if messages] == [9, 19]
    assert said[9] == [("reminder", "firing")]
    assert pager.tick(60, "PASS") == [("resolved", "resolved")]
    assert pager.tick(600, "PASS") == []


def test_a_silence_holds_back_until_it_ends(pager):
    """What still fires is said then, as late news."""
    pager.silence(100)
    assert pager.tick(10, "FAIL") == []
    assert pager.tick(80, "FAIL") == []
    assert pager.tick(10, "FAIL") == [("silence-ended", "firing")]
    assert pager.tick(10, "PASS") == [("resolved", "resolved")]


def test_the_body_says_why_it_is_sent(pager):
    """A reminder says for how long it has fired; the labels are those of the first word."""
    verdicts = [pager.make_verdict("FAIL")]
    state, edges = advance(pager.contract, pager.state, verdicts, {}, 1000.0)
    first = alert_body(pager.contract, edges, receiver="pager", reason="firing")
    again = alert_body(pager.contract, [replace(edges[0], at=4600.0)], receiver="pager", reason="reminder")
    assert state.firing
    assert first["kernelContract"]["reason"] == "firing"
    assert again["kernelContract"]["reason"] == "reminder"
    assert again["alerts"][0]["annotations"]["description"].startswith(
        "Reminder: the alert has fired for 1h and nobody has acknowledged it. "
    )
    for name in ("labels", "fingerprint", "startsAt", "endsAt", "status"):
        assert again["alerts"][0][name] == first["alerts"][0][name]


DEED = st.sampled_from(["", "", "", "", "silence", "acknowledge", "unsilence"])
TICKS = st.lists(
    st.tuples(st.integers(-400, 900), st.sampled_from(["FAIL", "FAIL", "PASS", "INCONCLUSIVE", "NO_DATA"]), DEED),
    max_size=60,
)


@given(ticks=TICKS, repeat=st.sampled_from(["0s", "1m", "10m"]))
def test_a_receiver_hears_a_story_that_makes_sense(make_contract, make_verdict, ticks, repeat):
    """A first word before any reminder, one end for it, no word while silenced, no reminder once acknowledged."""
    step = {"on": "fail", "clear_for": "5m", "repeat": repeat, "do": [{"webhook": "pager"}]}
    pager = Pager(make_contract([step]), make_verdict)
    open_, counted, due = False, 0.0, 0.0
    for seconds, status, action in ticks:
        firing = pager.state.firing
        if action == "silence" and not pager.people.silences:
            pager.silence(300)
        elif action == "unsilence" and pager.people.silences:
            pager.people = People(acknowledgements=pager.people.acknowledgements)
        elif action == "acknowledge" and firing and not pager.people.acknowledgements:
            pager.acknowledge()
        said = pager.tick(seconds, status)
        counted += min(max(0, seconds), 300)
        firing = pager.state.firing
        muted = bool(firing) and bool(pager.people.silencing(firing[0].cell, pager.now))
        taken = bool(firing) and pager.people.acknowledged(firing[0].fingerprint) is not None
        assert len(said) <= 1
        for reason, what in said:
            assert (what == "firing") == bool(firing)
            assert open_ == (reason in {"reminder", "resolved"})
            assert not (muted and what == "firing")
            if reason == "reminder":
                assert not taken
                assert repeat != "0s"
                assert counted - due >= {"1m": 60, "10m": 600}[repeat]
            open_, due = what == "firing", counted
        assert open_ == bool(firing) or (muted and not open_), "everything that fires is said, unless it is silenced"
        pager.people, _ = current(pager.people, pager.contract.name, {alert.fingerprint for alert in firing}, pager.now)


def test_what_grew_over_minutes_is_one_reminder(make_contract, make_verdict):
    """Of three slices that broke one after the other, all are said again when the first is due, and then together."""
    step = {"on": "fail", "repeat": "10m", "severity": "critical", "do": [{"webhook": "pager"}]}
    contract = make_contract([step])
    state, log, reminders = PolicyState(contract.name), NotificationLog(contract.name), []
    for minute in range(35):
        now = 1000.0 + 60.0 * minute
        broken = [
            make_verdict("FAIL", slice=name) for at, name in ((0, "all"), (2, "code"), (5, "prose")) if minute >= at
        ]
        state, edges = advance(contract, state, broken, {}, now)
        log, said = notices(contract, log, state.firing, edges, People(), now)
        reminders.append(sum(notice.reason == "reminder" for notice in said))
    assert {minute: many for minute, many in enumerate(reminders) if many} == {10: 3, 20: 3, 30: 3}
