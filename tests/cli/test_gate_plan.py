"""`kc-otel gate plan`: what a gate needs at best, before anything is recorded."""

from __future__ import annotations

import pytest

CONTRACT = """apiVersion: kernel-contract/v1
kind: KernelContract
metadata: {name: policy, version: 1, owner: rl}
kernels: {train: {engine: torch}, inference: {engine: vllm}}
assumptions: {horizon: 100}
slices: {code: {where: {task: code}}}
statistical:
  - {id: token-tv, metric: tv_token, unit: token, limit: 0.05}
  - {id: seq-tv, metric: tv_seq, limit: 0.5}
runtime: [{id: lag, metric: weights_lag, limit: 1}]
observability: {window: 5m, long_window: 1h, min_samples: 2000, min_sequences: 100, sampling: 0.05}
"""


@pytest.fixture
def run(tmp_path, command):
    gate, path = command("gate"), tmp_path / "policy.yaml"

    def invoke(*arguments, text=CONTRACT):
        path.write_text(text)
        return gate("gate", "plan", path, *arguments)

    return invoke


def test_the_command_prints_the_observations_that_each_clause_needs(run):
    code, out, err = run()
    assert (code, err) == (0, "")
    rows = " ".join(out.split())
    assert "token-tv all and code 2,000 tokens" in rows
    assert "seq-tv all and code 100 prompts" in rows
    assert "lag all and code 1 batch" in rows
    assert "batchs" not in out


def test_a_gate_that_can_never_pass_is_refused(run):
    """It would hold every version for ever; the clause is named."""
    code, out, err = run(text=CONTRACT.replace("limit: 0.05", "limit: 0"))
    assert code == 2
    assert "token-tv all and code never" in " ".join(out.split())
    assert "token-tv on all and code can never pass: not even identical kernels" in err
