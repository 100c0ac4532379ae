"""`kc-otel gate matrix`: every pair judged as a gate judges it, as a table, a picture and JSON."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from kc_otel.cli.gate_command import register

CONTRACT = """apiVersion: kernel-contract/v1
kind: KernelContract
metadata: {name: policy, version: 1, owner: rl}
kernels: {train: {engine: torch}, inference: {engine: vllm}}
slices: {code: {where: {task: code}}}
statistical: [{id: token-tv, metric: tv_token, cap: 0.25, limit: 0.05}]
runtime: [{id: weights, metric: weights_lag, statistic: max, limit: 0}]
observability: {min_samples: 100, min_sequences: 20}
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "contract.yaml").write_text(CONTRACT)
    rng = np.random.default_rng(0)
    said = -rng.exponential(1.0, (200, 16)) - 0.5
    for name, noise, rows in (("same", 0.0, 200), ("near", 0.02, 200), ("far", 0.6, 200), ("few", 0.02, 8)):
        train = said[:rows] - np.abs(noise * rng.standard_normal((rows, 16)))
        np.savez(f"{name}.npz", train_logprobs=train, inference_logprobs=said[:rows], task=np.array(["code"] * rows))
    app = typer.Typer()
    register(app)

    @app.command()
    def other() -> None:
        """Typer drops the name of a lone command."""

    def invoke(*arguments):
        found = CliRunner().invoke(app, ["gate", "matrix", "contract.yaml", *arguments])
        return found.exit_code, found.output

    return invoke


PAIRS = ("fp32/bf16=near.npz", "fp32/int8=far.npz", "bf16/bf16=same.npz", "bf16/fp8=few.npz")


def test_every_pair_is_in_its_place_with_what_is_worst(run, tmp_path):
    """Rows are trainers, columns rollouts; a pair that nobody recorded is empty; what is undecided is no PASS."""
    code, shown = run(*PAIRS, "--html", "matrix.html")
    assert code == 0
    rows = {row[0]: row[1:] for row in re.findall(r"^\| (\w+) \| (.*?) \| (.*?) \| (.*?) \|$", shown, re.MULTILINE)}
    assert [cell.partition(":")[0] for cell in rows["fp32"]] == ["PASS", "FAIL", ""]
    assert [cell.partition(":")[0] for cell in rows["bf16"]] == ["PASS", "", "INCONCLUSIVE"]
    assert rows["bf16"][0] == "PASS: 0 % of its limit"
    assert re.search(r"fp32/int8: FAIL token-tv on (code|all traffic): 0\.\d+, interval .*, limit 0.05", shown)
    assert "weights-lag" not in shown
    assert "weights: weights\\_lag cannot be told from this recording" in shown
    page = (tmp_path / "matrix.html").read_text()
    kinds = re.findall(r'<rect class="c-(\w+)"', page)
    assert kinds == ["pass", "fail", "pass", "open"]
    assert "fp32 with int8: FAIL" in page


def test_a_slice_without_sequences_is_no_number(run):
    """What is not known is called that, and is no PASS."""
    said = -np.ones((60, 16))
    np.savez("prose.npz", train_logprobs=said, inference_logprobs=said, task=np.array(["prose"] * 60))
    code, shown = run("fp32/bf16=prose.npz")
    assert (code, "| fp32 | NO\\_DATA: not known |" in shown, "nan" in shown) == (0, True, False), shown


def test_json_has_the_numbers(run):
    """One object for each pair, with the verdict that is worst."""
    code, shown = run(*PAIRS, "--json")
    cells = {(one["trainer"], one["rollout"]): one for one in json.loads(shown)["cells"]}
    assert code == 0
    assert cells["fp32", "int8"]["lower"] > cells["fp32", "int8"]["limit"] == 0.05
    assert cells["bf16", "fp8"]["sequences"] == 8


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("near.npz",), "TRAINER/ROLLOUT=FILE"),
        (("fp32=near.npz",), "'fp32' is no pair; write TRAINER/ROLLOUT=FILE"),
        (("a/b/c=near.npz",), "'a/b/c' is no pair"),
        (("fp32/bf16=none.npz",), "none.npz"),
        (("fp32/bf16=near.npz", "--html", "no/where.html"), "no/where.html: cannot be written"),
    ],
)
def test_what_cannot_be_used_is_said(run, arguments, said):
    """With exit code 2, and no traceback."""
    code, shown = run(*arguments)
    assert (code, said in shown.replace("\n", " ")) == (2, True), shown


def test_a_pair_that_is_given_twice_is_refused(run):
    """One of the two recordings would be judged and the other forgotten, whichever of them FAILs."""
    code, said = run("bf16/fp8=far.npz", "bf16/fp8=same.npz")
    assert code == 2
    assert "bf16/fp8 is given twice" in said
