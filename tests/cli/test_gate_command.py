"""`kc-otel gate run` and `gate verify`: exit codes, what is printed, and what is written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from xml.etree import ElementTree as ET

import numpy as np
import pytest

from kc_otel.cli import gate_command
from kc_otel.contract.load import check_text
from kc_otel.record.kernel import Kernel
from kc_otel.recordings.recording_files import save_recording
from tests.recordings._files import write_rows
from tests.recordings.test_importers_formats import numbers, prime_line
from tests.tools.two_kernels import sampled_from_logits

COMMANDS = ("gate",)

pytestmark = pytest.mark.slow

CONTRACT = """apiVersion: kernel-contract/v1
kind: KernelContract
metadata: {name: policy, version: 1, owner: rl}
kernels: {train: {engine: torch}, inference: {engine: vllm, dtype: bfloat16}}
slices: {code: {where: {task: code}}, prose: {where: {task: prose}}}
numerical: [{id: exact, metric: tv_exact, unit: token, limit: 0.05}]
statistical: [{id: token-tv, metric: tv_token, unit: token, limit: 0.05}]
runtime: [{id: lag, metric: weights_lag, limit: 1}]
observability: {min_samples: 500}
"""


def write(path, *, code=0.01, sequences=120, seed=3, logits=True, tasks=("code", "prose")):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(15, 40, size=sequences)
    task = rng.integers(len(tasks), size=sequences)
    noises = np.array([code if tasks[t] == "code" else 0.01 for t in task])
    about = tuple({"task": tasks[t]} for t in task)
    save_recording(sampled_from_logits(rng, lengths, noises, about, logits=logits), path)
    return path


@pytest.fixture
def contract(tmp_path):
    path = tmp_path / "policy.yaml"
    path.write_text(CONTRACT)
    return path


def test_a_sound_kernel_exits_with_0(run, contract, tmp_path):
    good = write(tmp_path / "good.npz")
    code, out, err = run("gate", "run", contract, good)
    assert (code, err) == (0, "")
    assert out.startswith("advance: vllm ")
    assert "PASS: 6 verdicts" in out
    assert "  verdicts that cover only the measured traffic: " in out
    assert out.splitlines()[0].endswith(" and may go on to shadow; not judged: lag")
    assert "  not judged: lag: no recording holds weights_lag; the evaluator judges live traffic by it\n" in out


def test_a_kernel_that_breaks_one_slice_exits_with_1_and_names_it(run, contract, tmp_path):
    code, out, _ = run("gate", "run", contract, write(tmp_path / "bad.npz", code=0.9))
    assert code == 1
    assert out.startswith("rollback: ")
    assert "FAIL token-tv on slice code: lower bound" in out
    assert "times the limit" in out
    assert "slice prose" not in out


def test_slices_that_lack_data_for_one_reason_share_a_line(run, contract, tmp_path):
    more = ", ".join(f"s{index:02}: {{where: {{task: t{index}}}}}" for index in range(20))
    contract.write_text(CONTRACT.replace("slices: {", f"slices: {{{more}, "))
    code, out, _ = run("gate", "run", contract, write(tmp_path / "log.npz"))
    assert code == 3
    (line,) = [line for line in out.splitlines() if "NO_DATA" in line]
    assert line == (
        "  NO_DATA exact and token-tv on slices s00, s01, s02 and 17 more: no sequence of this recording is in such a "
        "slice; `task` is prose, code there"
    )
    rows = [line.split()[:2] for line in run("gate", "plan", contract)[1].splitlines() if "s00" in line]
    assert [name for name, _ in rows] == ["exact", "token-tv", "lag"] * 2


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ({"sequences": 6}, "INCONCLUSIVE token-tv on all traffic: "),
        ({"tasks": ("code",)}, "NO_DATA exact and token-tv on slice prose: no sequence of this recording is in slice"),
        ({"logits": False}, None),
    ],
)
def test_the_undecided_exits_with_3_and_says_what_is_missing(run, contract, tmp_path, made, said):
    path = write(tmp_path / "log.npz", **made)
    code, out, _ = run("gate", "run", contract, path)
    assert code == 3
    assert out.startswith("wait: ")
    lacks = "  not judged: exact: this recording lacks tv_exact: record a .npz with train_logits and inference_logits"
    assert (said or f"{lacks}; or --require the other clauses\n") in out


def test_columns_of_other_names_are_found_now_and_when_verified(run, contract, tmp_path):
    """--columns goes into the evidence, so that the recordings can be read again."""
    path = write(tmp_path / "log.npz", logits=False)
    with np.load(path) as file:
        arrays = dict(file)
    arrays["mine"] = arrays.pop(next(name for name in arrays if "inference" in name or "rollout" in name))
    np.savez(path, **arrays)
    asked = ("gate", "run", contract, path, "--require", "token-tv", "--evidence", tmp_path / "e.json")
    assert run(*asked)[0] == 2
    assert run(*asked, "--columns", "inference=mine")[0] == 0
    assert run("gate", "verify", tmp_path / "e.json", "--recordings", path)[0] == 0


def test_reports_and_evidence_are_written(run, contract, tmp_path, monkeypatch):
    summary = tmp_path / "summary.md"
    summary.write_text("before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    bad = write(tmp_path / "bad.npz", code=0.9)
    folder = tmp_path / "gate"
    code, out, _ = run(
        *("gate", "run", contract, bad, "--junit", folder / "junit.xml"),
        *("--markdown", folder / "gate.md", "--evidence", folder, "--kernel", "inference.version=0.32.0"),
        *("--kernel", "inference.parallelism=tp=2,pp=1", "--kernel", "train.extra.commit=abc"),
    )
    assert code == 1
    assert f"evidence: {folder / 'evidence.json'}" in out
    root = ET.parse(folder / "junit.xml").getroot()
    assert (root.tag, int(root.get("failures")) >= 2) == ("testsuites", True)
    text = (folder / "gate.md").read_text(encoding="utf-8")
    assert text.startswith("## ❌ vllm ")
    assert summary.read_text(encoding="utf-8") == f"before\n{text}\n"
    record = json.loads((folder / "evidence.json").read_text())
    assert record["offline"]["kernels"] == {
        "train": {"engine": "torch", "extra": {"commit": "abc"}},
        "inference": {"engine": "vllm", "dtype": "bfloat16", "version": "0.32.0", "parallelism": "tp=2,pp=1"},
    }
    assert run("gate", "verify", folder)[:2] == (0, f"{folder / 'evidence.json'}: sound\n")
    code, out, _ = run("gate", "verify", folder, "--recordings", tmp_path)
    assert (code, out.endswith("its recordings give the same verdicts\n")) == (0, True)
    write(bad, code=0.9, seed=4)
    code, _, err = run("gate", "verify", folder, "--recordings", bad)
    assert (code, "no file has the checksum of" in err) == (1, True)
    bad.rename(folder / "recording.npz")
    code, _, err = run("gate", "verify", folder)
    assert (code, "no file has the checksum of" in err) == (1, True)


@pytest.mark.parametrize("where", ["gate", "gate.json"])
def test_a_gate_without_a_decision_leaves_no_evidence_of_the_one_before(run, contract, tmp_path, where):
    """A job that goes on with what lies there would promote by a run that judged something else."""
    asked = ("--evidence", tmp_path / where)
    assert run("gate", "run", contract, write(tmp_path / "good.npz"), *asked)[0] == 0
    assert run("gate", "verify", tmp_path / where)[0] == 0
    assert run("gate", "run", contract, tmp_path / "none.npz", *asked)[0] == 2
    code, out, err = run("gate", "verify", tmp_path / where)
    assert (code, out, "cannot be read" in err) == (2, "", True)


@pytest.mark.parametrize("option", ["--junit", "--markdown"])
def test_a_gate_without_a_decision_leaves_no_report_of_the_one_before(run, contract, tmp_path, option):
    """A job that shows what lies there would be green; a file that no gate wrote stays until there is a decision."""
    report = tmp_path / "report"
    assert run("gate", "run", contract, write(tmp_path / "good.npz"), option, report)[0] == 0
    assert report.exists()
    assert run("gate", "run", contract, tmp_path / "none.npz", option, report)[0] == 2
    assert not report.exists()
    report.write_text("## my own\n")
    assert run("gate", "run", contract, tmp_path / "none.npz", option, report)[0] == 2
    assert report.read_text() == "## my own\n"


@pytest.mark.parametrize("option", ["--evidence", "--junit", "--markdown"])
@pytest.mark.parametrize("name", ["policy.yaml", "good.npz", "folder/good.npz"])
def test_a_gate_replaces_no_file_that_it_reads(run, contract, tmp_path, option, name):
    """Neither does its evidence replace any file that is no evidence."""
    (tmp_path / "folder").mkdir()
    recording = write(tmp_path / ("folder/good.npz" if "/" in name else "good.npz"))
    before, given = (tmp_path / name).read_bytes(), recording.parent if "/" in name else recording
    code, out, err = run("gate", "run", contract, given, option, tmp_path / name)
    assert (code, out, err.startswith(f"{option}: {tmp_path / name} ")) == (2, "", True)
    assert (tmp_path / name).read_bytes() == before


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 1}', "no JSON"])
def test_evidence_replaces_evidence_alone(run, contract, tmp_path, text):
    (tmp_path / "other.json").write_text(text)
    code, _, err = run("gate", "run", contract, tmp_path / "none.npz", "--evidence", tmp_path / "other.json")
    assert (code, "other.json exists and is no gate's evidence; name another file" in err) == (2, True)
    assert (tmp_path / "other.json").read_text() == text


def test_the_contract_may_come_from_standard_input(run, tmp_path):
    path, record = write(tmp_path / "log.npz"), tmp_path / "e.json"
    assert run("gate", "run", "-", path, "--evidence", record, stdin=CONTRACT)[0] == 0
    assert json.loads(record.read_text())["offline"]["contract"] == CONTRACT


def test_a_limit_that_nothing_can_keep_is_said_to_be_one(run, contract, tmp_path):
    """Waiting for more of the same would be for ever."""
    contract.write_text(
        CONTRACT.replace("metric: tv_token, unit: token, limit: 0.05", "metric: tv_token, unit: token, limit: 0")
    )
    path = write(tmp_path / "log.npz", sequences=4)
    _, out, _ = run("gate", "run", contract, path)
    assert "no number of observations can show that this limit is kept" in out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("missing.npz",), "missing.npz: there is no such file or folder"),
        (("LOG", "LOG"), "has the same content as"),
        (("LOG", "--require", "tv"), "--require: the contract has no clause 'tv'; there are exact, token-tv, lag"),
        (("LOG", "--slice", "cod"), "--slice: the contract has no slice 'cod'; did you mean 'code'?"),
        (("LOG", "--kernel", "infer.dtype=fp8"), "--kernel: 'infer.dtype' does not name a side"),
        (("LOG", "--kernel", "inference.kv=fp8"), "--kernel: 'kv' is none of engine, version"),
        (("LOG", "--kernel", "inference.dtype"), "--kernel: 'inference.dtype' is not NAME=VALUE"),
        (("LOG", "--evidence", "CONTRACT/e.json"), "cannot be written"),
    ],
)
def test_what_cannot_be_used_exits_with_2_and_says_why(run, contract, tmp_path, options, said):
    log = write(tmp_path / "log.npz")
    shown = [str(log) if option == "LOG" else option.replace("CONTRACT", str(contract)) for option in options]
    code, _, err = run("gate", "run", contract, *shown)
    assert code == 2
    assert said in err


@pytest.mark.parametrize(("code", "exits"), [(0.01, 0), (0.6, 1)])
def test_who_stops_reading_changes_neither_decision_nor_evidence(contract, tmp_path, code, exits):
    """As `| head -1` does: the exit code is the decision's, and what was asked for is written."""
    recording = write(tmp_path / "a.npz", code=code)
    reads, writes = os.pipe()
    os.close(reads)
    words = [contract, recording, "--evidence", tmp_path / "gate"]
    command = [sys.executable, "-m", "kc_otel", "gate", "run", *map(str, words)]
    found = subprocess.run(command, stdout=writes, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    os.close(writes)
    assert (found.returncode, found.stderr) == (exits, "")
    assert len(list((tmp_path / "gate").glob("*.json"))) == 1


def test_what_is_no_evidence_and_no_recording_is_said_to_be_none(run, contract, tmp_path):
    (tmp_path / "a.npz").write_text("hello")
    code, _, err = run("gate", "run", contract, tmp_path / "a.npz")
    assert (code, "a.npz: is not a .npz file, whatever its name says; numpy.savez writes one" in err) == (2, True)
    code, _, err = run("gate", "verify", contract)
    assert (code, "is not a gate's evidence, which is JSON" in err) == (1, True)
    (tmp_path / "e.json").write_text("{}")
    assert run("gate", "verify", tmp_path / "e.json")[0] == 1
    assert run("gate", "verify", tmp_path / "none.json")[0] == 2


def test_a_limit_that_is_no_number_has_one_error_and_no_warning_about_0():
    found = check_text(CONTRACT.replace("limit: 0.05}]\nruntime", "limit: .nan}]\nruntime")).problems
    assert [(problem.level, problem.message) for problem in found if problem.field == "statistical[0].limit"] == [
        ("error", ".nan is not finite; write a finite number")
    ]


def test_each_file_of_a_trainers_folder_is_a_window(run, contract, tmp_path):
    folder = tmp_path / "step_1"
    for rank in range(2):
        rng, sides = np.random.default_rng(rank), zip(*numbers(40, 30, rank), strict=True)
        lines = [prime_line(p, q, task="code", token_ids=rng.integers(1, 99, 32).tolist()) for p, q in sides]
        write_rows(folder / f"rank_{rank}.jsonl", lines)
    only = ("--require", "token-tv", "--slice", "all", "--slice", "code")
    code, out, _ = run("gate", "run", contract, folder, *only)
    assert code == 0, out
    assert out.startswith("advance: "), out


def test_a_folder_without_recordings_is_said_to_have_none(run, contract, tmp_path):
    (tmp_path / "empty").mkdir()
    code, _, err = run("gate", "run", contract, tmp_path / "empty", width=500)
    assert code == 2
    assert "empty: holds no recording and no file of a trainer" in err


def test_a_kernel_that_is_not_what_the_contract_declares_is_refused(run, contract, tmp_path, monkeypatch):
    """The verdict would be on a kernel that nobody asked about; so would one of the training kernel against itself."""
    log = write(tmp_path / "log.npz")
    code, _, said = run("gate", "run", contract, log, "--kernel", "inference.dtype=float16")
    assert (code, "inference: dtype bfloat16 is declared, and float16 reported; start the engine" in said) == (2, True)
    served = [
        {"role": side, "version": Kernel("vllm").fingerprint, "fields": {"engine": "vllm"}}
        for side in ("train", "inference")
    ]
    monkeypatch.setattr(gate_command, "get", lambda *_: {"contracts": [{"name": "policy", "kernels": served}]})
    contract.write_text(CONTRACT.replace("{engine: torch}", "{engine: vllm, dtype: float32}"))
    both = ("--kernel", f"train={Kernel('vllm').fingerprint}", "--kernel", f"inference={Kernel('vllm').fingerprint}")
    code, _, said = run("gate", "run", contract, log, *both)
    assert (code, "two kernels are declared, but both sides report the same one" in said) == (2, True)


def test_a_fingerprint_stands_for_what_the_kernel_has_reported(run, contract, tmp_path, monkeypatch):
    kernel = Kernel("vllm", version="0.32.0", dtype="bfloat16", attention="FLASH_ATTN", hardware="H100", extra={"x": 1})
    served = {"role": "inference", "version": kernel.fingerprint, "fields": kernel.fields()}
    monkeypatch.setattr(
        gate_command, "get", lambda *_: {"contracts": [{"name": "policy", "kernels": [served]}, {"name": "other"}]}
    )
    log = write(tmp_path / "log.npz")
    code, _, said = run("gate", "run", contract, log, "--kernel", f"inference={kernel.fingerprint}")
    assert (code, "does not match its fingerprint" in said) == (2, True)
    kernel = Kernel("vllm", version="0.32.0", dtype="bfloat16", attention="FLASH_ATTN", hardware="H100")
    served |= {"version": kernel.fingerprint, "fields": kernel.fields()}
    evidence = tmp_path / "gate"
    run("gate", "run", contract, log, "--kernel", f"inference={kernel.fingerprint}", "--evidence", evidence)
    assert json.loads((evidence / "evidence.json").read_text())["kernel"] == kernel.fingerprint
    code, _, said = run("gate", "run", contract, log, "--kernel", "inference=0123456789ab")
    assert (code, "no inference kernel 0123456789ab of policy has reported" in said) == (2, True)
