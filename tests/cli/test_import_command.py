"""`kc-otel import` as a person calls it: what is measured, and what is refused."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
import time

import numpy as np
import pytest
from opentelemetry.sdk.metrics.export import MetricExportResult

from kc_otel.cli import measure_commands
from kc_otel.contract.input_reasons import REASONS
from kc_otel.record.telemetry import environment
from kc_otel.recordings.importers.importer import Ledger, _Measured, unseen
from tests.tools.contracts import contract_text
from tests.tools.memory import Memory

CLAUSES = [{"id": "tv", "metric": "tv_token", "unit": "token", "limit": 0.01}]
CONTRACT = contract_text("a", slices={"math": {"where": {"env_name": "math"}}}, statistical=CLAUSES)


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
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
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
    told = "the sequences of steps 3 to 4 are judged together, so that a step that drifts may be hidden; `kc-otel"
    assert told not in run("token_exports", "--contract", "contract.yaml")[1]
    later = tmp_path / "token_exports" / "step_4" / "rank_0.jsonl"
    later.parent.mkdir()
    later.write_text(json.dumps(line(seed=7, step=4)) + "\n")
    assert told in run("token_exports", "--contract", "contract.yaml", "--again")[1]


@pytest.mark.parametrize("told", [True, False])
def test_columns_that_look_swapped_are_told_of_all_files_together(run, tmp_path, told):
    rng = np.random.default_rng(0)
    for step in range(4, 6):
        sides = np.log(rng.uniform(0.05, 0.4, (2, 8000)))
        sides[1] = sides[0] + 0.1 * rng.standard_normal(8000) - 0.005
        columns = dict(zip(("trainer_logprobs", "inference_logprobs"), sides if told else sides[::-1], strict=True))
        file = tmp_path / "token_exports" / f"step_{step}" / "rank_0.jsonl"
        file.parent.mkdir()
        rows = [
            line(200, step=step, **{name: side[at : at + 200].tolist() for name, side in columns.items()})
            for at in range(0, 8000, 200)
        ]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = run("token_exports", "--contract", "contract.yaml", width=300)[1]
    assert ("the mean of P/Q over 16,080 tokens is 1.01" in out and "the columns look swapped" in out) is told


def test_a_copy_is_named_and_does_not_count_again(run, tmp_path):
    step = tmp_path / "token_exports" / "step_3"
    (step / "rank_1.jsonl").write_bytes((step / "rank_0.jsonl").read_bytes())
    code, out, _ = run("token_exports", "--contract", "contract.yaml", width=300)
    assert code == 0
    assert "/rank_1.jsonl: is a copy of /" in out
    assert "/token_exports/step_3/rank_0.jsonl, and does not count again" in out
    assert "1 files exported, 0 failed; of 2 sequences 2 measured: 80 tokens" in out


def test_an_import_ends_soon_where_nothing_takes_the_export_and_says_why(run, tmp_path, monkeypatch):
    (tmp_path / "token_exports" / "step_3" / "rank_1.jsonl").write_text(json.dumps(line(seed=1)) + "\n")
    down = Memory()
    down.result = MetricExportResult.FAILURE
    monkeypatch.setattr(environment, "metric_exporters", lambda _: (down,))
    monkeypatch.setattr("kc_otel.recordings.importers.importer.try_export", lambda: "Connection refused")
    monkeypatch.setattr(measure_commands, "_PATIENCE_SECONDS", 0.3)
    code, _, errors = run("token_exports", "--contract", "contract.yaml", width=300)
    assert code == 1
    assert "rank_0.jsonl: measured, not exported: no endpoint took the export: Connection refused" in errors
    assert errors.splitlines()[-1] == "stopped: 1 files were not imported"


def test_an_import_that_is_stopped_says_how_many_files_are_left(run, tmp_path, monkeypatch):
    for rank in (1, 2):
        (tmp_path / "token_exports" / "step_3" / f"rank_{rank}.jsonl").write_text(json.dumps(line(seed=rank)) + "\n")
    stop, one = threading.Event(), measure_commands._one
    monkeypatch.setattr(measure_commands, "stopped_by_signals", lambda: contextlib.nullcontext(stop))
    monkeypatch.setattr(measure_commands, "_one", lambda *given: (one(*given), stop.set()))
    code, _, errors = run("token_exports", "--contract", "contract.yaml")
    assert (code, errors.splitlines()[-1]) == (1, "stopped: 2 files were not imported")


def test_an_import_of_which_nothing_can_be_measured_has_exit_code_1(run, tmp_path):
    """Sides that are equal under two number formats; the file was read and exported, as invalid input."""
    formats = {"train": {"engine": "torch", "dtype": "float32"}, "inference": {"engine": "vllm", "dtype": "bfloat16"}}
    (tmp_path / "contract.yaml").write_text(contract_text("a", kernels=formats, statistical=CLAUSES))
    equal = line(seed=4)
    (tmp_path / "equal.jsonl").write_text(json.dumps(equal | {"trainer_logprobs": equal["inference_logprobs"]}) + "\n")
    code, out, _ = run("equal.jsonl", "--contract", "contract.yaml", width=300)
    assert (code, "1 files exported, 0 failed; of 1 sequences 0 measured" in out) == (1, True)


def test_what_is_not_measured_is_told_with_its_remedy(run, tmp_path):
    nan, other = line(seed=4), line(80, seed=5)
    nan["trainer_logprobs"][3] = None
    other["trainer_logprobs"] = [0.7 * logprob for logprob in other["inference_logprobs"]]
    short = {**line(), "inference_logprobs": line()["inference_logprobs"][1:]}
    records = [nan, other, line(loss_mask=[False] * 40), line(), short]
    (tmp_path / "rank_1.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    code, out, _ = run("rank_1.jsonl", "--contract", "contract.yaml")
    assert code == 0
    assert "refused: 1 no_tokens: rank_1.jsonl: line 3: loss_mask and rl_weights leave no token" in out
    assert f"not measured: 1 nan_logprob: {REASONS['nan_logprob'].meaning}" in out
    assert "not measured: 1 temperature_mismatch:" in out
    assert "processed_logprobs" in out
    assert "refused: 1 shape_mismatch: rank_1.jsonl: line 5: log-probabilities and mask have" in out
    assert "not measured: 1 shape_mismatch" not in out
    assert "of 4 sequences 1 measured: 40 tokens" in out


def test_a_second_import_to_a_contract_measures_nothing_again(run, tmp_path):
    """But on purpose; another contract is imported to for the first time."""
    arguments = ("token_exports", "--contract", "contract.yaml")
    assert "of 2 sequences 2 measured" in run(*arguments)[1]
    code, out, _ = run(*arguments, width=200)
    assert (code, "0 files exported, 0 failed; of 0 sequences 0 measured" in out) == (0, True)
    assert "token_exports/step_3/rank_0.jsonl: already exported for a at 20" in out
    assert "UTC: not measured again (--again does)" in out
    assert "of 2 sequences 2 measured" in run(*arguments, "--again")[1]
    assert "of 0 sequences 0 measured" in run(*arguments)[1]
    (tmp_path / "other.yaml").write_text(contract_text("b", statistical=CLAUSES))
    assert "of 2 sequences 2 measured" in run("token_exports", "--contract", "other.yaml")[1]


def test_without_a_list_of_finished_files_an_import_warns(run, tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    code, out, _ = run("token_exports", "--contract", "contract.yaml")
    assert (code, "of 2 sequences 2 measured" in out) == (0, True)
    assert "a second import will count the files again" in caplog.text


def test_what_another_import_has_finished_meanwhile_is_not_measured_again(tmp_path):
    """A list is read again before each file."""
    paths = [tmp_path / f"{name}.jsonl" for name in "ab"]
    for path in paths:
        path.write_text("{}\n")
    first, second = (Ledger(tmp_path / "done.txt") for _ in range(2))
    found = unseen(paths, first, threading.Event(), follow=False, poll=0.0)
    assert next(found) == paths[0]
    about = paths[1].stat()
    second.note(paths[1], _Measured(about.st_size, about.st_mtime_ns, 1, "digest", "first", [], 0.0))
    second.save()
    assert list(found) == []


def test_two_imports_at_once_measure_a_file_once(tmp_path):
    """The second waits until the first is done with it."""
    path = tmp_path / "a.jsonl"
    path.write_text("{}\n")
    ledgers = [Ledger(tmp_path / "done.txt") for _ in range(2)]
    first = unseen([path], ledgers[0], threading.Event(), follow=False, poll=0.0)
    assert next(first) == path
    waits = []

    class Meanwhile(threading.Event):
        def wait(self, timeout=None):
            waits.append(timeout)
            about = path.stat()
            ledgers[0].note(path, _Measured(about.st_size, about.st_mtime_ns, 1, "digest", "first", [], 0.0))
            ledgers[0].save()
            assert list(first) == []

    assert list(unseen([path], ledgers[1], Meanwhile(), follow=False, poll=0.0)) == []
    assert len(waits) == 1


def test_finished_files_are_remembered_and_only_what_is_appended_is_measured(run, tmp_path):
    arguments = ("token_exports", "--contract", "contract.yaml")
    path = tmp_path / "token_exports" / "step_3" / "rank_0.jsonl"
    assert "1 files exported, 0 failed; of 2 sequences" in run(*arguments)[1]
    assert "0 files exported" in run(*arguments)[1]
    path.write_text(path.read_text() + json.dumps(line(seed=7, step=4)) + "\n")
    assert "1 files exported, 0 failed; of 1 sequences 1 measured" in run(*arguments)[1]
    assert "0 files exported" in run(*arguments)[1]
    path.write_text(json.dumps(line(seed=8)) + "\n")
    assert "of 1 sequences 1 measured" in run(*arguments)[1]


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("OTEL_METRICS_EXPORTER", "none", "measured, not exported: OTEL_METRICS_EXPORTER=none sends nothing"),
        ("OTEL_SDK_DISABLED", "true", "not measured: OTEL_SDK_DISABLED=true turns the recorder off"),
    ],
)
def test_what_nothing_exports_is_not_called_exported(run, tmp_path, monkeypatch, name, value, said):
    monkeypatch.setenv(name, value)
    code, out, err = run("token_exports", "--contract", "contract.yaml")
    assert (code, (tmp_path / "state" / "kc-otel" / "imported-a.jsonl").read_text()) == (1, "")
    assert "0 files exported, 1 failed" in out
    assert f"rank_0.jsonl: {said}" in err


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
        (["token_exports", "--columns", "train"], "--columns: 'train' is not ROLE=COLUMN"),
        (["token_exports", "--attribute", "=x"], "--attribute: '=x' is not NAME=VALUE"),
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
        found.extend(path.name for path in unseen([tmp_path], Ledger(), stop, follow=True, poll=0.05))

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


def test_following_waits_for_a_folder_that_is_not_there_yet_or_is_removed(tmp_path):
    """The next run's clean-up is no fault; another folder is imported meanwhile."""
    late, there, stop = tmp_path / "late", tmp_path / "there.jsonl", Looks(7)
    there.write_text("{}\n")
    happens = {
        2: lambda: (late.mkdir(), (late / "step-1.jsonl").write_text("{}\n")),
        4: lambda: shutil.rmtree(late),
        5: lambda: (late.mkdir(), (late / "step-1.jsonl").write_text("{}{}\n")),
    }
    stop.happens = happens
    found = unseen([late, there], Ledger(), stop, follow=True, poll=5.0)
    assert [path.name for path in found] == ["there.jsonl", "step-1.jsonl", "step-1.jsonl"]
    (late / "step-2.jsonl").write_text("{}\n")
    for path in unseen([late], Ledger(), Looks(4), follow=True, poll=5.0):
        assert path.name == "step-1.jsonl"
        (late / "step-2.jsonl").unlink(missing_ok=True)


class Looks:
    """A stop event that is set after so many looks, between which something happens."""

    def __init__(self, most):
        self.most, self.looks, self.happens = most, 0, {}

    def is_set(self):
        return self.looks >= self.most

    def wait(self, _):
        self.looks += 1
        self.happens.get(self.looks, lambda: None)()
        return self.is_set()


def wait_for(true, seconds=120.0):
    """Give a thread some time."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)
