"""Incidents: what belongs together, where it stands, how it grew, and what was done about it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kc_otel.contract.model import Contract
from kc_otel.judge.decisions.table import DecisionTable, Pin, apply, kept_from, pin, resume
from kc_otel.judge.escalation.alert_lifecycle import advance
from kc_otel.judge.escalation.alerts import PolicyState, Transition
from kc_otel.judge.escalation.message_groups import IncidentMessage
from kc_otel.judge.escalation.notices import NoticeReason
from kc_otel.judge.escalation.people import People, Silence
from kc_otel.judge.incidents.actions_taken import actions_taken
from kc_otel.judge.incidents.incident import Incident, IncidentState
from kc_otel.judge.incidents.incident_lifecycle import follow, with_actions, with_told, with_word
from kc_otel.judge.plain_json import read_json, to_json
from kc_otel.judge.verdict import Verdict
from tests.judge.escalation.conftest import contract_with, verdict_of

QUIET: list[dict[str, Any]] = [{"on": "fail", "for": "1h", "do": ["notify"]}]
ROUTING: list[dict[str, Any]] = [{"on": "fail", "do": [{"route": "train-kernel"}, {"webhook": "pager"}, "halt"]}]


class Evaluator:
    """Verdicts, policy, decision table and incidents of one contract, an evaluation at a time."""

    def __init__(self, ladder: list[dict[str, Any]], *, dry_run: bool = False) -> None:
        self.contract: Contract = contract_with(ladder)
        self.policy, self.table, self.people = PolicyState(self.contract.name), DecisionTable(), People()
        self.lasting: tuple[Incident, ...] = ()
        self.dry_run = dry_run

    def tick(self, now: float, *verdicts: Verdict, invalid: dict[str, int] | None = None) -> tuple[Incident, ...]:
        """The incidents after an evaluation, each written and read again."""
        kept = kept_from(self.table, self.contract.name)
        self.policy, edges = advance(self.contract, self.policy, verdicts, invalid or {}, now, kept)
        self.table = self.table if self.dry_run else apply(self.table, edges, self.contract, now)
        found = follow(self.contract.name, self.lasting, verdicts, self.policy.firing, self.table, now)
        found = with_actions(found, edges, self.people, dry_run=self.dry_run)
        self.lasting = tuple(one for one in found if one.state is not IncidentState.RESOLVED)
        self.lasting = tuple(read_json(Incident, to_json(one)) for one in self.lasting)
        return found


def fail(slice: str, **more: Any) -> Verdict:
    return verdict_of("FAIL", slice=slice, **more)


def test_one_kernel_version_that_breaks_two_clauses_on_two_slices_is_one_incident() -> None:
    """Its headline names both, the worst first and all traffic last; its start is the first breach."""
    evaluator = Evaluator(QUIET)
    evaluator.tick(10.0, fail("code"))
    (one,) = evaluator.tick(11.0, fail("code"), fail("code", clause="tail", lower=0.005), fail("all", lower=0.05))
    assert one.headline == "token-tv and tail are above their limits on code and all traffic"
    assert (one.since, one.state, one.status) == (10.0, IncidentState.BROKEN, "FAIL")
    assert one.extents[0] == (
        "token-tv",
        "0.0123 on all traffic where 0.004 is the limit, at least 12 times that (confidence interval 0.05 to 0.014)",
    )
    assert [clause for clause, _ in one.extents] == ["token-tv", "tail"]


@pytest.mark.parametrize(("lower", "said"), [(0.01542, "3.8"), (0.016, "4"), (0.3999, "99"), (0.0041, "1")])
def test_how_many_times_the_limit_it_is_at_least_is_rounded_down(lower: float, said: str) -> None:
    """What is at least 3.855 times the limit is not at least 3.9 times that."""
    (one,) = Evaluator(QUIET).tick(10.0, fail("code", lower=lower))
    assert f", at least {said} times that" in one.extents[0][1]


def test_other_kernels_and_silence_are_incidents_of_their_own() -> None:
    """FAIL comes before silence, and the worse before the less bad."""
    verdicts = (
        verdict_of("NO_DATA", inference="c"), fail("code", inference="d", lower=0.005), fail("code", inference="b"),
    )  # fmt: skip
    found = Evaluator(QUIET).tick(10.0, *verdicts)
    assert [(one.status, one.kernel_inference) for one in found] == [("FAIL", "b"), ("FAIL", "d"), ("NO_DATA", "c")]
    assert found[2].headline == "No data for token-tv on code"
    assert found[2].extents == (("token-tv", "NO_DATA because of the numbers"),)
    assert len({one.id for one in found}) == 3


def test_a_thousand_cells_that_go_silent_at_once_are_one_incident() -> None:
    """One kernel is the cause."""
    (one,) = Evaluator(QUIET).tick(10.0, *(verdict_of("NO_DATA", slice=f"s{index}") for index in range(1000)))
    assert len(one.cells) == 1000
    assert one.growth == ((10.0, 1000),)


@pytest.mark.parametrize("status", ["PASS", "INCONCLUSIVE"])
def test_what_is_not_broken_is_no_incident(status: str) -> None:
    """An open question is none either, and nor is a cell that nobody has ever reported to."""
    assert Evaluator(QUIET).tick(10.0, verdict_of(status), verdict_of("NO_DATA", inference="")) == ()


def test_a_slice_that_a_new_version_has_not_met_yet_is_not_broken() -> None:
    """The first export of a version is about some slices; the others are silent news only once they were heard."""
    evaluator = Evaluator(QUIET)
    new = verdict_of("NO_DATA", observed=False)
    assert evaluator.tick(0.0, verdict_of("PASS", slice="prose"), new) == ()
    (one,) = evaluator.tick(1.0, verdict_of("PASS", slice="prose"), replace(new, observed=True))
    (same,) = evaluator.tick(2.0, verdict_of("PASS", slice="prose"), new)  # forgotten by then, and silent still
    assert (same.id, same.state) == (one.id, IncidentState.BROKEN)


def test_a_slice_that_is_routed_away_and_falls_silent_is_contained_and_no_second_incident() -> None:
    """That nothing reaches the kernel is what the route is for; nobody is alerted, and a resumed slice counts again."""
    silence = {"on": "no-data", "do": ["notify"]}
    evaluator = Evaluator([*ROUTING, silence])
    (one,) = evaluator.tick(0.0, fail("code"))
    for now in (10.0, 600.0):
        (same,) = evaluator.tick(now, verdict_of("NO_DATA"))
        assert (same.id, same.on, same.state) == (one.id, "fail", IncidentState.CONTAINED)
    assert {alert.on for alert in evaluator.policy.firing} == {"fail"}
    evaluator.table = resume(evaluator.table, evaluator.contract.name, None, "ada", "patched", 610.0)
    assert {one.on for one in evaluator.tick(620.0, verdict_of("NO_DATA"))} == {"fail", "no-data"}
    assert {alert.on for alert in evaluator.policy.firing} == {"fail", "no-data"}


def test_the_id_stays_while_an_incident_lasts_and_a_second_breach_has_another() -> None:
    """More cells, fewer cells and being read back change nothing; a recovery in between separates two."""
    evaluator = Evaluator(QUIET)
    ids = []
    for at, verdicts in (
        (10.0, [fail("code")]),
        (20.0, [fail("code"), fail("prose")]),
        (30.0, [verdict_of("PASS", slice="code"), fail("prose")]),
        (40.0, [verdict_of("PASS", slice="code"), verdict_of("PASS", slice="prose")]),
        (50.0, [fail("code")]),
    ):
        (one,) = evaluator.tick(at, *verdicts)
        ids.append(one.id)
        if at == 30.0:
            assert one.headline == "token-tv is above its limit on prose"
            assert {(cell.slice, cell.since, cell.until) for cell in one.cells} == {
                ("code", 10.0, 30.0), ("prose", 20.0, None),
            }  # fmt: skip
        if at == 40.0:
            assert (one.state, one.resolved_at) == (IncidentState.RESOLVED, 40.0)
            assert one.headline == "token-tv was above its limit on code and prose"
    assert ids[0] == ids[1] == ids[2] == ids[3] != ids[4]


def test_an_earlier_onset_moves_the_start_and_not_the_id() -> None:
    """An alert that waited knows of an earlier breach than the cell that is broken now."""
    evaluator = Evaluator(QUIET)
    (first,) = evaluator.tick(10.0, fail("code"))
    alert = replace(_alert(fail("prose")), since=3.0)
    (after,) = follow(evaluator.contract.name, (first,), [fail("code"), fail("prose")], [alert], DecisionTable(), 20.0)
    assert (after.id, after.since) == (first.id, 3.0)


def edges_of(verdict: Verdict) -> tuple[Transition, ...]:
    """What fires because of a verdict."""
    contract = contract_with(ROUTING)
    return advance(contract, PolicyState(contract.name), [verdict], {}, 15.0)[1]


def _alert(verdict: Verdict) -> Any:
    contract = contract_with([{"on": "fail", "do": ["notify"]}])
    state, _ = advance(contract, PolicyState(contract.name), [verdict], {}, 15.0)
    return state.alerts[0]


def test_an_incident_lasts_as_long_as_its_alerts() -> None:
    """Doubt is no proof that a breach is over: the alert holds, and so does the incident."""
    evaluator = Evaluator([{"on": "fail", "clear_for": "1m", "do": ["notify"]}])
    evaluator.tick(0.0, fail("code"))
    states = [
        evaluator.tick(at, verdict_of(status))[0].state
        for at, status in ((30.0, "INCONCLUSIVE"), (60.0, "PASS"), (90.0, "PASS"), (120.0, "PASS"))
    ]
    assert states == [IncidentState.BROKEN] * 3 + [IncidentState.RESOLVED]


def test_growth_is_told_by_the_minute_with_all_traffic_counted() -> None:
    """What broke and recovered in between counts for what it was."""
    evaluator = Evaluator(QUIET)
    evaluator.tick(0.0, fail("code"))
    evaluator.tick(30.0, fail("code"), fail("prose"), fail("all"))
    (one,) = evaluator.tick(300.0, fail("all"), *(fail(f"s{index}") for index in range(43)))
    assert one.growth == ((30.0, 3), (300.0, 46))
    assert one.growth_text == "3 slices at 00:00, 46 at 00:05 UTC"
    assert evaluator.tick(301.0, fail("all"))[0].growth == one.growth


def test_a_routed_incident_is_contained_until_a_person_gives_the_traffic_back() -> None:
    """While the kernel is broken and afterwards; without routes it is over when it holds."""
    evaluator = Evaluator(ROUTING)
    (one,) = evaluator.tick(0.0, fail("code"))
    assert (one.state, one.contained_at) == (IncidentState.CONTAINED, 0.0)
    (one,) = evaluator.tick(60.0, verdict_of("PASS"))
    assert (one.state, one.contained_at, one.headline) == (
        IncidentState.CONTAINED, 0.0, "token-tv was above its limit on code",
    )  # fmt: skip
    evaluator.table = resume(evaluator.table, evaluator.contract.name, None, "ada", "patched", 70.0)
    (one,) = evaluator.tick(90.0, verdict_of("PASS"))
    assert one.state is IncidentState.RESOLVED


def test_pins_decide_who_meets_a_broken_kernel_before_routes_do() -> None:
    """A slice pinned to the broken kernel is not contained, one pinned away from it is."""
    for ladder, kernel, expected in (
        (ROUTING, "inference-kernel", IncidentState.BROKEN),
        (QUIET, "train-kernel", IncidentState.CONTAINED),
        (QUIET, "inference-kernel", IncidentState.BROKEN),
    ):
        evaluator = Evaluator(ladder)
        evaluator.tick(0.0, fail("code"))
        wanted = Pin(evaluator.contract.name, "all", kernel, "ada", "planned", 5.0)
        evaluator.table = pin(evaluator.table, wanted)
        (one,) = evaluator.tick(10.0, fail("code"))
        assert one.state is expected


def test_one_slice_that_users_reach_keeps_an_incident_broken() -> None:
    """A route for another slice contains nothing of it."""
    evaluator = Evaluator(ROUTING)
    evaluator.tick(0.0, fail("code"))
    evaluator.table = replace(evaluator.table, routes=tuple(replace(one, slice="x") for one in evaluator.table.routes))
    (one,) = evaluator.tick(10.0, fail("code"))
    assert one.state is IncidentState.BROKEN


def test_what_was_done_says_whether_it_holds() -> None:
    """A route that was lifted is no longer in force; a person's word is part of the story, on its own slices only."""
    evaluator = Evaluator(ROUTING)
    (one,) = evaluator.tick(10.0, fail("code"))
    held = actions_taken(one, evaluator.table, {})
    assert [(action.kind, action.in_force, action.text) for action in held] == [
        ("halt", True, "trainers told to halt"),
        ("route", True, "code routed to the training kernel"),
    ]
    message = IncidentMessage("pager", NoticeReason.FIRING, one, edges_of(fail("code")), 1)
    (one,) = with_told([one], [message], 12.0)
    assert "told pager by webhook" in {action.text for action in actions_taken(one, evaluator.table, {})}
    late = actions_taken(one, DecisionTable(), {"pager": 9.0})
    assert {(action.kind, action.in_force) for action in late} >= {("route", False), ("halt", False)}
    assert "pager is still to be told: its webhook waits" in {action.text for action in late}
    for slice, heard in (("code", True), (None, True), ("all", True), ("prose", False)):
        (after,) = with_word([one], "resumed", {"slice": slice, "message": "ada resumed"}, 20.0)
        assert [word.text for word in after.words] == ["ada resumed"] * heard


def test_an_action_is_done_once_however_many_slices_it_is_about() -> None:
    """Its time is the first, its slices are all."""
    evaluator = Evaluator(ROUTING)
    evaluator.tick(10.0, fail("code"))
    (one,) = evaluator.tick(20.0, fail("code"), fail("prose"))
    assert [(action.kind, action.at, action.slices) for action in one.actions] == [
        ("route", 10.0, ("code", "prose")), ("halt", 10.0, ("code", "prose")),
    ]  # fmt: skip


def test_a_dry_run_says_what_it_would_do() -> None:
    """Nothing of it is said to have been done, and nothing is contained."""
    evaluator = Evaluator(ROUTING, dry_run=True)
    (one,) = evaluator.tick(10.0, fail("code"), fail("prose"))
    assert one.state is IncidentState.BROKEN
    assert [action.text for action in actions_taken(one, evaluator.table, {})] == [
        "dry run: it would halt", "dry run: it would route train-kernel", "dry run: it would webhook pager",
    ]  # fmt: skip


def test_nobody_is_told_of_what_is_silenced() -> None:
    """The route of a silenced alert is an action, its announcement is not."""
    evaluator = Evaluator([{"on": "fail", "do": [{"route": "train-kernel"}, "notify", "halt"]}])
    evaluator.people = People((Silence("1", evaluator.contract.name, None, None, "ada", "planned", 0.0, 99.0),))
    (one,) = evaluator.tick(10.0, fail("code"))
    assert [action.kind for action in one.actions] == ["route", "halt"]


def test_failed_input_checks_and_long_doubt_are_incidents_where_an_alert_fires_on_them() -> None:
    """With headlines of their own."""
    ladder = [{"on": "invalid-input", "do": ["notify"]}, {"on": "inconclusive", "do": ["notify"]}]
    found = Evaluator(ladder).tick(10.0, verdict_of("INCONCLUSIVE"), invalid={"nan": 2})
    assert [(one.on, one.headline) for one in found] == [
        ("invalid-input", "Sequences fail the input checks"), ("inconclusive", "token-tv is undecided on code"),
    ]  # fmt: skip
