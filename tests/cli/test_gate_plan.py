"""`kc-otel gate plan`: what a gate needs at best, before anything is recorded."""

from __future__ import annotations

import math

import pytest

from kc_otel.contract.load import load_text
from kc_otel.judge.sample_sizes import Traffic, plan_gate

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


def planned(text=CONTRACT, windows=3, **traffic):
    known = {"tokens_per_second": 1000.0, "sampling": 0.05, "shares": {"all": 1.0}}
    plan = plan_gate(load_text(text), Traffic(**(known | traffic)), windows)
    return {(cell.clause, cell.slice): cell for cell in plan}


@pytest.fixture
def run(tmp_path, command):
    gate, path = command("gate"), tmp_path / "policy.yaml"

    def invoke(*arguments, text=CONTRACT):
        path.write_text(text)
        return gate("gate", "plan", path, *arguments)

    return invoke


def test_time_is_observations_over_rate_and_a_window_for_each_further_pass():
    """2000 tokens at 1000/s and 5% take 40 s; two more windows of 5 minutes follow."""
    plan = planned()
    assert plan["token-tv", "all"].observations == 2000
    assert plan["token-tv", "all"].seconds == pytest.approx(40 + 2 * 300)
    assert planned(windows=1)["token-tv", "all"].seconds == pytest.approx(40)
    assert plan["seq-tv", "all"].unit == "prompt"
    assert plan["seq-tv", "all"].seconds == pytest.approx(100 / (1000 * 0.05 / 100) + 2 * 300)


def test_what_the_short_window_cannot_hold_takes_the_long_one_or_never_passes():
    """2000 tokens take 1000 s at 2 tokens/s measured, which fits into an hour, and 11 hours at 0.05."""
    assert planned(tokens_per_second=40.0)["token-tv", "all"].seconds == pytest.approx(1000 + 2 * 3600)
    cell = planned(tokens_per_second=1.0)["token-tv", "all"]
    assert (cell.never, cell.seconds) == (True, math.inf)
    assert cell.why == "about 11 h 6 min of traffic do not fit into the long window of 1h; sample more, or lengthen it"


def test_a_slice_needs_its_share():
    assert planned(shares={"all": 1.0, "code": 0.1}, windows=1)["token-tv", "code"].seconds == pytest.approx(400)
    cell = planned()["token-tv", "code"]
    assert (cell.seconds, cell.why) == (None, "give --share code=PART of the traffic")


def test_the_command_prints_what_each_clause_needs_and_how_long_the_gate_takes(run):
    code, out, err = run("--tokens-per-second", "1000", "--share", "code=0.1")
    assert (code, err) == (0, "")
    assert "token-tv all 2,000 tokens about" in " ".join(out.split())
    assert "no time: the number of batches does not follow from the number of tokens" in out
    assert "batchs" not in out
    assert "at 5% sampling this gate needs about 2 h 33 min; seq-tv on code takes longest" in out
    assert "at 50% sampling" in run("--tokens-per-second", "1000", "--sampling", "0.5", "--share", "code=0.1")[1]


def test_without_a_rate_only_observations_are_printed(run):
    code, out, _ = run()
    assert code == 0
    assert "no time: give --tokens-per-second" in out
    assert "this gate needs" not in out


def test_a_gate_that_can_never_pass_is_refused(run):
    """It would hold every version for ever; the clause is named."""
    code, out, err = run(text=CONTRACT.replace("limit: 0.05", "limit: 0"))
    assert code == 2
    assert "token-tv all and code never" in " ".join(out.split())
    assert "token-tv on all and code can never pass: not even identical kernels" in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--share", "cod=0.1"), "--share: the contract has no slice 'cod'; did you mean 'code'?"),
        (("--share", "code=2"), "--share: '2' is not a part of the traffic"),
    ],
)
def test_options_that_cannot_be_used_are_refused(run, arguments, said):
    code, _, err = run(*arguments)
    assert code == 2
    assert said in err
