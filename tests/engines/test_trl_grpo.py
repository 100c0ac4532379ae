"""GRPO in TRL with vLLM as the sampler: a real trainer, a real engine, and the evaluator's verdicts on what they did.

The libraries are imported where they are used: collecting the tests is quick, and their warnings are theirs.
"""

from __future__ import annotations

import shutil
from collections import Counter
from functools import partial

import numpy as np
import pytest
import torch

from examples.tiny_model import prompts
from kc_otel import Recorder, TrainingLog
from kc_otel.integrations.trl import instrument
from tests.engines._vllm import SLICES, offline_engine, sampled
from tests.tools.contracts import contract_of
from tests.tools.docstrings import run_examples
from tests.tools.judge import Judge

pytestmark = pytest.mark.slow

TOKENS = 32
PROMPTS = [(text, task) for task in ("code", "prose") for text in prompts(task, 12, characters=40)]


@pytest.fixture(scope="module")
def checkpoint(tiny_model, tmp_path_factory):
    """A copy of the checkpoint that the trainer writes its weights into and vLLM reads them from."""
    return shutil.copytree(tiny_model, tmp_path_factory.mktemp("grpo") / "model")


@pytest.fixture(scope="module")
def llm(checkpoint):
    with offline_engine(checkpoint, max_model_len=256, logprobs_mode="processed_logprobs") as llm:
        yield llm


@pytest.fixture
def engine(llm, checkpoint, tiny_model):
    """The engine with the untrained weights."""
    shutil.copyfile(tiny_model / "model.safetensors", checkpoint / "model.safetensors")
    llm.collective_rpc("reload_weights")
    return Engine(llm, checkpoint)


class Engine:
    """vLLM in this process, as a user's rollout function has it."""

    def __init__(self, llm, checkpoint):
        from transformers import AutoTokenizer

        self.llm, self.checkpoint = llm, checkpoint
        self.tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        self.step = 0
        self.skip_from = float("inf")
        self.scale = 1.0
        """Factor on the last projection of each layer's MLP, as a lost scale of a quantised checkpoint has it."""
        self.sampled = []

    def sync(self, trainer):
        if trainer.state.global_step < self.skip_from:
            trainer.model.save_pretrained(self.checkpoint)
            if self.scale != 1.0:
                self.rescale(self.checkpoint / "model.safetensors")
            self.llm.collective_rpc("reload_weights")
            self.step = trainer.state.global_step

    def rescale(self, file):
        from safetensors.torch import load_file, save_file

        weights = load_file(file)
        scaled = {name: self.scale for name in weights if name.endswith("down_proj.weight")}
        assert scaled
        save_file({name: tensor * scaled.get(name, 1.0) for name, tensor in weights.items()}, file, {"format": "pt"})

    def generate(self, prompt_ids, **sampling):
        asked = {"max_tokens": TOKENS, "temperature": 1.0, **sampling}
        completions, logprobs = sampled(self.llm, prompt_ids, **asked)
        self.sampled += list(zip(prompt_ids, completions, strict=True))
        return completions, logprobs

    def rollout(self, prompts, trainer):
        self.sync(trainer)
        ids = [self.tokenizer(prompt)["input_ids"] for prompt in prompts]
        completions, logprobs = self.generate(ids)
        return {"prompt_ids": ids, "completion_ids": completions, "logprobs": logprobs}


STATISTICAL = [
    {"id": "token-tv", "metric": "tv_token", "unit": "token", "limit": 0.016},
    {"id": "wide", "metric": "abs_log_ratio", "statistic": "p99", "limit": 50.0},
    {"id": "wide-signed", "metric": "log_ratio", "statistic": "p99", "limit": 50.0},
    {"id": "wide-ratio", "metric": "ratio", "statistic": "p99", "limit": 1e6},
    {"id": "wide-favoured", "metric": "advantage_drift_positive", "unit": "token", "limit": 9.0},
]
"""Wide limits are on what is looked at here: recorders send what clauses are computed from."""


contract = partial(
    contract_of,
    "grpo",
    kernels={"train": {"engine": "torch"}, "inference": {"engine": "vllm", "dtype": "bfloat16"}},
    slices={**SLICES, "disliked": {"where": {"advantage": "< 0"}}},
    statistical=STATISTICAL,
    runtime=[{"id": "lag", "metric": "weights_lag", "statistic": "max", "limit": 0}],
    observability={"window": "5m", "long_window": "10m", "min_samples": 200, "heartbeat": "60s", "sampling": 1.0},
    escalation=[{"on": "fail", "severity": "warning", "do": ["notify"]}],
)


@pytest.fixture
def recording():
    made = []

    def make(log=None, **changes):
        judge = Judge(contract(**changes))
        made.append(Recorder(contract(**changes), metric_exporter=judge, export_interval=1000.0, log=log))
        return made[-1], judge

    yield make
    for recorder in made:
        recorder.shutdown()


def reward(completions, task, **_):
    """More lower-case letters are better; prose is wanted twice as much, so that columns are really used."""
    return [sum(map(str.islower, c)) * (2.0 if t == "prose" else 1.0) for c, t in zip(completions, task, strict=True)]


@pytest.fixture
def trainer(engine, tmp_path):
    def make(**changes):
        from datasets import Dataset
        from trl import GRPOConfig, GRPOTrainer

        options = {"rollout_func": engine.rollout, "reward_funcs": [reward], **changes.pop("trainer", {})}
        settings = {
            "per_device_train_batch_size": 16, "per_device_eval_batch_size": 16, "num_generations": 8,
            "steps_per_generation": 2, "max_completion_length": TOKENS, "max_steps": 4, "beta": 0.0, "seed": 1,
            "learning_rate": 2e-3, "lr_scheduler_type": "constant", "bf16": False, "use_cpu": True,
            "logging_steps": 1, "report_to": "none", "save_strategy": "no", "disable_tqdm": True,
            **changes,
        }  # fmt: skip
        return GRPOTrainer(
            model=str(engine.checkpoint),
            args=GRPOConfig(output_dir=str(tmp_path), **settings),
            train_dataset=Dataset.from_list([{"prompt": text, "task": task} for text, task in PROMPTS]),
            processing_class=engine.tokenizer,
            **options,
        )

    return make


def after_step(look):
    from transformers import TrainerCallback

    class AfterStep(TrainerCallback):
        def on_step_end(self, _, state, *__, **___):
            look(state.global_step)

    return AfterStep()


def train(running, recorder, **options):
    """Train under watch, and export all that was seen."""
    with instrument(running, recorder, **options):
        running.train()
    assert recorder.force_flush()


def test_the_docstrings_example_runs(trainer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "none")
    (tmp_path / "contract.yaml").write_text(contract().model_dump_json(by_alias=True))
    run_examples("kc_otel.integrations.trl.instrumented_trainer", trainer=trainer(max_steps=2))


def test_a_skipped_weight_sync_fails_the_contract_with_the_next_rollout(trainer, engine, recording):
    """Healthy steps never fail; the first rollout from stale weights fails on lag, and the kernels go on passing.

    TRL's own log says it at the same step, beside the loss.
    """
    recorder, judge = recording(TrainingLog())
    running = trainer(max_steps=6)
    engine.skip_from = 4
    seen = {}

    def look(step):
        assert recorder.force_flush()
        seen[step] = {cell: verdict.status.value for cell, verdict in judge.verdicts().items()}

    running.add_callback(after_step(look))
    train(running, recorder, weights=lambda: engine.step)

    assert seen[4]["token-tv", "all"] == seen[4]["lag", "all"] == "PASS"
    assert not any("FAIL" in seen[step].values() for step in (1, 2, 3, 4))
    assert seen[5]["lag", "all"] == seen[6]["lag", "code"] == seen[6]["lag", "prose"] == "FAIL"
    assert {seen[step]["token-tv", "all"] for step in (5, 6)} == {"PASS"}
    assert recorder.stats().dropped == {}
    logged = {entry["step"]: entry for entry in running.state.log_history if "loss" in entry}
    assert [logged[step]["kc/token-tv/verdict"] for step in (4, 5)] == [0.0, 0.0]
    assert "kc/token-tv/staleness" not in logged[4]
    assert logged[6]["kc/token-tv/staleness/lower"] > 0.0
    assert logged[6]["kc/token-tv/kernel"] < 0.016
    assert [logged[step]["kc/lag/verdict"] for step in (4, 5)] == [0.0, 3.0]


@pytest.mark.parametrize("skip_from", [float("inf"), 4], ids=["drift", "both"])
def test_drift_planted_in_the_engine_is_the_kernels_own_beside_staleness_too(trainer, engine, recording, skip_from):
    recorder, judge = recording()
    running = trainer(max_steps=6)
    engine.scale, engine.skip_from = 1.3, skip_from
    train(running, recorder, weights=lambda: engine.step)
    found, causes = judge.verdicts(), judge.evaluation("grpo").causes
    assert found["token-tv", "all"].status.value == "FAIL"
    assert found["lag", "all"].status.value == ("PASS" if skip_from > 6 else "FAIL")
    if skip_from > 6:
        assert not causes
        return
    (both,) = {of for cell, of in causes.items() if (cell.clause, cell.slice) == ("token-tv", "all")}
    assert both.kernel.lower > both.limit
    assert 0.0 < both.share < 0.5
    assert both.staleness.estimate != 0.0


def test_every_sequence_is_measured_once_on_the_slices_of_its_columns(trainer, engine, recording):
    recorder, judge = recording()
    running = trainer(num_iterations=2, max_steps=8)
    train(running, recorder)

    task_of = {tuple(engine.tokenizer(text)["input_ids"]): task for text, task in PROMPTS}
    tokens = Counter()
    for prompt, completion in engine.sampled:
        tokens[task_of[tuple(prompt)]] += len(completion)
    assert judge.points("kc.drift.log_ratio", kc_slice="all")[0].count == sum(tokens.values())
    for task in ("code", "prose"):
        assert judge.points("kc.drift.log_ratio", kc_slice=task)[0].count == tokens[task]
    assert 0 < judge.points("kc.drift.log_ratio", kc_slice="disliked")[0].count < sum(tokens.values())
    assert judge.points("kc.drift.advantage_drift_positive")


def test_rewards_come_without_being_asked_for(trainer, engine, recording, monkeypatch):
    drift = {"id": "reward", "metric": "reward_drift", "limit": 100.0}
    changes = {"assumptions": {"reward_range": [0, 200]}, "statistical": [*STATISTICAL, drift]}
    recorder, judge = recording(**changes)
    seen, compare = [], recorder.compare

    def listened(*args, **given):
        kept = [ids[mask != 0] for ids, mask in zip(given["token_ids"], given["mask"], strict=True)]
        seen.extend(zip(kept, given["attributes"], given["rewards"], strict=True))
        compare(*args, **given)

    def length(completion_ids, **_):
        return [float(len(ids)) for ids in completion_ids]

    monkeypatch.setattr(recorder, "compare", listened)
    running = trainer(reward_weights=[1.0, 0.5], trainer={"reward_funcs": [reward, length]})
    train(running, recorder)
    assert len(seen) == 64
    for ids, attributes, found in seen:
        text = engine.tokenizer.decode(ids, skip_special_tokens=True)
        assert found == reward([text], [attributes["task"]])[0] + 0.5 * len(ids)
    sides = [judge.points(f"kc.drift.reward_{side}_by_prompt", kc_slice="all")[0].count for side in ("above", "below")]
    assert sides == [8, 8]  # eight rollouts of each prompt count once
    assert running.reward_funcs == [reward, length]


def test_without_old_log_probs_those_of_the_first_pass_are_taken(trainer, recording):
    """Where TRL computes none because the weights are the same, the model's own output is the training side."""
    recorder, judge = recording()
    running = trainer(steps_per_generation=2, gradient_accumulation_steps=2, max_steps=1)
    given = []
    original = running.compute_loss
    running.compute_loss = lambda model, inputs, **rest: (given.append(inputs), original(model, inputs, **rest))[1]
    before = {name: value.clone() for name, value in running.model.state_dict().items()}
    train(running, recorder)

    assert len(given) == 2
    assert all("old_per_token_logps" not in inputs for inputs in given)
    running.model.load_state_dict(before)
    drift = []
    for inputs in given:
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        with torch.no_grad():
            logits = running.model.eval()(input_ids=ids, attention_mask=mask).logits[:, -TOKENS - 1 : -1]
        scored = logits.log_softmax(-1).gather(-1, inputs["completion_ids"][..., None]).squeeze(-1)
        drift.append((scored - inputs["sampling_per_token_logps"])[inputs["completion_mask"].bool()])
    expected = torch.cat(drift).double()
    point = judge.points("kc.drift.abs_log_ratio", kc_slice="all")[0]
    assert point.count == expected.numel()
    assert point.sum == pytest.approx(expected.abs().sum().item(), rel=1e-3)


def test_training_is_not_changed_by_being_watched(trainer, engine, recording, tiny_model):
    replay = []

    def recorded(prompts, running):
        replay.append(engine.rollout(prompts, running))
        torch.manual_seed(len(replay))  # TRL shuffles by the global generator, which vLLM draws from
        return replay[-1]

    def replayed(*_):
        again.append(replay[len(again)])
        torch.manual_seed(len(again))
        return again[-1]

    plain = trainer(trainer={"rollout_func": recorded})
    plain.train()
    shutil.copyfile(tiny_model / "model.safetensors", engine.checkpoint / "model.safetensors")
    again = []
    watched = trainer(trainer={"rollout_func": replayed})
    recorder, _ = recording()
    with instrument(watched, recorder):
        watched.train()
    for own, other in zip(plain.model.parameters(), watched.model.parameters(), strict=True):
        assert torch.equal(own, other)


class InProcess:
    """TRL's vLLM backend as its trainer calls it, with the engine in this process instead of on a GPU or a server."""

    engine: Engine
    sampling: dict
    heavy = 0.0

    def __init__(self, **options):
        self.trainer = None
        self.options = options

    def sync_weights(self):
        self.engine.sync(self.trainer)

    def generate(self, prompts, **_):
        completions, logprobs = self.engine.generate(prompts, **self.sampling)
        logprobs[0][0] -= self.heavy
        return prompts, completions, [[[value] for value in row] for row in logprobs], None


@pytest.fixture
def through_vllm(trainer, engine, monkeypatch):
    """A trainer with `use_vllm=True`, whose backend is the in-process engine."""

    def make(*, heavy=0.0, sampling=None, **changes):
        monkeypatch.setattr("trl.trainer.grpo_trainer.VLLMGeneration", InProcess)
        monkeypatch.setattr(InProcess, "engine", engine, raising=False)
        monkeypatch.setattr(InProcess, "sampling", sampling or {}, raising=False)
        monkeypatch.setattr(InProcess, "heavy", heavy)
        changes |= {"steps_per_generation": 1, "max_steps": 1}
        running = trainer(use_vllm=True, vllm_mode="colocate", trainer={"rollout_func": None}, **changes)
        running.vllm_generation.trainer = running
        return running

    return make


def logged(running, name):
    return [entry[name] for entry in running.state.log_history if name in entry]


def test_log_probability_differences_equal_those_that_trl_prints(through_vllm, recording):
    """Mean and maximum of |l| are TRL's own, which it takes before its correction; lag is 0 as TRL synchronises."""
    recorder, judge = recording()
    running = through_vllm()
    train(running, recorder)
    point = judge.points("kc.drift.abs_log_ratio", kc_slice="all")[0]
    assert point.sum / point.count == pytest.approx(
        logged(running, "sampling/sampling_logp_difference/mean")[0], rel=1e-4
    )
    assert point.max == pytest.approx(logged(running, "sampling/sampling_logp_difference/max")[0], rel=1e-4)
    assert judge.points("kc.weights.lag", kc_slice="all")[0].max == 0
    assert judge.verdicts()["lag", "all"].status.value != "FAIL"


def test_a_heavy_ratio_that_trl_caps_is_seen_as_it_is(through_vllm, recording):
    recorder, judge = recording()
    capped = {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 3.0}
    running = through_vllm(heavy=6.0, **capped)
    train(running, recorder)
    assert logged(running, "sampling/importance_sampling_ratio/max") == [3.0]
    assert judge.points("kc.drift.ratio", kc_slice="all")[0].max == pytest.approx(np.exp(6.0), rel=0.2)
    assert judge.points("kc.drift.log_ratio", kc_slice="all")[0].max == pytest.approx(6.0, abs=0.2)


def test_temperature_is_on_both_sides(through_vllm, recording):
    recorder, judge = recording()
    train(through_vllm(temperature=0.6, sampling={"temperature": 0.6}), recorder)
    point = judge.points("kc.drift.tv_token", kc_slice="all")[0]
    assert 0 < point.sum / point.count < 0.03
