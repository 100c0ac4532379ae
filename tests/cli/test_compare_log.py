"""`kc-otel compare-log`: the same numbers as the functions behind it, by slice, for people and for programs."""

import json
import math
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from kc_otel.cli import compare_log_command as compare
from kc_otel.offline.compare_log.definitions import llama_cpp, nemo_rl, prime_rl, trl, verl
from kc_otel.record.measure.sampled import TOKEN, log_ratio
from kc_otel.recordings import Recording, load_recording, save_recording
from kc_otel.stats import Binned, mean_interval

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


def make(seed=3, sequences=90, vocab=12):
    """Tokens sampled from the inference kernel; on tables the kernels differ by far more."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(10, 60, size=sequences)
    task = rng.integers(3, size=sequences)
    n = int(lengths.sum())
    z = rng.standard_normal((n, vocab))
    other = z + np.repeat(np.where(task == 2, 0.6, 0.02), lengths)[:, None] * rng.standard_normal((n, vocab))
    p, q = (each - np.log(np.exp(each).sum(1, keepdims=True)) for each in (z, other))
    y = np.minimum((np.exp(q).cumsum(1) < rng.random((n, 1))).sum(1), vocab - 1)
    every = np.arange(n)
    return Recording(
        p[every, y],
        q[every, y],
        lengths,
        tuple(
            {"task": TASKS[t], "prompt_tokens": int(c)} for t, c in zip(task, rng.integers(1, 9000, n), strict=False)
        ),
        token_ids=y,
        advantages=np.repeat(rng.standard_normal(sequences), lengths),
        train_logits=z,
        inference_logits=other,
    )


@pytest.fixture
def log(tmp_path):
    """A recording with everything in it."""
    path = tmp_path / "log.npz"
    save_recording(make(), path)
    return path


@pytest.fixture
def contract(tmp_path):
    """A contract whose token-tv breaks on tables and holds elsewhere."""
    path = tmp_path / "policy.yaml"
    path.write_text(CONTRACT)
    return path


@pytest.fixture
def run(monkeypatch):
    """The exit code, standard output and standard error of the command, on a terminal so many columns wide."""
    app = typer.Typer()
    compare.register(app)

    def invoke(*arguments, width=80):
        monkeypatch.setenv("COLUMNS", str(width))
        result = CliRunner().invoke(app, [str(argument) for argument in arguments])
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return result.exit_code, result.stdout, result.stderr

    return invoke


def slices(answer):
    return {part["slice"]: part for part in answer["slices"]}


def test_a_pickle_is_not_read_and_the_message_says_what_to_write(run, tmp_path):
    """Verl's DataProto is kept as one: it could run any program."""
    path = tmp_path / "batch.pkl"
    path.write_bytes(pickle.dumps({"old_log_probs": [1.0]}))
    code, out, err = run(path)
    assert (code, out) == (2, "")
    assert "batch.pkl: a pickle can run any program when it is read, so it is not" in err
    assert "numpy.savez(file, train_logprobs=..., inference_logprobs=..., mask=...)" in err


def test_a_masked_row_counts_where_a_tool_counts_it(run, tmp_path):
    """Averages of verl are over all rows of a batch, with 0 for one without a token, and so in every slice."""
    rows = [
        {"train_logprobs": [-1.0, -2.0], "inference_logprobs": [-1.2, -2.3], "mask": [1, 1], "task": "a"},
        {"train_logprobs": [-1.0, -2.0], "inference_logprobs": [-1.2, -2.3], "mask": [0, 0], "task": "a"},
        {"train_logprobs": [-1.0, -2.0], "inference_logprobs": [-1.2, -2.3], "mask": [1, 1], "task": "b"},
    ]
    path = tmp_path / "log.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    answer = json.loads(run(path, "--by", "task", "--json", "--tool", "verl")[1])
    whole = math.exp(2 * 0.5) - 1
    found = {name: part["tools"]["verl"]["rollout_corr/chi2_seq"]["value"] for name, part in slices(answer).items()}
    assert found == pytest.approx({"all": whole * 2 / 3, "task=a": whole / 2, "task=b": whole})
    assert answer["masked_sequences"] == 1


def test_a_side_in_half_precision_is_noted(run, tmp_path):
    """Below the tables, and in JSON with its side, grid and size; null where both sides are whole."""
    rng = np.random.default_rng(0)
    inference = -rng.exponential(1.0, (20, 30)) - 0.1
    for name, train in (("half", inference.astype(np.float16)), ("whole", inference * 1.001)):
        np.savez(tmp_path / f"{name}.npz", train_logprobs=train, inference_logprobs=inference)
    found = json.loads(run(tmp_path / "half.npz", "--json")[1])["rounded"]
    assert (found["side"], found["grid"]) == ("train", "float16")
    assert 1e-4 < found["rounding"] < 1e-3
    assert "the train side all lie on float16's grid" in run(tmp_path / "half.npz", "--markdown")[1]
    assert json.loads(run(tmp_path / "whole.npz", "--json")[1])["rounded"] is None


def test_json_has_every_tools_numbers_exactly(run, log):
    """Each tool's metrics by its own names, digit by digit, per slice; ours beside them with unit and interval."""
    code, out, err = run(log, "--by", "task", "--json")
    assert (code, err) == (0, "")
    answer = json.loads(out)
    whole = load_recording(log)
    assert answer["tokens"] == whole.train.size
    assert list(slices(answer)) == ["all", "task=code", "task=prose", "task=tables"]
    for name, part in slices(answer).items():
        of = (
            whole
            if name == "all"
            else whole.only(
                np.array([f"task={a['task']}" == name for a in whole.attributes]),
                np.zeros(len(whole.masked), dtype=bool),
            )
        )
        assert (part["sequences"], part["tokens"]) == (of.lengths.size, of.train.size)
        arguments = (of.train, of.inference, of.lengths)
        tools = {tool: {k: v["value"] for k, v in numbers.items()} for tool, numbers in part["tools"].items()}
        assert verl.offpolicy_metrics(*arguments).items() <= tools["verl"].items()
        largest = verl.importance_weights(*arguments, level="sequence")["rollout_corr/rollout_is_max"]
        assert tools["verl"]["rollout_corr/rollout_is_max (sequence)"] == largest
        assert tools["nemo-rl"] == nemo_rl.metrics(*arguments)
        assert trl.metrics(*arguments).items() <= tools["trl"].items()
        raw = trl.before_clipping(*arguments)["sampling/importance_sampling_ratio/mean"]
        assert tools["trl"]["sampling/importance_sampling_ratio/mean (before clipping)"] == raw
        assert tools["prime-rl"] == prime_rl.mismatch_kl(*arguments) | prime_rl.masking(*arguments, of.advantages)
        table = llama_cpp.table(of.train_logits, of.inference_logits, of.token_ids)
        assert tools["llama.cpp"] == {label: printed.value for label, printed in table.items()}
        kld = part["tools"]["llama.cpp"]["Mean KLD"]
        assert kld == {
            "value": table["Mean KLD"].value,
            "standard_error": table["Mean KLD"].error,
            "kc": "kl_train_inference",
        }
        tv = mean_interval(
            Binned.of_samples(TOKEN["tv_token"](log_ratio(of.train, of.inference))),
            low=0.0,
            high=1.0,
            alpha_lower=0.005,
            alpha_upper=0.005,
        )
        ours = part["kc"]["tv_token"]
        # A side is found by a search: its last digit depends on the order in which NumPy's version adds.
        sides = pytest.approx((tv.lower, tv.upper), rel=1e-14)
        assert (ours["estimate"], ours["unit"], (ours["lower"], ours["upper"])) == (tv.estimate, "1", sides)


def test_our_quantities_agree_with_each_other_and_with_the_tools(run, log):
    """k1, k3, support deficit, ESS and the clip share obey their rules, and the equivalents that are claimed hold."""
    part = slices(json.loads(run(log, "--json", "--clip", "0.3")[1]))["all"]
    ours = {name: each["estimate"] for name, each in part["kc"].items()}
    theirs = {name: each["value"] for numbers in part["tools"].values() for name, each in numbers.items()}
    assert ours["k1"] - ours["k3"] == pytest.approx(ours["support_deficit"], abs=1e-9)
    assert ours["ess_token"] == pytest.approx(1 / (1 + ours["chi2_token"]))
    assert ours["clip_budget_share"] == pytest.approx(ours["abs_log_ratio mean"] / np.log(1.3))
    equal = {
        "rollout_corr/kl": ours["k1"],
        "rollout_corr/k3_kl": ours["k3"],
        "rollout_corr/chi2_token": ours["chi2_token"] - 2 * ours["support_deficit"],
        "gen_kl_error": ours["k3"],
        "sampling_importance_ratio": 1 - ours["support_deficit"],
        "sampling/sampling_logp_difference/mean": ours["abs_log_ratio mean"],
        "sampling/sampling_logp_difference/max": ours["abs_log_ratio max"],
        "mismatch_kl/all/mean": ours["k3"],
        "Same top p": 100 * (1 - ours["top1_disagreement"]),
    }
    for name, value in equal.items():
        assert theirs[name] == pytest.approx(value, rel=1e-5, abs=1e-8), name
    assert theirs["Mean KLD"] == pytest.approx(ours["kl_train_inference"], rel=0.01)
    ess = part["kc"]["ess_token"]
    chi2 = part["kc"]["chi2_token"]
    assert ess["lower"] == pytest.approx(0.0 if chi2["upper"] is None else 1 / (1 + chi2["upper"]))
    assert ess["upper"] == pytest.approx(1 / (1 + chi2["lower"]))


def test_a_contract_gives_slices_clip_range_and_verdicts(run, log, contract):
    """Its slices, its clip range, a verdict for each clause and slice, and what a recording cannot tell."""
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
    assert answer["not_judged"] == ["lag: weights_lag cannot be told from this recording"]
    reason = next(v["reason"] for v in answer["verdicts"] if (v["clause"], v["slice"]) == ("token-tv", "tables"))
    assert reason.startswith("lower bound")
    assert reason.endswith("samples")


@pytest.mark.slow
@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_tables_fit_the_terminal(run, log, contract, width):
    """No line is wider than the terminal, no name or number is cut, and verdicts come with their reasons."""
    code, out, err = run(log, "--contract", contract, width=width)
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= width
    assert "…" not in out
    lines = out.splitlines()
    assert any(line.startswith("FAIL") and "token-tv" in line and "tables" in line for line in lines)
    assert any(line.startswith("token-tv on tables: lower bound") for line in lines)
    assert "no sequence of this recording is in slice long" in out
    assert ("in our terms" in out) == (width >= 110)
    assert any(line.startswith("sampling/importance_sampling_ratio/mean ") for line in lines)
    if width >= 80:
        assert any(line.split()[:1] == ["masked_advantage_positive/mean"] for line in lines)


def test_markdown_has_a_table_per_tool(run, log, contract):
    """Headings, rows of equally many cells, and the verdicts."""
    code, out, _ = run(log, "--contract", contract, "--tool", "verl", "--tool", "llama.cpp", "--markdown")
    assert code == 0
    headings = [line for line in out.splitlines() if line.startswith("###")]
    assert headings == [
        "### kc-otel",
        "### verl",
        "### llama-perplexity --kl-divergence; base is the training kernel",
        "### Verdicts",
    ]
    for block in out.split("\n\n"):
        cells = {line.count(" | ") for line in block.splitlines() if line.startswith("|")}
        assert len(cells) <= 1
    assert "| rollout_corr/kl | k1 |" in out


def test_one_slice_and_one_tool(run, log, contract):
    """--slice and --tool leave the rest out; verdicts of other slices go too."""
    answer = json.loads(run(log, "--contract", contract, "--slice", "tables", "--tool", "trl", "--json")[1])
    assert list(slices(answer)) == ["tables"]
    assert list(answer["slices"][0]["tools"]) == ["trl"]
    assert {v["slice"] for v in answer["verdicts"]} == {"tables"}


def test_numbers_with_many_values_become_ranges(run, log):
    """Quarters of an attribute, which together hold every sequence once."""
    answer = slices(json.loads(run(log, "--by", "prompt_tokens", "--json")[1]))
    assert len(answer) == 5
    assert all(name.startswith("prompt_tokens in [") for name in list(answer)[1:])
    assert sum(part["sequences"] for name, part in answer.items() if name != "all") == answer["all"]["sequences"] == 90


def test_rare_values_are_together(run, tmp_path):
    """Twenty values of an attribute get a slice each; the rest is `other`, and nobody is lost."""
    lengths = np.ones(60, dtype=np.int64)
    values = -np.ones(60)
    names = [f"v{min(row, 59 - row):02d}" for row in range(60)]
    save_recording(Recording(values, values, lengths, tuple({"k": k} for k in names)), tmp_path / "a.jsonl")
    answer = slices(json.loads(run(tmp_path / "a.jsonl", "--by", "k", "--json")[1]))
    assert len(answer) == 22
    assert answer["k=other"]["sequences"] == 20


def test_identical_kernels_have_no_number_that_is_not_one(run, tmp_path):
    """Two equal sides: zeros and ones, no NaN in the JSON, and a bound that nobody claims is null."""
    values = -np.ones(5)
    save_recording(Recording(values, values, np.array([2, 3]), ({}, {})), tmp_path / "a.npz")
    answer = json.loads(run(tmp_path / "a.npz", "--json")[1])
    own = answer["slices"][0]["kc"]
    assert own["tv_token"]["estimate"] == 0.0
    assert own["abs_log_ratio p99.9"]["upper"] is None
    assert "llama.cpp" not in answer["slices"][0]["tools"]
    assert run(tmp_path / "a.npz")[0] == 0


@pytest.mark.slow
def test_many_tokens_keep_exact_means_and_valid_intervals(run, tmp_path):
    """Beyond 32,768 distinct values the mean stays exact, and its interval contains the one of all values, barely."""
    rng = np.random.default_rng(5)
    values = -rng.exponential(size=60_000) - 1.0
    log = Recording(values + 0.05 * rng.standard_normal(values.size), values, np.full(600, 100), ({},) * 600)
    save_recording(log, tmp_path / "a.npz")
    found = json.loads(run(tmp_path / "a.npz", "--json", "--tool", "verl")[1])["slices"][0]["kc"]["k3"]
    k3 = TOKEN["k3"](log_ratio(log.train, log.inference))
    assert np.unique(k3).size > 32_768
    whole = mean_interval(Binned.of_samples(k3), low=0.0, high=5.0, alpha_lower=0.005, alpha_upper=0.005)
    assert found["estimate"] == whole.estimate
    assert found["lower"] <= whole.lower < whole.upper <= found["upper"]
    assert found["upper"] - found["lower"] == pytest.approx(whole.upper - whole.lower, rel=0.01)


def test_columns_are_named_on_the_command_line(run, tmp_path):
    """ROLE=COLUMN pairs, separated by commas."""
    np.savez(tmp_path / "a.npz", left=[-1.0, -2.0], right=[-1.0, -2.5])
    assert run(tmp_path / "a.npz", "--columns", "train=left, inference=right", "--json")[0] == 0
    code, out, err = run(tmp_path / "a.npz", "--columns", "train")
    assert (code, out) == (2, "")
    assert "--columns: 'train' is not ROLE=COLUMN" in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tool", "grpo"], "--tool: 'grpo' is not known; write one of verl, nemo-rl, trl, prime-rl, llama.cpp"),
        (["--by", "colour"], "no sequence has an attribute 'colour'; there are prompt_tokens, task"),
        (["--slice", "code"], "--slice: there is no slice 'code'; there are all"),
        (["--contract", "c.yaml", "--by", "task"], "--contract and --by exclude each other"),
        (["--json", "--markdown"], "--json and --markdown exclude each other"),
        (["--contract", "nowhere.yaml"], "nowhere.yaml"),
    ],
)
def test_bad_options_end_with_2_and_a_remedy(run, log, options, message):
    """The option is named on standard error; nothing is printed."""
    code, out, err = run(log, *options)
    assert (code, out) == (2, "")
    assert message in err


def test_a_bad_recording_ends_with_2_and_every_problem(run, tmp_path):
    """File, line, field and remedy on standard error."""
    row = json.dumps({"train_logprobs": [0.5], "inference_logprobs": [-1.0]})
    Path(tmp_path / "a.jsonl").write_text(f"{row}\n{row}")
    code, out, err = run(tmp_path / "a.jsonl")
    assert (code, out) == (2, "")
    assert [line.partition(": ")[2][:6] for line in err.splitlines()] == ["line 1", "line 2"]


@pytest.mark.slow
def test_the_command_is_there():
    """`kc-otel compare-log --help` names its options, and asking for help loads no NumPy."""
    script = (
        "import sys; sys.argv = ['kc-otel', 'compare-log', '--help']\n"
        "from kc_otel.cli import compare_log_command as compare; import typer\n"
        "app = typer.Typer(); compare.register(app); app.callback()(lambda: None)\n"
        "try: app()\nexcept SystemExit: pass\n"
        "assert 'numpy' not in sys.modules"
    )
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert "--contract" in told
    listed = subprocess.run(
        [sys.executable, "-m", "kc_otel", "--help"], capture_output=True, text=True, check=True
    ).stdout
    assert "compare-log" in listed


def test_a_token_that_the_training_kernel_rules_out_is_shown(run, tmp_path):
    """A log P of -inf is a disagreement, not a fault: infinite in the tools, saturated in our own quantities."""
    rows = {"train_logprobs": [-np.inf, -1.0, -1.0], "inference_logprobs": [-1.0, -1.0, -1.5], "lengths": [2, 1]}
    np.savez(tmp_path / "a.npz", **{name: np.array(values) for name, values in rows.items()}, advantages=[1.0, -1.0])
    code, out, err = run(tmp_path / "a.npz", "--json")
    assert (code, err) == (0, "")
    part = json.loads(out)["slices"][0]
    assert part["tools"]["verl"]["rollout_corr/kl"]["value"] is None
    assert part["kc"]["abs_log_ratio max"]["estimate"] == 64.0
    assert part["kc"]["tv_token"]["estimate"] == pytest.approx(1 / 3)
    assert "inf" in run(tmp_path / "a.npz")[1]
