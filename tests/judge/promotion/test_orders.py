"""The offline gate's evidence: what is taken in as proof, and what is not."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from datetime import datetime

import numpy as np
import pytest

from kc_otel.contract.load import load_text
from kc_otel.judge.promotion.gate_evidence import checksum_of
from kc_otel.judge.promotion.machine import admit, advance, begin, ordered
from kc_otel.judge.promotion.stages import OrderError, Stage
from kc_otel.judge.verdict import Evaluation
from kc_otel.offline.gate.evidence import offline_evidence, section_problems
from kc_otel.offline.gate.recorded_gate import GateTerms, gate_recordings, read_input
from kc_otel.record.kernel import Kernel
from kc_otel.recordings.recording import Recording
from kc_otel.recordings.recording_files import save_recording

TEXT = """\
apiVersion: kernel-contract/v1
kind: KernelContract
metadata: {name: policy, version: 1, owner: rl}
kernels: {train: {engine: torch}, inference: {engine: vllm, dtype: bfloat16}}
statistical: [{id: token-tv, metric: tv_token, unit: token, limit: 0.05}]
observability: {min_samples: 500}
"""
TRAIN, INFERENCE = Kernel("torch"), Kernel("vllm", dtype="bfloat16")


@pytest.fixture(scope="module")
def contract():
    return load_text(TEXT)


@pytest.fixture(scope="module")
def evidence(contract, tmp_path_factory):
    """Evidence of a recording whose log ratios have a given standard deviation."""

    def make(sigma):
        rng = np.random.default_rng(0)
        inference = np.log(rng.uniform(0.1, 0.9, 4000))
        train = -np.abs(inference + rng.normal(-sigma * sigma / 2, sigma, 4000))
        file = tmp_path_factory.mktemp("recording") / "recording.npz"
        save_recording(Recording(train, inference, np.full(100, 40), ({},) * 100), file)
        gate = gate_recordings(contract, [read_input(file)], (TRAIN, INFERENCE), GateTerms(), 1e9)
        return offline_evidence(gate, TEXT)

    return make


@pytest.fixture
def promotion(contract):
    return begin(contract, INFERENCE.fingerprint, "ada", 0.0)[0]


NOW = 1.1e9
"""After the gate that wrote the evidence."""


def sealed(record, **changes):
    changed = {**record, **changes}
    del changed["checksum"]
    return changed | {"checksum": checksum_of(changed)}


def test_sound_evidence_opens_the_offline_gate(contract, promotion, evidence):
    record = evidence(0.01)
    admitted = admit(replace(promotion, missing=("no evidence yet",)), contract, record, section_problems, NOW)
    assert (admitted.offline, admitted.missing) == (record["checksum"], ())
    after, move = advance(admitted, contract, Evaluation(1.0), ())
    assert (after.position.stage, str(move.before), move.decision.stage) == (Stage.SHADOW, "offline-ci", "shadow")
    held, move = advance(admitted, contract, Evaluation(1.0), ["prose is silent"])
    assert (move, held.missing) == (None, ("held: prose is silent",))


def test_a_gate_that_refused_opens_nothing(contract, promotion, evidence):
    with pytest.raises(
        OrderError, match=r"the offline gate says rollback: token-tv on all: FAIL.*a person has to force"
    ):
        admit(promotion, contract, evidence(0.5), section_problems, NOW)


def test_a_gate_that_was_asked_about_a_part_opens_nothing(tmp_path):
    """What it was not asked about did not pass, so that the version is not one that keeps every promise."""
    same = np.log(np.random.default_rng(0).uniform(0.1, 0.9, 4000))
    save_recording(Recording(same, same, np.full(100, 40), ({},) * 100), tmp_path / "a.npz")
    text = TEXT + "slices: {code: {where: {task: code}}}\n"
    made = load_text(text)
    gate = gate_recordings(made, [read_input(tmp_path / "a.npz")], (TRAIN, INFERENCE), GateTerms(slices=("all",)), 1e9)
    assert gate.decision.outcome == "advance"
    new = begin(made, INFERENCE.fingerprint, "ada", 0.0)[0]
    with pytest.raises(OrderError, match=r"judged only a part .* and token-tv on code did not pass; run it"):
        admit(new, made, offline_evidence(gate, text), section_problems, NOW)


def test_evidence_of_something_else_opens_nothing(contract, promotion, evidence):
    record = evidence(0.01)
    other = dataclasses.replace(promotion, version="0123456789ab")
    with pytest.raises(OrderError, match=f"about kernel {INFERENCE.fingerprint}, not about 0123456789ab"):
        admit(other, contract, record, section_problems, NOW)
    looser = load_text(TEXT.replace("0.05", "0.06"))
    with pytest.raises(OrderError, match=r"of another contract .* run the gate again"):
        admit(promotion, looser, record, section_problems, NOW)
    with pytest.raises(OrderError, match=r"invalid: .*checksum"):
        admit(promotion, contract, {**record, "kernel": "x"}, section_problems, NOW)
    plain = {name: value for name, value in record.items() if name != "offline"}
    with pytest.raises(OrderError, match="is of stage offline-ci; give the evidence that the offline"):
        admit(promotion, contract, sealed(plain), section_problems, NOW)
    forced, _ = ordered(promotion, contract, "force", "ada", "hurry", Evaluation(1.0), 1.0, Stage.SHADOW)
    with pytest.raises(OrderError, match="is not in offline-ci but in shadow"):
        admit(forced, contract, record, section_problems, NOW)


def test_evidence_from_before_a_roll_back_opens_nothing(contract, promotion, evidence):
    record = evidence(0.01)  # of 1e9
    for rolled_at in (1e9 - 1.0, 1e9 + 1.0):
        back, _ = ordered(promotion, contract, "rollback", "ada", "broken tables", Evaluation(0.0), rolled_at)
        again, _ = begin(contract, promotion.version, "ada", rolled_at + 5.0, previous=back)
        if rolled_at < 1e9:
            assert admit(again, contract, record, section_problems, NOW).offline
            continue
        with pytest.raises(OrderError, match=r"rolled back at 2001-09-09 01:46:41 UTC; run the gate again"):
            admit(again, contract, record, section_problems, NOW)


def test_a_changed_contract_asks_for_the_gate_again(contract, promotion, evidence):
    admitted = admit(promotion, contract, evidence(0.01), section_problems, NOW)
    after, move = advance(admitted, load_text(TEXT.replace("0.05", "0.06")), Evaluation(1.0), ())
    assert (move, after.offline) == (None, "")
    assert "no evidence of the offline stage; `kc-otel gate run" in after.missing[0]


def test_evidence_from_the_future_opens_nothing(contract, promotion, evidence):
    record = evidence(0.01)
    written = datetime.fromisoformat(record["time"]).timestamp()
    assert admit(promotion, contract, record, section_problems, written - 200.0).offline
    with pytest.raises(OrderError, match="in the future: correct that clock"):
        admit(promotion, contract, record, section_problems, written - 400.0)
