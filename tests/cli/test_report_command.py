"""`kc-otel report`: what it refuses, and a gate's evidence as a document."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kc_otel.cli import _register, app
from kc_otel.contract import load
from kc_otel.judge.promotion.stages import Decision, GateOutcome, Stage
from kc_otel.judge.verdict import Cell, Status, Verdict
from kc_otel.offline.gate.evidence import make_evidence

CONTRACT = Path(__file__).parents[2] / "contracts" / "serving-int8.yaml"


@pytest.fixture(scope="module", autouse=True)
def commands() -> None:
    _register()


@pytest.fixture
def record(tmp_path: Path) -> Path:
    contract = load(CONTRACT)
    passed = Verdict(
        Cell(contract.name, contract.clauses[0].id, "all", "t", "b"), Status.PASS, 10.0, 0.02, 0.01, 0.005, 0.015,
        5000, "short", "betting", "fine", contract.metadata.version, contract.hash, "population",
    )  # fmt: skip
    wide = replace(passed, cell=passed.cell._replace(slice="x"), status=Status.INCONCLUSIVE, upper=float("inf"))
    decision = Decision(GateOutcome.WAIT, Stage.CANARY, 1, ("x needs 400 more samples",))
    path = tmp_path / "evidence.json"
    path.write_text(json.dumps(make_evidence(contract, Stage.CANARY, "b", decision, [passed, wide], 20.0)))
    return path


def run(*arguments: object):
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


def test_evidence_becomes_a_document_that_says_whether_to_trust_it(record: Path, tmp_path: Path) -> None:
    """Decision, contract, what is missing, each verdict with its interval; an edited record is called out on top."""
    html, markdown = tmp_path / "gate.html", tmp_path / "gate.md"
    done = run("--evidence", record, "--out", html, "--out", markdown)
    assert done.exit_code == 0, done.output
    text = markdown.read_text()
    assert text.startswith("# Kernel b has to wait in stage canary\n\n")
    assert "The record verifies" in text.split("\n\n")[1]
    assert "x needs 400 more samples" in text
    assert "0.005 to unbounded" in text
    assert html.read_text().count('role="img"') == 2  # a chart is one image, whatever it is drawn of
    assert text.count("0.01 ") == text.count("0.01 |") == 2  # the table says it; a drawing's sentence would again

    record.write_text(record.read_text().replace('"samples": 5000', '"samples": 9000'))
    assert run("--evidence", record, "--out", markdown).exit_code == 0
    assert "DO NOT RELY ON THIS RECORD: the checksum does not match" in markdown.read_text()


def test_a_record_with_a_hole_is_refused_in_a_sentence(record: Path, tmp_path: Path) -> None:
    """What cannot be shown is not shown; what is wrong with it is said."""
    plain = json.loads(record.read_text())
    for hole in ("decision", "tool"):
        record.write_text(json.dumps(plain | {hole: None}))
        done = run("--evidence", record, "--out", tmp_path / "x.md")
        assert done.exit_code == 2
        assert "checksum" in done.output or "shape" in done.output
        assert "Traceback" not in done.output


@pytest.mark.slow
def test_mistakes_are_answered_with_what_to_do(tmp_path: Path, record: Path) -> None:
    """A wrong ending, a missing file, no evidence, no period, nobody there: exit code 2 and a sentence."""
    other = tmp_path / "other.json"
    other.write_text("{}")
    for arguments, said in (
        (("--out", tmp_path / "report.pdf"), "ends in .html or .md"),
        (("--evidence", tmp_path / "none.json"), "cannot be read"),
        (("--evidence", other), "not a record"),
        (("--since", "yesterday"), "--since"),
        (("--url", "http://127.0.0.1:9", "--out", tmp_path / "x.md"), "no evaluator answers"),
        (("--evidence", record, "--out", tmp_path / "no" / "x.md"), "cannot be written"),
    ):
        done = run(*arguments)
        assert done.exit_code == 2, arguments
        assert said in done.output, arguments
        assert "Traceback" not in done.output
