"""What `kc-otel status` makes of many cells and routes: one line for what belongs together."""

from __future__ import annotations

from typing import Any

import pytest

from kc_otel.cli.status_command import _exit_code, _incidents, _missing, _on_their_way, _reasons, _routes, _tables


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


def test_a_cell_without_traffic_is_not_called_no_data() -> None:
    verdict = {"contract": "policy", "clause": "tv", "slice": "code", "kernel_inference": "b",
               "kernel_train": "a", "status": "NO_DATA", "reason": "no tokens in 5m", "samples": 0, "estimate": None,
               "limit": 0.1, "no_traffic": True, "since": 0.0, "firing": []}  # fmt: skip
    cells = [verdict]
    table = _tables(cells, 60.0, 120, most=1)[1]
    assert str(next(iter(table.columns[0].cells))) == "NO TRAFFIC"
    assert [line.plain for line in _reasons(cells)] == ["NO TRAFFIC  tv on code: no tokens in 5m"]


def test_cells_that_differ_only_in_the_training_kernel_say_so() -> None:
    same = {
        "contract": "policy", "clause": "tv", "slice": "code", "kernel_inference": "b", "status": "NO_DATA",
        "samples": 0, "reason": "the run ended: 3 s ago", "estimate": None, "limit": 0.1, "no_traffic": False,
        "since": 0.0, "firing": ["critical"],
    }  # fmt: skip
    cells = [same | {"kernel_train": train} for train in ("a1", "a2")]
    table = _tables(cells, 60.0, 120, most=2)[1]
    rows = list(zip(*(map(str, column.cells) for column in table.columns), strict=True))
    assert [row[4] for row in rows] == ["a1", "a2"]
    assert {row[0] for row in rows} == {"ENDED"}


def test_invalid_input_is_told_with_its_reason_and_what_to_do() -> None:
    said = "9 sequences failed an input check and were not measured (9 nan_logprob). A kernel overflows."
    incident = {"id": "0123456789ab", "contract": "policy", "state": "broken", "state_text": "Broken", "status": "FAIL",
                "on": "invalid-input", "since": 0.0, "headline": "Sequences fail the input checks", "slices": ["all"],
                "grew": "", "went_away": False, "kernel_inference": "bb", "kernel_train": "aa", "actions": [],
                "extents": [["input", said], ["other", said]],
                "diagnoses": []}  # fmt: skip
    lines = [line.plain for line in _incidents([incident], 60.0, [])]
    assert lines.count(f"  {said}") == 1
    assert "  on bb against aa" in lines


def test_points_that_are_not_judged_have_a_line_each_while_they_are_few() -> None:
    row = {"contract": "policy", "kernel_train": "aa", "kernel_inference": "bb", "outcome": "future", "since": 0.0,
           "text": "a clock is wrong"}  # fmt: skip
    (line,) = _missing([row])
    assert line.plain.startswith("policy: points of bb against aa are not judged, since ")
    assert line.plain.endswith(": a clock is wrong")
    (unknown,) = _missing([row | {"kernel_train": "", "kernel_inference": ""}])
    assert unknown.plain.startswith("policy: points are not judged")
    assert _missing([row | {"outcome": "invalid"}])[0].plain.startswith("policy: sequences of bb against aa are not")
    assert _missing([row] * 64)[-1].plain == "points of 58 more kernel pairs are not judged"


def test_status_is_not_0_while_an_incident_is_broken() -> None:
    cells = [{"status": "PASS"}]

    def incident(on: str, state: str, until: float | None = None, *, went_away: bool = False) -> dict[str, Any]:
        return {"on": on, "state": state, "went_away": went_away, "cells": [{"until": 1.0}, {"until": until}]}

    codes = {
        (on, state): _exit_code(cells, [incident(on, state)], [], unknown=False)
        for on in ("fail", "no-data")
        for state in ("broken", "contained")
    }
    assert codes == {
        ("fail", "broken"): 1, ("fail", "contained"): 0, ("no-data", "broken"): 3, ("no-data", "contained"): 0,
    }  # fmt: skip
    assert _exit_code(cells, [], [], unknown=False) == 0
    assert _exit_code(cells, [incident("fail", "broken", 2.0)], [], unknown=False) == 0, "only its route remains"
    assert _exit_code(cells, [incident("fail", "broken", 2.0, went_away=True)], [], unknown=False) == 1
    assert _exit_code(cells, [incident("fail", "unproven", 2.0)], [], unknown=False) == 3
    assert _exit_code(cells, [], ["v2 was rolled back, and was measured after that"], unknown=False) == 1
    assert _exit_code([{"status": "FAIL"}], [], [], unknown=True) == 1
    assert _exit_code(cells, [], [], unknown=True) == 3, "points that are not judged, or a late evaluation"


def test_a_version_below_100_percent_has_a_line_and_one_that_is_full_or_over_has_none() -> None:
    entry = {"contract": "policy", "kernel": "bb", "status": "running", "position": "canary at 5%", "share": 0.05}
    others = [entry | {"share": 1.0}, entry | {"status": "rolled-back", "share": 0.0}]
    assert [line.plain for line in _on_their_way([entry, *others])] == [
        "promotion  policy: bb is in canary at 5%: it may serve 5% of the requests; see kc-otel promote policy bb"
    ]
