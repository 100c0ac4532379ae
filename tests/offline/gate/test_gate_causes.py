"""A gate on a recording of asynchronous training holds stale tokens against no kernel, and says which cause grew."""

from __future__ import annotations

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from kc_otel.cli import register
from kc_otel.recordings.recording import Recording
from kc_otel.recordings.recording_files import save_recording
from tests.tools.two_causes import LIMIT, PLANTED, sampled

pytestmark = pytest.mark.slow

CONTRACT = f"""apiVersion: kernel-contract/v1
kind: KernelContract
metadata: {{name: policy, version: 1, owner: rl}}
kernels: {{train: {{engine: torch}}, inference: {{engine: vllm}}}}
slices: {{code: {{where: {{task: code}}}}, older: {{where: {{lag: ">= 4"}}}}}}
statistical: [{{id: token-tv, metric: tv_token, unit: token, limit: {LIMIT}, slices: {{older: 0.9}}}}]
observability: {{min_samples: 100}}
"""


def gate(folder, seed, drift, aging, **known):
    """Exit code and output of `gate run` on a simulated recording, whose sequences have these columns, too."""
    train, inference, lags = sampled(seed, drift, aging)
    attributes = tuple({"task": "code" if row.any() else "prose", "train_weights": 20, **known} for row in lags)
    lengths = np.full(len(lags), lags.shape[1])
    versions = None if known else (20 - lags).ravel()
    path, contract = folder / "rollouts.npz", folder / "policy.yaml"
    save_recording(Recording(train.ravel(), inference.ravel(), lengths, attributes, versions=versions), path)
    contract.write_text(CONTRACT)
    app = typer.Typer()
    register(app, "gate")
    done = CliRunner().invoke(app, ["gate", "run", str(contract), str(path)])
    return done.exit_code, done.output


@pytest.mark.parametrize("said", PLANTED)
def test_stale_tokens_are_held_against_no_kernel(tmp_path, said):
    for seed in range(10):
        code, output = gate(tmp_path, seed, *PLANTED[said])
        assert code == (0 if said.startswith("staleness") else 1), output
        assert f"token-tv: 25 % was sampled by older weights and is not held against the kernels; {said}: " in output


def test_a_recording_of_nothing_but_older_weights_decides_nothing(tmp_path):
    code, output = gate(tmp_path, 0, 0.5, 0.4, inference_weights=17)
    assert code == 3, output
    assert "except what older weights sampled, whose drift includes staleness" in output
    assert "all of it was sampled by older weights, so kernel drift is not known" in output


@pytest.mark.parametrize("known", [{"inference_weights": 20}, {"inference_weights": "a"}])
def test_a_recording_without_older_weights_is_judged_as_a_whole(tmp_path, known):
    code, output = gate(tmp_path, 0, 0.25, 0.01, **known)
    assert code == 1, output
    assert "older weights" not in output.replace("slice older", "")
