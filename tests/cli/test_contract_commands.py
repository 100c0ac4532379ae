"""`kc-otel check`, `diff` and `reference`."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from kc_otel.contract.input_reasons import REASONS
from kc_otel.contract.registry.clause_metrics import DERIVED, QUANTITIES

COMMANDS = ("check", "diff", "reference")

_CONTRACTS = Path(__file__).parents[2] / "contracts"
_TEXT = """apiVersion: kernel-contract/v1
kind: KernelContract
metadata: {name: a, version: 1, owner: o}
kernels: {train: {engine: torch}, inference: {engine: vllm}}
statistical: [{id: tv, metric: tv_token, limit: 0.01}]
"""
_UNKNOWN = "unknown key; did you mean 'owner'? keys here are name, version, owner, description, runbook"


@pytest.fixture
def files(tmp_path):
    """Writes contracts with one replacement each, and returns their paths."""

    def write(**replacements):
        paths = []
        for name, (old, new) in replacements.items():
            path = tmp_path / f"{name}.yaml"
            path.write_text(_TEXT.replace(old, new), encoding="utf-8")
            paths.append(path)
        return paths

    return write


def test_check_accepts_the_example_contracts(run):
    count = len(list(_CONTRACTS.glob("*.yaml")))
    code, out, err = run("check", _CONTRACTS)
    assert (code, err) == (0, "")
    assert out.endswith(f"\n{count} files: 0 errors, 0 warnings\n")
    assert all(": verdicts that cover " in line for line in out.splitlines()[:-1])


def test_check_says_what_verdicts_are_about_and_which_clauses_take_sequences_for_independent(run, files):
    more = "limit: 0.01}, {id: tail, metric: tv_token, statistic: p90, limit: 0.1}"
    (path,) = files(x=("limit: 0.01", more + ", {id: own, metric: tv_token, unit: sequence, limit: 0.1"))
    assert run("check", path)[1].splitlines()[:3] == [
        f"{path}: verdicts that cover future traffic, too: tv, own",
        f"{path}: verdicts that cover only the measured traffic: tail",
        f"{path}: assumes that sequences are independent: own",
    ]
    (file,) = json.loads(run("check", path, "--json")[1])["files"]
    assert file["about"] == {"tv": "population", "tail": "traffic", "own": "population"}


def test_check_prints_every_problem_of_every_file(run, files):
    first, second = files(x=("limit: 0.01", "limit: 4"), y=("owner: o", "ownr: o"))
    code, out, _ = run("check", first, second)
    assert code == 2
    assert out.splitlines() == [
        f"{first}:5: statistical[0].limit: 4 is more than a total variation can be (0..1); did you mean 0.004?",
        f"{second}:3: metadata.owner: is missing; add it (Responsible team or person)",
        f"{second}:3: metadata.ownr: {_UNKNOWN}",
        "2 files: 3 errors, 0 warnings",
    ]


def test_check_prints_warnings_and_exits_0(run, files):
    (path,) = files(x=("limit: 0.01", "limit: 0"))
    code, out, _ = run("check", path)
    assert code == 0
    assert out.startswith(f"{path}:5: warning: statistical[0].limit: ")
    assert out.endswith("1 file: 0 errors, 1 warning\n")


def test_check_reads_standard_input(run):
    assert run("check", "-", stdin=_TEXT)[0] == 0
    assert run("check", "-", stdin=_TEXT.replace("0.01", "4"))[1].startswith("-:5: statistical[0].limit: 4 is more")


def test_check_as_json(run, files):
    first, second = files(x=("limit: 0.01", "limit: 4"), y=("name: a", "name: b"))
    code, out, _ = run("check", "--json", first, second)
    refused, sound = json.loads(out)["files"]
    assert code == 2
    assert refused["contract"] is None
    where = {"file": str(first), "line": 5, "field": "statistical[0].limit", "level": "error"}
    assert refused["problems"][0] | {"message": ""} == where | {"message": ""}
    assert sound["contract"]["name"] == "b"
    assert len(sound["contract"]["hash"]) == 64


def test_check_without_a_contract_exits_2(run, tmp_path):
    assert run("check", tmp_path / "nowhere.yaml")[0] == 2
    assert run("check", tmp_path)[0] == 2
    assert run("check")[0] == 2


@pytest.mark.parametrize(
    ("new", "code", "last"),
    [
        ("limit: 0.01", 0, "no difference"),
        ("limit: 0.005", 0, "2 changes, none loosening"),
        ("limit: 0.02", 1, "2 changes, 1 loosening"),
    ],
)
def test_diff_exits_1_when_anything_loosens(run, files, new, code, last):
    """0 when nothing does, with a line for each change and a summary; as JSON too."""
    old, changed = files(old=("", ""), new=("limit: 0.01", new))
    got, out, _ = run("diff", old, changed)
    assert got == code
    assert out.splitlines()[-1] == last
    got, out, _ = run("diff", old, changed, "--json")
    answer = json.loads(out)
    assert (got, answer["loosens"]) == (code, code == 1)
    assert [change["old"] for change in answer["changes"]][1:] == ([] if last == "no difference" else [0.01])


def test_diff_of_what_cannot_be_read_exits_2(run, files, tmp_path):
    old, broken = files(old=("", ""), broken=("limit: 0.01", "limit: 4"))
    code, out, err = run("diff", old, broken)
    assert (code, out) == (2, "")
    assert err.startswith(f"{broken}:5: statistical[0].limit: 4 is more than")
    assert run("diff", tmp_path / "nowhere.yaml", old)[0] == 2


def test_what_is_said_of_many_lines_alike_is_one_line(run, files):
    slices = "\n".join(f"  s{index}: {{where: {{completion_token: '> {index}'}}}}" for index in range(20))
    (path,) = files(x=("statistical:", f"slices:\n{slices}\nstatistical:"))
    code, out, _ = run("check", path)
    assert code == 0
    (line,) = [line for line in out.splitlines() if "where.completion_token" in line]
    assert line == (
        f"{path}:6: warning: slices.s0.where.completion_token: no integration sends 'completion_token'; "
        "did you mean 'completion_tokens'?; also on lines 7, 8, 9 and 16 more"
    )
    assert "20 warnings" in out
    assert len(json.loads(run("check", path, "--json")[1])["files"][0]["problems"]) == 20


def test_what_contracts_and_verdicts_can_say_is_printed(run):
    jsonschema.Draft202012Validator.check_schema(json.loads(run("reference", "schema")[1]))
    out = run("reference", "metrics")[1]
    assert all(name in out for name in (*QUANTITIES, *DERIVED))
    out = run("reference", "invalid-input")[1]
    for name, reason in REASONS.items():
        assert f"{name}\n    {reason.meaning}\n    {reason.remedy}" in out


@pytest.mark.parametrize(("way", "nobody"), [("loop", "route"), ("vllm", "halt")])
def test_check_says_which_actions_nobody_carries_out(run, files, way, nobody):
    steps = "escalation: [{on: fail, do: [{route: train-kernel}, halt, notify]}]"
    (path,) = files(many=(_TEXT.splitlines()[-1], f"{_TEXT.splitlines()[-1]}\n{steps}"))
    code, out, _ = run("check", path, "--for", way)
    said = [line.partition("no process carries out ")[2] for line in out.splitlines() if "carries out" in line]
    assert (code, len(said), said[0].startswith(nobody)) == (0, 1, True)
    assert nobody in json.dumps(json.loads(run("check", path, "--for", way, "--json")[1])[way])


GATED = _TEXT.replace(
    "statistical: [{id: tv, metric: tv_token, limit: 0.01}]",
    """slices: {code: {where: {task: code}}}
statistical:
  - {id: tv, metric: tv_token, limit: 0.01}
  - {id: ratio, metric: ratio, statistic: p99, limit: 1.2, slices: {code: 1.2}}
escalation: [{on: fail, do: [notify, hold-promotion]}]""",
)


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("limit: 0.01", "limit: 0", "7: statistical[0].limit: 0 keeps every promotion gate shut"),
        ("limit: 1.2,", "limit: 0.9,", "8: statistical[1].limit: 0.9 keeps every promotion gate shut"),
        ("code: 1.2", "code: 0.5", "8: statistical[1].slices.code: 0.5 keeps every promotion gate shut"),
    ],
)
@pytest.mark.parametrize(
    ("held", "promotion", "code"), [(", hold-promotion", "", 2), ("", "promotion: {windows: 2}\n", 2), ("", "", 0)]
)
def test_a_gate_that_can_never_open_is_refused_at_its_line(run, tmp_path, old, new, line, held, promotion, code):
    """What only alarms may be out of reach."""
    path = tmp_path / "a.yaml"
    for text, refused in ((GATED, 0), (GATED.replace(old, new), code)):
        path.write_text(text.replace(", hold-promotion", held) + promotion)
        got, out, _ = run("check", path)
        assert (got, f"{path}:{line}" in out) == (refused, refused == 2)
