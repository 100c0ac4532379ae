"""`kc_otel.compare`: verdicts from arrays, without an evaluator."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

import kc_otel
from kc_otel.contract.load import load_text
from kc_otel.judge.verdict import Status
from kc_otel.offline.gate.recorded_verdicts import by_contract, judge
from kc_otel.recordings.recording import RecordingError
from kc_otel.recordings.recording_files import load_recording

CONTRACT = """apiVersion: kernel-contract/v1
kind: KernelContract
metadata: {name: policy, version: 2, owner: rl}
kernels: {train: {engine: torch}, inference: {engine: vllm}}
slices: {code: {where: {task: code}}}
statistical: [{id: token-tv, metric: tv_token, unit: token, limit: 0.05}]
numerical: [{id: kl, metric: kl_train_inference, unit: token, limit: 0.1}]
observability: {min_samples: 500}
"""
FULL_LOGITS = "numerical: [{id: kl, metric: kl_train_inference, unit: token, limit: 0.1}]\n"


@pytest.fixture
def contract():
    return load_text(CONTRACT)


@pytest.fixture
def sides():
    """Two kernels of which the second half of the sequences, task code, has drifted."""
    rng = np.random.default_rng(0)
    inference = -rng.exponential(1.0, (120, 40)) - 1.0
    train = inference + 0.01 * rng.standard_normal(inference.shape)
    train[60:] -= np.abs(0.6 * rng.standard_normal((60, 40)))
    return train, inference, ["prose"] * 60 + ["code"] * 60


def test_sides_that_are_equal_have_no_verdict_under_two_number_formats(contract, sides):
    """As at a gate; what FAILs elsewhere is told."""
    train, inference, task = sides
    assert kc_otel.compare(inference, inference, contract=contract, slices={"task": task}).verdicts[0].status == "PASS"
    formats = CONTRACT.replace("{engine: torch}", "{engine: vllm, dtype: float32}")
    formats = load_text(formats.replace("{engine: vllm}", "{engine: vllm, dtype: bfloat16}"))
    with pytest.raises(RecordingError, match=r"^compare: both sides have the same number"):
        kc_otel.compare(inference, inference, contract=formats, slices={"task": task})
    copied = np.concatenate([inference[:60], train[60:]])
    assert kc_otel.compare(copied, inference, contract=formats, slices={"task": task}).status is Status.FAIL


def test_verdicts_are_those_of_a_recording_and_its_text_has_each_and_what_is_not_judged(contract, sides, tmp_path):
    train, inference, task = sides
    found = kc_otel.compare(train, inference, contract=contract, slices={"task": task})
    assert (found.status, found.sequences, found.tokens) == (Status.FAIL, 120, 4800)
    assert (found.verdicts[0].cell.clause, found.verdicts[0].status) == ("token-tv", Status.FAIL)
    text = repr(found)
    assert text.startswith("FAIL under policy v2: 120 sequences, 4,800 tokens")
    assert "  verdicts that cover only the measured traffic: token-tv" in text
    assert "not judged: kl" in text
    np.savez(tmp_path / "log.npz", train_logprobs=train, inference_logprobs=inference, task=np.array(task))
    recording = load_recording(tmp_path / "log.npz")
    same = judge(contract, by_contract(recording, contract), time.time())
    numbers = {(row.cell.slice, row.estimate, row.lower, row.upper, row.status) for row in same.verdicts}
    assert {(row.cell.slice, row.estimate, row.lower, row.upper, row.status) for row in found.verdicts} == numbers


def test_a_clause_that_a_gate_waits_for_has_no_data(sides):
    """Rewards could be given, and no arrays hold what a runtime clause is about."""
    text = CONTRACT[: CONTRACT.index("numerical")] + "assumptions: {reward_range: [0, 1]}\n"
    text += "runtime: [{id: lag, metric: weights_lag, limit: 1}]\nobservability: {min_samples: 500, min_sequences: 2}\n"
    train, inference = (side[:60] for side in sides[:2])
    given = {"slices": {"task": "code"}, "groups": range(60)}
    assert kc_otel.compare(train, inference, contract=load_text(text), **given).status is Status.PASS
    reward = text.replace("limit: 0.05}", "limit: 0.05}, {id: reward, metric: reward_drift, limit: 0.9}")
    found = kc_otel.compare(train, inference, contract=load_text(reward), **given)
    assert repr(found).startswith("NO_DATA under policy v2: ")
    given["slices"]["reward"] = [0.0, 1.0] * 30
    assert kc_otel.compare(train, inference, contract=load_text(reward), **given).status is not Status.NO_DATA


def test_a_contract_on_densities_judges_densities(sides):
    """What is above 0 is refused under any other."""
    train, inference, _ = sides
    dense = load_text(CONTRACT.replace("slices:", "assumptions: {density: true}\nslices:"))
    found = kc_otel.compare(train + 3.0, inference + 3.0, contract=dense)
    plain = kc_otel.compare(train, inference, contract=load_text(CONTRACT))
    assert found.verdicts[0].estimate == pytest.approx(plain.verdicts[0].estimate)
    with pytest.raises(RecordingError, match="a log-probability is at most 0"):
        kc_otel.compare(train + 3.0, inference + 3.0, contract=load_text(CONTRACT))


def test_a_side_in_half_precision_is_noted(contract, sides):
    train, inference, task = sides
    rounded = train.astype(np.float16).astype(np.float64)
    found = kc_otel.compare(rounded, inference, contract=contract, slices={"task": task})
    assert "log-probabilities of the train side all lie on float16's grid" in repr(found)
    assert "grid" not in repr(kc_otel.compare(train, inference, contract=contract, slices={"task": task}))


def test_a_sequence_counts_once_and_a_side_that_is_a_copy_is_noted(contract, sides):
    train, inference, task = (side[:20] for side in sides)
    often = np.tile([train, inference], (20, 1))
    found = kc_otel.compare(*often, contract=contract, slices={"task": np.tile(task, 20)})
    assert (found.sequences, max(verdict.samples for verdict in found.verdicts)) == (20, 800)
    assert found.notes[0].startswith("380 of 400 sequences repeat others")
    assert "one side is a copy of the other" in repr(kc_otel.compare(inference, inference, contract=contract))


def test_rollouts_of_one_prompt_count_together_and_unknown_prompts_are_noted(sides):
    """16 rollouts of each of 64 prompts; 5 prompts have drifted. Counted one by one they seem to show a PASS."""
    rng = np.random.default_rng(2)
    rollout = np.log(rng.uniform(0.02, 0.2, (1024, 64)))
    group = np.repeat(np.arange(64), 16)
    spread = np.where(group < 5, 0.5, 0.02)[:, None]
    train = np.minimum(rollout + spread * rng.standard_normal(rollout.shape), -1e-3)
    by_prompt = CONTRACT.replace(", unit: token, limit: 0.05", ", limit: 0.03").replace(FULL_LOGITS, "")
    contract = load_text(by_prompt.replace("slices: {code: {where: {task: code}}}\n", ""))
    alone = kc_otel.compare(train, rollout, contract=contract)
    assert alone.status is Status.PASS
    (note,) = alone.notes
    assert note.startswith("assumes that sequences are independent")
    assert note.endswith("if some share one, name it with `groups=`")
    assert f"  note: {note}" in repr(alone)
    prompts = np.stack([group, group + 1], axis=1)
    for named in ({"groups": group}, {"groups": [f"p{name}" for name in group]}, {"prompt_ids": prompts}):
        found = kc_otel.compare(train, rollout, contract=contract, **named)
        samples = {verdict.cell.clause: verdict.samples for verdict in found.verdicts}
        assert (found.notes, samples["token-tv"]) == ((), 64)
        assert found.status is not Status.PASS
    with pytest.raises(ValueError, match="groups: group has 2 values for 1024 sequences"):
        kc_otel.compare(train, rollout, contract=contract, groups=["a", "b"])
    with pytest.raises(TypeError, match="give prompt tokens as prompt_ids"):
        kc_otel.compare(train, rollout, contract=contract, groups=[[1, 2], [3]])
    with pytest.raises(ValueError, match="prompt_ids: 1 prompts for 1024 sequences"):
        kc_otel.compare(train, rollout, contract=contract, prompt_ids=[[1, 2]])
    train, rollout, task = sides
    assert kc_otel.compare(train, rollout, contract=load_text(CONTRACT), slices={"task": task}).notes == ()


@pytest.mark.parametrize("form", ["lists", "torch", "rows", "bfloat16"])
def test_arrays_of_every_kind(contract, sides, form):
    train, inference, task = sides
    mask = np.ones(train.shape, dtype=bool)
    mask[0, 20:] = False
    slices = {"task": task}
    if form == "lists":
        lengths = mask.sum(1)
        train, inference = ([row[:n] for row, n in zip(side, lengths, strict=True)] for side in (train, inference))
        mask = None
    elif form == "rows":
        slices = [{"task": name} for name in task]
    else:
        dtype = torch.float64 if form == "torch" else torch.bfloat16
        train, inference, mask = (torch.as_tensor(column) for column in (train, inference, mask))
        train, inference = (side.to(dtype).requires_grad_() for side in (train, inference))
    found = kc_otel.compare(train, inference, contract=contract, slices=slices, mask=mask)
    assert (found.sequences, found.tokens, found.status) == (120, 4780, Status.FAIL)
    assert {verdict.cell.slice for verdict in found.verdicts} == {"all", "code"}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"inference": np.zeros((3, 40))}, "inference: 3 sequences, but train has 120"),
        ({"inference": np.zeros((120, 39))}, "sequence 0: inference_logprobs: has 39 numbers where train_logprobs"),
        ({"mask": np.zeros((120, 40))}, "mask leaves no token of any row"),
        ({"slices": {"task": ["code"]}}, "slices: task has 1 values for 120 sequences"),
        ({"slices": [{"task": "code"}]}, "slices: 1 mappings for 120 sequences"),
        ({"train": np.zeros((2, 3, 4))}, r"train: shape \(2, 3, 4\) is neither"),
    ],
)
def test_what_does_not_fit_is_said(contract, sides, change, said):
    train, inference, _ = sides
    with pytest.raises((RecordingError, ValueError), match=said):
        kc_otel.compare(**{"train": train, "inference": inference, "contract": contract} | change)


def test_a_path_is_no_array(contract):
    with pytest.raises(TypeError, match="compare takes arrays, and `kc-otel compare` files"):
        kc_otel.compare("a.npz", "b.npz", contract=contract)
