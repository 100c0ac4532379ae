"""Reports as files: self-contained, escaped, the same for the same input."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from typing import Any

import pytest

from kc_otel.promotion.evidence import EvidenceError
from kc_otel.report.blocks import Bullets, Heading, Picture, Table, Text, to_html, to_markdown
from kc_otel.report.gate import gate_blocks
from kc_otel.report.period import Period, period_blocks, wanted_cells
from kc_otel.report.svg import draw_distribution, draw_history, draw_interval

EVIL = "<script>alert('1')</script> | `x` *y*"
KEY = ("policy", "tv", "code", "t", "b")
VERDICT: dict[str, Any] = {
    "contract": "policy", "clause": "tv", "slice": "code", "kernel_train": "t", "kernel_inference": "b",
    "status": "FAIL", "limit": 0.02, "estimate": 0.1, "lower": 0.08, "upper": 0.12, "samples": 12345,
    "reason": f"lower bound 0.08 > limit 0.02 {EVIL}",
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
            "kernels": [{"role": "inference", "version": "b", "fields": {"engine": "vllm", "dtype": EVIL}}],
        }
    ],
    cells=[{"verdict": VERDICT, "since": 40.0}],
    events=[
        {"id": 1, "at": 40.0, "kind": "verdict", "contract": "policy", "message": f"tv on code: PASS -> FAIL: {EVIL}",
         "data": {"clause": "tv", "slice": "code", "kernel_train": "t", "kernel_inference": "b", "status": "FAIL"}},
    ],
    decisions={"routes": [], "directives": []},
    health={"outbox": []},
    histories={
        KEY: [[10.0, 0.01, 0.005, 0.015, 0.02, 9, 0], [20.0, None, None, None, 0.02, 0, 2],
              [40.0, 0.1, 0.08, None, 0.02, 99, 3], [90.0, 0.1, 0.08, 0.12, 0.02, 99, 3]],
    },
    distributions={
        KEY: {"metric": "tv_token", "window": 60.0, "edges": [0.01, 0.1, 1.0], "above": [3, 5], "below": [1, 0],
              "zero": 1, "total": 10, "mean": 0.1, "maximum": 0.9, "marks": [{"value": 0.02, "text": f"limit {EVIL}"}]},
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


def test_drawings_are_well_formed_and_named() -> None:
    """Every picture is XML that a screen reader has a name for, with its sentence below."""
    pictures = [block for block in period_blocks(PERIOD) if isinstance(block, Picture)]
    assert len(pictures) == 2
    for picture in pictures:
        root = ET.fromstring(picture.svg)
        assert root.get("role") == "img"
        assert root.get("aria-label")
        assert picture.says
    assert wanted_cells(PERIOD) == (KEY,)


def test_a_gap_in_the_past_is_a_gap_in_the_drawing() -> None:
    """Lines do not bridge silence, and the part above the limit is drawn once more as such."""
    root = ET.fromstring(draw_history(PERIOD.histories[KEY], "x"))
    by_class = [node.get("class") for node in root]
    assert by_class.count("line") == 2
    assert by_class.count("over") == 1


@pytest.mark.parametrize("value", [0.0, 1e-9, 5.0])
def test_drawings_stand_extremes(value: float) -> None:
    """One point, zeros, a limit of zero: numbers stay finite."""
    drawn = [
        draw_history([[1.0, value, None, None, 0.0, 1, 3]], "x"),
        draw_interval(value, None, None, 0.0, "x"),
        draw_distribution(
            {"edges": [1.0, 10.0], "above": [1], "below": [0], "total": 1, "marks": [{"value": value, "text": ""}]}, "x"
        ),
    ]
    for svg in drawn:
        assert "nan" not in svg
        assert "inf" not in svg
        ET.fromstring(svg)


def test_a_quiet_period_says_so() -> None:
    """No incident, no cell, no event: still a report."""
    calm = replace(PERIOD, cells=[], events=[], contracts=[], histories={}, distributions={}, complete=False)
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
