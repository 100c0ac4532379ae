"""`kc-otel import` as a person calls it: what is measured, and scalars by step of a run that is over."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from functools import partial

import numpy as np
import pytest
from opentelemetry.sdk.metrics.export import MetricExportResult

from kc_otel.cli import measure_commands
from kc_otel.contract.input_reasons import REASONS
from kc_otel.record.telemetry import environment
from kc_otel.recordings.importers.importer import Ledger, unseen
from tests.client.test_training_log import CONTRACT as STEP_CONTRACT
from tests.tools.memory import Memory

CONTRACT = """apiVersion: kernel-contract/v1
kind: KernelContract
metadata: {name: a, version: 1, owner: o}
kernels: {train: {engine: torch}, inference: {engine: vllm}}
slices: {math: {where: {env_name: math}}}
statistical: [{id: tv, metric: tv_token, unit: token, limit: 0.01}]
"""


def line(tokens=40, seed=0, **changes):
    """A record of prime-rl's token export."""
    rng = np.random.default_rng(seed)
    inference = np.log(rng.uniform(0.01, 1, tokens))
    train = np.minimum(inference + 0.01 * rng.standard_normal(tokens), 0)
    return {
        "schema_version": 1,
        "step": 3,
        "env_name": "math",
        "token_ids": [*range(tokens)],
        "loss_mask": [True] * tokens,
        "inference_logprobs": inference.tolist(),
        "trainer_logprobs": train.tolist(),
        **changes,
    }


@pytest.fixture
def run(tmp_path, monkeypatch, command):
    """Runs a command in a folder with a contract and an exported step of two sequences."""
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.startswith("OTEL_"):
            monkeypatch.delenv(name)
    monkeypatch.setattr(environment, "metric_exporters", lambda _: (Memory(),))
    (tmp_path / "contract.yaml").write_text(CONTRACT)
    step = tmp_path / "token_exports" / "step_3"
    step.mkdir(parents=True)
    (step / "rank_0.jsonl").write_text("".join(json.dumps(line(seed=n)) + "\n" for n in range(2)))
    return command("import")


def test_a_folder_is_imported_and_counted(run):
    code, out, _ = run("token_exports", "--contract", "contract.yaml")
    assert code == 0
    assert "rank_0.jsonl: 2 sequences, 80 tokens" in out
    assert "1 files exported, 0 failed; of 2 sequences 2 measured: 80 tokens" in out
    assert "it is unknown which weights sampled 2 sequences: their figures contain drift and staleness together" in out


def test_steps_that_are_judged_together_are_told(run, tmp_path):
    """A step that drifts is a small part of a whole run."""
    told = "the sequences of steps 3 to 4 are judged together, so that a step that drifts may be hidden; --log FILE"
    assert told not in run("token_exports", "--contract", "contract.yaml")[1]
    later = tmp_path / "token_exports" / "step_4" / "rank_0.jsonl"
    later.parent.mkdir()
    later.write_text(json.dumps(line(seed=7, step=4)) + "\n")
    assert told in run("token_exports", "--contract", "contract.yaml")[1]
    assert told not in run("token_exports", "--contract", "contract.yaml", "--log", "steps.jsonl")[1]


def test_a_copy_is_named_and_does_not_count_again(run, tmp_path):
    step = tmp_path / "token_exports" / "step_3"
    (step / "rank_1.jsonl").write_bytes((step / "rank_0.jsonl").read_bytes())
    code, out, _ = run("token_exports", "--contract", "contract.yaml", width=300)
    assert code == 0
    assert "/rank_1.jsonl: is a copy of /" in out
    assert "/token_exports/step_3/rank_0.jsonl, and does not count again" in out
    assert "1 files exported, 0 failed; of 2 sequences 2 measured: 80 tokens" in out


def test_an_import_that_is_stopped_says_how_many_files_are_left(run, tmp_path, monkeypatch):
    for rank in (1, 2):
        (tmp_path / "token_exports" / "step_3" / f"rank_{rank}.jsonl").write_text(json.dumps(line(seed=rank)) + "\n")
    stop, one = threading.Event(), measure_commands._one
    monkeypatch.setattr(measure_commands, "stopped_by_signals", lambda: contextlib.nullcontext(stop))
    monkeypatch.setattr(measure_commands, "_one", lambda *given: (one(*given), stop.set()))
    code, _, errors = run("token_exports", "--contract", "contract.yaml")
    assert (code, errors.splitlines()[-1]) == (1, "stopped: 2 files were not imported")


def test_what_is_not_measured_is_told_with_its_remedy(run, tmp_path):
    nan, other = line(seed=4), line(80, seed=5)
    nan["trainer_logprobs"][3] = None
    other["trainer_logprobs"] = [0.7 * logprob for logprob in other["inference_logprobs"]]
    short = {**line(), "inference_logprobs": line()["inference_logprobs"][1:]}
    records = [nan, other, line(loss_mask=[False] * 40), line(), short]
    (tmp_path / "rank_1.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    code, out, _ = run("rank_1.jsonl", "--contract", "contract.yaml", "--format", "prime-rl")
    assert code == 0
    assert "refused: 1 no_tokens: rank_1.jsonl:3: loss_mask and rl_weights leave no token" in out
    assert f"not measured: 1 nan_logprob: {REASONS['nan_logprob'].meaning}" in out
    assert "not measured: 1 temperature_mismatch:" in out
    assert "processed_logprobs" in out
    assert "refused: 1 shape_mismatch: rank_1.jsonl:5: log-probabilities and mask have" in out
    assert "not measured: 1 shape_mismatch" not in out
    assert "of 4 sequences 1 measured: 40 tokens" in out


def test_finished_files_are_remembered_and_only_what_is_appended_is_measured(run, tmp_path):
    arguments = ("token_exports", "--contract", "contract.yaml", "--done", "done.jsonl")
    path = tmp_path / "token_exports" / "step_3" / "rank_0.jsonl"
    assert "1 files exported, 0 failed; of 2 sequences" in run(*arguments)[1]
    assert "0 files exported" in run(*arguments)[1]
    path.write_text(path.read_text() + json.dumps(line(seed=7)) + "\n")
    assert "1 files exported, 0 failed; of 1 sequences 1 measured" in run(*arguments)[1]
    assert "0 files exported" in run(*arguments)[1]
    path.write_text(json.dumps(line(seed=8)) + "\n")
    code, out, err = run(*arguments)
    assert (code, "of 0 sequences" in out) == (1, True)
    assert "rank_0.jsonl: no longer begins with the 3 lines that were measured; only append to it" in err


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("OTEL_METRICS_EXPORTER", "none", "measured, not exported: OTEL_METRICS_EXPORTER=none sends nothing"),
        ("OTEL_SDK_DISABLED", "true", "not measured: OTEL_SDK_DISABLED=true turns the recorder off"),
    ],
)
def test_what_nothing_exports_is_not_called_exported(run, tmp_path, monkeypatch, name, value, said):
    monkeypatch.setenv(name, value)
    code, out, err = run("token_exports", "--contract", "contract.yaml", "--done", "done.jsonl")
    assert (code, (tmp_path / "done.jsonl").exists()) == (1, False)
    assert "0 files exported, 1 failed" in out
    assert f"rank_0.jsonl: {said}" in err


def test_a_file_whose_export_is_accepted_late_is_finished(run, tmp_path, monkeypatch):
    class Late(Memory):
        def export(self, metrics_data, **_):
            super().export(metrics_data)
            return MetricExportResult.FAILURE if len(self.exports) == 1 else MetricExportResult.SUCCESS

    monkeypatch.setattr(environment, "metric_exporters", lambda _: (Late(),))
    code, out, err = run("token_exports", "--contract", "contract.yaml", "--done", "done.jsonl", "--patience", "0")
    assert "measured, not exported: no endpoint took the export" in err
    assert (code, "1 files exported, 0 failed" in out) == (0, True)
    assert len((tmp_path / "done.jsonl").read_text().splitlines()) == 1


def test_a_file_that_cannot_be_imported_makes_exit_code_1(run, tmp_path):
    (tmp_path / "token_exports" / "9.jsonl").write_text(json.dumps({"input": "a", "output": "b", "step": 9}) + "\n")
    code, out, err = run("token_exports", "--contract", "contract.yaml")
    assert code == 1
    assert "text and scores without log-probabilities" in err
    assert "1 files exported, 1 failed" in out


def test_files_that_fail_for_one_reason_are_counted(run, tmp_path):
    for index in range(5):
        text = json.dumps({"input": "a", "output": "b", "step": 9}) + "\n"
        (tmp_path / "token_exports" / f"{index}.jsonl").write_text(text)
    code, out, err = run("token_exports", "--contract", "contract.yaml")
    assert code == 1
    assert err.count("text and scores without log-probabilities") == 1
    (line,) = [line for line in out.splitlines() if "text and scores" in line]
    assert line.startswith(
        "  failed: 5 files, token_exports/0.jsonl, token_exports/1.jsonl, token_exports/2.jsonl and 2 "
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["empty"], "empty: holds no recording and no file of a trainer"),
        (["nowhere"], "nowhere: there is no such file or folder"),
        (["token_exports", "--format", "csv"], "--format csv: write one of auto, verl"),
        (["token_exports", "--columns", "train"], "--columns: 'train' is not ROLE=COLUMN"),
        (["token_exports", "--attribute", "=x"], "--attribute: '=x' is not NAME=VALUE"),
        (["token_exports", "--done", "contract.yaml"], "contract.yaml:1: is no record of a finished file"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(run, tmp_path, arguments, said):
    """Exit code 2, and nothing is imported."""
    (tmp_path / "empty").mkdir()
    code, out, err = run(*arguments, "--contract", "contract.yaml")
    assert code == 2
    assert said in err
    assert "exported" not in out


@pytest.mark.slow
def test_following_waits_for_files_to_be_finished(tmp_path):
    step = tmp_path / "token_exports" / "step_1"
    step.mkdir(parents=True)
    growing = tmp_path / "log.jsonl"
    growing.write_text("{}\n")
    (step / "rank_0.jsonl").write_text("{}\n")
    stop, found = threading.Event(), []

    def look():
        found.extend(path.name for path in unseen([tmp_path], Ledger(None), stop, follow=True, poll=0.05))

    thread = threading.Thread(target=look)
    thread.start()
    for _ in range(8):
        with growing.open("a") as file:
            file.write("{}\n")
        time.sleep(0.02)
    wait_for(lambda: found == ["log.jsonl"])
    (step / "STABLE").touch()
    wait_for(lambda: found == ["log.jsonl", "rank_0.jsonl"])
    time.sleep(0.2)
    stop.set()
    thread.join(5)
    assert found == ["log.jsonl", "rank_0.jsonl"]


def wait_for(true, seconds=120.0):
    """Give a thread some time."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture
def log_steps(run, tmp_path):
    """Runs `import --log` with a limit of 0.02 on the mean of tv_token."""
    (tmp_path / "policy.yaml").write_text(STEP_CONTRACT.replace("  prose: {where: {task: prose}}\n", ""))
    return partial(run, "--contract", "policy.yaml", "--log", "drift.jsonl")


def export(folder, step, sigma, rank=0, seed=None):
    """A rank's file of a step as prime-rl exports it; the mean of its tv_token."""
    rng = np.random.default_rng(step if seed is None else seed)
    inference = -rng.exponential(size=(100, 64)) - 2.0
    train = inference + sigma * rng.normal(size=inference.shape).clip(-4, 4) - sigma**2 / 2  # E_Q[P/Q] = 1
    path = folder / "run" / "token_exports" / f"step_{step}" / f"rank_{rank}.jsonl"
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
def test_each_step_of_a_bulk_import_is_judged_for_itself(log_steps, tmp_path):
    """Step 10 drifts, its neighbours do not: their scalars know nothing of each other, and two ranks are one step."""
    drift = {9: export(tmp_path, 9, 0.01), 11: export(tmp_path, 11, 0.01)}
    drift[10] = (export(tmp_path, 10, 0.2) + export(tmp_path, 10, 0.3, rank=1, seed=99)) / 2
    code, out, _ = log_steps("run/token_exports")
    assert code == 0, out
    assert "drift.jsonl: 3 steps, 9 to 11" in out
    lines = [json.loads(line) for line in (tmp_path / "drift.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [9, 10, 11]
    assert [line["kc/token-tv/verdict"] for line in lines] == [0.0, 3.0, 0.0]
    for line in lines:
        assert line["kc/token-tv/worst/code"] == pytest.approx(drift[line["step"]], rel=1e-3)
    assert lines[1]["kc/token-tv/bound"] > lines[1]["kc/token-tv/limit"] == 0.02


def test_what_comes_after_its_step_was_written_is_told_of(log_steps, tmp_path):
    export(tmp_path, 1, 0.01)
    export(tmp_path, 2, 0.01)
    late = tmp_path / "run" / "token_exports" / "step_3" / "rank_0.jsonl"
    late.parent.mkdir()
    lines = (tmp_path / "run" / "token_exports" / "step_1" / "rank_0.jsonl").read_text().splitlines(keepends=True)
    late.write_text("".join(lines[1:]))
    (late.parent / "STABLE").touch()
    code, out, _ = log_steps("run/token_exports")
    assert code == 0
    assert "1 batches arrived after their step was written" in out
    assert len((tmp_path / "drift.jsonl").read_text().splitlines()) == 2


def test_files_that_say_no_step_are_given_one(log_steps, tmp_path):
    rng = np.random.default_rng(0)
    inference = -rng.exponential(size=(100, 64)) - 2.0
    np.savez(tmp_path / "rollouts.npz", train_logprobs=inference + 1e-3, inference_logprobs=inference)
    code, out, _ = log_steps("rollouts.npz")
    assert (code, (tmp_path / "drift.jsonl").read_text()) == (0, "")
    assert "no sequence has a step; give --attribute step=NUMBER" in out
    log_steps("rollouts.npz", "--attribute", "step=7")
    assert json.loads((tmp_path / "drift.jsonl").read_text())["step"] == 7
