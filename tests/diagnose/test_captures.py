"""Captures of two machines: small, sealed, gone on with when interrupted, and enough to name the first divergence."""

from __future__ import annotations

import json
import zipfile
from itertools import chain
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("torch")

from typer.testing import CliRunner

from kc_otel import cli
from kc_otel.contract.model import KernelSpec
from kc_otel.diagnose.boundaries import HEAD, OUTPUT, SAMPLER, Boundary, fused
from kc_otel.diagnose.captures import (
    Capture,
    CapturedSequence,
    CaptureWriter,
    compare_captures,
    projected,
    read_capture,
    relative_error,
)
from kc_otel.diagnose.kernel_sources import capture_kernel, capture_of, kernel_from, torch_kernel_from
from kc_otel.diagnose.located import NotComparableError
from kc_otel.diagnose.torch_kernel import TorchKernel
from kc_otel.diagnose.vllm_kernel import VllmKernel
from tests.diagnose.planted_faults import FAULTS, Model, conversations, pair
from tests.tools.contracts import contract_of, contract_text

CONTRACT = contract_of("planted")


def captured(kernel, count=6):
    return Capture("tests", tuple(capture_kernel(kernel, conversations(count))))


def test_a_projection_keeps_a_relative_error():
    """Of any size, within a fifth, over 32 positions of 2048 features."""
    rng = np.random.default_rng(0)
    values = rng.standard_normal((32, 2048), dtype=np.float32)
    for size in (1e-4, 1e-2, 1.0):
        other = values + np.float32(size) * rng.standard_normal(values.shape, dtype=np.float32)
        assert relative_error(projected(values), projected(other)) == pytest.approx(size, rel=0.2)


def test_queries_keys_and_values_are_put_side_by_side():
    keys = [Boundary(0, operator) for operator in ("attention_norm", "q_proj", "k_proj", "v_proj", "o_proj")]
    joined = fused({key: [index, index] for index, key in enumerate(keys)}, lambda parts: [*chain(*parts)])
    assert list(joined) == [keys[0], Boundary(0, "qkv_proj"), keys[4]]
    assert joined[Boundary(0, "qkv_proj")] == [1, 1, 2, 2, 3, 3]


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "operator"), [(FAULTS[0], "rotary"), (FAULTS[2], "o_proj"), (FAULTS[5], "router")])
def test_the_first_divergence_is_the_planted_one(fault, operator):
    train, inference = pair(fault, 2)
    located = compare_captures(CONTRACT, captured(train), captured(inference))
    assert [finding.boundary for finding in located.findings] == [Boundary(2, operator, located.culprit.boundary.part)]
    assert sum(row.is_above for row in located.boundaries) > 5


@pytest.mark.slow
def test_equal_kernels_have_no_culprit():
    train, inference = pair(None, 0)
    assert compare_captures(CONTRACT, captured(train), captured(inference)).findings == ()


@pytest.mark.slow
def test_other_checkpoints_and_other_tokens_are_refused():
    kernel = TorchKernel(Model())
    with pytest.raises(NotComparableError, match="the checkpoints are others"):
        compare_captures(CONTRACT, captured(kernel), captured(TorchKernel(Model(seed=1))))
    other = Capture("tests", tuple(capture_kernel(kernel, conversations(3, seed=9))))
    with pytest.raises(NotComparableError, match="no sequence of the same tokens"):
        compare_captures(CONTRACT, captured(kernel), other)


@pytest.mark.slow
def test_an_interrupted_capture_is_gone_on_with(tmp_path):
    sequences = conversations(3)
    made = list(capture_kernel(TorchKernel(Model()), sequences))
    first = CaptureWriter(tmp_path / "a.capture", "tests")
    first.write(0, sequences[0].token_ids, made[0])
    again = CaptureWriter(tmp_path / "a.capture", "tests")
    assert [again.has(index, sequence.token_ids) for index, sequence in enumerate(sequences)] == [True, False, False]
    for index in (1, 2):
        again.write(index, sequences[index].token_ids, made[index])
    again.seal()
    read = read_capture(tmp_path / "a.capture")
    assert [sequence.token_ids for sequence in read.sequences] == [sequence.token_ids for sequence in sequences]
    for ours, theirs in zip(made, read.sequences, strict=True):
        assert ours.noise == theirs.noise
        assert all(np.array_equal(ours.outputs[key], theirs.outputs[key]) for key in ours.outputs)
    with pytest.raises(ValueError, match="a sealed capture is not changed"):
        CaptureWriter(tmp_path / "a.capture", "tests")


def test_a_capture_of_another_kernel_is_not_gone_on_with(tmp_path):
    """Two kernels would be mixed."""
    CaptureWriter(tmp_path / "a.capture", "one")
    with pytest.raises(ValueError, match="was begun for another kernel"):
        CaptureWriter(tmp_path / "a.capture", "other")


def test_a_changed_capture_is_refused(tmp_path):
    sequences = conversations(2)
    writer = CaptureWriter(tmp_path / "a.capture", "tests")
    for index, outputs in enumerate(capture_kernel(TorchKernel(Model()), sequences)):
        writer.write(index, sequences[index].token_ids, outputs)
    writer.seal()
    with zipfile.ZipFile(tmp_path / "a.capture") as packed:
        members = {name: packed.read(name) for name in packed.namelist()}
    victim = next(name for name in members if name.endswith(".npz"))
    for changed in (
        {**members, victim: members[victim][:-1] + b"x"},
        {k: v for k, v in members.items() if k != victim},
    ):
        with zipfile.ZipFile(tmp_path / "b.capture", "w") as packed:
            for name, raw in changed.items():
                packed.writestr(name, raw)
        with pytest.raises(ValueError, match="was changed after it was sealed"):
            read_capture(tmp_path / "b.capture")
    (tmp_path / "c.capture").write_bytes(b"no zip")
    with pytest.raises(ValueError, match="is no sealed capture"):
        read_capture(tmp_path / "c.capture")
    with pytest.raises(ValueError, match=r"c\.capture: is neither a whole capture, nor"):
        torch_kernel_from(str(tmp_path / "c.capture"), CONTRACT.kernels.train)


def test_an_engine_that_is_not_what_the_contract_declares_is_refused(monkeypatch, tmp_path):
    """Unless an option says so: what was forgotten would be sound, also in a capture."""
    started = SimpleNamespace(close=lambda: None)
    started.formats = {"dtype": "torch.bfloat16", "kv_cache_dtype": "auto", "quantization": "none"}
    monkeypatch.setattr(VllmKernel, "of", lambda *_: started)
    spec = KernelSpec(engine="vllm", dtype="bfloat16", kv_cache_dtype="fp8")
    said = r"^vllm:model: kv_cache_dtype fp8 is declared, and auto reported; add --engine NAME=VALUE, or"
    with pytest.raises(NotComparableError, match=said), kernel_from("vllm:model", spec, {"max_model_len": 256}):
        pass
    with kernel_from("vllm:model", spec, {"kv_cache_dtype": "auto"}) as kernel:
        assert kernel is started
    tokens = (1, 2)
    sequence = CapturedSequence(tokens, 1, np.arange(2), {HEAD: np.ones((2, 4), np.float32)}, {HEAD: 4}, {}, {})
    for name, kernel in (("with", "vllm:model, kv_cache_dtype=fp8, max_model_len=9"), ("without", "vllm:model")):
        writer = CaptureWriter(tmp_path / name, kernel)
        writer.write(0, tokens, sequence)
        writer.seal()
    assert capture_of(tmp_path / "with", spec).sequences
    with pytest.raises(
        NotComparableError, match=r"vllm:model: kv_cache_dtype fp8 is declared, and auto reported; capt"
    ):
        capture_of(tmp_path / "without", spec)


@pytest.mark.slow
def test_two_machines_need_two_commands_and_one_more(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kernels.py").write_text(
        "from tests.diagnose.planted_faults import FAULTS, pair\ntrain, infer = pair(FAULTS[2], 1)\n"
    )
    clauses = [{"id": "token-tv", "metric": "tv_token", "limit": 0.01}]
    (tmp_path / "contract.yaml").write_text(contract_text("planted", statistical=clauses))
    rows = [{"token_ids": sequence.token_ids} for sequence in conversations(6)]
    (tmp_path / "tokens.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))

    def run(*words):
        cli._register(words[0])
        return CliRunner().invoke(cli.app, words)

    def capture(side, sequences):
        return run("locate", "capture", f"kernels.py:{side}", "--sequences", sequences, "--out", f"{side}.capture")

    assert capture("infer", "tokens.jsonl").exit_code == 0
    assert capture("train", "infer.capture").exit_code == 0
    sides = ("--train", "train.capture", "--infer", "infer.capture", "--sequences", "infer.capture")
    result = run("locate", "run", "contract.yaml", *sides)
    assert result.exit_code == 1, result.output
    assert "culprit: layer 1, o_proj" in result.output


def test_captures_are_compared_on_the_sequences_of_the_slice(tmp_path, monkeypatch):
    """Those that --sequences puts into it; of a capture, which has no attributes, all are taken for it and told of."""
    monkeypatch.chdir(tmp_path)
    slices = {task: {"where": {"task": task}} for task in ("code", "prose", "chat")}
    clauses = [{"id": "token-tv", "metric": "tv_token", "limit": 0.01}]
    kernels = {"train": {"engine": "torch"}, "inference": {"engine": "vllm", "quantization": "fp8"}}
    text = contract_text("planted", statistical=clauses, slices=slices, kernels=kernels)
    (tmp_path / "contract.yaml").write_text(text)
    rows = [{"token_ids": [*range(number, number + 8)], "task": ("code", "prose")[number % 2]} for number in range(24)]
    rows.append({"token_ids": [1, 2, 3], "task": "chat"})
    (tmp_path / "tokens.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    for side, error in (("train", 0.0), ("infer", 0.1)):
        writer = CaptureWriter(tmp_path / f"{side}.capture", side)
        for number, row in enumerate(rows[:-1]):
            values = np.random.default_rng(number).standard_normal((8, 32)).astype(np.float32)
            values[:, 0] += error * (row["task"] == "code")
            tokens = tuple(row["token_ids"])
            writer.write(number, tokens, CapturedSequence(tokens, 2, np.arange(8), {HEAD: values}, {HEAD: 32}, {}, {}))
        writer.seal()
    cli._register("locate")

    def located(sequences, slice, train="train.capture"):
        sides = ("--train", train, "--infer", "infer.capture", "--sequences", sequences, "--slice", slice)
        return CliRunner().invoke(cli.app, ("locate", "run", "contract.yaml", *sides))

    assert [located("tokens.jsonl", slice).exit_code for slice in ("code", "prose", "chat")] == [1, 0, 2]
    assert "slice prose: 12 sequences" in located("tokens.jsonl", "prose").output
    itself = located("tokens.jsonl", "code", train="infer.capture")
    assert (itself.exit_code, "infer.capture: is the training kernel, too" in itself.output) == (2, True)
    whole = located("infer.capture", "prose")
    assert (whole.exit_code, "all of them are taken for prose" in whole.output) == (1, True)
    assert "note: not checked, because captures do not say it: quantization fp8 of infer.capture" in whole.output


@pytest.mark.parametrize(("temperature", "named"), [(1.0, False), (0.9, True)])
def test_what_is_sampled_from_inherits_the_rounding_of_the_logits(temperature, named):
    rng = np.random.default_rng(0)

    def capture(rounded):
        made = []
        for number in range(24):
            logits = np.random.default_rng(number).standard_normal((8, 32)).astype(np.float32) * 4
            noise = 0.003 * rng.standard_normal(logits.shape).astype(np.float32) if rounded else 0.0
            logits = logits * (1.0 + noise)
            scaled = logits / (temperature if rounded else 1.0)
            logprobs = scaled - np.log(np.exp(scaled).sum(-1, keepdims=True))
            outputs = {**dict.fromkeys((HEAD, OUTPUT), logits.astype(np.float32)), SAMPLER: logprobs.astype(np.float32)}
            tokens = tuple(range(number, number + 8))
            precision = dict.fromkeys((HEAD, OUTPUT), 0.003)
            made.append(CapturedSequence(tokens, 2, np.arange(8), outputs, dict.fromkeys(outputs, 32), {}, precision))
        return Capture("rounded" if rounded else "exact", tuple(made))

    found = compare_captures(CONTRACT, capture(False), capture(True)).findings
    assert [finding.kind for finding in found] == (["sampler"] if named else [])
