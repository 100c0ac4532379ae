"""Trainers' files with planted drift of the kernels, planted staleness, or both: none says which weights sampled."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import typer
from typer.testing import CliRunner

from kc_otel.cli import register
from tests.recordings.test_importers_batches import plain, skyrl_file
from tests.recordings.test_importers_formats import nemo_line, prime_line, write
from tests.tools.two_causes import LIMIT, PLANTED, sampled

pytestmark = pytest.mark.slow

CONTRACT = f"""apiVersion: kernel-contract/v1
kind: KernelContract
metadata: {{name: policy, version: 1, owner: rl}}
kernels: {{train: {{engine: torch}}, inference: {{engine: vllm}}}}
slices: {{}}
statistical: [{{id: token-tv, metric: tv_token, unit: token, limit: {LIMIT}}}]
observability: {{min_samples: 100}}
"""
TOGETHER = "drift and staleness together"


def nemo_rl(folder, train, inference, tokens, _):
    """`train_data_step{N}.jsonl`, as `log_batched_dict_as_jsonl` cuts the batch."""
    lines = [
        nemo_line(p, q, token_ids=[1, 2, 3, *ids, 0, 0])
        for p, q, ids in zip(train.tolist(), inference.tolist(), tokens.tolist(), strict=True)
    ]
    return write(folder / "train_data_step12.jsonl", lines)


def prime_rl(folder, train, inference, tokens, _):
    """`TokenExporter`'s file of a rank, whose weights say that every token was sampled by the policy."""
    ones = [1.0] * (tokens.shape[1] + 2)
    streams = {"rl_weights": ones, "ce_weights": None, "ref_kl_weights": None, "losses": None}
    lines = [
        prime_line(p, q, token_ids=[1, 2, *ids]) | streams
        for p, q, ids in zip(train.tolist(), inference.tolist(), tokens.tolist(), strict=True)
    ]
    return write(folder / "token_exports" / "step_7" / "rank_0.jsonl", lines)


def slime(folder, train, inference, tokens, _):
    """The payload of `_build_dump_payload`, tensors over the response of each sample."""
    samples = [
        {
            "data_parallel_rank": 0, "sample_index": row, "rollout_position": row, "truncated": 0,
            "tokens": torch.tensor([1, 2, *ids]), "response_lengths": len(ids), "total_lengths": len(ids) + 2,
            "loss_masks": torch.ones(len(ids), dtype=torch.int64), "log_probs": torch.tensor(p, dtype=torch.float32),
            "rollout_log_probs": torch.tensor(q, dtype=torch.float32), "advantages": torch.zeros(len(ids)),
        }
        for row, (p, q, ids) in enumerate(zip(train.tolist(), inference.tolist(), tokens.tolist(), strict=True))
    ]  # fmt: skip
    payload = {"format_version": 2, "rollout_id": 17, "rank": 0, "samples": samples, "dp_shards": []}
    torch.save(payload, folder / "17.pt")
    return folder / "17.pt"


def skyrl(folder, train, inference, tokens, monkeypatch):
    """`TensorBatch.save`'s pickle of a training batch."""
    fields = {
        "sequences": np.concatenate([np.ones((len(tokens), 2), dtype=np.int64), tokens], axis=1),
        "action_log_probs": train.astype(np.float32),
        "rollout_logprobs": inference.astype(np.float32),
        "loss_mask": np.ones(train.shape, dtype=np.float32),
        "response_mask": np.ones(train.shape, dtype=np.int64),
    }
    return skyrl_file(folder, {name: plain(array) for name, array in fields.items()}, monkeypatch)


@pytest.fixture
def run(tmp_path):
    """Runs a command on a contract and a file; returns its exit code and what it prints on one line."""
    contract = tmp_path / "policy.yaml"
    contract.write_text(CONTRACT)

    def invoke(*command):
        app = typer.Typer()
        register(app, "gate")
        register(app, "compare")
        done = CliRunner().invoke(app, [str(part).replace("CONTRACT", str(contract)) for part in command])
        return done.exit_code, " ".join(done.output.split())

    return invoke


def file_of(writer, folder, planted, monkeypatch):
    train, inference, lags = sampled(0, *PLANTED.get(planted, (0.02, 0.01)))
    tokens = np.random.default_rng(1).integers(3, 30_000, lags.shape)
    return writer(folder, train, inference, tokens, monkeypatch)


WRITERS = pytest.mark.parametrize("writer", [skyrl, prime_rl, nemo_rl, slime])


@WRITERS
@pytest.mark.parametrize("planted", PLANTED)
def test_what_exceeds_a_limit_blames_no_kernel(run, tmp_path, monkeypatch, writer, planted):
    path = file_of(writer, tmp_path, planted, monkeypatch)
    code, output = run("gate", "run", "CONTRACT", path, "--evidence", tmp_path / "evidence")
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


@WRITERS
def test_what_stays_within_a_limit_passes(run, tmp_path, monkeypatch, writer):
    code, output = run("gate", "run", "CONTRACT", file_of(writer, tmp_path, "neither", monkeypatch))
    assert code == 0, output


@WRITERS
def test_a_synchronous_trainers_files_are_held_against_the_kernels(run, tmp_path, monkeypatch, writer):
    path = file_of(writer, tmp_path, "the kernels' drift grew", monkeypatch)
    given = ("--attribute", "lag=0", "--evidence", tmp_path / "evidence")
    code, output = run("gate", "run", "CONTRACT", path, *given)
    assert code == 1, output
    assert "FAIL token-tv on all traffic" in output
    assert TOGETHER not in output
    assert run("gate", "verify", tmp_path / "evidence", "--recordings", path)[0] == 0
    _, output = run("compare", path, "--contract", "CONTRACT", "--attribute", "lag=0")
    assert "FAIL" in output
    assert TOGETHER not in output
