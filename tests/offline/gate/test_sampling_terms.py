"""A contract's list of sampling parameters: what a recording was made with is shown, or it is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest

from kc_otel.contract.diff import diff
from kc_otel.contract.errors import ContractError
from kc_otel.contract.load import load_text
from kc_otel.contract.policy import SAMPLING_PARAMETERS
from kc_otel.integrations.vllm.delivery import _RESTRICTIONS
from kc_otel.judge.promotion.gate_evidence import EvidenceError
from kc_otel.offline.gate.evidence import offline_evidence, verify_evidence, verify_recordings
from kc_otel.offline.gate.recorded_gate import GateTerms, gate_recordings, read_input
from kc_otel.record.kernel import Kernel
from kc_otel.recordings.recording import Recording
from kc_otel.recordings.recording_files import save_recording
from kc_otel.recordings.request import NEUTRAL
from tests.offline.gate.conftest import changed, resealed

BARE = """apiVersion: kernel-contract/v1
kind: KernelContract
metadata: {name: policy, version: 1, owner: rl}
kernels: {train: {engine: torch}, inference: {engine: vllm}}
statistical: [{id: token-tv, metric: tv_token, unit: token, limit: 0.05}]
observability: {min_samples: 500}
promotion: {windows: 2}
"""
LISTED = BARE.replace("windows: 2", "sampling: {temperature: [0.7, 1.0], top_p: [1.0], top_k: [-1]}")
SOUND = {"temperature": 0.7, "top_p": 1.0, "top_k": 0}


def gated(path, row, text=LISTED, rows=60):
    rng = np.random.default_rng(1)
    q = -rng.exponential(1.0, 20 * rows) - 0.5
    p = np.minimum(q + 0.01 * rng.standard_normal(q.size), 0.0)
    about = [SOUND] * (rows - 1) + [row]
    save_recording(Recording(p, q, np.full(rows, 20), tuple(about)), path)
    return gate_recordings(load_text(text), [read_input(path)], (Kernel("torch"), Kernel("vllm")), GateTerms(), 1e9)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({**SOUND, "temperature": 0.8}, "sequence 59: temperature is 0.8, and promotion.sampling allows 0.7, 1.0"),
        ({**SOUND, "temperature": "0.7"}, "sequence 59: temperature is '0.7'"),
        ({**SOUND, "temperature": True}, "sequence 59: temperature is True"),
        ({**SOUND, "temperature": float("nan")}, "sequence 59: temperature is nan"),
        ({"temperature": 0.7, "top_k": -1}, "sequence 59: says no top_p, of which promotion.sampling allows 1.0"),
        ({**SOUND, "min_p": 0.1}, "sequence 59: min_p is 0.1, and promotion.sampling lists no min_p"),
        ({**SOUND, "logit_bias": True}, "sequence 59: logit_bias is True"),
    ],
)
def test_one_sequence_that_is_not_as_listed_refuses_the_recording(tmp_path, row, said):
    with pytest.raises(ValueError, match=r"one\.npz: sequence 59") as refused:
        gated(tmp_path / "one.npz", row)
    assert said in str(refused.value)
    gated(tmp_path / "one.npz", row, BARE)


def test_what_was_in_force_is_in_the_evidence_and_cannot_be_changed(tmp_path):
    path = tmp_path / "one.npz"
    gate = gated(path, {"temperature": np.float32(0.7).item(), "top_p": 1, "top_k": -1, "min_p": 0.0})
    record = json.loads(json.dumps(offline_evidence(gate, LISTED), allow_nan=False))
    said = record["offline"]["recordings"][0]["sampling"]
    assert {name: values[0] for name, values in said.items()} == {**SOUND, "min_p": 0.0}
    verify_evidence(record)
    verify_recordings(record, [path])
    for wrong in ({**said, "top_p": [0.9]}, {**said, "top_p": []}, {**said, "bad_words": [True]}):
        with pytest.raises(EvidenceError, match=r"top_p|bad_words"):
            verify_evidence(resealed(changed(record, ("offline", "recordings", 0, "sampling"), wrong)))
    assert "sampling" not in offline_evidence(gated(path, SOUND, BARE), BARE)["offline"]["recordings"][0]


def test_every_parameter_that_engines_record_is_known():
    """A name that is missing here would pass unseen."""
    assert {*NEUTRAL, *_RESTRICTIONS, "min_tokens", "watermarking"} == {*SAMPLING_PARAMETERS}


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("tempreature: [1]", "'tempreature' is not a sampling parameter; write one of temperature, top_p"),
        ("temperature: [0]", "temperature: drift cannot be measured at 0"),
        ("top_p: [1.5]", "top_p: drift cannot be measured at 1.5"),
        ("bad_words: [1]", "bad_words: 1.0 is not true or false"),
        ("top_k: []", "is empty"),
    ],
)
def test_a_list_that_cannot_be_meant_is_refused_at_its_line(written, said):
    with pytest.raises(ContractError) as refused:
        load_text(BARE.replace("windows: 2", f"sampling: {{{written}}}"))
    assert ":7: promotion.sampling" in str(refused.value)
    assert said in str(refused.value)


def test_a_longer_list_and_a_shorter_demand_loosen():
    def kinds(old, new):
        return {change.kind for change in diff(load_text(old), load_text(new)) if change.field == "promotion.sampling"}

    longer, fewer = LISTED.replace("[0.7, 1.0]", "[0.7, 1.0, 2.0]"), LISTED.replace(", top_k: [-1]", "")
    assert [kinds(LISTED, new) for new in (longer, fewer, BARE)] == [{"loosens"}] * 3
    assert [kinds(old, LISTED) for old in (longer, fewer, BARE)] == [{"tightens"}, {"loosens"}, {"tightens"}]


def test_a_parameter_that_cannot_be_read_is_named(tmp_path):
    n = 60
    q = -np.random.default_rng(1).exponential(1.0, 20 * n) - 0.5
    given = {"train_logprobs": q, "inference_logprobs": q - 1e-3, "lengths": np.full(n, 20)}
    np.savez(tmp_path / "a.npz", **given, temperature=np.ones((n, 1)), top_p=1.0, top_k=-1)
    with pytest.raises(ValueError, match=r"says no temperature, .* \(its temperature holds float64 of shape \(60, 1\)"):
        gate_recordings(
            load_text(LISTED), [read_input(tmp_path / "a.npz")], (Kernel("torch"), Kernel("vllm")), GateTerms(), 1e9
        )
