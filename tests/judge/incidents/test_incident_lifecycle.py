"""Incidents: what belongs together, where it stands, how it grew, and what was done about it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from kc_otel.judge.decisions import Canary, DecisionTable, Pin, changed, kept_since, lift, pin
from kc_otel.judge.escalation.alerts import Alert, People, Silence
from kc_otel.judge.escalation.tick import TrafficSeen
from kc_otel.judge.escalation.webhook_body import summary
from kc_otel.judge.incidents.incident import Incident, IncidentAction, IncidentState, actions_taken, lifting_commands
from kc_otel.judge.incidents.incident_lifecycle import by_urgency, follow, with_actions, with_word
from kc_otel.judge.verdict import Status, Verdict
from tests.judge.escalation.conftest import contract_with
from tests.tools.escalations import Escalating, advanced, tick_of
from tests.tools.verdicts import verdict_of

UNTAKEN = "no router that sent requests to this kernel has kept any away from it yet"
QUIET: list[dict[str, Any]] = [{"on": "fail", "for": "1h", "do": ["notify"]}]
ROUTING: list[dict[str, Any]] = [{"on": "fail", "do": [{"route": "train-kernel"}, {"webhook": "pager"}, "halt"]}]


class Evaluator(Escalating):
    """The incidents of one contract."""

    def __init__(self, ladder: list[dict[str, Any]], *, dry_run: bool = False) -> None:
        super().__init__(contract_with(ladder), dry_run=dry_run)
        self.traffic = TrafficSeen(kept=lambda *_: math.inf)  # somebody routes, and asks all the time

    def tick(self, now: float, *verdicts: Verdict, invalid: dict[str, int] | None = None) -> tuple[Incident, ...]:
        """The incidents after an evaluation."""
        self.options["traffic"] = self.traffic
        step = self.evaluate(now, verdicts, invalid)
        return (*self.lasting, *step.resolved)


def fail(slice: str, **more: Any) -> Verdict:
    return verdict_of("FAIL", slice=slice, **more)


def test_one_kernel_version_that_breaks_two_clauses_on_two_slices_is_one_incident():
    evaluator = Evaluator(QUIET)
    evaluator.tick(10.0, fail("code"))
    (incident,) = evaluator.tick(11.0, fail("code"), fail("code", clause="tail", lower=0.005), fail("all", lower=0.05))
    assert incident.headline == "token-tv and tail are above their limits on code and all traffic"
    assert (incident.since, incident.state, incident.status) == (10.0, IncidentState.BROKEN, "FAIL")
    assert incident.extents[0] == (
        "token-tv",
        "0.0123 on all traffic, at least 12 times the limit of 0.004 (confidence interval 0.05 to 0.014)",
    )
    assert [clause for clause, _ in incident.extents] == ["token-tv", "tail"]


@pytest.mark.parametrize(("lower", "said"), [(0.01542, "3.8"), (0.016, "4"), (0.3999, "99"), (0.0041, "")])
def test_how_many_times_the_limit_it_is_at_least_is_rounded_down(lower, said):
    (incident,) = Evaluator(QUIET).tick(10.0, fail("code", lower=lower))
    times = f", at least {said} times the limit of " if said else " on code against a limit of "
    assert times in incident.extents[0][1]


def test_other_kernels_and_silence_are_incidents_of_their_own():
    verdicts = (
        verdict_of("NO_DATA", inference="c"), fail("code", inference="d", lower=0.005), fail("code", inference="b"),
    )  # fmt: skip
    found = Evaluator(QUIET).tick(10.0, *verdicts)
    assert [(incident.status, incident.kernel_inference) for incident in found] == [
        ("FAIL", "b"),
        ("FAIL", "d"),
        ("NO_DATA", "c"),
    ]
    assert found[2].headline == "No data for token-tv on code"
    assert found[2].extents == (("token-tv", "NO_DATA because of the numbers"),)
    assert len({incident.id for incident in found}) == 3


@pytest.mark.parametrize("status", ["PASS", "INCONCLUSIVE"])
def test_what_is_not_broken_is_no_incident(status):
    assert Evaluator(QUIET).tick(10.0, verdict_of(status), verdict_of("NO_DATA", inference="")) == ()


def test_a_slice_that_a_new_version_has_not_met_yet_is_not_broken():
    """The first export of a version is about some slices; the others are silent news only once they were heard."""
    evaluator = Evaluator(QUIET)
    new = verdict_of("NO_DATA", observed=False)
    assert evaluator.tick(0.0, verdict_of("PASS", slice="prose"), new) == ()
    (incident,) = evaluator.tick(1.0, verdict_of("PASS", slice="prose"), replace(new, observed=True))
    (same,) = evaluator.tick(2.0, verdict_of("PASS", slice="prose"), new)  # forgotten by then, and silent still
    assert (same.id, same.state) == (incident.id, IncidentState.BROKEN)


def test_a_slice_that_is_routed_away_and_falls_silent_is_contained_and_no_second_incident():
    """That nothing reaches the kernel is what the route is for; nobody is alerted, and a resumed slice counts again."""
    silence = {"on": "no-data", "do": ["notify"]}
    evaluator = Evaluator([*ROUTING, silence])
    (incident,) = evaluator.tick(0.0, fail("code"))
    for now in (61.0, 600.0):
        (same,) = evaluator.tick(now, verdict_of("NO_DATA"))
        assert (same.id, same.on, same.state) == (incident.id, "fail", IncidentState.CONTAINED)
    assert {alert.on for alert in evaluator.firing} == {"fail"}
    evaluator.table = lift(evaluator.table, "route", evaluator.contract.name, None, 610.0)
    assert {entry.on for entry in evaluator.tick(620.0, verdict_of("NO_DATA"))} == {"fail", "no-data"}
    assert {alert.on for alert in evaluator.firing} == {"fail", "no-data"}


def test_the_id_stays_while_an_incident_lasts_and_a_second_breach_has_another():
    evaluator = Evaluator(QUIET)
    ids = []
    for at, verdicts in (
        (10.0, [fail("code")]),
        (20.0, [fail("code"), fail("prose")]),
        (30.0, [verdict_of("PASS", slice="code"), fail("prose")]),
        (40.0, [verdict_of("PASS", slice="code"), verdict_of("PASS", slice="prose")]),
        (50.0, [fail("code")]),
    ):
        (incident,) = evaluator.tick(at, *verdicts)
        ids.append(incident.id)
        if at == 30.0:
            assert incident.headline == "token-tv is above its limit on prose"
            assert {(cell.slice, cell.since, cell.until) for cell in incident.cells} == {
                ("code", 10.0, 30.0), ("prose", 20.0, None),
            }  # fmt: skip
        if at == 40.0:
            assert (incident.state, incident.resolved_at) == (IncidentState.RESOLVED, 40.0)
            assert incident.headline == "token-tv was above its limit on code and prose"
    assert ids[0] == ids[1] == ids[2] == ids[3] != ids[4]


def test_an_earlier_onset_moves_the_start_and_not_the_id():
    """An alert that waited knows of an earlier breach than the cell that is broken now."""
    evaluator = Evaluator(QUIET)
    (first,) = evaluator.tick(10.0, fail("code"))
    alert = replace(fired(fail("prose")), since=3.0)
    (after,) = follow(tick_of(evaluator.contract, [fail("code"), fail("prose")], 20.0), (first,), [alert])
    assert (after.id, after.since) == (first.id, 3.0)


def fired(verdict: Verdict) -> Alert:
    contract = contract_with(ROUTING)
    return advanced(contract, [verdict], 15.0)[1][0]


def test_what_only_the_alert_holds_is_told_as_it_was():
    evaluator = Evaluator([{"on": "fail", "clear_for": "5m", "do": ["notify"]}])
    (incident,) = evaluator.tick(0.0, fail("code"))
    assert (incident.state_text, incident.headline) == ("Broken", "token-tv is above its limit on code")
    (incident,) = evaluator.tick(120.0, verdict_of("PASS"))
    assert incident.state_text == "Was broken; its alert still fires"
    assert incident.headline == "token-tv was above its limit on code"
    assert incident.extents[0][1].startswith(
        "0.0123 on code at 1970-01-01 00:00 UTC, at least 2.5 times the limit of 0.004"
    )
    (incident,) = evaluator.tick(130.0, verdict_of("PASS"), fail("prose"))
    assert incident.headline == "token-tv is above its limit on prose"
    (incident,) = evaluator.tick(140.0, fail("code"), fail("prose"))
    assert (incident.state_text, incident.headline) == ("Broken", "token-tv is above its limit on code and prose")
    passes = [verdict_of("PASS"), verdict_of("PASS", slice="prose")]
    states = [evaluator.tick(now, *passes)[0].state for now in (150.0, 440.0, 450.0)]
    assert states == [IncidentState.BROKEN, IncidentState.BROKEN, IncidentState.RESOLVED], "once `clear_for` is over"


@pytest.mark.parametrize("slice", ["code", "all"])
def test_what_only_an_alert_holds_and_nothing_refutes_is_named_beside_what_is_broken(slice):
    """A slice that is kept away from the kernel, say, or all traffic, beside another that is above its limit."""
    evaluator = Evaluator([{"on": "fail", "clear_for": "5m", "do": ["notify"]}])
    evaluator.tick(0.0, fail(slice))
    found = evaluator.tick(60.0, verdict_of("NO_DATA", slice=slice), fail("prose"))
    where = "all traffic" if slice == "all" else slice
    headline = f"token-tv is above its limit on prose; unproven on {where}"
    assert [incident.headline for incident in found if incident.on == "fail"] == [headline]


def test_what_came_since_and_refutes_nothing_is_not_told_as_a_recovery():
    for since in ("INCONCLUSIVE", "NO_DATA"):
        evaluator = Evaluator([{"on": "fail", "clear_for": "5m", "do": ["notify"]}])
        evaluator.tick(0.0, fail("code"))
        (incident,) = (found for found in evaluator.tick(120.0, verdict_of(since)) if found.on == "fail")
        assert incident.state_text == "Was broken; nothing has refuted it since"
        (incident,) = (
            found for found in evaluator.tick(130.0, verdict_of("PASS", inference="c" * 12)) if found.on == "fail"
        )
        assert incident.state_text == "Was broken; nothing has refuted it since", "its cells are gone"
        (incident,) = (found for found in evaluator.tick(140.0, verdict_of("PASS")) if found.on == "fail")
        assert incident.state_text == "Was broken; its alert still fires"


def test_a_breach_that_the_last_verdict_does_not_show_is_told_as_past_whatever_was_ordered():
    evaluator = Evaluator([{"on": "fail", "clear_for": "5m", "do": [{"route": "train-kernel"}]}])
    evaluator.traffic = TrafficSeen()
    evaluator.tick(10.0, fail("code"))
    (passes,) = evaluator.tick(20.0, verdict_of("PASS", slice="code"))
    order = f"routing to the training kernel was ordered at 1970-01-01 00:00 UTC, but {UNTAKEN}"
    assert passes.state_text == f"Was broken; its alert still fires; {order}"


@pytest.mark.parametrize("doubt", ["a recorder of it is dead", "its limit was raised"])
def test_a_pass_that_does_not_refute_the_breach_is_not_told_as_a_recovery(doubt):
    """As is said at the end, without proof of recovery or by a changed limit, it is said while the alert fires."""
    evaluator = Evaluator([{"on": "fail", "clear_for": "5m", "do": ["notify"]}])
    evaluator.tick(0.0, fail("code"))
    unheard = doubt == "a recorder of it is dead"
    evaluator.traffic = replace(evaluator.traffic, unheard=lambda cell: unheard and cell.slice == "code")
    passes = verdict_of("PASS") if unheard else verdict_of("PASS", limit=0.02, estimate=0.0123, upper=0.014)
    (incident,) = evaluator.tick(120.0, passes)
    assert incident.state_text == "Was broken; nothing has refuted it since"
    evaluator.traffic = replace(evaluator.traffic, unheard=lambda _: False)
    (incident,) = evaluator.tick(130.0, verdict_of("PASS", limit=passes.limit))
    assert incident.state_text == "Was broken; its alert still fires"


def test_what_went_away_without_proof_is_named_beside_what_is_broken_or_refuted():
    """In the headline, until verdicts refute it or a person closes it; where all of it went away, the state says so."""
    evaluator, prose = Evaluator(QUIET), verdict_of("PASS", slice="prose")
    evaluator.tick(0.0, fail("code"), fail("prose"), fail("prose", clause="tail", lower=0.005))
    (incident,) = evaluator.tick(60.0, fail("prose"), fail("prose", clause="tail", lower=0.005))
    said = "token-tv and tail are above their limits on prose; token-tv unproven on code"
    assert (incident.state_text, incident.headline) == ("Broken", said)
    (incident,) = evaluator.tick(120.0, fail("prose"))
    assert incident.headline == "token-tv is above its limit on prose; token-tv and tail unproven on code and prose"
    (incident,) = evaluator.tick(180.0, fail("prose"), verdict_of("PASS", slice="prose", clause="tail"))
    assert incident.headline == "token-tv is above its limit on prose; unproven on code"
    (incident,) = evaluator.tick(240.0, prose)
    assert incident.headline == "token-tv and tail were above their limits on code and prose; token-tv unproven on code"
    assert incident.state_text == "Went away without proof of recovery"
    (incident,) = evaluator.tick(300.0, fail("prose"), verdict_of("PASS"))
    assert incident.headline == "token-tv is above its limit on prose"
    evaluator = Evaluator(QUIET)
    evaluator.tick(0.0, fail("code"), fail("prose"))
    (incident,) = evaluator.tick(60.0, verdict_of("PASS", slice="other"))
    assert incident.headline == "token-tv was above its limit on code and prose"
    assert incident.state_text == "Went away without proof of recovery"


def test_a_slice_that_nobody_has_ever_reported_to_is_not_told_as_recovered():
    evaluator = Evaluator([{"on": "no-data", "for": "3m", "do": ["notify"]}])
    for now in (0.0, 180.0, 190.0):
        found = evaluator.tick(now, verdict_of("NO_DATA", observed=False), verdict_of("PASS", slice="prose"))
        assert [incident.headline for incident in found] == ["No data for token-tv on code"] * (now > 0.0)


UNHEARD = replace(verdict_of("NO_DATA"), cell=verdict_of("NO_DATA").cell._replace(kernel_train="", kernel_inference=""))
RUN_ENDED = verdict_of("NO_DATA", reason="the run ended: its last recorder shut down 70 s ago")
OVER = {"inconclusive": "Decided"}
FAILED = "1 sequence failed an input check within 5m and was not measured (1 nan_logprob). "


@pytest.mark.parametrize(
    ("on", "first", "invalid", "state", "present", "past", "extent"),
    [
        ("no-data", verdict_of("NO_DATA"), None, "No data", "No data for token-tv on code",
         "There were no data for token-tv on code", "NO_DATA because of the numbers"),
        ("no-data", RUN_ENDED, None, "Ended", "The run ended: no more data for token-tv on code",
         "There were no data for token-tv on code", "the run ended: its last recorder shut down 70 s ago"),
        ("no-data", UNHEARD, None, "Waiting for first data", "No kernel has reported token-tv on code yet",
         "No kernel had reported token-tv on code yet", "NO_DATA because of the numbers"),
        ("inconclusive", verdict_of("INCONCLUSIVE"), None, "Undecided", "token-tv is undecided on code",
         "token-tv was undecided on code", "0.004 on code against a limit of 0.004"),
        ("invalid-input", verdict_of("PASS"), {"nan_logprob": 1}, "Invalid input", "Sequences fail the input checks",
         "Sequences failed the input checks", FAILED),
    ],
)  # fmt: skip
def test_each_kind_of_incident_is_told_in_its_own_words_and_as_past_while_its_alert_holds(
    on, first, invalid, state, present, past, extent
):
    evaluator = Evaluator([{"on": on, "clear_for": "5m", "do": ["notify"]}])
    (incident,) = evaluator.tick(0.0, first, invalid=invalid)
    assert (incident.on, incident.state_text, incident.headline) == (on, state, present)
    assert incident.extents[0][1].startswith(extent)
    assert (incident.kernel_train, incident.kernel_inference) == first.cell.pair
    (incident,) = evaluator.tick(10.0, verdict_of("PASS"))
    assert incident.headline == past


@pytest.mark.parametrize(
    ("on", "first", "said"), [("inconclusive", "INCONCLUSIVE", "Decided"), ("fail", "FAIL", "Resolved")]
)
def test_what_a_fail_has_decided_is_not_called_resolved(on, first, said):
    (incident,) = Evaluator([{"on": on, "do": ["notify"]}]).tick(0.0, verdict_of(first))
    cells = tuple(replace(cell, until=1.0, refuted=True) for cell in incident.cells)
    assert replace(incident, cells=cells, state=IncidentState.RESOLVED).state_text == said


def test_what_a_fail_has_decided_is_over_though_that_orders_a_route():
    evaluator = Evaluator([{"on": "inconclusive", "do": ["notify"]}, {"on": "fail", "do": [{"route": "train-kernel"}]}])
    evaluator.tick(0.0, verdict_of("INCONCLUSIVE", slice="code"))
    found = {incident.on: incident.state_text for incident in evaluator.tick(10.0, fail("code"))}
    assert found["inconclusive"] == "Decided"


def test_what_is_told_of_silence_and_invalid_input_grows_with_it():
    evaluator = Evaluator([{"on": "invalid-input", "do": ["notify"]}])
    evaluator.tick(0.0, verdict_of("PASS"), invalid={"nan_logprob": 1})
    (incident,) = evaluator.tick(10.0, verdict_of("PASS"), invalid={"nan_logprob": 2, "token_mismatch": 9999})
    said = "10001 sequences failed an input check within 5m and were not measured (2 nan_logprob, 9999 token_mismatch)"
    assert incident.extents[0][1].startswith(said)
    (fewer,) = evaluator.tick(700.0, verdict_of("PASS"), invalid={"nan_logprob": 3})
    assert fewer.extents[0][1].startswith(
        "10,001 on all traffic at 1970-01-01 00:00 UTC; 3 sequences failed an input check within"
    )
    counts = {"code": 34.0, "prose": 30.0, "all": 64.0}
    cells = (
        replace(incident.cells[0], slice=name, estimate=count, peak=count, reason=f"{count:g}")
        for name, count in counts.items()
    )
    assert replace(incident, cells=tuple(cells)).extents == (("input", "64"),), "those of all slices"
    evaluator = Evaluator(QUIET)
    evaluator.tick(0.0, RUN_ENDED)
    (incident,) = evaluator.tick(10.0, RUN_ENDED, verdict_of("NO_DATA", slice="prose"))
    assert (incident.state_text, incident.headline) == ("No data", "No data for token-tv on code and prose")


def test_growth_is_told_by_the_minute_with_all_traffic_counted():
    evaluator = Evaluator(QUIET)
    evaluator.tick(0.0, fail("code"))
    evaluator.tick(30.0, fail("code"), fail("prose"), fail("all"))
    (incident,) = evaluator.tick(300.0, fail("all"), *(fail(f"s{index}") for index in range(43)))
    assert incident.growth == ((30.0, 3), (300.0, 46))
    assert incident.growth_text == "3 slices at 1970-01-01 00:00, 46 at 1970-01-01 00:05 UTC"
    assert evaluator.tick(301.0, fail("all"))[0].growth == incident.growth


def test_a_routed_incident_is_contained_until_a_person_gives_the_traffic_back():
    evaluator = Evaluator(ROUTING)
    evaluator.tick(0.0, fail("code"))
    (incident,) = evaluator.tick(61.0, fail("code"))
    assert (incident.state, incident.contained_at) == (IncidentState.CONTAINED, 61.0)
    (incident,) = evaluator.tick(65.0, verdict_of("PASS"))
    assert (incident.state, incident.contained_at, incident.headline) == (
        IncidentState.CONTAINED, 61.0, "token-tv was above its limit on code",
    )  # fmt: skip
    evaluator.table = lift(evaluator.table, "route", evaluator.contract.name, None, 70.0)
    (incident,) = evaluator.tick(90.0, verdict_of("PASS"))
    assert incident.state is IncidentState.RESOLVED


def known(**changes: Any) -> tuple[Incident, ...]:
    """An incident of version b, of which this is remembered."""
    return (replace(Evaluator(QUIET).tick(0.0, fail("code", inference="b"))[0], **changes),)


def test_a_breach_of_a_run_that_ended_comes_after_one_that_users_meet():
    (broken,) = known()
    (worse,) = known(cells=(replace(broken.cells[0], lower=9.0, held=True),), run_ended=True)
    assert (worse.state, worse.state_text) == (IncidentState.BROKEN, "Ended")
    assert sorted((worse, broken), key=by_urgency) == [broken, worse]
    left = replace(worse, cells=(replace(worse.cells[0], until=1.0, refuted=True),), run_ended=False, ordered_at=0.0)
    assert left.only_route_left
    assert sorted((left, broken), key=by_urgency) == [broken, left]


def test_invalid_input_beside_a_breach_that_is_routed_is_not_called_broken():
    (incident,) = Evaluator([{"on": "invalid-input", "do": ["notify"]}]).tick(
        0.0, verdict_of("PASS"), invalid={"nan_logprob": 1}
    )
    said = replace(incident, ordered_at=0.0, unmet="").state_text
    assert said == "Invalid input; routing to the training kernel was ordered at 1970-01-01 00:00 UTC"


def ordered(evaluator: Evaluator, now: float, **seen: Any) -> Incident:
    """The incident after an evaluation that still sees a FAIL, with what is known of its traffic."""
    evaluator.traffic = TrafficSeen(**seen)
    (incident,) = evaluator.tick(now, fail("code"))
    return incident


def test_a_router_contains_by_this_contracts_slices_and_what_it_had_sent_to_the_kernel():
    """Neither one of another service, which has the table, nor while others have not applied it."""
    evaluator = Evaluator(ROUTING)
    incident = ordered(evaluator, 0.0)
    assert (incident.state, incident.ordered_at, incident.contained_at) == (IncidentState.BROKEN, 0.0, None)
    order = "Broken; routing to the training kernel was ordered at 1970-01-01 00:00 UTC, but"
    assert ordered(evaluator, 100.0).state_text == f"{order} {UNTAKEN}"
    other = "1 of 2 routers has not applied it: b"
    seen: dict[str, Any] = {"kept": lambda *_: 200.0}
    incident = ordered(evaluator, 300.0, **seen, behind=lambda *order: other * (order == ("code", 0.0, None)))
    assert incident.state_text == f"{order} {other}"
    (route, *_) = (action for action in actions_taken(incident, evaluator.table) if action.kind == "route")
    assert route.text == f"routing code to the training kernel was ordered, but {other}"
    assert not TrafficSeen(**seen, behind=lambda *_: other).excuses("code", "b", lambda *_: 0.0)
    assert ordered(evaluator, 310.0, **seen).state is IncidentState.CONTAINED
    incident = ordered(evaluator, 320.0, **seen, behind=lambda *_: other)
    assert incident.state is IncidentState.BROKEN, "also once a router has taken it"


def test_an_order_contains_a_heartbeat_after_a_router_took_it():
    """Until then the old version may still answer. A router that went keeps its table, and another may never ask."""
    evaluator = Evaluator(ROUTING)
    ordered(evaluator, 0.0)
    incident = ordered(evaluator, 520.0, kept=lambda *_: 500.0, measured=lambda *_: 495.0)
    assert incident.state_text.endswith("but this kernel has not been silent for a heartbeat since a router applied it")
    assert ordered(evaluator, 560.0, kept=lambda *_: 560.0, measured=lambda *_: 510.0).state is IncidentState.BROKEN
    incident = ordered(evaluator, 561.0, measured=lambda *_: 559.0)
    assert (incident.state, incident.contained_at, incident.ordered_at) == (IncidentState.CONTAINED, 561.0, 0.0)
    (route, *_) = (action for action in actions_taken(incident, evaluator.table) if action.kind == "route")
    assert route.text == "routing code to the training kernel was ordered"
    incident = ordered(evaluator, 700.0, kept=lambda *_: 700.0, measured=lambda *_: 561.0)
    assert incident.state_text.endswith("but this kernel was measured after a router applied it")
    (incident,) = evaluator.tick(710.0, verdict_of("PASS"))
    assert incident.state is IncidentState.BROKEN, "its route is in force and somebody does not obey it"
    assert incident.state_text.endswith("UTC remains, but this kernel was measured after a router applied it")


def test_an_order_contains_while_no_recorder_that_reported_the_kernel_is_lost():
    """Each has to report after the heartbeat: one that fell silent may have died beside a kernel that serves."""
    last = 60.0
    seen: dict[str, Any] = {"kept": lambda *_: 1.0, "lost": lambda _, since, until: since < last <= until}
    evaluator = Evaluator(ROUTING)
    ordered(evaluator, 0.0, **seen)
    incident = ordered(evaluator, 900.0, **seen)
    assert incident.state_text.endswith("but a recorder of this kernel has not been heard of since")
    assert not TrafficSeen(**seen, incidents=known(taken_at=70.0)).excuses("code", "b", lambda *_: 0.0)
    last = 62.0
    assert ordered(evaluator, 910.0, **seen).state is IncidentState.CONTAINED
    assert TrafficSeen(**seen, incidents=known(taken_at=1.0)).excuses("code", "b", lambda *_: 0.0)


def test_that_a_kernel_was_measured_in_spite_of_an_order_outlasts_the_windows():
    """They forget a recorder that died; only one that lives and measures nothing shows that the order is obeyed now."""
    last = 300.0
    kept: dict[str, Any] = {"kept": lambda *_: 500.0, "lost": lambda _, since, until: since < last <= until}
    seen: dict[str, Any] = {"measured": lambda *_: 300.0, "arrived": lambda *_: 300.0}
    evaluator = Evaluator(ROUTING)
    ordered(evaluator, 0.0, **kept)
    said = "but this kernel was measured after a router applied it"
    evaluator.traffic = TrafficSeen(**kept, **seen)
    for now in (310.0, 4000.0):
        (incident,) = evaluator.tick(now, fail("code"))
        assert (incident.state, incident.disobeyed_at) == (IncidentState.BROKEN, 300.0)
        assert incident.state_text.endswith(said)
        evaluator.traffic = TrafficSeen(**kept)
    for before in (), known(disobeyed_at=100.0):
        incidents = (*before, *known(disobeyed_at=300.0))
        assert not TrafficSeen(**kept, incidents=incidents).excuses("code", "b", lambda *_: 0.0)
    last = 3990.0
    assert ordered(evaluator, 4010.0, **kept).state is IncidentState.CONTAINED


def test_a_kernel_that_is_measured_all_the_time_is_at_no_moment_contained():
    """Neither between the end of the heartbeat and the next export, nor while the clock of its sender is behind."""
    for behind in (0.0, 200.0):
        evaluator = Evaluator(ROUTING)
        for now in (float(second) for second in range(0, 400, 5)):
            export = now - now % 10.0
            incident = ordered(
                evaluator, now, kept=lambda *_: 500.0,
                measured=lambda *_, at=export - behind: at, arrived=lambda *_, at=export: at,
            )  # fmt: skip
            assert incident.state is IncidentState.BROKEN, (behind, now)


def test_a_slice_that_breaks_later_is_contained_when_its_own_order_is():
    evaluator = Evaluator(ROUTING)
    evaluator.traffic = replace(evaluator.traffic, kept=lambda *_: 200.0)
    evaluator.tick(0.0, fail("code"))
    states = [evaluator.tick(100.0, fail("code"))[0].state_text]
    for now, kept in ((300.0, 200.0), (310.0, 305.0), (361.0, 305.0)):
        evaluator.traffic = replace(evaluator.traffic, kept=lambda *_, kept=kept: kept)
        states.append(evaluator.tick(now, fail("code"), fail("prose"))[0].state_text)
    order = "Broken; routing to the training kernel was ordered at 1970-01-01 00:00 UTC, but"
    recent = "this kernel has not been silent for a heartbeat since a router applied it"
    assert states == ["Contained", f"{order} {UNTAKEN}", f"{order} {recent}", "Contained"]


def test_a_route_that_no_router_applied_is_told_so_while_another_slice_without_an_order_is_broken_too():
    evaluator = Evaluator([ROUTING[0] | {"for": "1m"}])
    evaluator.traffic = TrafficSeen()
    for now, verdicts in ((0.0, [fail("code")]), (60.0, [fail("code")]), (61.0, [fail("code"), fail("all")])):
        (incident,) = evaluator.tick(now, *verdicts)
    assert (incident.state_text, incident.ordered_at) == ("Broken", None)
    (route, *_) = (action for action in actions_taken(incident, evaluator.table) if action.kind == "route")
    assert route.text == f"routing code to the training kernel was ordered, but {UNTAKEN}"


def test_a_later_pin_does_not_move_the_order_of_an_incident():
    evaluator = Evaluator(ROUTING)
    evaluator.traffic = TrafficSeen()
    evaluator.tick(0.0, fail("code"))
    evaluator.table = pin(evaluator.table, Pin(evaluator.contract.name, "code", "train-kernel", "ada", "sure", 300.0))
    (incident,) = evaluator.tick(310.0, fail("code"))
    assert (incident.state, incident.ordered_at) == (IncidentState.BROKEN, 0.0)
    seen = TrafficSeen(kept=lambda *_: 301.0, measured=lambda *_: 299.0)
    evaluator.traffic = seen
    assert [evaluator.tick(now, fail("code"))[0].state for now in (320.0, 362.0)] == [
        IncidentState.BROKEN, IncidentState.CONTAINED,
    ]  # fmt: skip


def test_what_is_contained_stays_so_when_it_is_pinned_to_the_training_kernel_also_after_a_restart():
    """A further order lets no request through; an evaluator that restarts has not heard of its routers yet."""
    evaluator = Evaluator(ROUTING)
    evaluator.traffic = seen = TrafficSeen(kept=lambda *_: 1.0, measured=lambda *_: 0.5, arrived=lambda *_: 0.5)
    evaluator.tick(0.0, fail("code"))
    assert evaluator.tick(62.0, fail("code"))[0].state is IncidentState.CONTAINED
    evaluator.table = pin(evaluator.table, Pin(evaluator.contract.name, "code", "train-kernel", "ada", "sure", 70.0))
    assert evaluator.tick(71.0, fail("code"))[0].state is IncidentState.CONTAINED
    evaluator.traffic = replace(seen, kept=lambda *_: -math.inf, listening=72.0)
    (incident,) = evaluator.tick(73.0, fail("code"))
    assert incident.state is IncidentState.CONTAINED
    restarted = replace(evaluator.traffic, incidents=(incident,))
    assert restarted.excuses("code", incident.kernel_inference, lambda where, _: {"code": 70.0}.get(where))
    evaluator.traffic = replace(seen, measured=lambda *_: 72.0, arrived=lambda *_: 72.0)
    assert evaluator.tick(75.0, fail("code"))[0].state is IncidentState.BROKEN


def test_an_order_for_a_slice_that_the_contract_has_no_more_contains_nothing():
    """No router knows which requests are on it, though it has the table: renaming a slice lifts its routes."""
    evaluator = Evaluator(ROUTING)
    evaluator.tick(0.0, fail("code"))
    (incident,) = evaluator.tick(61.0, fail("code"))
    assert incident.state is IncidentState.CONTAINED
    evaluator.traffic = TrafficSeen(behind=lambda *_: "it has no effect")
    (incident,) = evaluator.tick(70.0)
    assert incident.state is IncidentState.BROKEN
    assert incident.state_text.endswith("was ordered at 1970-01-01 00:00 UTC, but it has no effect")


def test_silence_is_not_explained_by_an_order_for_all_traffic_that_somebody_disobeys():
    """The slice without observations may be served as others are."""
    for newest, explained in (({}, True), ({"all": 100.0}, False)):
        seen = TrafficSeen(kept=lambda *_: 150.0, measured=lambda where, _, newest=newest: newest.get(where, -math.inf))
        assert seen.excuses("code", "b", lambda *_: 0.0) is explained


def test_a_later_order_for_all_traffic_that_nobody_took_yet_leaves_a_slices_silence_explained():
    seen = TrafficSeen(kept=lambda where, _: 15.0 if where == "code" else -math.inf)
    orders = {"code": 10.0, "all": 20.0, "": 20.0, "prose": 20.0}
    for slice, explained in (("code", True), ("prose", False), ("all", False)):
        assert seen.excuses(slice, "b", lambda where, _: orders[where]) is explained


def test_an_evaluator_that_has_just_begun_knows_what_was_contained():
    for taken_at, explained in ((1.0, True), (-1.0, False), (None, False)):
        assert TrafficSeen(incidents=known(taken_at=taken_at)).excuses("code", "b", lambda *_: 0.0) is explained


def test_silence_of_everybody_alerts_whatever_is_routed():
    evaluator = Evaluator([*ROUTING, {"on": "no-data", "do": ["notify"]}])
    evaluator.tick(0.0, fail("code"))
    assert {incident.on for incident in evaluator.tick(10.0, verdict_of("NO_DATA"))} == {"fail"}
    evaluator.traffic = replace(evaluator.traffic, silent=True)
    states = {incident.on: incident.state for incident in evaluator.tick(200.0, verdict_of("NO_DATA"))}
    assert states == {"fail": IncidentState.CONTAINED, "no-data": IncidentState.BROKEN}, "silence is never contained"
    assert {alert.on for alert in evaluator.firing} == {"fail", "no-data"}
    evaluator.traffic = replace(evaluator.traffic, silent=False)
    states = {incident.on: incident.state for incident in evaluator.tick(210.0, fail("code"))}
    assert states["no-data"] is IncidentState.RESOLVED, "the route is the other incident's"


def test_what_only_went_away_stays_until_it_is_known_how_it_ended():
    """For days: verdicts of its own cells, a rollback that is taken, a clean shutdown or a person end it."""
    other = verdict_of("PASS", inference="c" * 12)
    gone = Evaluator([{"on": "fail", "do": ["notify"]}])
    gone.tick(10.0, fail("code"), fail("all"))

    def said(kind: str, at: float) -> tuple[Incident, ...]:
        return with_word(gone.lasting, kind, {"message": "ada: it was killed"}, at)

    gone.lasting = said("closed", 5.0)
    gone.tick(60.0, other)
    (unproven,) = gone.tick(1e6, other, verdict_of("INCONCLUSIVE", slice="code"), verdict_of("PASS", slice="all"))
    assert (unproven.state, unproven.resolved_at) == (IncidentState.UNPROVEN, None), "closed before it went away"
    assert [cell.refuted for cell in unproven.cells] == [False, False], "all traffic is made of the slices"

    def after(*verdicts: Verdict, **changes: Any) -> tuple[Incident, ...]:
        evaluator = Evaluator([{"on": "fail", "do": ["notify"]}])
        evaluator.lasting = (replace(unproven, **changes.pop("incident", {})),)
        since = changes.pop("rolled_back", 100.0)
        share = Canary("policy-7b", unproven.kernel_inference, 0.0, "", since)
        evaluator.table = changed(evaluator.table, since, canaries=[share])
        evaluator.traffic = replace(evaluator.traffic, **changes)
        return evaluator.tick(1e6 + 60.0, *verdicts)

    for code in (verdict_of("PASS", slice="code"), verdict_of("INCONCLUSIVE", slice="code", ended=True)):
        (proven,) = after(other, code, verdict_of("PASS", slice="all"))
        assert (proven.state, proven.state_text) == (IncidentState.RESOLVED, "Resolved"), "each cell at its time"
    back = IncidentAction("roll-back", "v2 from canary", 100.0, ("all",))
    for known in (
        {"incident": {"actions": (back,)}},
        {"incident": {"words": said("closed", 1e6)[0].words}},
        {"ended": lambda train, inference: (train, inference) == (unproven.kernel_train, unproven.kernel_inference)},
    ):
        (closed,) = after(other, **known)
        text = "Ended" if "ended" in known else "Closed without proof of recovery"
        assert (closed.state, closed.state_text) == (IncidentState.RESOLVED, text)
    (untaken,) = after(other, incident={"actions": (back,)}, kept=lambda *_: 99.0)
    assert untaken.state is IncidentState.UNPROVEN, "nobody is known to carry the roll-back out"
    (serves,) = after(other, incident={"actions": (back, replace(back, kind="serves", target="", at=200.0))})
    assert serves.state is IncidentState.UNPROVEN
    (again,) = after(other, incident={"actions": (back,)}, rolled_back=150.0)
    assert again.state is IncidentState.UNPROVEN, "it was started again"
    (measured,) = after(other, incident={"actions": (back,)}, measured=lambda *_: 161.0)
    assert measured.state is IncidentState.UNPROVEN
    for kind in ("acknowledged", "resumed"):
        (still,) = after(other, incident={"words": said(kind, 1e6)[0].words})
        assert still.state is IncidentState.UNPROVEN, "that was said of something else"
    (again,) = after(other, fail("code"))
    assert (again.id, again.state) == (unproven.id, IncidentState.BROKEN)


def test_of_breaches_that_went_away_the_oldest_are_closed():
    evaluator = Evaluator(QUIET)
    evaluator.tick(0.0, *(fail("code", inference=f"{version:012d}") for version in range(50)))
    evaluator.tick(10.0, *(fail("code", inference=f"{version:012d}") for version in range(50, 101)))
    found = evaluator.tick(60.0, verdict_of("PASS", inference="c" * 12))
    over = [incident for incident in found if incident.state is IncidentState.RESOLVED]
    assert (len(found), len(over)) == (101, 1)
    assert over[0].since == 0.0


def test_no_kind_of_incident_is_resolved_by_silence():
    other = verdict_of("PASS", inference="c" * 12)
    for on, first, invalid, settled in (
        ("inconclusive", "INCONCLUSIVE", None, "PASS"),
        ("no-data", "NO_DATA", None, "INCONCLUSIVE"),
    ):
        for last, said in (
            (other, "Closed without proof of recovery"),
            (verdict_of(settled), OVER.get(on, "Resolved")),
        ):
            evaluator = Evaluator([{"on": on, "do": ["notify"]}])
            evaluator.tick(0.0, verdict_of(first), invalid=invalid)
            (incident,) = (found for found in evaluator.tick(60.0, last) if found.on == on)
            assert (incident.state, incident.state_text) == (IncidentState.RESOLVED, said), on


def test_the_wait_for_first_data_says_whether_they_came():
    ladder = [{"on": "no-data", "do": ["notify"]}]
    unheard = verdict_of("NO_DATA", observed=False)
    unheard = replace(unheard, cell=unheard.cell._replace(kernel_train="", kernel_inference=""))
    for last, said in (
        ([verdict_of("INCONCLUSIVE", slice=slice) for slice in ("all", "code")], "First data arrived"),
        ([verdict_of("INCONCLUSIVE", slice="all"), verdict_of("NO_DATA")], "Closed before all data arrived"),
        ([replace(verdict_of("NO_DATA"), status=Status.INVALID_INPUT)], "Closed before valid data arrived"),
        ([verdict_of("PASS", clause="other")], "Closed before valid data arrived"),
        ([], "Closed before valid data arrived"),
    ):
        evaluator = Evaluator(ladder)
        (waiting,) = evaluator.tick(0.0, unheard, replace(unheard, cell=unheard.cell._replace(slice="all")))
        (incident,) = (found for found in evaluator.tick(60.0, *last) if found.id == waiting.id)
        assert (waiting.state_text, incident.state_text) == ("Waiting for first data", said)
        assert incident.state is IncidentState.RESOLVED


def test_a_server_that_names_no_kernel_and_fell_silent_is_not_waited_for():
    """Its latencies were judged before, whatever else has never been reported."""
    evaluator = Evaluator([{"on": "no-data", "do": ["notify"]}])
    nameless = [verdict_of("NO_DATA", clause=name) for name in ("ttft", "tv")]
    nameless = [replace(row, cell=row.cell._replace(kernel_train="", kernel_inference="")) for row in nameless]
    silent = replace(nameless[0], reason="no report for 51s (heartbeat 12s): its exports do not arrive")
    (incident,) = evaluator.tick(0.0, silent, replace(nameless[1], observed=False))
    assert (incident.state_text, incident.headline.split(" on ")[0]) == ("No data", "No data for ttft and tv")
    passes = [replace(verdict_of("PASS", clause=row.cell.clause), cell=row.cell) for row in nameless]
    (incident,) = evaluator.tick(60.0, *passes)
    assert incident.state_text == "Resolved"


def test_what_was_done_says_whether_it_holds():
    evaluator = Evaluator(ROUTING)
    evaluator.tick(10.0, fail("code"))
    (incident,) = evaluator.tick(71.0, fail("code"))
    held = actions_taken(incident, evaluator.table)
    of_another = replace(evaluator.table, directives=[replace(own, version="c") for own in evaluator.table.directives])
    assert ("halt", False) in {(action.kind, action.in_force) for action in actions_taken(incident, of_another)}
    assert [(action.kind, action.in_force, action.text) for action in held] == [
        ("halt", True, "trainers asked to halt"),
        ("route", True, "routing code to the training kernel was ordered"),
        ("webhook", None, "notified pager by webhook"),
    ]
    late = actions_taken(incident, DecisionTable(), {"pager": (9.0, "1 message to pager waits")})
    assert {(action.kind, action.in_force) for action in late} >= {("route", False), ("halt", False)}
    assert [action.text for action in late if action.kind == "webhook"] == ["1 message to pager waits"]
    later = actions_taken(incident, evaluator.table, {"pager": (40.0, "9 messages to pager wait")})
    texts = [action.text for action in later if action.kind == "webhook"]
    assert texts == ["notified pager by webhook; 9 messages to pager wait"]
    for slice, heard in (("code", True), (None, True), ("all", True), ("prose", False)):
        (after,) = with_word([incident], "resumed", {"slice": slice, "message": "ada resumed"}, 20.0)
        assert [word.text for word in after.words] == ["ada resumed"] * heard


def test_an_action_is_done_once_however_many_slices_it_is_about_and_nobody_is_told_of_what_is_silenced():
    evaluator = Evaluator([{"on": "fail", "do": [{"route": "train-kernel"}, "notify", "halt"]}])
    evaluator.people = People((Silence("1", evaluator.contract.name, None, None, "ada", "planned", 0.0, 99.0),))
    evaluator.tick(10.0, fail("code"))
    (incident,) = evaluator.tick(20.0, fail("code"), fail("prose"))
    assert [(action.kind, action.at, action.slices) for action in incident.actions] == [
        ("route", 10.0, ("code",)), ("halt", 10.0, ("code", "prose")), ("route", 20.0, ("prose",)),
    ]  # fmt: skip


def test_a_route_that_is_ordered_anew_is_told_at_its_last_time_and_what_it_lacks_where_the_breach_is_shown():
    evaluator = Evaluator([{"on": "fail", "do": [{"route": "train-kernel"}]}])
    evaluator.traffic = TrafficSeen()
    evaluator.tick(10.0, fail("code"))
    (incident,) = evaluator.tick(20.0, fail("code"), fail("prose"))

    def told(incident: Incident) -> list[tuple[float, str]]:
        return [(done.at, done.text) for done in actions_taken(incident, evaluator.table) if done.kind == "route"]

    code, prose = (f"routing {slice} to the training kernel was ordered" for slice in ("code", "prose"))
    assert told(incident) == [(10.0, f"{code}, but {UNTAKEN}"), (20.0, f"{prose}, but {UNTAKEN}")]
    contained = replace(incident, cells=tuple(replace(cell, held=cell.slice == "code") for cell in incident.cells))
    assert told(contained) == [(10.0, code), (20.0, f"{prose}, but {UNTAKEN}")]
    again = [replace(fired(fail("code")), at=30.0)]
    (same,) = with_actions([contained], again, People(), evaluator.table, dry_run=False)
    assert told(same) == told(contained)
    evaluator.table = changed(
        evaluator.table,
        30.0,
        routes=[replace(route, since=30.0) for route in evaluator.table.routes if route.slice == "code"],
    )
    (anew,) = with_actions([contained], again, People(), evaluator.table, dry_run=False)
    assert [at for at, _ in told(anew)] == [20.0, 30.0]


def test_a_dry_run_says_what_it_would_do():
    evaluator = Evaluator(ROUTING, dry_run=True)
    (incident,) = evaluator.tick(10.0, fail("code"), fail("prose"))
    assert incident.state is IncidentState.BROKEN
    assert [action.text for action in actions_taken(incident, evaluator.table)] == [
        "dry run: it would halt", "dry run: it would route train-kernel", "dry run: it would webhook pager",
    ]  # fmt: skip


def test_invalid_input_of_a_recorder_that_is_lost_is_not_called_resolved():
    for unheard, said in ((True, "Went away without proof of recovery"), (False, "Resolved")):
        evaluator = Evaluator([{"on": "invalid-input", "do": ["notify"]}])
        evaluator.tick(0.0, verdict_of("PASS"), invalid={"nan": 2})
        evaluator.traffic = TrafficSeen(unheard=lambda _, unheard=unheard: unheard)  # type: ignore[misc]
        found = [incident for now in (60.0, 400.0) for incident in evaluator.tick(now, verdict_of("PASS"))]
        assert found[-1].state_text == said


def test_an_incident_of_invalid_input_ends_with_valid_input_whatever_was_routed():
    evaluator = Evaluator([*ROUTING, {"on": "invalid-input", "do": ["notify"]}])
    evaluator.tick(0.0, fail("code"))
    evaluator.tick(10.0, fail("code"), invalid={"nan_logprob": 2})
    states = {incident.on: incident.state for incident in evaluator.tick(20.0, fail("code"))}
    assert states["invalid-input"] is IncidentState.RESOLVED
    assert states["fail"] is not IncidentState.RESOLVED


def test_a_breach_is_told_as_it_was_and_then_as_it_is():
    evaluator = Evaluator(QUIET)
    evaluator.tick(60.0, fail("code", estimate=0.0374, lower=0.03, at=60.0))
    (incident,) = evaluator.tick(140.0, fail("code", estimate=0.00406, lower=0.0041, upper=0.006, at=140.0))
    ((_, said),) = incident.extents
    assert said == (
        "0.0374 on code at 1970-01-01 00:01 UTC against a limit of 0.004; 0.00406 in the window "
        "(confidence interval 0.0041 to 0.006)"
    )
    (incident,) = evaluator.tick(150.0, fail("code", estimate=0.05, lower=0.04, at=150.0))
    assert incident.extents[0][1].startswith("0.05 on code, at least 10 times the limit of 0.004")


def test_a_breach_that_a_changed_limit_ends_is_not_called_resolved():
    routed = Evaluator([{"on": "fail", "do": [{"route": "train-kernel"}]}])
    routed.tick(0.0, fail("code"))
    (incident,) = routed.tick(60.0, replace(verdict_of("PASS", slice="code"), limit=0.5, upper=0.3))
    remains = "No longer measured as broken: it was closed by a changed limit, and the route ordered at "
    assert incident.state_text.startswith(remains)
    ladder = [{"on": "fail", "do": ["notify"]}]
    for upper, state, said in ((0.3, "Closed by a changed limit", "is closed"), (0.001, "Resolved", "is resolved")):
        evaluator = Evaluator(ladder)
        evaluator.tick(0.0, fail("code"))
        passes = replace(verdict_of("PASS", slice="code"), limit=0.5, upper=upper)
        (incident,) = evaluator.tick(60.0, passes)
        assert (incident.state, incident.state_text) == (IncidentState.RESOLVED, state)
        end = fired(fail("code")).resolved(60.0, passes)
        assert said in summary(end, {}, incident)
        changed = "its limit was changed from 0.004 to 0.5" in summary(end, {}, incident)
        assert changed == (upper == 0.3)
        ((_, extent),) = incident.extents
        assert ("the limit was then changed to 0.5" in extent) == changed


def test_data_of_another_clause_of_the_same_name_are_not_told_as_those_that_were_missing():
    for on, first in (("no-data", "NO_DATA"), ("inconclusive", "INCONCLUSIVE")):
        contract, another = (
            contract_with(
                [{"on": on, "do": ["notify"]}], statistical=[{"id": "token-tv", "metric": name, "limit": 0.004}]
            )
            for name in ("tv_token", "k3")
        )
        was, now = verdict_of(first), verdict_of("PASS")
        state, (fired,) = advanced(contract, [was], 0.0)
        (begun,) = follow(tick_of(contract, [was], 0.0), (), state.firing)
        state, (ended,) = advanced(contract, [now], 60.0, state)
        (over,) = follow(tick_of(another, [now], 60.0), [begun], state.firing)
        assert (fired.on, over.state_text) == (on, "Closed without proof of recovery")
        assert "is no longer asked for" in summary(ended, {}, over)
        (same,) = follow(tick_of(contract, [now], 60.0), [begun], ())
        assert same.state_text == OVER.get(on, "Resolved")


@pytest.mark.parametrize(("upper", "said"), [(0.3, "Closed by a changed limit"), (0.001, "Resolved")])
def test_a_breach_of_two_limits_is_resolved_below_the_stricter_one(upper, said):
    evaluator = Evaluator([{"on": "fail", "do": ["notify"]}])
    evaluator.tick(0.0, fail("code", estimate=0.9, lower=0.8))
    (incident,) = evaluator.tick(30.0, fail("code", limit=0.5, estimate=0.9, lower=0.8))
    assert incident.extents[0][1].endswith("; a limit of 0.004 was broken before it was changed")
    passes = replace(verdict_of("PASS", slice="code"), limit=0.5, upper=upper)
    (incident,) = evaluator.tick(60.0, passes)
    assert (incident.state, incident.state_text) == (IncidentState.RESOLVED, said)
    end = fired(fail("code")).resolved(60.0, passes)
    assert ("its limit was changed from 0.004 to 0.5" in summary(end, {}, incident)) == (upper == 0.3)


def test_a_limit_that_was_kept_before_a_second_breach_does_not_count_for_it():
    """A verdict refuted the breach of it while another cell was broken."""
    evaluator = Evaluator([{"on": "fail", "do": ["notify"]}])
    evaluator.tick(0.0, fail("code"), fail("prose"))
    evaluator.tick(30.0, replace(verdict_of("PASS", slice="code"), upper=0.001), fail("prose"))
    evaluator.tick(60.0, fail("code", limit=0.5, estimate=0.9, lower=0.8), fail("prose"))
    passes = replace(verdict_of("PASS", slice="code"), limit=0.5, upper=0.3)
    (incident,) = evaluator.tick(90.0, passes, verdict_of("PASS", slice="prose"))
    assert incident.state_text == "Resolved"


@pytest.mark.parametrize(
    ("ladder", "slice", "kernel", "meets", "said"),
    [
        (ROUTING, "all", "inference-kernel", (), "the pin of all traffic to the inference kernel by ada overrides it"),
        (ROUTING, "code", "inference-kernel", (), "the pin of code to the inference kernel by ada overrides it"),
        (ROUTING, "long", "inference-kernel", ("code",),
         "the pin of long to the inference kernel by ada overrides it in part"),
        (ROUTING, "long", "inference-kernel", (), None),
        (QUIET, "all", "train-kernel", (), None),
        (QUIET, "all", "inference-kernel", (), ""),
    ],
)  # fmt: skip
def test_pins_decide_who_meets_a_broken_kernel_before_routes_do(ladder, slice, kernel, meets, said):
    """Also a pin of another slice that shares requests; and what is over is told beside the route below a pin."""
    evaluator = Evaluator(ladder)
    evaluator.tick(0.0, fail("code"))
    evaluator.table = pin(evaluator.table, Pin("policy-7b", slice, kernel, "ada", "planned", 5.0, meets=meets))
    evaluator.tick(10.0, fail("code"))
    (incident,) = evaluator.tick(71.0, fail("code"))
    assert incident.state is (IncidentState.CONTAINED if said is None else IncidentState.BROKEN)
    if said:
        order = "routing to the training kernel was ordered at 1970-01-01 00:00 UTC"
        assert incident.state_text == f"Broken; {order}, but {said}"
        commands = lifting_commands(incident, evaluator.table)
        assert any(f"unpin policy-7b --slice {slice}" in command for command in commands)
        (gone,) = evaluator.tick(80.0, verdict_of("PASS", inference="c" * 12))
        assert (gone.broken, gone.state_text) == ((), f"No longer measured as broken; {order}, but {said}")
        (over,) = evaluator.tick(90.0, verdict_of("PASS"))
        over_text = (
            "No longer measured as broken: the breach is over, and the route ordered at 1970-01-01 00:00 UTC remains"
        )
        assert (over.state, over.state_text) == (IncidentState.BROKEN, f"{over_text}, but {said}")
        evaluator.table = lift(evaluator.table, "pin", "policy-7b", None, 100.0)
        assert [route.since for route in evaluator.table.routes] == [100.0]


def test_the_end_of_invalid_input_advises_to_lift_no_route_of_a_breach_beside_it():
    evaluator = Evaluator([*ROUTING, {"on": "invalid-input", "do": ["notify"]}])
    found = evaluator.tick(0.0, fail("all"), invalid={"nan_logprob": 3})
    assert {incident.on for incident in found} == {"fail", "invalid-input"}
    for incident in (*found, *evaluator.tick(10.0, fail("all"), verdict_of("PASS", slice="code"))):
        resume = ["kc-otel route resume policy-7b --slice all --why '...'"] * (incident.on == "fail")
        assert [*lifting_commands(incident, evaluator.table)] == resume


@pytest.mark.parametrize(("listening", "since"), [(-math.inf, 7200.0), (7000.0, 10.0)])
def test_an_outage_of_the_evaluator_is_no_pause_of_a_breach(listening, since):
    """It heard of no recovery; what it heard itself for a window without a sign of the breach is one."""
    evaluator = Evaluator([{"on": "fail", "clear_for": "5m", "do": ["notify"]}])
    evaluator.tick(10.0, fail("code", at=10.0))
    evaluator.traffic = replace(evaluator.traffic, listening=listening)
    evaluator.tick(7000.0, verdict_of("NO_DATA"))
    (incident,) = (found for found in evaluator.tick(7200.0, fail("code")) if found.on == "fail")
    assert (incident.since, incident.lasting_since(300.0)) == (10.0, since)


def test_all_traffic_is_not_contained_while_a_slice_of_it_is_pinned_to_the_kernel():
    evaluator = Evaluator(ROUTING)
    evaluator.tick(0.0, fail("all"))
    evaluator.table = pin(evaluator.table, Pin("policy-7b", "code", "inference-kernel", "ada", "fine", 5.0))
    (incident,) = evaluator.tick(71.0, fail("all"))
    assert (incident.state, "overrides it" in incident.unmet) == (IncidentState.BROKEN, True)
    evaluator.table = pin(evaluator.table, Pin("policy-7b", "all", "train-kernel", "ada", "it is not", 80.0))
    evaluator.tick(90.0, fail("all"))
    (incident,) = evaluator.tick(151.0, fail("all"))
    assert incident.state is IncidentState.CONTAINED


def test_an_order_for_all_traffic_covers_a_slice_whatever_is_pinned_of_others():
    """Routers that do not know the slice keep it away by that order, although all traffic is not contained by it."""
    evaluator = Evaluator(ROUTING)
    evaluator.tick(0.0, fail("all"))
    evaluator.table = pin(evaluator.table, Pin("policy-7b", "prose", "inference-kernel", "ada", "fine", 5.0))
    kept = kept_since(evaluator.table, "policy-7b")
    assert [kept(slice, "b" * 12) for slice in ("all", "prose", "code", "")] == [None, None, 0.0, 0.0]
    evaluator.traffic = replace(evaluator.traffic, behind=lambda *given: "" if given[2] == 0.0 else "one is behind")
    evaluator.tick(10.0, fail("code"), verdict_of("PASS", slice="all"))
    (incident,) = evaluator.tick(71.0, fail("code"), verdict_of("PASS", slice="all"))
    assert incident.state is IncidentState.CONTAINED
