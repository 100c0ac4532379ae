"""Reports as files: self-contained, escaped, the same for the same input."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kc_otel.contract import load
from kc_otel.judge.promotion import orders
from kc_otel.judge.promotion.machine import begin
from kc_otel.judge.promotion.stages import Stage
from kc_otel.judge.verdict import Evaluation
from kc_otel.offline.gate.evidence import EvidenceError, step_evidence
from kc_otel.report.document import Bullets, Figure, Heading, Table, Text, to_html, to_markdown
from kc_otel.report.gate_report import gate_blocks
from kc_otel.report.period_report import Period, period_blocks, wanted_cells
from tests.tools.located_evidence import located_evidence

EVIL = "<script>alert('1')</script> | `x` *y*"
KEY = ("policy", "tv", "code", "t", "b")
VERDICT: dict[str, Any] = {
    "contract": "policy", "clause": "tv", "slice": "code", "kernel_train": "t", "kernel_inference": "b",
    "status": "FAIL", "about": "population", "limit": 0.02, "estimate": 0.1, "lower": 0.08, "upper": 0.12,
    "samples": 12345,
    "reason": f"lower bound 0.08 > limit 0.02 {EVIL}",
}  # fmt: skip
INCIDENT: dict[str, Any] = {
    "id": "0123456789ab", "contract": "policy", "on": "fail", "status": "FAIL", "state": "broken",
    "headline": "tv is above its limit on code", "extents": [["tv", "0.1 on code where 0.02 is the limit"]],
    "since": 40.0, "contained": None, "until": None, "growth": [[40.0, 1], [70.0, 2]],
    "grew": "1 slice at 00:00, 2 at 00:01 UTC", "kernel_train": "t", "kernel_inference": "b", "clauses": ["tv"],
    "slices": ["code"], "more": 0, "actions": [{"at": 41.0, "kind": "notify", "text": EVIL, "in_force": None}],
    "diagnoses": [
        {"at": 60.0, "kind": "locate", "slice": "code", "text": f"layer 3 {EVIL}", "by": "ada", "evidence": "e" * 64},
    ],
    "cells": [{"clause": "tv", "slice": "code", "since": 40.0, "until": None, "reason": EVIL},
              {"clause": "tv", "slice": "prose", "since": 70.0, "until": 75.0, "reason": EVIL}],
}  # fmt: skip
PERIOD = Period(
    start=0.0,
    end=100.0,
    source="http://evaluator",
    version="1.2",
    contracts=[
        {
            "name": "policy",
            "version": 3,
            "hash": "0" * 64,
            "owner": EVIL,
            "description": "trainer against rollouts",
            "runbook": None,
            "window": 20.0,
            "long_window": 60.0,
            "confidence": 0.99,
            "clauses": [{"id": "tv", "unit": "1", "meaning": "Mean of tv_token must not be above 0.02."}],
            "kernels": [{"role": "inference", "version": "b", "fields": {"engine": "vllm", "dtype": EVIL}}],
        }
    ],
    cells=[{"verdict": VERDICT, "since": 40.0}],
    events=[
        {"id": 1, "at": 40.0, "kind": "verdict", "contract": "policy", "message": f"tv on code: PASS -> FAIL: {EVIL}",
         "data": {"clause": "tv", "slice": "code", "kernel_train": "t", "kernel_inference": "b", "status": "FAIL"}},
    ],
    decisions={"routes": [], "directives": []},
    in_force=[
        {"contract": "policy", "kind": "pin", "text": "code is pinned by ada", "since": 50.0, "until": 90.0},
        {"contract": "policy", "kind": "route", "text": "told above", "since": 50.0, "until": None},
    ],
    health={"outbox": []},
    incidents=[INCIDENT],
    histories={
        KEY: [[10.0, 0.01, 0.005, 0.015, 0.02, 9, 0, 0.2], [20.0, None, None, None, 0.02, 0, 2, None],
              [40.0, 0.1, 0.08, None, 0.02, 99, 3, 1.0], [90.0, 0.1, 0.08, 0.12, 0.02, 99, 3, 1.0]],
    },
    distributions={
        KEY: {"metric": "tv_token", "unit": "1", "window": 60.0, "edges": [0.01, 0.1, 1.0], "above": [3, 5],
              "below": [1, 0], "zero": 1, "total": 10, "mean": 0.1, "minimum": -0.1, "maximum": 0.9,
              "marks": [{"value": 0.02, "text": f"limit {EVIL}"}]},
    },
)  # fmt: skip


def test_equal_input_gives_equal_bytes_and_markup_stays_text() -> None:
    """Deterministic; what senders wrote is escaped in HTML and in Markdown; no address of another file is in it."""
    blocks = period_blocks(PERIOD)
    page, text = to_html("report", blocks), to_markdown(blocks)
    assert page == to_html("report", period_blocks(PERIOD))
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert re.findall(r"(?:src|href)=", page) == []
    assert "default-src 'none'" in page
    assert "<script" not in text.replace("\\<script", "")
    assert "tv is above its limit on code" in page
    assert "| **FAIL** |" in text


def test_what_was_located_is_drawn_where_its_evidence_is_this_programs() -> None:
    """The operator's name is a text; evidence of another shape has no picture, and the report goes on."""
    for evidence, drawn in ((located_evidence(EVIL), True), ({"findings": [1]}, False), ({"boundaries": []}, False)):
        blocks = period_blocks(replace(PERIOD, evidence={"e" * 64: evidence}))
        pictures = [each for each in blocks if isinstance(each, Figure) and each.says.startswith("Drift along depth")]
        assert bool(pictures) is drawn
        assert "<script" not in to_html("report", blocks)
        for each in pictures:
            ET.fromstring(each.chart.svg)


def test_drawings_are_well_formed_and_named() -> None:
    """Every picture is XML that a screen reader has a name for, with its sentence below."""
    figures = [block for block in period_blocks(PERIOD) if isinstance(block, Figure)]
    assert len(figures) == 3
    for figure in figures:
        root = ET.fromstring(figure.chart.svg)
        assert root.get("role") == "img"
        assert root.find("{*}title").text
        assert root.find("{*}desc").text
        assert figure.says
    assert wanted_cells(PERIOD) == (KEY, ("policy", "tv", "prose", "t", "b"))


def test_a_quiet_period_says_so() -> None:
    """No incident, no cell, no event: still a report."""
    calm = replace(
        PERIOD, cells=[], events=[], contracts=[], in_force=[], incidents=[], histories={}, distributions={},
        complete=False,
    )  # fmt: skip
    text = to_markdown(period_blocks(calm))
    assert text.startswith("# No promise was broken\n")
    assert "the beginning of the period is missing" in text


def test_blocks_in_markdown() -> None:
    """Each kind has its form."""
    blocks = (Heading(2, "a_b"), Text("x", "PASS"), Bullets(("1", "2")), Table(("h",), (("a|b",),)))
    assert to_markdown(blocks) == "## a\\_b\n\n**PASS** x\n\n- 1\n- 2\n\n| h |\n| --- |\n| a\\|b |\n"


def test_something_else_is_no_evidence() -> None:
    """A file that a gate did not write is refused."""
    with pytest.raises(EvidenceError):
        gate_blocks({"hello": 1})


def test_markdown_shows_names_as_they_are_and_calls_nobody() -> None:
    """No list, formula, entity or mention comes of a name, and no character that turns the order of the others."""
    said = ("1. x", "- x", "= x", "a &lt; $b$", "@ada", "x\u202ey")
    assert to_markdown([Text(one) for one in said]).split("\n\n") == [
        "1\\. x", "\\- x", "\\= x", "a \\&lt; \\$b\\$", "@\u200bada", "x\ufffdy\n",
    ]  # fmt: skip
    assert "x\ufffdy" in to_html("x", [Text("x\u202ey")])


def test_the_title_says_what_is_broken_or_that_it_is_over() -> None:
    """A reader of the attachment's name knows whether to hurry."""
    assert to_markdown(period_blocks(PERIOD)).startswith("# 1 promise is broken on code\n")
    cells = [cell | {"until": 90.0} for cell in INCIDENT["cells"]]
    for state, title in (
        ("contained", "1 promise was broken on code, and contained"),
        ("resolved", "1 promise was broken on code, and holds again"),
    ):
        over = INCIDENT | {"state": state, "contained": 80.0, "until": 90.0, "cells": cells}
        assert to_markdown(period_blocks(replace(PERIOD, incidents=[over]))).startswith(f"# {title}\n")


def test_an_incident_has_a_section_with_its_onsets_though_its_events_are_dropped() -> None:
    """Every slice with the time at which it broke, how it grew, what was done, and its id to ask for more."""
    text = to_markdown(period_blocks(replace(PERIOD, events=[])))
    assert "## tv is above its limit on code" in text
    assert "Broken. Since 1970-01-01 00:00:40 UTC, it is not over (1 min); contract policy, " in text
    assert "incident 0123456789ab" in text
    assert "It grew: 1 slice at 00:00, 2 at 00:01 UTC." in text
    assert (
        "| code | 1970-01-01 00:00:40 | still | tv |\n| prose | 1970-01-01 00:01:10 | 1970-01-01 00:01:15 | tv |"
        in text
    )
    assert "for a time also prose" in text
    assert "- 1970-01-01 00:01:00 UTC, locate on code by ada: layer 3 " in text
    assert "(evidence eeeeeeeeeeee)" in text


def test_the_contract_and_what_holds_are_spelled_out() -> None:
    """For a reader who never saw the contract: what each clause means, and what people decided, until when."""
    text = to_markdown(period_blocks(PERIOD))
    assert "| tv | Mean of tv\\_token must not be above 0.02. |" in text
    assert "code is pinned by ada, since 1970-01-01 00:00:50 UTC, until 1970-01-01 00:01:30 UTC" in text
    assert "told above" not in text
    assert "Verdicts about the population, what the slice will show: tv." in text


def test_a_flood_of_verdicts_is_counted_not_listed() -> None:
    """What comes and goes near a limit does not bury what broke; of what matters the newest are kept."""
    (breach,) = PERIOD.events
    flips = [
        breach | {"id": 9, "at": 50.0, "message": "flip", "data": {"status": "PASS", "before": "INCONCLUSIVE"}}
    ] * 300
    text = to_markdown(period_blocks(replace(PERIOD, events=[breach, *flips])))
    assert "flip" not in text
    assert "Not listed: 300 changes between PASS and INCONCLUSIVE." in text
    alerts = [{**breach, "kind": "resolved", "at": 1.0 + index / 10, "message": f"no. {index}"} for index in range(250)]
    text = to_markdown(period_blocks(replace(PERIOD, events=alerts)))
    assert "no. 249 |" in text
    assert "no. 49 |" not in text
    assert "Not listed: 50 earlier ones of these." in text


def test_a_step_says_from_where_to_where_and_who_forced_it() -> None:
    """Evidence of a promotion's step, which may rest on no verdict at all; an edited one is called out."""
    terms = load(Path(__file__).parents[2] / "contracts" / "serving-int8.yaml")
    started, _ = begin(terms, "abcdef012345", "ada", 0.0)
    _, (forced,) = orders.force(started, terms, Stage.CANARY, "ada", "the launch", Evaluation(5.0, ()), 5.0)
    record = step_evidence(terms, started, forced, (), 5.0)
    text = to_markdown(gate_blocks(record))
    assert re.match(r"# Kernel abcdef012345 went from \S+ to canary at \S+ %, forced by ada\n", text)
    assert "The record verifies" in text
    assert "Why: the launch." in text
    assert "## Verdicts\n\nNone." in text
    edited = record | {"step": record["step"] | {"by": "nobody"}}
    assert "DO NOT RELY ON THIS RECORD" in to_markdown(gate_blocks(edited))
