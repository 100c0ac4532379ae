"""`kc-otel init`."""

from pathlib import Path

import numpy as np
import pytest

from kc_otel.contract.load import check, load
from kc_otel.contract.measuring_paths import MeasuringPath, left_open
from kc_otel.judge.verdict import Status
from kc_otel.offline.gate.recorded_gate import GateTerms, gate_recordings, read_input
from kc_otel.record.kernel import Kernel
from kc_otel.recordings.recording_files import load_recording

_RECORDINGS = Path(__file__).resolve().parents[2] / "examples" / "real_model" / "recordings"
_GIVEN = (
    "--owner=rl",
    "--train=engine=torch,dtype=bfloat16",
    "--inference=engine=vllm,dtype=fp8",
    "--reward-budget=0.1",
)


@pytest.fixture
def run(tmp_path, monkeypatch, command):
    """Runs `kc-otel init` in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return command("init")


@pytest.fixture
def noise(tmp_path):
    """A recording of log ratios with a standard deviation."""

    def write(deviation):
        rng = np.random.default_rng(0)
        q = -rng.exponential(1.0, (400, 32)) - 1.0
        path = tmp_path / "noise.npz"
        p = q + deviation * rng.normal(size=q.shape)
        np.savez(path, train_logprobs=p, inference_logprobs=q, mask=np.ones(q.shape, dtype=bool))
        return path

    return write


def test_a_contract_is_written_that_is_sound(run):
    slices = "--slices=code: task=code; long: prompt_tokens>=8192, prompt_tokens<99999, task!=chat"
    code, out, err = run(*_GIVEN, "--name=p", "--horizon=64", "--clip=0.2", "--reward-range=-1,1", slices)
    assert (code, out) == (0, "")
    assert err.splitlines()[0] == "wrote p.yaml"
    assert err.splitlines()[-1] == "next: kc-otel gate plan p.yaml"
    assert check("p.yaml").problems == ()
    made = load("p.yaml")
    assert made.assumptions.reward_range == (-1.0, 1.0)
    assert (made.assumptions.horizon, made.assumptions.clip) == (64, 0.2)
    assert made.slices["code"].where == {"task": "code"}
    assert made.slices["long"].where == {"prompt_tokens": ">= 8192, < 99999", "task": "!= chat"}


def test_to_standard_output(run):
    code, out, err = run(*_GIVEN, "--out", "-")
    assert code == 0
    assert out.startswith("# policy: how far vllm may be from torch")
    assert "a PASS takes at least" in err
    assert "wrote" not in err


def test_a_file_is_not_overwritten(run):
    assert run(*_GIVEN)[0] == 0
    code, _, err = run(*_GIVEN)
    assert (code, "--out: policy.yaml exists; remove it" in err) == (2, True)


def test_a_script_needs_a_budget_only(run):
    assert run()[0] == 2
    assert run("--reward-budget=0.1")[0] == 0
    made = load("policy.yaml")
    assert (made.kernels.train.engine, made.kernels.inference.engine) == ("torch", "vllm")
    assert (made.kernels.train.dtype, made.metadata.owner) == (None, "unknown")


@pytest.mark.parametrize("data", ["vllm", "trl", "trainer", "verl", "loop", "gate"])
def test_every_clause_is_one_that_the_data_can_fill(run, data):
    """No clause, and no step of the policy, waits for what this way of measuring never brings; actions are obeyed."""
    assert run("--reward-budget=0.1", f"--data={data}")[0] == 0
    made = load("policy.yaml")
    assert {finding.level for finding in left_open(made, MeasuringPath(data))} <= {"ok"}
    assert ("weights-lag" in {clause.id for clause in made.clauses}) == (data in {"trl", "trainer", "verl", "loop"})


def test_a_budget_at_a_long_horizon_lets_good_kernels_through_a_gate(run, noise):
    path = noise(1e-3)
    assert run("--reward-budget=0.05", "--horizon=1024", "--data=gate")[0] == 0
    gate = gate_recordings(load("policy.yaml"), [read_input(path)], (Kernel("torch"), Kernel("vllm")), GateTerms(), 1e9)
    assert gate.decision.outcome == "advance"


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--train=dtype=fp8", "--train: 'dtype=fp8': no engine"),
        ("--reward-range=1,0", "--reward-range: '1,0' is not a range"),
        ("--slices=code", "--slices: 'code' is not a slice"),
        ("--slices=all: task=x", "'all' is reserved"),
        ("--reward-budget=3", "reward budget: 3.0"),
        ("--name=Not A Name", "metadata.name"),
        ("--baseline=nowhere.npz", "nowhere.npz"),
    ],
)
def test_what_cannot_be_is_named_and_exits_2(run, option, said):
    code, out, err = run(*_GIVEN, "--out=x.yaml", option)
    assert (code, out) == (2, "")
    assert said in err
    assert run(*_GIVEN, "--out=x.yaml")[0] == 0


def test_a_baseline_decides_the_limits_and_the_terminal_says_what_is_left_to_the_budget(run, noise):
    limits = []
    for margin in (2, 4):
        path = noise(0.03)
        code, _, err = run(*_GIVEN, "--horizon=32", "--baseline", path, f"--margin={margin}", f"--out={margin}.yaml")
        assert code == 0, err
        assert "token-kl, token-tv, tail: limits of the baseline" in err
        assert err.splitlines()[-1] == f"next: kc-otel gate plan {margin}.yaml"
        limits.append({c.id: c.limit_for("all") for c in load(f"{margin}.yaml").clauses}["token-tv"])
    assert "noise.npz" in Path("2.yaml").read_text(encoding="utf-8")
    assert limits[0] > 2 * 0.0119
    assert limits[1] == pytest.approx(2 * limits[0], rel=0.01)


def test_a_baseline_that_breaks_the_bound_of_the_budget_is_said(run, noise):
    code, _, err = run(*_GIVEN, "--horizon=32", "--baseline", noise(0.2))
    assert code == 0, err
    assert "reward: not asked for, because the baseline itself breaks the bound; record rewards" in err


def test_stale_tokens_and_empty_slices_of_a_baseline_are_said(run, noise):
    arrays = dict(np.load(noise(0.03)))
    np.savez("aged.npz", **arrays, lag=np.arange(400) % 2)
    given = (*_GIVEN, "--horizon=32", "--slices=code: task=code")
    code, _, err = run(*given, "--baseline", "aged.npz")
    assert (code, "6,400 tokens of the baseline were sampled by older weights and are left out" in err) == (0, True)
    assert "slice code: the baseline has no sequence of it; its limits are those of all traffic" in err
    arrays["lag"] = np.ones(400, dtype=np.int64)
    np.savez("stale.npz", **arrays)
    code, _, err = run(*given, "--baseline", "stale.npz", "--out=b.yaml")
    assert (code, "stale.npz: older weights sampled all of it" in err) == (2, True)


def test_limits_that_may_allow_staleness_are_told(run, noise):
    """A trainer's step without the sampler's tells no age; equal steps do."""
    np.savez("unknown.npz", **np.load(noise(0.03)), train_weights=np.full(400, 7))
    code, _, err = run(*_GIVEN, "--horizon=32", "--baseline", "unknown.npz")
    said = "it is unknown which weights sampled 400 sequences of the baseline: limits include their staleness"
    assert (code, said in err) == (0, True), err
    np.savez("known.npz", **np.load("unknown.npz"), inference_weights=np.full(400, 7))
    code, _, err = run(*_GIVEN, "--horizon=32", "--baseline", "known.npz", "--out=b.yaml")
    assert (code, "unknown" in err) == (0, False), err


def test_a_baseline_whose_drift_changes_half_way_is_told(run, noise):
    before, after = dict(np.load(noise(0.03))), np.load(noise(0.06))
    for name, said in (("one.npz", False), ("two.npz", True)):
        np.savez(name, **before)
        code, _, err = run(*_GIVEN, "--horizon=32", "--baseline", name, f"--out={name}.yaml")
        assert (code, "the baseline's drift changes: mean (1-w)+ of 0.0115" in err) == (0, said), err
        before["train_logprobs"][200:] = after["train_logprobs"][200:]


def _more_of(recording, path, *, prompts, rollouts=4, tokens=128):
    """As many prompts like a recording's: each draws its tokens, with both kernels' numbers, from those of one."""
    rng = np.random.default_rng(0)
    there = np.repeat(recording.prompts, recording.lengths)
    tasks = [recording.attributes[number]["task"] for number in np.unique(recording.prompts, return_index=True)[1]]
    like = rng.integers(len(tasks), size=prompts)
    drawn = np.concatenate([rng.choice(np.flatnonzero(there == number), rollouts * tokens) for number in like])
    np.savez(
        path, train_logprobs=recording.train[drawn], inference_logprobs=recording.inference[drawn],
        lengths=np.full(prompts * rollouts, tokens), task=np.repeat(np.array(tasks)[like], rollouts),
        group=np.repeat(np.arange(prompts), rollouts), reward=rng.integers(0, 2, prompts * rollouts).astype(float),
    )  # fmt: skip
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "outcome", "named"),
    [("vllm-bf16", "advance", ()), ("vllm-fp8-kv", "rollback", ("tail", "token-kl", "token-tv"))],
)
def test_the_first_hour_is_green_for_the_baselines_kernel_and_red_by_name_for_another(run, kernel, outcome, named):
    """More traffic of a real model's bfloat16 passes the limits made from it; an fp8 cache without scales fails."""
    code, _, err = run(
        *("--owner=rl", "--train=engine=transformers,dtype=float32", "--inference=engine=vllm,dtype=bfloat16"),
        *("--reward-budget=0.05", "--horizon=512", "--data=gate", "--baseline", _RECORDINGS / "vllm-bf16.npz"),
    )
    assert code == 0, err
    contract = load("policy.yaml")
    traffic = _more_of(load_recording(_RECORDINGS / f"{kernel}.npz"), Path("traffic.npz"), prompts=600)
    kernels = Kernel.declared(contract.kernels.train), Kernel.declared(contract.kernels.inference)
    gate = gate_recordings(contract, [read_input(traffic)], kernels, GateTerms(), 1e9)
    assert gate.decision.outcome == outcome
    [judged] = gate.judged
    failed = {verdict.cell.clause for verdict in judged.verdicts if verdict.status is Status.FAIL}
    assert failed == set(named)
