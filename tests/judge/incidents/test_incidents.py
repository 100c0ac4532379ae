"""Incidents from cells, events and decisions: the same story while it happens and afterwards."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from kc_otel.judge.incidents.incidents import Incident, incidents

CALM: dict[str, Any] = {"routes": [], "directives": []}
IDS = itertools.count(1)


def cell(clause: str, slice: str, status: str, since: float, kernel: str = "b", **more: Any) -> dict[str, Any]:
    verdict = {
        "contract": "policy", "clause": clause, "slice": slice, "kernel_train": "t", "kernel_inference": kernel,
        "status": status, "limit": 0.02, "estimate": 0.1, "lower": 0.08, "upper": 0.12, "reason": "because",
    }  # fmt: skip
    return {"verdict": verdict | more, "since": since}


def event(
    kind: str, at: float, clause: str = "tv", slice: str = "code", kernel: str = "b", **data: Any
) -> dict[str, Any]:
    details = {"clause": clause, "slice": slice, "kernel_train": "t", "kernel_inference": kernel} | data
    message = f"{clause} on {slice}: PASS -> {data.get('status')}: numbers" if kind == "verdict" else kind
    return {"id": next(IDS), "at": at, "kind": kind, "contract": "policy", "message": message, "data": details}


def only(found: tuple[Incident, ...]) -> Incident:
    (one,) = found
    return one


def test_one_kernel_version_that_breaks_two_clauses_on_two_slices_is_one_incident() -> None:
    """Its headline names both, the worst slice first and all traffic last; its start is the first breach."""
    cells = [
        cell("tv", "all", "FAIL", 12.0, lower=0.5),
        cell("tv", "code", "FAIL", 10.0),
        cell("tail", "code", "FAIL", 11.0, lower=0.03),
        cell("tv", "prose", "PASS", 0.0),
    ]
    one = only(incidents(cells, [], CALM))
    assert one.headline == "tv and tail are above their limits on code and all traffic"
    assert (one.since, one.until) == (10.0, None)
    assert one.extents[0] == (
        "tv", "0.1 on all traffic where 0.02 is the limit, at least 25 times that (confidence interval 0.5 to 0.12)",
    )  # fmt: skip
    assert [clause for clause, _ in one.extents] == ["tv", "tail"]


def test_other_kernels_and_silence_are_incidents_of_their_own() -> None:
    """FAIL comes before silence, and the worse before the less bad."""
    cells = [
        cell("tv", "code", "NO_DATA", 1.0, kernel="c", estimate=None, lower=None, upper=None),
        cell("tv", "code", "FAIL", 5.0, kernel="d", lower=0.03),
        cell("tv", "code", "FAIL", 9.0, kernel="b", lower=0.08),
    ]
    found = incidents(cells, [], CALM)
    assert [(one.status, one.kernel_inference) for one in found] == [("FAIL", "b"), ("FAIL", "d"), ("NO_DATA", "c")]
    assert found[2].headline == "No data for tv on code"
    assert found[2].extents == (("tv", "because"),)


def test_what_has_recovered_is_told_from_events_alone() -> None:
    """Begin and end come from verdicts, the numbers from the alert that fired, the headline is in the past."""
    numbers = {"limit": 0.02, "estimate": 0.2, "lower": 0.15, "upper": "inf"}
    events = [
        event("verdict", 10.0, status="FAIL"),
        event("firing", 12.0, actions=["notify", {"webhook": "pager"}], verdict=numbers),
        event("verdict", 30.0, status="PASS"),
    ]
    one = only(incidents([cell("tv", "code", "PASS", 30.0)], events, CALM))
    assert one.headline == "tv was above its limit on code"
    assert (one.since, one.until) == (10.0, 30.0)
    assert one.extents[0][1].endswith("(confidence interval 0.15 to unbounded)")
    assert [action.text for action in one.actions] == ["announced in the log", "told pager by webhook"]
    assert incidents([cell("tv", "code", "PASS", 30.0)], events, CALM, since=31.0) == ()


def test_a_breach_twice_is_two_incidents() -> None:
    """A recovery in between separates them; what lasts comes first."""
    events = [event("verdict", at, status=status) for at, status in ((1.0, "FAIL"), (2.0, "PASS"), (5.0, "FAIL"))]
    found = incidents([cell("tv", "code", "FAIL", 5.0)], events, CALM)
    assert [(one.since, one.until) for one in found] == [(5.0, None), (1.0, 2.0)]
    assert len({one.id for one in found}) == 2


def test_a_version_that_went_out_of_use_ends_its_incident() -> None:
    """The verdict of its successor, or the last event, ends what nobody can end any more."""
    events = [event("verdict", 1.0, status="FAIL", kernel="old"), event("verdict", 9.0, status="PASS", kernel="new")]
    one = only(incidents([cell("tv", "code", "PASS", 9.0, kernel="new")], events, CALM))
    assert (one.kernel_inference, one.until) == ("old", 9.0)


def test_what_was_done_says_whether_it_holds() -> None:
    """A route that was lifted is no longer in force; a person's word is part of the story; other slices' are not."""
    cells = [cell("tv", "code", "FAIL", 10.0)]
    events = [
        event("firing", 11.0, actions=[{"route": "train-kernel"}, "halt", {"webhook": "pager"}], status=None),
        event("firing", 11.5, slice="prose", actions=["quarantine-rollouts"]),
        {"id": 9, "at": 20.0, "kind": "resumed", "contract": "policy", "message": "ada resumed slice code: patched",
         "data": {"slice": "code"}},
    ]  # fmt: skip
    route = {"contract": "policy", "slice": "code", "avoid": "b"}
    directive = {"contract": "policy", "kind": "halt"}
    held = only(incidents(cells, events, {"routes": [route], "directives": [directive]}))
    assert [(action.kind, action.in_force) for action in held.actions] == [
        ("halt", True), ("route", True), ("webhook", None), ("resumed", None),
    ]  # fmt: skip
    lifted = only(incidents(cells, events, CALM, waiting={"pager": 10.5}))
    assert {action.kind: action.in_force for action in lifted.actions}["route"] is False
    assert "pager is still to be told: its webhook waits" in {action.text for action in lifted.actions}
    assert "quarantine-rollouts" not in {action.kind for action in lifted.actions}


@pytest.mark.parametrize("status", ["PASS", "INCONCLUSIVE"])
def test_what_is_not_broken_is_no_incident(status: str) -> None:
    """An open question is none either."""
    assert incidents([cell("tv", "code", status, 1.0)], [event("verdict", 1.0, status=status)], CALM) == ()


def test_what_is_in_force_is_told_when_its_event_is_no_longer_kept() -> None:
    """The decision table remembers what a long log of events has dropped, of its own slices and kernel only."""
    route = {"contract": "policy", "slice": "code", "avoid": "b", "since": 11.0}
    hold = {"contract": "policy", "slice": "code", "kind": "hold-promotion", "since": 12.0}
    decisions = {
        "routes": [route, route | {"slice": "prose"}, route | {"avoid": "a"}],
        "directives": [hold | {"since": 13.0}, hold, hold | {"contract": "other", "kind": "halt"}],
    }
    one = only(incidents([cell("tv", "code", "FAIL", 10.0)], [], decisions))
    assert [(action.at, action.kind, action.text, action.in_force) for action in one.actions] == [
        (11.0, "route", "code routed to the training kernel", True),
        (12.0, "hold-promotion", "promotions held", True),
    ]


def test_a_headline_is_about_what_is_broken_still() -> None:
    """A slice that has recovered while others have not is part of the incident, not of what is said to be broken."""
    cells = [cell("tv", "code", "FAIL", 10.0), cell("tail", "prose", "PASS", 30.0)]
    one = only(incidents(cells, [event("verdict", 12.0, "tail", "prose", status="FAIL")], CALM))
    assert one.headline == "tv is above its limit on code"
    assert (one.clauses, one.slices, len(one.cells)) == (("tv",), ("code",), 2)


def test_a_dry_run_says_what_it_would_do_once() -> None:
    """Whatever the number of cells; nothing of it is said to have been done."""
    cells = [cell("tv", name, "FAIL", 10.0) for name in ("code", "prose")]
    events = [
        event("would-fire", 11.0, slice=name, actions=[{"webhook": "pager"}, "halt"]) for name in ("code", "prose")
    ]
    one = only(incidents(cells, events, CALM))
    assert [action.text for action in one.actions] == ["dry run: it would halt", "dry run: it would webhook pager"]


def test_nobody_is_told_of_what_is_silenced() -> None:
    """The route of a silenced alert is an action, its webhook is not; who silenced it is."""
    events = [
        event("firing", 11.0, actions=[{"route": "train-kernel"}, {"webhook": "pager"}], silenced=["1"]),
        {"id": 99, "at": 10.5, "kind": "silenced", "contract": "policy", "message": "ada silenced code: planned",
         "data": {"slice": "code", "clause": None}},
    ]  # fmt: skip
    one = only(incidents([cell("tv", "code", "FAIL", 10.0)], events, CALM))
    assert [action.kind for action in one.actions] == ["silenced", "route"]
