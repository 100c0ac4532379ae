"""What `kc-otel status` makes of many cells and routes: one line for what belongs together."""

from __future__ import annotations

import io
import time
from datetime import UTC, datetime
from typing import Any

import pytest
from rich.console import Console

from kc_otel.cli.status_command import (
    _ended_broken,
    _exit_code,
    _incidents,
    _missing,
    _on_their_way,
    _reasons,
    _routes,
    _tables,
)


@pytest.mark.parametrize(
    ("slices", "said"),
    [
        (["s0"], "s0 is to avoid b and use train-kernel: bad 0; end it with kc-otel route resume policy --slice s0 "),
        (["s1"] * 2, "s1 and s1 are to avoid b and use train-kernel: bad 1; end them with kc-otel route resume policy"),
        ([f"s{index}" for index in range(46)], "s0, s1, s2 and 43 more are to avoid b and use train-kernel; end them"),
    ],
)
def test_routes_away_from_one_version_are_one_line(slices: list[str], said: str) -> None:
    of = {"contract": "policy", "avoid": "b", "kernel": "train-kernel", "outdated": ""}
    routes = [of | {"slice": name, "reason": f"bad {name[1:]}"} for name in slices]
    (line,) = _routes(routes)
    assert line.plain.startswith(f"route  policy: {said}")


def cell(status: str = "NO_DATA", **changes: Any) -> dict[str, Any]:
    """A cell of the API's answer."""
    return {
        "contract": "policy", "clause": "tv", "slice": "code", "kernel_train": "a", "kernel_inference": "b",
        "status": status, "reason": "no tokens in 5m", "samples": 9, "estimate": 0.1, "lower": 0.1, "upper": 0.1,
        "limit": 0.02, "no_traffic": False, "since": 0.0, "firing": [], **changes,
    }  # fmt: skip


def incident(on: str = "fail", state: str = "broken", **changes: Any) -> dict[str, Any]:
    """An incident of the API's answer."""
    return {
        "id": "0123456789ab", "contract": "policy", "on": on, "state": state, "state_text": "Broken", "status": "FAIL",
        "since": 0.0, "headline": "tv is above its limit", "slices": ["all"], "grew": "", "went_away": False,
        "only_route_left": False,
        "kernel_inference": "bb", "kernel_train": "", "actions": [], "extents": [], "diagnoses": [],
        "cells": [{"until": 1.0}, {"until": None}], **changes,
    }  # fmt: skip


def test_a_cell_without_traffic_is_not_called_no_data() -> None:
    cells = [cell(no_traffic=True, samples=0, estimate=None)]
    table = _tables(cells, 60.0, 120, most=1)[1]
    assert str(next(iter(table.columns[0].cells))) == "NO TRAFFIC"
    assert [line.plain for line in _reasons(cells)] == ["NO TRAFFIC  tv on code: no tokens in 5m"]


def test_cells_that_differ_only_in_the_training_kernel_say_so() -> None:
    cells = [cell(kernel_train=train, reason="the run ended: 3 s ago", samples=0) for train in ("a1", "a2")]
    table = _tables(cells, 60.0, 120, most=2)[1]
    rows = list(zip(*(map(str, column.cells) for column in table.columns), strict=True))
    assert [row[4] for row in rows] == ["a1", "a2"]
    assert {row[0] for row in rows} == {"ENDED"}


def test_a_run_that_ended_is_told_with_the_breach_that_it_ended_in() -> None:
    """Not with one that came before the last, and not once a run of the kernel is measured again."""
    of = {"kernel_train": "a", "kernel_inference": "b", "state": "resolved"}
    broken = incident(until=time.time(), state_text="Ended", **of)
    over = incident(until=time.time(), state_text="Resolved", **of)
    ended = cell(reason="the run ended: its last recorder shut down 5m ago")
    (line,) = _ended_broken([broken, over], [ended])
    assert line.plain.startswith("Ended without proof of recovery (")
    assert line.plain.endswith(")  policy: tv is above its limit; incident 0123456789ab")
    assert _ended_broken([over, broken], [ended]) == _ended_broken([broken], [cell("PASS")]) == []


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_a_job_that_ended_in_a_breach_gives_exit_code_3_before_its_next_report_is_due(command, monkeypatch, options):
    """Also where many incidents of other kernels have ended since."""
    ended = incident(state="resolved", state_text="Ended", until=time.time(), kernel_train="a", kernel_inference="b")
    answers = {
        "verdicts": {"verdicts": [cell(reason="next report due by 08:55:40 UTC", samples=0, since=time.time())]},
        "health": {"shards": []},
        "overview": {"now": time.time(), "missing": [], "incidents": [], "in_force": []},
        "promotions": {"promotions": []},
        "decisions": {"routes": []},
        "contracts": {"contracts": []},
    }
    past = [incident(until=1.0, kernel_train=str(other)) for other in range(200)]

    def get(_, path: str, limit: int = 100, **__: str) -> Any:
        name = path.removeprefix("/api/v1/")
        return {"incidents": [*past, ended][:limit]} if name == "incidents" else answers[name]

    monkeypatch.setattr("kc_otel.cli.status_command.get", get)
    monkeypatch.setattr("kc_otel.cli.status_command.troubles", lambda *_: [])
    code, shown, _ = command("status")(*options)
    assert (code, "Ended without proof of recovery" in shown) == (3, not options)


def test_long_names_cut_no_verdict_no_number_and_no_fingerprint() -> None:
    named = {"clause": "share-of-prompts-beyond-the-cap", "slice": "customers-of-the-northern-region"}
    versions = "a1" * 6, "b2" * 6
    cells = [cell("INCONCLUSIVE", kernel_inference=version, firing=["critical"], **named) for version in versions]
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(*_tables(cells, 60.0, 80, most=20))
    said = console.export_text()
    assert [said.count(word) for word in ("INCONCLUSIVE", " a1a1a1a1a1a1 ", " critical")] == [2, 1, 2]
    assert "…" not in said
    assert max(map(len, said.splitlines())) <= 80
    console = Console(width=60, record=True, file=io.StringIO())
    trained = [one | {"kernel_train": train} for one, train in zip(cells, ("c3" * 6, "d4" * 6), strict=True)]
    console.print(*_tables(trained, 60.0, 60, most=20))
    narrow = "".join(console.export_text().split())
    assert "clause" in narrow
    assert min(narrow.count(digit) for digit in "1234") >= 6, "the last digits of versions, too"


def test_a_long_table_is_cut_after_what_does_not_pass() -> None:
    statuses = ["FAIL"] * 15 + ["NO_DATA"] * 15 + ["PASS"] * 30
    cells = [cell(status, slice=f"s{index}") for index, status in enumerate(statuses)]
    console = Console(width=80, record=True, file=io.StringIO())
    found = incident(
        headline="tv is above its limit on s0, s1, s2 and 12 more", slices=["s"] * 15,
        grew="3 slices at 04:45, 15 at 04:50 UTC",
        actions=[
            {"at": 0.0, "kind": "webhook" if index == 2 else "route", "text": f"action {index}", "in_force": index != 5}
            for index in range(6)
        ],
    )  # fmt: skip
    incidents = [found | {"id": f"{index:012d}"} for index in range(8)]
    named = {"role": "inference", "version": "bb", "name": "vllm 0.32 fp8 (bb)"}
    lines = _incidents(incidents, [], 60.0, [{"name": "policy", "kernels": [named]}])
    console.print(*lines, *_tables(cells, 60.0, 80, most=20), sep="\n")
    said = console.export_text().splitlines()
    assert said[0] == "Broken  policy: tv is above its limit on s0, s1, s2 and 12 more"
    assert said[1] == "  for 1m, 15 slices, 3 slices at 04:45, 15 at 04:50 UTC; incident 000000000000"
    assert said[2] == "  on vllm 0.32 fp8 (bb)"
    assert [line[-8:] for line in said[3:7]] == ["action 0", "action 1", "action 3", "action 4"]  # 5 holds no more
    assert said[7:9] == [said[0], said[1].replace("0" * 12, f"{1:012d}")]
    assert said[26] == "2 more incidents"
    assert said[-1] == "and 40 more: 10 NO_DATA, 30 PASS (kc-otel status --all shows them)"
    assert max(map(len, said)) <= 80


def test_invalid_input_is_told_with_its_reason_and_what_to_do() -> None:
    said = "9 sequences failed an input check and were not measured (9 nan_logprob). A kernel overflows."
    found = incident("invalid-input", kernel_train="aa", extents=[["input", said], ["other", said]])
    lines = [line.plain for line in _incidents([found], [], 60.0, [])]
    assert lines.count(f"  {said}") == 1
    assert "  on bb against aa" in lines


@pytest.mark.parametrize("text", ["nothing has refuted it since", "routing to the training kernel was ordered"])
def test_what_is_measured_is_not_said_to_be_closed_once_its_traffic_has_ended(text: str) -> None:
    """A person closes what nothing is measured of: a raised limit, or a recorder that died beside others, is more."""
    found = incident(kernel_train="aa", state_text=f"Was broken; {text}")
    for status, said in (("PASS", False), ("NO_DATA", True)):
        here = cell(status, slice="all", kernel_train="aa", kernel_inference="bb")
        lines = [line.plain for line in _incidents([found], [here], 60.0, [])]
        assert any("if its traffic has ended, close the incident" in line for line in lines) is said


@pytest.mark.parametrize(("now", "said"), [(1e6 + 60, "08:46:40 EST"), (1e6 + 86400, "1970-01-12 08:46:40 EST")])
def test_times_of_what_was_done_have_a_zone_and_a_date_unless_it_is_todays(monkeypatch, now, said):
    monkeypatch.setenv("TZ", "EST5")
    time.tzset()
    try:
        done = incident(actions=[{"at": 1e6, "kind": "webhook", "text": "paged", "in_force": None}])
        assert f"  {said}  paged" in [line.plain for line in _incidents([done], [], now, [])]
    finally:
        monkeypatch.undo()
        time.tzset()


def test_points_that_are_not_judged_have_a_line_each_while_they_are_few() -> None:
    row = {"contract": "policy", "kernel_train": "aa", "kernel_inference": "bb", "outcome": "future", "since": 0.0,
           "text": "a clock is wrong"}  # fmt: skip
    (line,) = _missing([row])
    since = datetime.fromtimestamp(0.0, tz=UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")
    assert line.plain == f"policy: points of bb against aa are not judged, since {since}: a clock is wrong"
    (unknown,) = _missing([row | {"kernel_train": "", "kernel_inference": ""}])
    assert unknown.plain.startswith("policy: points are not judged")
    assert _missing([row | {"outcome": "invalid"}])[0].plain.startswith("policy: sequences of bb against aa are not")
    assert _missing([row] * 64)[-1].plain == "points of 58 more kernel pairs are not judged"


def test_status_is_not_0_while_an_incident_is_broken() -> None:
    cells, over = [{"status": "PASS"}], [{"until": 2.0}]
    codes = {
        (on, state): _exit_code(cells, [incident(on, state)], [], unknown=False)
        for on in ("fail", "no-data")
        for state in ("broken", "contained")
    }
    assert codes == {
        ("fail", "broken"): 1, ("fail", "contained"): 0, ("no-data", "broken"): 3, ("no-data", "contained"): 0,
    }  # fmt: skip
    assert _exit_code(cells, [], [], unknown=False) == 0
    assert _exit_code([], [], [], unknown=False) == 3, "no evaluation yet"
    assert _exit_code(cells, [incident("fail", "broken", only_route_left=True)], [], unknown=False) == 0
    assert _exit_code(cells, [incident("fail", "broken", cells=over, went_away=True)], [], unknown=False) == 3
    assert _exit_code(cells, [incident("fail", "unproven", cells=over)], [], unknown=False) == 3
    assert _exit_code(cells, [], ["v2 was rolled back, and was measured after that"], unknown=False) == 1
    assert _exit_code([{"status": "FAIL"}], [], [], unknown=True) == 1
    assert _exit_code([*cells, {"status": "INCONCLUSIVE"}], [], [], unknown=False) == 3, "the undecided is not known"
    assert _exit_code(cells, [], [], unknown=True) == 3, "points that are not judged, or a late evaluation"


def test_a_version_below_100_percent_has_a_line_and_one_that_is_full_or_over_has_none() -> None:
    entry = {"contract": "policy", "kernel": "bb", "status": "running", "position": "canary at 5%", "share": 0.05}
    others = [entry | {"share": 1.0}, entry | {"status": "rolled-back", "share": 0.0}]
    assert [line.plain for line in _on_their_way([entry, *others])] == [
        "promotion  policy: bb is in canary at 5%: it may serve 5% of the requests; see kc-otel promote policy bb"
    ]
