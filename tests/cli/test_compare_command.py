"""`kc-otel compare`: the same numbers as the functions behind it, by slice, for people and for programs."""

import json

import numpy as np
import pytest

import kc_otel
from kc_otel.offline import remedy
from kc_otel.record.measure.sampled import TOKEN, log_ratio
from kc_otel.recordings.recording import Recording
from kc_otel.recordings.recording_files import load_recording, save_recording
from kc_otel.stats import Binned, mean_interval
from tests.offline.remedy.test_remedy import SOME
from tests.tools.two_kernels import sampled_from_logits

COMMANDS = ("compare",)

CONTRACT = """apiVersion: kernel-contract/v1
kind: KernelContract
metadata: {name: policy, version: 1, owner: rl}
kernels: {train: {engine: torch}, inference: {engine: vllm}}
assumptions: {reward_range: [0, 1], horizon: 200, clip: 0.4}
slices: {code: {where: {task: code}}, tables: {where: {task: tables}}, long: {where: {prompt_tokens: ">= 99999"}}}
numerical: [{id: exact, metric: tv_exact, unit: token, limit: 0.5}]
statistical:
  - {id: token-tv, metric: tv_token, unit: token, limit: 0.05}
  - {id: reward, metric: reward_drift_bound, limit: 0.9}
runtime: [{id: lag, metric: weights_lag, limit: 1}]
observability: {min_samples: 500}
"""
TASKS = ("code", "prose", "tables")


def make(seed=3, sequences=90):
    """Tokens sampled from the inference kernel; on tables the kernels differ by far more."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(10, 60, size=sequences)
    task = rng.integers(3, size=sequences)
    noises = np.where(task == 2, 0.6, 0.02)
    prompts = np.random.default_rng(seed + 1).integers(1, 9000, sequences)
    about = tuple({"task": TASKS[t], "prompt_tokens": int(c)} for t, c in zip(task, prompts, strict=True))
    advantages = np.repeat(rng.standard_normal(sequences), lengths)
    return sampled_from_logits(rng, lengths, noises, about, advantages=advantages)


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "log.npz"
    save_recording(make(), path)
    return path


@pytest.fixture
def contract(tmp_path):
    """A contract whose token-tv breaks on tables and holds elsewhere."""
    path = tmp_path / "policy.yaml"
    path.write_text(CONTRACT)
    return path


def slices(answer):
    return {part["slice"]: part for part in answer["slices"]}


@pytest.mark.parametrize(("name", "said"), [("often", "380 of 400 sequences repeat others"), ("copy", "one side is a")])
def test_each_command_tells_of_copies_and_of_a_copied_side(command, tmp_path, monkeypatch, contract, name, said):
    """Verdicts and limits count a sequence once, as the gate does; no limits follow from a side that is a copy."""
    monkeypatch.setattr(remedy, "catalogue", lambda **_: SOME)
    rng = np.random.default_rng(0)
    inference = np.log(rng.uniform(0.05, 0.4, (20, 128)))
    train = inference + 0.04 * rng.standard_normal(inference.shape) - 0.0008
    sides = (inference, inference) if name == "copy" else np.tile([train, inference], (20, 1))
    log = tmp_path / f"{name}.npz"
    np.savez(log, train_logprobs=sides[0], inference_logprobs=sides[1], task=["code"] * len(sides[0]))
    for asked in (["compare"], ["remedy", "--trainer", "verl"]):
        _, out, err = command(asked[0])(log, "--contract", contract, *asked[1:])
        counted = "400 sequences, 51,200" if (asked[0], name) == ("remedy", "often") else "20 sequences, 2,560"
        assert (said in out, f"{counted} tokens" in out) == (True, True), err
        assert ("count all the same" in out) is ((asked[0], name) == ("remedy", "often"))
    _, out, err = command("compare")(log)
    assert (said in out, f"{len(sides[0])} sequences" in out) == (True, True), err
    assert "count all the same" in out or name == "copy"
    assert said in json.loads(command("compare")(log, "--contract", contract, "--json")[1])["notes"][0]
    out = tmp_path / "made.yaml"
    code, _, err = command("init")("--reward-budget", 0.1, "--baseline", log, "--out", out)
    assert (code, out.exists()) == ((2, False) if name == "copy" else (0, True))
    assert ("a copy of the other" if name == "copy" else said) in err


def test_columns_that_look_swapped_are_told(command, tmp_path, contract):
    """A drift below the 2 % that a verdict allows: where the mean of P/Q is larger, the input is invalid."""
    rng = np.random.default_rng(0)
    train = np.log(rng.uniform(0.05, 0.4, (200, 128)))
    inference = train + 0.1 * rng.standard_normal(train.shape) - 0.005
    log, said = tmp_path / "log.npz", "the columns look swapped"
    for sides, answer in (((train, inference), True), ((inference, train), False)):
        np.savez(log, train_logprobs=sides[0], inference_logprobs=sides[1], task=["code"] * 200)
        for asked in (["compare"], ["compare", "--contract", contract]):
            assert (said in command(asked[0])(log, *asked[1:])[1]) is answer
        found = kc_otel.compare(*sides, contract=contract, slices={"task": ["code"] * 200})
        assert any(said in note for note in found.notes) is answer


def test_json_has_the_numbers_exactly(run, log):
    code, out, err = run(log, "--by", "task", "--json")
    assert (code, err) == (0, "")
    answer = json.loads(out)
    whole = load_recording(log)
    assert answer["tokens"] == whole.train.size
    assert list(slices(answer)) == ["all", "task=code", "task=prose", "task=tables"]
    for name, part in slices(answer).items():
        inside = np.array([name in {"all", f"task={row['task']}"} for row in whole.attributes])
        of = whole.only(inside)
        assert (part["sequences"], part["tokens"]) == (of.lengths.size, of.train.size)
        values = Binned.of_samples(TOKEN["tv_token"](log_ratio(of.train, of.inference)))
        tv = mean_interval(values, low=0.0, high=1.0, alpha_lower=0.005, alpha_upper=0.005)
        ours = part["kc"]["tv_token"]
        # A side is found by a search: its last digit depends on the order in which NumPy's version adds.
        sides = pytest.approx((tv.lower, tv.upper), rel=1e-14)
        assert (ours["estimate"], ours["unit"], (ours["lower"], ours["upper"])) == (tv.estimate, "1", sides)


def test_quantities_agree_with_each_other(run, log):
    """k1, k3, support deficit, ESS and the clip share obey their rules."""
    part = slices(json.loads(run(log, "--json", "--clip", "0.3")[1]))["all"]
    ours = {name: interval["estimate"] for name, interval in part["kc"].items()}
    assert ours["k1"] - ours["k3"] == pytest.approx(ours["support_deficit"], abs=1e-9)
    assert ours["ess_token"] == pytest.approx(1 / (1 + ours["chi2_token"]))
    assert ours["clip_budget_share"] == pytest.approx(ours["abs_log_ratio mean"] / np.log(1.3))
    ess = part["kc"]["ess_token"]
    chi2 = part["kc"]["chi2_token"]
    assert ess["lower"] == pytest.approx(0.0 if chi2["upper"] is None else 1 / (1 + chi2["upper"]))
    assert ess["upper"] == pytest.approx(1 / (1 + chi2["lower"]))


def test_a_contract_gives_slices_clip_range_and_verdicts(run, log, contract):
    code, out, _ = run(log, "--contract", contract, "--json")
    assert code == 0
    answer = json.loads(out)
    assert list(slices(answer)) == ["all", "code", "tables", "long"]
    assert slices(answer)["long"]["tokens"] == 0
    assert answer["clip"] == 0.4
    status = {(v["clause"], v["slice"]): v["status"] for v in answer["verdicts"]}
    assert status["token-tv", "code"] == "PASS"
    assert status["token-tv", "tables"] == "FAIL"
    assert status["exact", "all"] == "PASS"
    assert status["reward", "all"] == "INCONCLUSIVE"
    assert status["token-tv", "long"] == "NO_DATA"
    assert answer["not_judged"] == ["lag: no recording holds weights_lag; the evaluator judges live traffic by it"]
    reason = next(v["reason"] for v in answer["verdicts"] if (v["clause"], v["slice"]) == ("token-tv", "tables"))
    assert reason.startswith("lower bound")
    assert reason.endswith("samples")


@pytest.mark.slow
@pytest.mark.parametrize(("width", "tables"), [(60, 3), (120, 1)])
def test_tables_fit_the_terminal(run, log, contract, width, tables):
    code, out, err = run(log, "--contract", contract, width=width)
    assert (code, err) == (0, "")
    before, after = out.split("\nVerdicts\n")
    assert before.count("\nmetric") == tables
    assert max(map(len, before.splitlines()[1:])) <= width
    lines = after.splitlines()
    (line,) = [line for line in lines if line.startswith("FAIL") and "token-tv on tables" in line]
    assert "; lower bound" in line
    assert "no sequence of this recording is in slice long" in out


def test_prompts_that_are_not_known_are_noted(run, log, contract):
    assert "assumes that sequences are independent" in " ".join(run(log, "--contract", contract)[1].split())


def test_numbers_with_many_values_become_ranges(run, log):
    answer = slices(json.loads(run(log, "--by", "prompt_tokens", "--json")[1]))
    assert len(answer) == 5
    assert all(name.startswith("prompt_tokens in [") for name in list(answer)[1:])
    assert sum(part["sequences"] for name, part in answer.items() if name != "all") == answer["all"]["sequences"] == 90


def test_rare_values_are_together(run, tmp_path):
    lengths = np.ones(60, dtype=np.int64)
    values = -np.ones(60)
    names = [f"v{min(row, 59 - row):02d}" for row in range(60)]
    save_recording(Recording(values, values, lengths, tuple({"k": k} for k in names)), tmp_path / "a.npz")
    answer = slices(json.loads(run(tmp_path / "a.npz", "--by", "k", "--json")[1]))
    assert len(answer) == 22
    assert answer["k=other"]["sequences"] == 20


def test_identical_kernels_have_no_number_that_is_not_one(run, tmp_path):
    values = -np.ones(5)
    save_recording(Recording(values, values, np.array([2, 3]), ({}, {})), tmp_path / "a.npz")
    answer = json.loads(run(tmp_path / "a.npz", "--json")[1])
    own = answer["slices"][0]["kc"]
    assert own["tv_token"]["estimate"] == 0.0
    assert own["abs_log_ratio p99.9"]["upper"] is None
    assert run(tmp_path / "a.npz")[0] == 0


@pytest.mark.slow
def test_many_tokens_keep_exact_means_and_valid_intervals(run, tmp_path):
    """Beyond 32,768 distinct values the mean stays exact, and its interval contains the one of all values, barely."""
    rng = np.random.default_rng(5)
    values = -rng.exponential(size=60_000) - 1.0
    log = Recording(values + 0.05 * rng.standard_normal(values.size), values, np.full(600, 100), ({},) * 600)
    save_recording(log, tmp_path / "a.npz")
    found = json.loads(run(tmp_path / "a.npz", "--json")[1])["slices"][0]["kc"]["k3"]
    k3 = TOKEN["k3"](log_ratio(log.train, log.inference))
    assert np.unique(k3).size > 32_768
    whole = mean_interval(Binned.of_samples(k3), low=0.0, high=5.0, alpha_lower=0.005, alpha_upper=0.005)
    assert found["estimate"] == whole.estimate
    assert found["lower"] <= whole.lower < whole.upper <= found["upper"]
    assert found["upper"] - found["lower"] == pytest.approx(whole.upper - whole.lower, rel=0.01)


def test_columns_are_named_on_the_command_line(run, tmp_path):
    np.savez(tmp_path / "a.npz", left=[-1.0, -2.0], right=[-1.0, -2.5])
    assert run(tmp_path / "a.npz", "--columns", "train=left, inference=right", "--json")[0] == 0
    code, out, err = run(tmp_path / "a.npz", "--columns", "train")
    assert (code, out) == (2, "")
    assert "--columns: 'train' is not ROLE=COLUMN" in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--by", "colour"], "no sequence has an attribute 'colour'; there are completion_tokens, prompt_tokens, task"),
        (["--contract", "c.yaml", "--by", "task"], "--contract and --by exclude each other"),
        (["--contract", "nowhere.yaml"], "nowhere.yaml"),
    ],
)
def test_bad_options_end_with_2_and_a_remedy(run, log, options, message):
    code, out, err = run(log, *options)
    assert (code, out) == (2, "")
    assert message in err
