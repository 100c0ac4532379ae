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


def test_time_is_observations_over_rate_and_a_window_for_each_further_pass(run):
    """2,000 tokens at 1,000 a second and 5 % take 40 s, on a tenth of them 400 s; two more windows follow."""
    code, out, err = run("--tokens-per-second", "1000", "--share", "code=0.1")
    assert (code, err) == (0, "")
    rows = " ".join(out.split())
    assert "token-tv all 2,000 tokens about 10 min 40 s" in rows
    assert "token-tv code 2,000 tokens about 2 h 6 min" in rows
    assert "seq-tv all 100 prompts about 13 min 20 s" in rows
    assert "lag all and code 1 batch -" in rows


def test_traffic_that_is_too_thin_for_the_long_window_is_refused(run):
    """2,000 tokens take 11 hours at 0.05 a second."""
    code, out, err = run("--tokens-per-second", "1000", "--share", "code=0.001")
    assert code == 2
    assert "token-tv code 2,000 tokens never" in " ".join(out.split())
    assert "token-tv on code can never pass: its observations take longer than the long window of 1h" in err


def test_a_slice_needs_its_share(run):
    code, out, _ = run("--tokens-per-second", "1000")
    assert code == 0
    assert "token-tv code 2,000 tokens -" in " ".join(out.split())
    assert "no time on code: give --share code=PART of the traffic" in out
    assert "no time" not in run()[1]


@pytest.mark.parametrize(
    ("share", "said"),
    [
        ("cod=0.1", "--share: the contract has no slice 'cod'; did you mean 'code'?"),
        ("code=2", "--share: '2' is not a part of the traffic"),
        ("code", "--share: 'code' is not SLICE=PART"),
    ],
)
def test_a_share_that_cannot_be_used_is_refused(run, share, said):
    code, _, err = run("--share", share)
    assert code == 2
    assert said in err


def test_a_gate_that_can_never_pass_is_refused(run):
    """It would hold every version for ever; the clause is named."""
    code, out, err = run(text=CONTRACT.replace("limit: 0.05", "limit: 0"))
    assert code == 2
    assert "token-tv all and code never" in " ".join(out.split())
    assert "token-tv on all and code can never pass: not even identical kernels" in err
