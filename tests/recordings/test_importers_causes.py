"""Trainers' files with planted drift of the kernels, planted staleness, or both: none says which weights sampled."""

from __future__ import annotations

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from kc_otel.cli import register
from tests.recordings.test_importers_formats import nemo_line, write
from tests.tools.two_causes import LIMIT, PLANTED, sampled

pytestmark = pytest.mark.slow

CONTRACT = f"""apiVersion: kernel-contract/v1
kind: KernelContract
metadata: {{name: policy, version: 1, owner: rl}}
kernels: {{train: {{engine: torch}}, inference: {{engine: vllm}}}}
slices: {{}}
statistical: [{{id: token-tv, metric: tv_token, unit: token, limit: {LIMIT}}}]
observability: {{min_samples: 100}}
"""
TOGETHER = "drift and staleness together"


def file_of(folder, planted):
    """A file of NeMo-RL; the formats' own tests hold that the others say as little of the weights that sampled."""
    train, inference, lags = sampled(0, *PLANTED.get(planted, (0.02, 0.01)))
    tokens = np.random.default_rng(1).integers(3, 30_000, lags.shape)
    lines = [
        nemo_line(p, q, token_ids=[1, 2, 3, *ids, 0, 0])
        for p, q, ids in zip(train.tolist(), inference.tolist(), tokens.tolist(), strict=True)
    ]
    return write(folder / "train_data_step12.jsonl", lines)


@pytest.fixture
def run(tmp_path):
    """Runs a command on a contract and a file; returns its exit code and what it prints on one line."""
    contract = tmp_path / "policy.yaml"
    contract.write_text(CONTRACT)

    def invoke(*command):
        app = typer.Typer()
        register(app, "gate")
        register(app, "compare")
        done = CliRunner().invoke(app, [str(part).replace("CONTRACT", str(contract)) for part in command])
        return done.exit_code, " ".join(done.output.split())

    return invoke


@pytest.mark.parametrize("planted", PLANTED)
def test_what_exceeds_a_limit_blames_no_kernel(run, tmp_path, planted):
    path = file_of(tmp_path, planted)
    code, output = run("gate", "run", "CONTRACT", path, "--evidence", tmp_path / "evidence")
    assert code == 3, output
    assert output.startswith("wait: ")
    assert "INCONCLUSIVE token-tv on all traffic: lower bound 0." in output
    assert f"; {TOGETHER}, because it is unknown which weights sampled" in output
    assert f"it is unknown which weights sampled 100 % of the sequences: {TOGETHER}" in output
    assert "FAIL" not in output
    assert run("gate", "verify", tmp_path / "evidence", "--recordings", path)[0] == 0
    _, output = run("compare", path, "--contract", "CONTRACT")
    assert TOGETHER in output
    assert "FAIL" not in output


def test_what_stays_within_a_limit_passes(run, tmp_path):
    code, output = run("gate", "run", "CONTRACT", file_of(tmp_path, "neither"))
    assert code == 0, output


def test_a_synchronous_trainers_files_are_held_against_the_kernels(run, tmp_path):
    path = file_of(tmp_path, "the kernels' drift grew")
    given = ("--attribute", "lag=0", "--evidence", tmp_path / "evidence")
    code, output = run("gate", "run", "CONTRACT", path, *given)
    assert code == 1, output
    assert "FAIL token-tv on all traffic" in output
    assert TOGETHER not in output
    assert run("gate", "verify", tmp_path / "evidence", "--recordings", path)[0] == 0
    _, output = run("compare", path, "--contract", "CONTRACT", "--attribute", "lag=0")
    assert "FAIL" in output
    assert TOGETHER not in output
