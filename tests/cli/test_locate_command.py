"""`kc-otel locate run`: from two kernels and a failing slice to a layer, module and share, or to the reason why not."""

from __future__ import annotations

import json

import numpy as np
import pytest
from typer.testing import CliRunner

pytest.importorskip("torch")

from kc_otel import cli
from kc_otel.cli import locate_command
from kc_otel.diagnose.above_noise import boundary_drift
from kc_otel.diagnose.boundaries import Boundary
from tests.diagnose.planted_faults import conversations
from tests.diagnose.test_above_noise import located, measured

CONTRACT = """\
apiVersion: kernel-contract/v1
kind: KernelContract
metadata: {name: planted, version: 1, owner: tests}
kernels: {train: {engine: torch}, inference: {engine: torch}}
slices: {code: {where: {task: code}}, prose: {where: {task: prose}}}
statistical:
  - {id: token-tv, metric: tv_token, limit: 0.01}
  - {id: tail, metric: abs_log_ratio, statistic: "fraction > 0.01", limit: 5%}
"""
KERNELS = """\
import torch
from tests.diagnose.planted_faults import FAULTS, Model, pair

train, infer = pair(FAULTS[{fault}], 2)
same = pair(None, 0)[1]
other = Model(seed=1)
shallow = Model()
del shallow.layers[3]
number = 3
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "contract.yaml").write_text(CONTRACT)
    (tmp_path / "kernels.py").write_text(KERNELS.format(fault=2))
    rows = [
        {
            "prompt_ids": sequence.token_ids[: sequence.prompt_tokens],
            "token_ids": sequence.token_ids[sequence.prompt_tokens :],
            "attributes": {"task": "code" if index < 8 else "prose"},
        }
        for index, sequence in enumerate(conversations())
    ]
    (tmp_path / "code.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    cli._register("locate")

    def invoke(*options, infer="infer"):
        kernels = ["--train", "kernels.py:train", "--infer", f"kernels.py:{infer}", "--sequences", "code.jsonl"]
        return CliRunner().invoke(cli.app, ["locate", "run", "contract.yaml", *kernels, *options])

    return invoke


@pytest.mark.slow
def test_the_culprit_has_a_layer_a_tensor_and_a_share(run):
    """One command from a failing slice to the tensor, with evidence."""
    result = run("--slice", "code")
    assert result.exit_code == 1
    assert "culprit: layer 2, o_proj, module layers.2.o_proj" in result.output
    assert "tensor layers.2.o_proj.weight differs by" in result.output
    assert "100 % [100, 100] of tv_token on code comes from o_proj in layer 2" in result.output
    assert "slice code: 8 sequences" in result.output


@pytest.mark.slow
def test_evidence_is_json(run):
    """Everything that was printed, and every boundary, for a program."""
    found = json.loads(run("--json", "--clause", "tail").stdout)
    assert found["culprit"]["boundary"] == {"layer": 2, "operator": "o_proj", "part": 0}
    assert found["metric"] == "tokens with |log ratio| above 0.01"
    assert [row["boundary"]["operator"] for row in found["boundaries"] if row["is_above"]] == ["o_proj"]


@pytest.mark.slow
def test_equal_kernels_have_no_culprit(run):
    """And the command says so with 0."""
    result = run(infer="same")
    assert (result.exit_code, "no culprit: no boundary is above noise" in result.output) == (0, True)


def test_the_undecided_has_an_exit_code_of_its_own(run, monkeypatch):
    """3: too few sequences to tell are neither a culprit nor none."""
    family = {Boundary(i, "kv_cache"): measured(np.full(4, 0.0 if i else 13.0)) for i in range(360)}
    monkeypatch.setattr(locate_command, "_of_kernels", lambda *_, **__: located(boundary_drift(family, 0.005)))
    result = run()
    assert (result.exit_code, "undecided: layer 0, kv_cache differs by" in result.output) == (3, True)


@pytest.mark.parametrize(
    ("options", "infer", "said"),
    [
        ((), "other", "have nothing to do with each other"),
        ((), "shallow", "the training kernel has 4 layers and the inference kernel 3"),
        ((), "number", "kernels.py:number: is int, not a torch module"),
        ((), "absent", "kernels.py: has no 'absent'"),
        (("--slice", "tables"), "infer", "'tables' is not a slice of the contract; there are all, code, prose"),
        (("--clause", "x"), "infer", "'x' is not in the contract; there are token-tv, tail"),
        (("--precision", "fp17"), "infer", "'fp17' is no number format of torch"),
    ],
)
def test_what_cannot_be_compared_is_refused_with_the_reason(run, options, infer, said):
    """Other checkpoints, other depths, names that are not there."""
    result = run(*options, infer=infer)
    assert result.exit_code == 2
    assert said in result.output


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("[1, 2]", "code.jsonl:1: is not a JSON object but list"),
        ("{", "code.jsonl:1: is not JSON"),
        ('{"prompt_ids": [1]}', "code.jsonl:1: has no token_ids"),
        ('{"token_ids": [1]}', "1 tokens; a sequence needs two"),
        ('{"token_ids": [1, -2]}', "token_ids: is no list of whole numbers from 0"),
        ('{"token_ids": [1, 2], "attributes": 3}', "attributes: int is no object"),
        ('{"token_ids": [1, 9999]}', "sequence 0: token 9999 is beyond the vocabulary of 128"),
    ],
)
def test_sequences_that_cannot_be_used_are_refused(run, tmp_path, line, said):
    """With file, line and field."""
    (tmp_path / "code.jsonl").write_text(f"{line}\n" * 8)
    result = run()
    assert result.exit_code == 2
    assert said in result.output
