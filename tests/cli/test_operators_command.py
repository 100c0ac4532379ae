"""`kc-otel locate operators`: a file with comparisons becomes a table, JSON and verdicts."""

import json
from functools import partial

import pytest

SPEC = """
import numpy as np

from kc_otel.integrations.operators import OperatorPair, cases_over


def make(shape, dtype, seed):
    return [np.random.default_rng(seed).normal(size=shape).astype(dtype)]


def bad(x):
    return x * x.dtype.type(1.5)


def comparisons():
    easy = cases_over(make, [(800, 8)], ["float32"])
    hard = cases_over(make, [(800, 8)], ["float16"], attributes={"task": "code"})
    return [
        OperatorPair("good", lambda x: x, lambda x: x, [*easy, *hard], batch_sizes=(4,)),
        OperatorPair("bad", lambda x: x, bad, [*easy, *hard]),
    ]


def holes(x):
    out = x.copy()
    out[::10] = np.nan
    return out


def breaks(x):
    raise IndexError("out of shared memory")


LIST = comparisons()[:1]
HOLES = [OperatorPair("good", lambda x: x, holes, cases_over(make, [(800, 8)], ["float32"]))]
BREAKS = [OperatorPair("good", lambda x: x, breaks, cases_over(make, [(800, 8)], ["float32"]))]
EMPTY = []
WRONG = [1]
"""
CONTRACT = """
apiVersion: kernel-contract/v1
kind: KernelContract
metadata: {name: policy, version: 1, owner: tests}
kernels: {train: {engine: numpy}, inference: {engine: numpy}}
slices: {code: {where: {task: code}}}
numerical:
  - {id: good, metric: operator_ulp, operator: good, statistic: p99, limit: 1}
  - {id: batch, metric: operator_batch_dependence, operator: good, limit: 0}
  - {id: bad, metric: operator_relative, operator: bad, statistic: mean, limit: 0.1}
  - {id: absent, metric: operator_ulp, operator: elsewhere, statistic: max, limit: 1}
statistical:
  - {id: tv, metric: tv_token, unit: token, limit: 0.01}
observability: {min_samples: 600}
"""


@pytest.fixture
def run(tmp_path, monkeypatch, command):
    (tmp_path / "spec.py").write_text(SPEC)
    (tmp_path / "c.yaml").write_text(CONTRACT)
    (tmp_path / "fine.yaml").write_text(CONTRACT.replace("limit: 0.1", "limit: 0.9"))
    monkeypatch.chdir(tmp_path)
    return partial(command("locate"), "locate", "operators", width=220)


def test_the_table_has_two_lines_per_case(run):
    code, out, _ = run("spec.py:comparisons")
    assert code == 0
    lines = [line.split() for line in out.splitlines() if "800x8" in line]
    assert [(line[0], line[1], line[2]) for line in lines] == [
        (name, "800x8", dtype) for name in ("good", "bad") for dtype in ("float32", "float16")
    ]
    assert "Verdicts" not in out
    rows = [lines.split() for lines in out.splitlines() if lines.strip()[:1].isdigit()]
    assert [row[0] for row in rows] == ["800"] * 4
    assert {len(row) for row in rows} == {9}
    assert max(map(len, out.splitlines())) <= 80


def test_a_bad_operator_fails_its_clause_and_the_command(run):
    """Exit code 1; the verdicts are by slice, and what could not be judged is said."""
    code, out, _ = run("spec.py:comparisons", "--contract", "c.yaml")
    assert code == 1
    verdicts = [line.split()[:3] for line in out.splitlines() if " samples" in line]
    judged = (("PASS", "good"), ("INCONCLUSIVE", "batch"), ("FAIL", "bad"))
    assert verdicts == [[*status_and_clause, slice] for status_and_clause in judged for slice in ("all", "code")]
    assert "8 of 600 samples: 592 more needed" in out  # a batch of 4 rows in each of two cases
    assert "not judged: absent: operator_ulp of elsewhere was not compared here" in out
    assert "not judged: tv: tv_token was not compared here" in out
    assert run("spec.py:comparisons", "--contract", "fine.yaml")[0] == 3, "batch is undecided"


def test_only_verdicts_that_all_pass_give_exit_code_0(run, tmp_path):
    """Neither operators of other names nor too few rows are a success."""
    for few, other, code in ((600, "good", 0), (6000, "good", 3), (600, "renamed", 3)):
        text = CONTRACT.replace("600", str(few)).replace("operator: good, statistic", f"operator: {other}, statistic")
        kept = [line for line in text.splitlines() if not line.startswith("  - {id: ") or "id: good" in line]
        (tmp_path / "only.yaml").write_text("\n".join(line for line in kept if line != "statistical:"))
        assert run("spec.py:comparisons", "--contract", "only.yaml")[0] == code


def test_json_has_everything(run):
    code, out, _ = run("spec.py:comparisons", "--contract", "c.yaml", "--json")
    assert code == 1
    found = json.loads(out)
    good, _, bad, _ = found["cases"]
    assert (good["operator"], good["rows"], good["ulp_max"]) == ("good", 800, 0)
    assert good["batch_dependence_by_size"] == {"4": 0}
    assert good["attributes"] == {"shape": "800x8", "dtype": "float32", "seed": 0}
    assert bad["batch_dependence_max"] is None
    assert bad["relative_max"] == pytest.approx(0.5)
    assert [v["status"] for v in found["verdicts"] if v["clause"] == "bad"] == ["FAIL", "FAIL"]
    samples = {(v["clause"], v["slice"]): v["samples"] for v in found["verdicts"]}
    assert (samples["good", "all"], samples["good", "code"], samples["batch", "code"]) == (1600, 800, 4)
    assert len(found["left_out"]) == 2


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("spec.py", "write FILE.py:NAME"),
        ("absent.py:x", "absent.py: is no Python file"),
        ("spec.py:missing", "has no 'missing'"),
        ("spec.py:EMPTY", "holds nothing, not kc_otel.integrations.operators.OperatorPair"),
        ("spec.py:WRONG", "holds int, not"),
        ("c.yaml:x", "c.yaml: is no Python file"),
    ],
)
def test_what_cannot_be_used_is_refused(run, target, said):
    code, out, err = run(target)
    assert (code, out) == (2, "")
    assert said in err


def test_a_contract_that_cannot_be_used_is_refused(run):
    code, _, err = run("spec.py:comparisons", "--contract", "absent.yaml")
    assert code == 2
    assert "absent.yaml" in err


def test_rows_that_are_not_finite_on_one_side_fail_the_command(run):
    code, text, _ = run("spec.py:HOLES", "--contract", "fine.yaml")
    assert code == 1
    assert "80 rows are NaN, or infinite on one side alone; they are not judged" in text


def test_an_operator_that_raises_is_named_and_is_no_failure_of_a_clause(run):
    code, _, text = run("spec.py:BREAKS")
    assert code == 2
    assert "spec.py:BREAKS: IndexError: out of shared memory (while comparing good on case" in " ".join(text.split())
