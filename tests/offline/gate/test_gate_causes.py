"""A gate holds stale tokens against no kernel: of asynchronous training, and of trainers' files without versions."""

from __future__ import annotations

import numpy as np
import pytest

from kc_otel.recordings.recording import Recording
from kc_otel.recordings.recording_files import save_recording
from tests.recordings._files import write_rows
from tests.recordings.test_importers_formats import nemo_line
from tests.tools.commands import commands
from tests.tools.contracts import contract_text
from tests.tools.two_causes import LIMIT, PLANTED, sampled

pytestmark = pytest.mark.slow

CONTRACT = contract_text(
    slices={"code": {"where": {"task": "code"}}, "older": {"where": {"lag": ">= 4"}}},
    statistical=[{"id": "token-tv", "metric": "tv_token", "unit": "token", "limit": LIMIT, "slices": {"older": 0.9}}],
    observability={"min_samples": 100},
)
TOGETHER = "drift and staleness together"


@pytest.fixture
def run(tmp_path):
    """Runs a command on a contract; returns its exit code and what it prints on one line."""
    contract = tmp_path / "policy.yaml"
    contract.write_text(CONTRACT)
    invoke = commands("gate", "compare")

    def ran(*words):
        code, out, _ = invoke(*(contract if word == "CONTRACT" else word for word in words))
        return code, " ".join(out.split())

    return ran


def recorded(folder, seed, drift, aging, **known):
    """A simulated recording, whose sequences have these columns, too."""
    train, inference, lags = sampled(seed, drift, aging)
    attributes = tuple({"task": "code" if row.any() else "prose", "train_weights": 20, **known} for row in lags)
    lengths = np.full(len(lags), lags.shape[1])
    versions = None if known else (20 - lags).ravel()
    path = folder / "rollouts.npz"
    save_recording(Recording(train.ravel(), inference.ravel(), lengths, attributes, versions=versions), path)
    return path


@pytest.mark.parametrize("said", PLANTED)
def test_stale_tokens_are_held_against_no_kernel(run, tmp_path, said):
    for seed in range(10):
        code, output = run("gate", "run", "CONTRACT", recorded(tmp_path, seed, *PLANTED[said]))
        assert code == (0 if said.startswith("staleness") else 1), output
        assert f"token-tv: 25 % was sampled by older weights and is not held against the kernels; {said}: " in output


def test_a_recording_of_nothing_but_older_weights_decides_nothing(run, tmp_path):
    code, output = run("gate", "run", "CONTRACT", recorded(tmp_path, 0, 0.5, 0.4, inference_weights=17))
    assert code == 3, output
    assert "except what older weights sampled, whose drift includes staleness" in output
    assert "all of it was sampled by older weights, so kernel drift is not known" in output


@pytest.mark.parametrize("known", [{"inference_weights": 20}, {"train_weights": "a", "inference_weights": "a"}])
def test_a_recording_without_older_weights_is_judged_as_a_whole(run, tmp_path, known):
    code, output = run("gate", "run", "CONTRACT", recorded(tmp_path, 0, 0.25, 0.01, **known))
    assert code == 1, output
    assert "older weights" not in output.replace("slice older", "")


def of_a_trainer(folder, planted):
    """A file of NeMo-RL; the formats' own tests hold that the others say as little of the weights that sampled."""
    train, inference, lags = sampled(0, *PLANTED[planted])
    tokens = np.random.default_rng(1).integers(3, 30_000, lags.shape)
    lines = [
        nemo_line(p, q, token_ids=[1, 2, 3, *ids, 0, 0], task="code")
        for p, q, ids in zip(train.tolist(), inference.tolist(), tokens.tolist(), strict=True)
    ]
    return write_rows(folder / "train_data_step12.jsonl", lines)


@pytest.mark.parametrize("planted", PLANTED)
def test_what_a_trainer_wrote_without_versions_blames_no_kernel(run, tmp_path, planted):
    path = of_a_trainer(tmp_path, planted)
    code, output = run("gate", "run", "CONTRACT", path, "--slice", "all", "--evidence", tmp_path / "evidence")
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


def test_no_number_of_samples_is_said_to_make_a_fail_of_drift_and_staleness_together(run, tmp_path):
    path = of_a_trainer(tmp_path, "the kernels' drift grew")
    few = tmp_path / "policy.yaml"
    few.write_text(CONTRACT.replace('"min_samples":100', '"min_samples":10000000'))
    code, output = run("gate", "run", few, path, "--slice", "all")
    assert (code, "is at least " in output) == (3, True), output
    assert "a FAIL requires" not in output
    assert f" samples; {TOGETHER}, because" in output
    assert "more needed" not in output.split("NO_DATA")[0]
    assert "a FAIL requires" in run("gate", "run", few, path, "--slice", "all", "--attribute", "lag=0")[1]


def test_a_synchronous_trainers_files_are_held_against_the_kernels(run, tmp_path):
    path = of_a_trainer(tmp_path, "the kernels' drift grew")
    code, output = run("gate", "run", "CONTRACT", path, "--attribute", "lag=0", "--evidence", tmp_path / "evidence")
    assert code == 1, output
    assert "FAIL token-tv on all traffic" in output
    assert TOGETHER not in output
    assert run("gate", "verify", tmp_path / "evidence", "--recordings", path)[0] == 0
