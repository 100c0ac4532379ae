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


RATE = ("--tokens-per-second", "1000")


@pytest.mark.parametrize(
    ("options", "limit", "exits", "said"),
    [
        (
            (), 0.05, 0,
            ("token-tv all and code 2,000 tokens", "seq-tv all and code 100 prompts", "lag all and code 1 batch"),
        ),
        # 2,000 tokens at 5 % take 40 s, on a tenth of them 400 s; two more windows follow.
        (
            (*RATE, "--share", "code=0.1"), 0.05, 0,
            ("token-tv all 2,000 tokens about 10 min 40 s", "token-tv code 2,000 tokens about 2 h 6 min",
             "seq-tv all 100 prompts about 13 min 20 s", "lag all and code 1 batch -"),
        ),
        # At 0.05 a second they take 11 hours.
        (
            (*RATE, "--share", "code=0.001"), 0.05, 2,
            ("token-tv code 2,000 tokens never",
             "token-tv on code can never pass: its observations take longer than the long window of 1h"),
        ),
        (RATE, 0.05, 0, ("token-tv code 2,000 tokens -", "no time on code: give --share code=PART of the traffic")),
        (
            (), 0, 2,
            ("token-tv all and code never", "token-tv on all and code can never pass: not even identical kernels"),
        ),
    ],
)  # fmt: skip
def test_it_says_what_a_gate_needs_and_how_long_that_takes(run, options, limit, exits, said):
    code, out, err = run(*options, text=CONTRACT.replace("limit: 0.05", f"limit: {limit}"))
    text = " ".join((out + err).split())
    assert (code, [part for part in said if part not in text]) == (exits, [])
    assert ("no time" in text) is (options == RATE)


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
