"""Scalars by step of a run that is over: each step for itself, a line for each."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from kc_otel.cli import register
from tests.client.test_training_log import CONTRACT


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs `import` in a folder with a contract: a limit of 0.02 on the mean of tv_token."""
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.startswith("OTEL_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "none")
    (tmp_path / "policy.yaml").write_text(CONTRACT)
    app = typer.Typer()
    app.callback()(lambda: None)
    register(app, "import")

    def invoke(*arguments):
        result = CliRunner().invoke(app, ["import", "--contract", "policy.yaml", *map(str, arguments)])
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return result.exit_code, result.stdout + result.stderr

    return invoke


def export(folder, step, sigma, rank=0, seed=None):
    """A rank's file of a step as prime-rl exports it; the mean of its tv_token."""
    rng = np.random.default_rng(step if seed is None else seed)
    inference = -rng.exponential(size=(100, 64)) - 2.0
    train = inference + sigma * rng.normal(size=inference.shape).clip(-4, 4) - sigma**2 / 2  # E_Q[P/Q] = 1
    path = folder / "token_exports" / f"step_{step}" / f"rank_{rank}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    about = {"schema_version": 1, "step": step, "task": "code", "loss_mask": [True] * 64}
    lines = [
        {**about, "inference_logprobs": q.tolist(), "trainer_logprobs": p.tolist()}
        for p, q in zip(train, inference, strict=True)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (path.parent / "STABLE").touch()
    return float(np.maximum(-np.expm1(train - inference), 0.0).mean())


@pytest.mark.slow
def test_each_step_of_a_bulk_import_is_judged_for_itself(run, tmp_path):
    """Step 10 drifts, its neighbours do not: their scalars know nothing of each other, and two ranks are one step."""
    drift = {9: export(tmp_path, 9, 0.01), 11: export(tmp_path, 11, 0.01)}
    drift[10] = (export(tmp_path, 10, 0.2) + export(tmp_path, 10, 0.3, rank=1, seed=99)) / 2
    code, out = run("token_exports", "--log", "drift.jsonl")
    assert code == 0, out
    assert "drift.jsonl: 3 steps, 9 to 11" in out
    lines = [json.loads(line) for line in (tmp_path / "drift.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [9, 10, 11]
    assert [line["kc/token-tv/verdict"] for line in lines] == [0.0, 3.0, 0.0]
    for line in lines:
        assert line["kc/token-tv/worst/code"] == pytest.approx(drift[line["step"]], rel=1e-3)
    assert lines[1]["kc/token-tv/bound"] > lines[1]["kc/token-tv/limit"] == 0.02


def test_what_comes_after_its_step_was_written_is_told_of(run, tmp_path):
    export(tmp_path, 1, 0.01)
    export(tmp_path, 2, 0.01)
    late = tmp_path / "token_exports" / "step_3" / "rank_0.jsonl"
    late.parent.mkdir()
    late.write_text((tmp_path / "token_exports" / "step_1" / "rank_0.jsonl").read_text())
    (late.parent / "STABLE").touch()
    code, out = run("token_exports", "--log", "drift.jsonl")
    assert code == 0
    assert "1 batches arrived after their step was written" in out
    assert len((tmp_path / "drift.jsonl").read_text().splitlines()) == 2


def test_files_that_say_no_step_are_given_one(run, tmp_path):
    rng = np.random.default_rng(0)
    inference = -rng.exponential(size=(100, 64)) - 2.0
    np.savez(tmp_path / "rollouts.npz", train_logprobs=inference + 1e-3, inference_logprobs=inference)
    code, out = run("rollouts.npz", "--log", "drift.jsonl")
    assert (code, (tmp_path / "drift.jsonl").read_text()) == (0, "")
    assert "no sequence has a step; give --attribute step=NUMBER" in out
    code, out = run("rollouts.npz", "--log", "drift.jsonl", "--attribute", "step=7")
    assert json.loads((tmp_path / "drift.jsonl").read_text())["step"] == 7
