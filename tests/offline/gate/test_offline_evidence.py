"""Evidence of the offline stage: what it holds, and that no number in it can be changed unnoticed."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kc_otel.contract.load import load_text
from kc_otel.judge.promotion.gate_evidence import EvidenceError, checksum_of
from kc_otel.offline.gate.evidence import offline_evidence, verify_evidence, verify_recordings
from kc_otel.offline.gate.recorded_gate import GateTerms, gate_recordings, read_input
from kc_otel.record.kernel import Kernel
from kc_otel.recordings.recording import Recording
from kc_otel.recordings.recording_files import save_recording

TEXT = """apiVersion: kernel-contract/v1
kind: KernelContract
metadata: {name: policy, version: 2, owner: rl}
kernels: {train: {engine: torch}, inference: {engine: vllm}}
slices: {code: {where: {task: code}}}
statistical:
  - {id: token-tv, metric: tv_token, unit: token, limit: 0.05}
  - {id: spread, metric: abs_log_ratio, statistic: p99, limit: 0.3}
runtime: [{id: lag, metric: weights_lag, limit: 1}]
observability: {min_samples: 500}
"""
TIMES = {"time", "tool"}


def make(path, seed, scale=0.01, sequences=60):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(20, 40, sequences)
    q = -rng.exponential(1.0, lengths.sum()) - 0.5
    p = -np.abs(q + scale * rng.standard_normal(q.size) - scale**2 / 2)
    save_recording(Recording(p, q, lengths, tuple({"task": "code"} for _ in lengths)), path)
    return path


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recordings")
    return [make(folder / "one.npz", 1), make(folder / "two.npz", 2)]


def evidence(files, terms=GateTerms()):  # noqa: B008
    kernels = Kernel("torch", dtype="float32"), Kernel("vllm", version="0.32.0", extra={"patch": 3})
    gate = gate_recordings(load_text(TEXT), [read_input(path) for path in files], kernels, terms, 1_700_000_000.125)
    return json.loads(json.dumps(offline_evidence(gate, TEXT), allow_nan=False))


@pytest.fixture(scope="session")
def record(files):
    return evidence(files)


def sealed(record):
    changed = {name: value for name, value in record.items() if name != "checksum"}
    return changed | {"checksum": checksum_of(changed)}


def leaves(value, path=()):
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from leaves(inner, (*path, name))
    elif isinstance(value, list):
        for place, inner in enumerate(value):
            yield from leaves(inner, (*path, place))
    else:
        yield path


def changed(record, path, value):
    new = copy.deepcopy(record)
    inner = new
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = value
    return new


def at(record, path):
    for step in path:
        record = record[step]
    return record


def test_record_holds_what_is_needed_to_judge_again(record, files):
    assert record["decision"]["outcome"] == "advance"
    assert record["offline"]["contract"] == TEXT
    assert record["offline"]["kernels"]["inference"] == {"engine": "vllm", "version": "0.32.0", "extra": {"patch": 3}}
    assert [entry["name"] for entry in record["offline"]["recordings"]] == [path.as_posix() for path in files]
    assert all(entry["sequences"] == 60 for entry in record["offline"]["recordings"])
    assert [row["recording"] for row in record["verdicts"]] == [0] * 4 + [1] * 4
    verify_evidence(record)


def test_recordings_are_found_by_content_and_give_the_same_numbers(record, files, tmp_path):
    moved = [tmp_path / "renamed.npz", tmp_path / "other.npz"]
    moved[0].write_bytes(files[1].read_bytes())
    moved[1].write_bytes(b"something else")
    verify_recordings(record, [moved[1], files[0], moved[0]])


def test_a_recording_that_changed_or_is_gone_is_named(record, files, tmp_path):
    other = make(tmp_path / "two.npz", 3)
    with pytest.raises(EvidenceError, match=r"no file has the checksum of .*two\.npz"):
        verify_recordings(record, [files[0], other])


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_any_change_is_found_by_the_checksum(record, data):
    path = data.draw(st.sampled_from(list(leaves(record))))
    old = at(record, path)
    new = data.draw(st.one_of(st.text(), st.integers(), st.floats(allow_nan=False), st.none()))
    if type(new) is type(old) and new == old:
        return
    with pytest.raises(EvidenceError):
        verify_evidence(changed(record, path, new))


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_number_that_was_changed_and_sealed_again_is_found_from_the_recordings(record, files, data):
    numbers = [path for path in leaves(record) if isinstance(at(record, path), int | float)]
    path = data.draw(st.sampled_from(numbers))
    old = at(record, path)
    if isinstance(old, bool):
        new = not old
    elif isinstance(old, int):
        new = old + data.draw(st.integers(-50, 50).filter(bool))
    else:
        new = old + data.draw(st.sampled_from([-1, 1])) * data.draw(st.floats(1e-6, 1.0)) * max(abs(old), 1e-9)
    with pytest.raises(EvidenceError):
        verify_recordings(sealed(changed(record, path, new)), files)


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("offline", "contract"), TEXT.replace("0.05", "0.5"), "does not match the hash"),
        (("offline", "contract"), "kind: nothing", "does not load"),
        (("contract", "version"), 9, "another name or version"),
        (("stage",), "canary", "stage offline-ci"),
        (("kernel",), "0" * 12, "do not match the fingerprint"),
        (("offline", "kernels", "train", "dtype"), "float16", "is about other kernels"),
        (("verdicts", 0, "limit"), 0.9, "the contract sets no such limit"),
        (("verdicts", 0, "about"), "population", "`about` is population, and the contract's clause is about the traff"),
        (("verdicts", 0, "quantity"), "0" * 12, "`quantity` is not the digest of what the contract's clause measures"),
        (("verdicts", 0, "samples"), 3, "is a PASS with 3 observations, and the contract asks for"),
        (("verdicts", 0, "status"), "INCONCLUSIVE", "the verdicts lead to 'wait'"),
        (("offline", "recordings", 0, "unreadable"), 5, "the verdicts lead to 'wait'"),
        (("offline", "terms"), {}, "another shape"),
        (("verdicts", 0, "recording"), -1, "there is no recording -1"),
        (("verdicts", 0, "recording"), 2, "there is no recording 2"),
    ],
)
def test_what_does_not_follow_is_found_without_the_recordings(record, path, value, said):
    with pytest.raises(EvidenceError, match=said):
        verify_evidence(sealed(changed(record, path, value)))


def test_a_clause_whose_rows_were_removed_holds_the_gate(record):
    """A recording could have its columns, so that its absence is no permission to advance."""
    rows = [row for row in record["verdicts"] if row["clause"] != "token-tv"]
    assert 0 < len(rows) < len(record["verdicts"])
    with pytest.raises(EvidenceError, match="the verdicts lead to 'wait'"):
        verify_evidence(sealed(changed(record, ("verdicts",), rows)))


def test_a_slice_without_a_verdict_is_found_without_the_recordings(record):
    for left_out in range(len(record["verdicts"])):
        verdicts = [row for number, row in enumerate(record["verdicts"]) if number != left_out]
        clause, slice = (record["verdicts"][left_out][name] for name in ("clause", "slice"))
        others = [row for row in verdicts if (row["recording"], row["clause"]) == (0, clause)]
        if others and record["verdicts"][left_out]["recording"] == 0:
            with pytest.raises(EvidenceError, match=f"{clause} on {slice} has no verdict"):
                verify_evidence(sealed(record | {"verdicts": verdicts}))


def test_a_gate_that_waits_or_refuses_has_sound_evidence_too(files, tmp_path):
    waiting = evidence(files, GateTerms(require=("lag",)))
    assert waiting["decision"]["outcome"] == "wait"
    verify_recordings(waiting, files)
    bad = make(tmp_path / "bad.npz", 4, scale=0.8)
    refused = evidence([bad])
    assert refused["decision"]["outcome"] == "rollback"
    verify_recordings(refused, [bad])
    short = make(tmp_path / "short.npz", 5, sequences=2)
    few = evidence([short])
    assert few["decision"]["outcome"] == "wait"
    verify_recordings(few, [short])


def test_evidence_of_a_gate_that_waits_is_sound_whatever_the_order_of_slices(files):
    text = TEXT.replace("slices: {code:", "slices: {zebra: {where: {task: zebra}}, ant: {where: {task: ant}}, code:")
    kernels = Kernel("torch"), Kernel("vllm")
    gate = gate_recordings(load_text(text), [read_input(files[0])], kernels, GateTerms(), 1.0)
    found = json.loads(json.dumps(offline_evidence(gate, text)))
    assert len(found["decision"]["missing"]) > 2
    verify_recordings(found, files)
    with pytest.raises(EvidenceError, match="the verdicts lead to 'wait'"):
        verify_evidence(sealed(changed(found, ("decision", "missing"), found["decision"]["missing"][1:])))


def test_online_evidence_has_no_recordings(contract, make_verdict):
    from kc_otel.judge.promotion.gate_evidence import sealed, verdict_row
    from kc_otel.judge.promotion.stages import Decision, GateOutcome, Stage

    decision = Decision(GateOutcome.ADVANCE, Stage.FULL, 3)
    online = sealed(contract, Stage.CANARY, "inferB", decision, [verdict_row(contract, make_verdict())], 0)
    with pytest.raises(EvidenceError, match="stage canary, which has no recordings"):
        verify_recordings(online, [])
