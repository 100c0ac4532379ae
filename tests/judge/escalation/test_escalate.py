"""Who is told, and when: silences, reminders, and webhooks of which one is about an incident."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kc_otel.judge.escalation.alerts import Acknowledgement, People, Phase, Silence, current
from kc_otel.judge.escalation.escalate import AT_ONCE, GroupTiming
from kc_otel.judge.incidents.incident import IncidentState
from kc_otel.judge.verdict import Cell
from tests.tools.bodies import body_of
from tests.tools.escalations import Escalating


def silenced(id="one", clause=None, slice=None, at=0.0, until=100.0, by="ada", why="planned work"):
    return Silence(id, "policy-7b", clause, slice, by, why, at, until)


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
    people = People((silenced(clause=clause, slice=slice),))
    cells = [("token-tv", "all"), ("token-tv", "code"), ("reward", "code")]
    assert {cell for cell in cells if people.silencing(Cell("policy-7b", *cell), 50.0)} == covered
    assert not people.silencing(Cell("other", "token-tv", "all"), 50.0)


def test_a_silence_ends_by_its_time() -> None:
    people = People((silenced(), silenced("two", until=200.0)))
    cell = Cell("policy-7b", "token-tv", "all")
    assert [entry.id for entry in people.silencing(cell, 99.9)] == ["one", "two"]
    assert [entry.id for entry in people.silencing(cell, 100.0)] == ["two"]
    left, ended = current(people, "policy-7b", (), 100.0)
    assert ([entry.id for entry in left.silences], [entry.id for entry in ended]) == (["two"], ["one"])


def test_an_acknowledgement_ends_with_its_alert() -> None:
    people = People((), tuple(Acknowledgement("policy-7b", alert, "ada", "looking", 20.0) for alert in ("a1", "a2")))
    left, _ = current(people, "policy-7b", {"a2"}, 50.0)
    assert [left.acknowledged(alert) for alert in ("a1", "a2")] == [None, people.acknowledgements[1]]
    assert current(people, "another", (), 50.0)[0] == people


class Pager(Escalating):
    """The messages of a contract."""

    def __init__(self, contract, make_verdict, timing=AT_ONCE):
        super().__init__(contract, timing=timing)
        self.make_verdict, self.now = make_verdict, 1000.0

    def step(self, seconds, **statuses):
        """What an evaluation leads to after so many seconds, by the status of each slice."""
        self.now += seconds
        return self.evaluate(self.now, [self.make_verdict(status, slice=slice) for slice, status in statuses.items()])

    def said(self, seconds, status):
        """(reason, whether it fires) of every message."""
        return [(str(message.reason), message.lasting > 0) for message in self.messages(seconds, code=status)]

    def messages(self, seconds, **statuses):
        return self.step(seconds, **statuses).messages

    def tick(self, seconds, **statuses):
        """(endpoint, reason, how many fire, how many end, how many last) of every webhook."""
        return [
            (
                message.endpoint,
                str(message.reason),
                *(sum(edge.phase is what for edge in message.alerts) for what in (Phase.FIRING, Phase.RESOLVED)),
                message.lasting,
            )
            for message in self.messages(seconds, **statuses)
        ]

    @property
    def groups(self):
        return self.state.groups[self.contract.name]

    def silence(self, seconds, slice=None):
        made = Silence("s", self.contract.name, None, slice, "ada", "planned", self.now, self.now + seconds)
        self.people = replace(self.people, silences=(*self.people.silences, made))

    def acknowledge(self):
        found = (Acknowledgement(self.contract.name, alert.fingerprint, "ada", "", self.now) for alert in self.firing)
        self.people = replace(self.people, acknowledgements=tuple(found))


@pytest.fixture
def pager(make_contract, make_verdict):
    step = {"on": "fail", "repeat": "10m", "severity": "critical", "do": [{"webhook": "pager"}]}
    return Pager(make_contract([step]), make_verdict)


def test_the_body_says_why_it_is_sent(pager):
    edges = pager.step(0, code="FAIL").edges
    first = body_of(pager.contract, edges, reason="firing")
    again = body_of(pager.contract, [replace(edges[0], at=4600.0)], reason="reminder")
    assert first["kernelContract"]["reason"] == "firing"
    assert again["kernelContract"]["reason"] == "reminder"
    assert again["alerts"][0]["annotations"]["description"].startswith(
        "Reminder: the alert has fired for 1h and nobody has acknowledged it. "
    )
    for name in ("labels", "fingerprint", "startsAt", "endsAt", "status"):
        assert again["alerts"][0][name] == first["alerts"][0][name]


def test_an_endpoint_whose_alert_ends_first_is_told_of_the_end_of_the_breach(make_contract, make_verdict):
    """While the alert of another step still fires, the breach is not over for anybody."""
    first = {"on": "fail", "severity": "warning", "do": [{"webhook": "chat"}]}
    second = {"on": "fail", "clear_for": "10m", "severity": "critical", "do": [{"webhook": "pager"}]}
    team = Pager(make_contract([first, second]), make_verdict)
    team.tick(0, code="FAIL")
    ends = [("chat", "resolved", 0, 1, 0), ("pager", "resolved", 0, 1, 0)]
    assert [team.tick(300, code="PASS") for _ in range(3)] == [[], [], ends]
    # An end of its run is told at once.
    team.tick(60, code="FAIL")
    ended = replace(make_verdict("NO_DATA"), ended=True)
    assert [message.endpoint for message in team.evaluate(team.now + 60, [ended]).messages] == ["chat"]


@pytest.mark.parametrize("ended", [True, False])
def test_a_run_that_ended_in_order_is_told_once_and_asks_for_nothing(make_contract, make_verdict, ended):
    """A recorder that fell silent without a word may be down: that is repeated."""
    step = {"on": "no-data", "repeat": "10m", "do": [{"webhook": "pager"}]}
    evaluator = Escalating(make_contract([step]))
    reason = "the run ended: its last recorder shut down 5m ago" if ended else "no report for 5m"
    told = [
        message
        for now in range(1000, 3000, 60)
        for message in evaluator.evaluate(now, [make_verdict("NO_DATA", reason=reason, at=now)]).messages
    ]
    assert [str(message.reason) for message in told] == ["firing"] + ["reminder"] * 3 * (not ended)
    body = body_of(evaluator.contract, told[0].alerts, incident=told[0].incident, lasting=1)
    said, alert = body["kernelContract"], body["alerts"][0]["annotations"]["description"]
    impact = "The run ended: nothing of this kernel is measured on slice code any more."
    remedy = "Now: nothing, if that was intended; otherwise start it again."
    if not ended:
        impact = "Nothing monitors slice code: a fault there goes unseen."
        remedy = "Now: check the traffic, the recorders' exports and the contract that they apply."
    assert (said["impact"], said["next"]) == (impact, remedy)
    assert alert.startswith(impact)
    assert remedy in alert


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
        firing = pager.firing
        if action == "silence" and not pager.people.silences:
            pager.silence(300)
        elif action == "unsilence" and pager.people.silences:
            pager.people = People(acknowledgements=pager.people.acknowledgements)
        elif action == "acknowledge" and firing and not pager.people.acknowledgements:
            pager.acknowledge()
        said = pager.said(seconds, status)
        counted += min(max(0, seconds), 300)
        firing = pager.firing
        muted = bool(firing) and bool(pager.people.silencing(firing[0].cell, pager.now))
        taken = bool(firing) and pager.people.acknowledged(firing[0].fingerprint) is not None
        assert len(said) <= 1
        for reason, fires in said:
            assert fires == bool(firing)
            assert open_ == (reason in {"reminder", "resolved"})
            assert not (muted and fires)
            if reason == "reminder":
                assert not taken
                assert repeat != "0s"
                assert counted - due >= {"1m": 60, "10m": 600}[repeat]
            open_, due = fires, counted
        assert open_ == bool(firing) or (muted and not open_), "everything that fires is said, unless it is silenced"


PAGER = [{"on": "fail", "severity": "critical", "repeat": "1h", "do": [{"webhook": "pager"}]}]


@pytest.fixture
def fleet(make_contract, make_verdict):
    """Makes one, with the steps and the timing given."""
    return lambda steps=PAGER, timing=GroupTiming(): Pager(make_contract(steps), make_verdict, timing)  # noqa: B008


def test_an_incident_is_one_message_after_the_wait_an_update_and_an_end(fleet):
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
    escalation.silence(1000, "a")
    assert [gone(100) for _ in range(5)] == [[], [], [("pager", "unproven", 1, 0, 2)], [], []], "b alone"
    escalation.people = People()
    assert [gone(10), gone(10)] == [[("pager", "unproven", 1, 0, 2)], []]
    assert [here("ab"), gone(10), here("ab"), gone(10)] == [[]] * 4, "the pager still has it as unproven"
    assert [gone(60) for _ in range(9)] == [[]] * 9
    assert here("a") == [("pager", "update", 1, 0, 2)]
    assert [gone(150) for _ in range(3)] == [[], [], [("pager", "unproven", 1, 0, 2)]]
    escalation.make_verdict = make
    assert escalation.tick(10, a="PASS", b="PASS") == [("pager", "resolved", 0, 2, 0)]


def test_requests_are_said_to_be_answered_badly_where_the_last_verdict_shows_it(fleet):
    """A slice that only its alert holds is in the message, too, but nothing is known of its requests now."""
    escalation = fleet(timing=AT_ONCE)
    escalation.tick(10, a="FAIL")
    (message,) = escalation.messages(60, a="NO_DATA", b="FAIL")
    (first,) = (edge for edge in message.alerts if edge.fires)
    body = body_of(escalation.contract, [first], "update", message.incident, lasting=2)["kernelContract"]
    assert body["impact"].startswith("About 1.23% of the tokens on slice b would differ")
    assert "unproven on a" in body["incident"]["headline"]


def test_what_is_refuted_is_not_said_to_be_unproven_beside_another_slice(fleet):
    escalation = fleet(timing=AT_ONCE)
    make = escalation.make_verdict
    escalation.tick(10, a="FAIL", b="FAIL")
    escalation.tick(60, a="PASS", b="FAIL")
    escalation.make_verdict = lambda status, **of: make(status, inference="c" * 12, **of)
    (message,) = (message for _ in range(6) for message in escalation.messages(60, a="PASS"))
    assert message.reason == "unproven"
    body = body_of(escalation.contract, message.alerts, "unproven", message.incident, lasting=1)["kernelContract"]
    assert body["impact"].startswith("Nothing proves that token-tv keeps its limit again on slice b:")


@pytest.mark.parametrize("then", ["the silence ends", "the breach ends", "its kernel is gone"])
def test_an_incident_has_no_end_while_a_silenced_slice_of_it_is_broken(fleet, then):
    """PagerDuty closes the incident on it."""
    escalation = fleet(timing=AT_ONCE)
    escalation.silence(1000, "b")
    assert escalation.tick(10, a="FAIL", b="FAIL") == [("pager", "firing", 1, 0, 1)]
    assert [escalation.tick(60, a="PASS", b="FAIL") for _ in range(10)] == [[]] * 10
    if then == "the breach ends":
        assert escalation.tick(60, a="PASS", b="PASS") == [("pager", "resolved", 0, 1, 0)]
    elif then == "its kernel is gone":
        make = escalation.make_verdict
        escalation.make_verdict = lambda status, **of: make(
            status, inference={"a": "b", "b": "c"}[of["slice"]] * 12, **of
        )
        assert [escalation.tick(60, a="PASS", b="PASS") for _ in range(6)] == [[]] * 6
        escalation.people = People()
        assert escalation.tick(60, a="PASS", b="PASS") == [("pager", "unproven", 1, 1, 1)]
    else:
        escalation.people = People()
        assert escalation.tick(60, a="PASS", b="FAIL") == [("pager", "silence-ended", 1, 1, 1)]
        assert escalation.tick(60, a="PASS", b="PASS") == [("pager", "resolved", 0, 1, 0)]


def test_a_breach_that_went_away_and_is_back_is_not_told_as_its_end(fleet):
    """Neither while its step waits to fire again nor when it does, of which the pager is told."""
    escalation = fleet([{**PAGER[0], "for": "2m"}], timing=AT_ONCE)
    make = escalation.make_verdict
    assert [escalation.tick(60, a="FAIL") for _ in range(3)] == [[], [], [("pager", "firing", 1, 0, 1)]]
    escalation.make_verdict = lambda status, **where: make(status, inference="c" * 12, **where)
    told = [escalation.tick(60, a="PASS") for _ in range(20)]
    assert told == [*[[]] * 5, [("pager", "unproven", 1, 0, 1)], *[[]] * 14]
    escalation.make_verdict = make
    assert escalation.firing == ()
    told = [message for _ in range(8) for message in escalation.tick(30, a="FAIL")]
    assert told == [("pager", "update", 1, 0, 1)]
    assert escalation.firing
    assert [message.reason for _ in range(9) for message in escalation.messages(60, a="PASS")] == ["resolved"]


def test_what_begins_and_ends_within_the_wait_is_not_said(fleet):
    escalation = fleet()
    escalation.tick(0, a="FAIL")
    assert escalation.tick(10, a="PASS") == []
    assert escalation.groups == ()
    escalation.tick(0, a="FAIL", b="FAIL")
    assert escalation.tick(30, a="FAIL", b="FAIL") == [("pager", "firing", 2, 0, 2)]
    assert escalation.tick(10, a="PASS", b="FAIL") == []
    assert escalation.tick(10, a="FAIL", b="FAIL") == []
    assert escalation.tick(300, a="FAIL", b="FAIL") == []


def test_a_step_that_was_not_told_waits_for_the_short_time_only(fleet):
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


def test_an_incident_reminds_in_one_message_until_somebody_acknowledges_it(fleet):
    """Also of what broke later: the first that is due takes the others along."""
    escalation = fleet()
    escalation.tick(0, a="FAIL")
    sent = [message for _ in range(12) for message in escalation.messages(300, a="FAIL", b="FAIL")]
    assert [(message.reason, len(message.alerts), message.lasting) for message in sent] == [
        ("firing", 2, 2), ("reminder", 2, 2),
    ]  # fmt: skip
    assert {edge.at - edge.started_at for edge in sent[1].alerts} == {3600.0, 3300.0}, "how long it has fired"
    escalation.acknowledge()
    assert [escalation.tick(300, a="FAIL", b="FAIL") for _ in range(30)] == [[]] * 30


STATUS = st.sampled_from(["FAIL", "FAIL", "PASS", "INCONCLUSIVE"])


@given(
    ticks=st.lists(st.tuples(st.integers(0, 200), STATUS, STATUS, STATUS), max_size=40),
    timing=st.sampled_from([AT_ONCE, GroupTiming(), GroupTiming(0.0, 60.0)]),
)
def test_nothing_is_lost_and_nothing_is_said_twice(make_contract, make_verdict, ticks, timing):
    """A receiver that adds up its messages knows what fires, once both waits are over."""
    escalation = Pager(make_contract(PAGER), make_verdict, timing)
    known = set()

    def hear(seconds, **statuses):
        for message in escalation.messages(seconds, **statuses):
            for alert in message.alerts:
                if alert.phase is Phase.FIRING:
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
    assert known == {alert.fingerprint for alert in escalation.firing}


@pytest.mark.parametrize("silenced", [True, False])
@pytest.mark.parametrize(("back", "told"), [(False, ["unproven", "resolved"]), (True, [])])
def test_a_breach_that_went_away_before_it_was_told_is_told_as_unproven(fleet, silenced, back, told):
    """Its kernel fell silent within the wait or a silence; one that was refuted by then is not told at all."""
    escalation = fleet(timing=GroupTiming(60.0, 300.0))
    make = escalation.make_verdict
    if silenced:
        escalation.silence(1000)
    assert escalation.tick(0, a="FAIL") == []
    escalation.make_verdict = lambda status, **where: make(status, inference="c" * 12, **where)
    assert escalation.tick(10, a="PASS") == []
    if back:
        escalation.make_verdict = make
    sent = [message.reason for _ in range(5) for message in escalation.messages(150, a="PASS")]
    assert sent == ([] if silenced else told[:1])
    escalation.people = People()
    sent += [message.reason for _ in range(10) for message in escalation.messages(150, a="PASS")]
    escalation.make_verdict = make
    sent += [message.reason for message in escalation.messages(60, a="PASS")]
    assert (sent, escalation.groups) == (told, ())
