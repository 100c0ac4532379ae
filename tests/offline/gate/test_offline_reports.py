"""The offline stage as lines, as JUnit XML and as Markdown."""

from __future__ import annotations

import math
from dataclasses import replace
from xml.etree import ElementTree as ET

import numpy as np
import pytest

from kc_otel.judge.verdict import Status
from kc_otel.offline.gate.gate_report import findings, headline, how_far, junit, lines, markdown, safe
from kc_otel.offline.gate.recorded_gate import GatedRecording, GateTerms, OfflineGate, gate_decision
from kc_otel.offline.gate.recorded_verdicts import RecordingVerdicts, UnjudgedClause
from kc_otel.record.kernel import Kernel
from kc_otel.recordings.recording import Recording

INFERENCE = Kernel("vllm", dtype="fp8")
LEFT_OUT = (UnjudgedClause("lag", "weights_lag cannot be told | here"),)


@pytest.fixture
def gate(contract, make_verdict):
    """A gate on one recording with a verdict of each status, or on several."""

    def build(*statuses, name="runs/a.npz", terms=GateTerms(), left_out=LEFT_OUT, recordings=1, **changes):  # noqa: B008
        verdicts = tuple(
            make_verdict(status, slice=f"s{at}" if at else "all", version=INFERENCE.fingerprint, **changes)
            for at, status in enumerate(statuses)
        )
        judged = RecordingVerdicts(verdicts, left_out)
        sides = -np.random.default_rng(0).random((2, 5000))
        recording = Recording(*sides, np.full(4, 1250), ({},) * 4)
        inputs = tuple(
            GatedRecording(name.replace("a", "abc"[at], 1), str(at) * 64, 10, recording, judged=judged)
            for at in range(recordings)
        )
        decision = gate_decision(contract, [judged] * recordings, INFERENCE.fingerprint, terms, 0.0)
        return OfflineGate(contract, Kernel("torch"), INFERENCE, terms, inputs, decision, 1_700_000_000.25)

    return build


def check_junit(text):
    """The structure on which the readers of JUnit reports agree."""
    assert text.startswith('<?xml version="1.0" encoding="UTF-8"?>\n')
    root = ET.fromstring(text.encode())
    for element in (root, *root):
        counted = {"tests": "testcase", "failures": "testcase/failure", "skipped": "testcase/skipped"}
        assert {name: int(element.get(name)) for name in counted} == {
            name: len(element.findall(f".//{path}")) for name, path in counted.items()
        }
    assert all([child.tag for child in case] in ([], ["failure"], ["skipped"]) for case in root.iter("testcase"))
    return root


def test_junit_has_a_suite_per_recording_and_a_case_per_clause_and_slice(gate):
    root = check_junit(junit(gate("PASS", "FAIL", "INCONCLUSIVE", "NO_DATA", recordings=2)))
    assert [suite.get("name") for suite in root] == [f"policy-7b: {name}" for name in ("a.npz", "b.npz", "not judged")]
    cases = [(case.get("name"), *((of.tag, of.get("message")) for of in case)) for case in (*root[0], *root[2])]
    assert cases == [
        ("token-tv on s1", ("failure", "numbers; at least 2.52 times the limit")),
        ("token-tv on s2", ("skipped", "INCONCLUSIVE: numbers")),
        ("token-tv on s3", ("skipped", "NO_DATA: numbers")),
        ("token-tv on all",),
        ("lag", ("skipped", "not judged: weights_lag cannot be told | here")),
    ]
    assert {case.get("classname") for case in root.iter("testcase")} == {"policy-7b.token-tv", "policy-7b.lag"}


def test_junit_of_names_that_xml_cannot_hold_is_still_xml(gate):
    root = check_junit(junit(gate("FAIL", name='a"<&\x1b\ud800.npz')))
    assert root[0].get("name") == 'policy-7b: a"<&\ufffd\ufffd.npz'


def rows(text):
    return [line.split(" | ") for line in text.splitlines() if line.startswith("| ") and "---" not in line]


def test_markdown_is_worst_first_and_has_the_lines_of_the_terminal(gate):
    made = gate("PASS", "NO_DATA", "INCONCLUSIVE", "FAIL")
    text = markdown(made)
    table = rows(text)
    assert [row[2] for row in table] == ["For", "slice s3", "slice s2", "slice s1", "all traffic"]
    assert table[1][3:] == ["0.0123", "0.0101 to 0.014", "0.004", "5,000 tokens", "runs/a.npz |"]
    assert table[3][3:7] == ["-", "-", "0.004", "nothing"]
    assert text.splitlines()[0] == (
        f"## ❌ vllm {INFERENCE.fingerprint} breaks policy-7b v3: token-tv on slice s3 is at least 2.52 times the "
        "limit of 0.004"
    )
    assert [f"- {safe(line.strip())}" in text.splitlines() for line in lines(made)] == [True] * len(list(lines(made)))
    assert "- not judged: lag: weights\\_lag cannot be told \\| here" in text
    assert "4 sequences, 5,000 tokens, sha256 `" + "0" * 64 in text


def test_of_two_failures_the_larger_is_first(gate):
    made = gate("FAIL", "FAIL")
    first, two = made.judged[0].verdicts
    judged = RecordingVerdicts((first, replace(two, lower=5.0, limit=4.9)))
    made = replace(made, inputs=(replace(made.inputs[0], judged=judged),))
    assert [finding.verdict.cell.slice for finding in findings(made)] == ["all", "s1"]


def test_waiting_says_what_is_missing_and_names_the_clause_that_is_likely_to_fail(gate):
    made = gate("INCONCLUSIVE", samples=10)
    assert headline(made).endswith("cannot be decided under policy-7b v3: 1 of 1 verdicts do not PASS yet")
    assert not any("windows have passed" in line for line in lines(made))
    assert "0 of 2 consecutive windows have passed" in markdown(gate("INCONCLUSIVE", recordings=2))
    likely = gate("PASS", "INCONCLUSIVE", samples=1_400, lower=0.01, upper=0.02)
    assert headline(likely).endswith(
        "1 of 2 verdicts do not PASS yet, and token-tv on slice s1 is at least 2.5 times the limit of 0.004 so far; "
        "a FAIL requires 600 more tokens"
    )


def test_an_open_gate_names_the_next_stage(gate):
    kept = f"## ✅ vllm {INFERENCE.fingerprint} keeps policy-7b v3 and may go on to shadow; not judged: lag\n"
    assert markdown(gate("PASS", "PASS")).startswith(kept)
    text = markdown(gate("PASS", "INCONCLUSIVE", terms=GateTerms(slices=("all",))))
    part = "keeps the required part of policy-7b v3; 1 other verdict does not PASS, so a promotion does not accept this"
    assert text.startswith(f"## ✅ vllm {INFERENCE.fingerprint} {part} evidence; not judged: lag\n")
    assert "❔ (not required) | token-tv | slice s1" in text
    assert "- note: only all had to pass" in text


@pytest.mark.parametrize(
    ("status", "changes", "said"),
    [
        ("FAIL", {"limit": 0.0}, "at least 0.0101 above the limit"),
        ("PASS", {}, "at most 0.75 times the limit"),
        ("PASS", {"limit": 0.0, "upper": -0.25}, "at most -0.25 above the limit"),
        ("INCONCLUSIVE", {"upper": math.inf}, "no upper bound"),
        ("NO_DATA", {}, ""),
    ],
)
def test_distances_are_in_limits_where_a_limit_can_be_multiplied(make_verdict, status, changes, said):
    """A limit of 0 has no multiples, and no upper bound is no distance."""
    assert how_far(make_verdict(status, **changes)) == said
    assert Status(status)
