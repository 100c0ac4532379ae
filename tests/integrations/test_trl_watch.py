"""Watching a GRPO trainer, quarantine and synchronisation: what needs no TRL. A trainer here has TRL's attributes."""

from __future__ import annotations

import asyncio
import math
import sys
from types import SimpleNamespace

import pytest
import torch

from kc_otel import TrainingLog
from kc_otel.integrations.trl import instrument
from kc_otel.record.kernel import Kernel
from tests.integrations.test_vllm_parts import config

GENERATIONS = 4


class Vllm:
    """TRL's backend: two public methods."""

    def __init__(self):
        self.synced = 0

    def sync_weights(self):
        self.synced += 1

    def generate(self, prompts, **_):
        completions = [[9, 9, 1], [9, 9, 2], [9, 9, 1], [7]]
        return prompts, completions, [[[-1.0]] * len(completion) for completion in completions], None


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, ids):
        return SimpleNamespace(log_probs=self.weight - torch.ones(ids.shape[0], ids.shape[1] - 1))


class Trainer:
    """The parts of TRL's trainer that are watched, in the order in which TRL goes through them."""

    def __init__(self, reward, *, use_vllm=True, rollout_func=None, **args):
        self.model = Model()
        self.use_vllm = use_vllm
        self.rollout_func = rollout_func
        self.vllm_generation = Vllm()
        self.reward_funcs = [reward]
        self.state = SimpleNamespace(global_step=0)
        defaults = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0}
        self.args = SimpleNamespace(**{**defaults, "generation_kwargs": None, "bf16": False, "fp16": False, **args})
        self.accelerator = SimpleNamespace(num_processes=1, distributed_type=SimpleNamespace(value="NO"))
        self.losses = 0

    def compute_loss(self, model, inputs, **_):
        self.losses += 1
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        return model(ids).log_probs.sum()

    def generated(self, prompts, tasks, *, order=(2, 0, 3, 1), sync=True, **columns):
        """One generation: weights, completions, rewards, and a shuffled batch."""
        if sync:
            self.vllm_generation.sync_weights()
        _, completions, logprobs, _ = self.vllm_generation.generate(prompts=prompts, num_generations=GENERATIONS)
        columns |= {"prompts": ["text"] * len(prompts), "completion_ids": completions, "task": tasks}
        result = self.reward_funcs[0](**columns)
        if asyncio.iscoroutine(result):
            result = asyncio.run(result)
        assert result == [1.0] * len(prompts)
        width = max(map(len, completions))
        pad = lambda rows: torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])  # noqa: E731
        return {
            "prompt_ids": torch.tensor(prompts)[list(order)],
            "prompt_mask": torch.ones(len(prompts), len(prompts[0]), dtype=torch.int64),
            "completion_ids": pad(completions)[list(order)],
            "completion_mask": pad([[1] * len(completion) for completion in completions])[list(order)],
            "sampling_per_token_logps": pad([[value[0] for value in row] for row in logprobs])[list(order)],
            "advantages": torch.tensor([1.0, -1.0, 1.0, -1.0]),
        }


def reward(completion_ids, **_):
    return [1.0] * len(completion_ids)


PROMPTS = [[5, 6], [5, 6], [5, 8], [5, 8]]
TASKS = ["code", "code", "prose", "prose"]


@pytest.fixture
def watched(recorders, contract):
    """A trainer, its watch and its recorder, for a contract with slices by column."""

    def make(trainer=None, **options):
        own = {"slices": {name: {"where": {"task": name}} for name in ("code", "prose")}}
        recorder = recorders(contract=contract(**own | options.pop("contract", {})))
        trainer = trainer or Trainer(reward)
        return trainer, instrument(trainer, recorder, **options), recorder

    return make


def test_equal_completions_of_different_prompts_keep_their_columns_apart(watched, memory):
    trainer, _, recorder = watched()
    trainer.compute_loss(trainer.model, trainer.generated(PROMPTS, TASKS))
    recorder.force_flush()
    assert (memory.count("code"), memory.count("prose"), memory.count()) == (6, 4, 10)


def test_columns_that_cannot_be_told_are_left_out_and_said_once(watched, memory, caplog):
    trainer, _, recorder = watched()
    for _ in range(2):
        trainer.compute_loss(trainer.model, trainer.generated([[5, 6]] * 4, ["code", "code", "prose", "prose"]))
    recorder.force_flush()
    assert (memory.count("code"), memory.count("prose"), memory.count()) == (2 * 3, 2 * 1, 2 * 10)
    assert caplog.text.count("columns of some sequences could not be told") == 1


def test_a_column_that_the_dataset_has_not_is_named(watched, caplog):
    trainer, _, _ = watched(contract={"slices": {"hard": {"where": {"difficulty": "> 3"}}}})
    trainer.generated(PROMPTS, TASKS)
    assert "slices use difficulty, which the dataset has no column for" in caplog.text


def test_columns_may_have_any_name(watched, memory):
    """A dataset's columns are keyword arguments of the reward functions, beside our own names."""
    trainer, _, recorder = watched(contract={"assumptions": {"reward_range": [0, 1]}})
    trainer.reward_weights = torch.ones(1)
    names = ("original", "listener", "number", "scores", "owner", "name", "returned")
    trainer.compute_loss(trainer.model, trainer.generated(PROMPTS, TASKS, **dict.fromkeys(names, TASKS)))
    recorder.force_flush()
    assert (memory.count("code"), memory.count("prose"), recorder.stats().dropped) == (6, 4, {})


def test_a_batch_that_is_trained_on_again_counts_once(watched, memory):
    trainer, _, recorder = watched()
    batch = trainer.generated(PROMPTS, TASKS)
    for _ in range(3):
        trainer.compute_loss(trainer.model, batch)
    recorder.force_flush()
    assert memory.count() == 10
    assert recorder.stats().dropped == {}
    assert trainer.losses == 3
    del batch
    trainer.compute_loss(trainer.model, trainer.generated(PROMPTS, TASKS))
    recorder.force_flush()
    assert memory.count() == 20


def test_the_lag_is_between_scoring_and_the_last_synchronisation(watched, memory):
    trainer, _, recorder = watched()
    batch = trainer.generated(PROMPTS, TASKS)
    trainer.state.global_step = 3
    trainer.compute_loss(trainer.model, batch)
    recorder.force_flush()
    assert memory.points("kc.weights.lag", kc_slice="all")[0].max == 0
    trainer.compute_loss(trainer.model, trainer.generated(PROMPTS, TASKS, sync=False))
    recorder.force_flush()
    assert memory.points("kc.weights.lag", kc_slice="all")[0].max == 3


def test_evaluation_does_not_disturb_the_rollout_that_is_trained_on(watched, memory):
    trainer, _, recorder = watched(
        contract={"slices": {"eval": {"where": {"mode": "eval"}}, "code": {"where": {"task": "code"}}}}
    )
    batch = trainer.generated(PROMPTS, TASKS)
    trainer.model.eval()
    trainer.compute_loss(trainer.model, trainer.generated(PROMPTS, ["prose"] * 4))
    trainer.model.train()
    trainer.compute_loss(trainer.model, batch)
    recorder.force_flush()
    assert (memory.count("eval"), memory.count("code"), memory.count()) == (10, 6, 20)


def test_old_log_probs_are_preferred_to_those_of_the_pass(watched, memory):
    trainer, _, recorder = watched()
    batch = trainer.generated(PROMPTS, TASKS)
    batch["old_per_token_logps"] = batch["sampling_per_token_logps"] + 0.125
    batch["sampling_per_token_logps"] = batch["sampling_per_token_logps"] - 1.0
    trainer.compute_loss(trainer.model, batch)
    recorder.force_flush()
    point = memory.points("kc.drift.log_ratio", kc_slice="all")[0]
    assert (point.min, point.max) == (1.125, 1.125)


def test_asynchronous_rewards_and_models_beside_them(watched, memory):
    async def later(completion_ids, **_):
        await asyncio.sleep(0)
        return [1.0] * len(completion_ids)

    trainer = Trainer(later)
    model = torch.nn.Linear(1, 1)
    trainer.reward_funcs.append(model)
    trainer, watch, recorder = watched(trainer)
    assert asyncio.iscoroutinefunction(trainer.reward_funcs[0])
    assert trainer.reward_funcs[1] is model
    trainer.compute_loss(trainer.model, trainer.generated(PROMPTS, TASKS))
    recorder.force_flush()
    assert memory.count("code") == 6
    watch.remove()
    assert trainer.reward_funcs[0] is later


def test_a_batch_without_sampling_log_probs_is_counted(watched):
    trainer, _, recorder = watched()
    batch = trainer.generated(PROMPTS, TASKS)
    del batch["sampling_per_token_logps"]
    loss = trainer.compute_loss(trainer.model, batch)
    assert loss.item() == -16.0
    assert loss.requires_grad
    assert recorder.stats().dropped == {"rollout-unusable": 1}


@pytest.mark.parametrize(
    ("args", "processing", "invalid"),
    [
        ({"temperature": 0.7}, None, {}),
        ({"top_p": 0.9}, None, {"processing_mismatch": 4}),
        ({"generation_kwargs": {"min_p": 0.1}}, None, {"processing_mismatch": 4}),
        ({"temperature": 0.7}, {"temperature": 1.0}, {"processing_mismatch": 4}),
        ({"top_p": 0.9, "rollout_func": dict}, None, {}),  # it may sample otherwise
        ({"rollout_func": dict}, {"top_p": 0.9}, {"processing_mismatch": 4}),
    ],
)
def test_processing_that_trl_applies_to_one_side_alone_is_a_mismatch(watched, args, processing, invalid):
    trainer, _, recorder = watched(Trainer(reward, **args), processing=processing)
    trainer.compute_loss(trainer.model, trainer.generated(PROMPTS, TASKS))
    recorder.force_flush()
    assert recorder.stats().invalid == invalid


def test_who_instruments_twice_counts_once(watched, memory, caplog):
    """As a notebook's cell that runs again does: the later one takes the earlier one's place, and says so."""
    trainer, first, recorder = watched()
    with instrument(trainer, recorder):
        assert "was instrumented for contract policy already: this takes its place" in caplog.text
        trainer.compute_loss(trainer.model, trainer.generated(PROMPTS, TASKS))
    recorder.force_flush()
    assert memory.count() == 10
    first.remove()


@pytest.mark.slow
def test_two_watches_come_off_in_any_order(watched, recorders, contract):
    trainer, first, recorder = watched()
    other = recorders(contract=contract(metadata={"name": "other", "version": 1, "owner": "rl"}))
    second = instrument(trainer, other)
    first.remove()
    trainer.compute_loss(trainer.model, trainer.generated(PROMPTS, TASKS))
    recorder.force_flush()
    other.force_flush()
    assert (recorder.stats().tokens, other.stats().tokens) == (0, 10)
    second.remove()
    trainer.compute_loss(trainer.model, trainer.generated(PROMPTS, TASKS))
    other.force_flush()
    assert other.stats().tokens == 10


def test_what_cannot_be_watched_is_refused_with_a_remedy(contract, recorders):
    with pytest.raises(TypeError, match=r"object has no compute_loss; give a trl\.GRPOTrainer"):
        instrument(object(), contract())
    with pytest.raises(ValueError, match="there is no second kernel; set use_vllm=True or give a rollout_func"):
        instrument(Trainer(reward, use_vllm=False), contract())
    trainer = Trainer(torch.nn.Linear(1, 1))
    with pytest.raises(ValueError, match="task are only handed to reward functions"):
        instrument(trainer, recorders(contract=contract()))
    assert "compute_loss" not in vars(trainer)
    for own in ({"inference": recorders()._pair.inference}, {"log": TrainingLog()}):
        with pytest.raises(TypeError, match="the recorder has its own"):
            instrument(Trainer(reward), recorders(), **own)


def test_from_a_contract_it_makes_and_shuts_down_its_own_recorder(contract, monkeypatch):
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "none")
    trainer = Trainer(reward)
    with instrument(trainer, contract(), attributes={"model": "7b"}) as watch:
        kernel = watch.recorder._pair.train
        assert (kernel.engine, kernel.dtype, kernel.hardware) == ("torch", "float32", "cpu")
        trainer.compute_loss(trainer.model, trainer.generated(PROMPTS, TASKS))
        watch.recorder.force_flush()
        assert watch.recorder.stats().tokens == 10
    assert "compute_loss" not in vars(trainer)
    assert watch.recorder.stats().dropped == {}
    watch.recorder.compare([0.0], [0.0])
    assert watch.recorder.stats().dropped == {"shutdown": 1}


DECLARED = {"engine": "vllm", "quantization": "fp8"}


def test_the_engine_in_the_trainers_process_is_reported_as_it_is(contract, monkeypatch):
    """A new version of it is another kernel, whatever the contract declares."""
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "none")
    trainer, found = Trainer(reward), []
    trainer.vllm_generation.llm = SimpleNamespace(llm_engine=SimpleNamespace(vllm_config=config()))
    for version in ("0.30.0", "0.32.0"):
        monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__=version))
        with instrument(trainer, contract()) as watch:
            found.append(watch.recorder._pair.inference)
    assert [(kernel.engine, kernel.version) for kernel in found] == [("vllm", "0.30.0"), ("vllm", "0.32.0")]
    trainer.vllm_generation.llm.llm_engine.vllm_config = object()
    with instrument(trainer, contract(kernels={"train": {"engine": "torch"}, "inference": DECLARED})) as watch:
        assert watch.recorder._pair.inference == Kernel("vllm", version="0.32.0"), "and not what is declared"


def test_what_the_trainer_logs_has_the_verdicts_while_it_is_watched(contract, monkeypatch):
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "none")
    trainer, logged = Trainer(reward), []
    trainer.log = original = lambda logs, start_time=None: logged.append((logs, start_time))
    terms = contract(statistical=[{"id": "tv", "metric": "tv_token", "unit": "token", "limit": 0.5}])
    with instrument(trainer, terms, log=TrainingLog()) as watch:
        trainer.compute_loss(trainer.model, trainer.generated(PROMPTS, TASKS))
        assert watch.recorder.force_flush()
        trainer.log({"reward": 1.0}, 7.0)
    trainer.log({"reward": 2.0})
    assert logged[0][1] == 7.0
    assert logged[0][0] | {"reward": 1.0, "kc/tv/all": 0.0, "kc/tv/limit": 0.5} == logged[0][0]
    assert logged[1] == ({"reward": 2.0}, None)
    assert trainer.log is original


CLAUSES = [{"id": "tv", "metric": "tv_token", "unit": "token", "statistic": "mean", "limit": 0.1}]


@pytest.fixture
def in_quarantine(recorders, contract):
    """A trainer whose losses keep what they were given, its watch and its recorder; `slices` are in quarantine."""

    def make(slices, clauses=CLAUSES):
        named = {name: {"where": {"task": name}} for name in ("code", "prose")}
        recorder = recorders(contract=contract(slices=named, statistical=clauses))
        trainer = Trainer(reward)
        trainer.given = []
        original = trainer.compute_loss
        trainer.compute_loss = lambda *args: (trainer.given.append(args[1]), original(*args))[1]
        return trainer, instrument(trainer, recorder, quarantine=slices), recorder

    return make


def batch_of(trainer, *drifts):
    """A batch of tasks prose, code, prose, code, each of whose tokens has drifted by so many nats."""
    batch = trainer.generated(PROMPTS, TASKS)
    moved = torch.tensor(drifts)[:, None] * batch["completion_mask"]
    batch["old_per_token_logps"] = batch["sampling_per_token_logps"] + moved
    batch["importance_sampling_ratio"] = moved.exp()
    return batch


def test_sequences_that_broke_are_in_no_loss_and_in_every_metric(in_quarantine, memory):
    trainer, watch, recorder = in_quarantine(lambda: {"prose": "tv is 0.3 where 0.1 is allowed"})
    batch = batch_of(trainer, -0.5, -0.5, 0.0, 0.0)
    trainer.compute_loss(trainer.model, batch)
    recorder.force_flush()

    (given,) = trainer.given
    assert watch.quarantine.reasons == ("tv", "", "", "")
    assert given["tool_mask"].sum(1).tolist() == [0, *batch["completion_mask"].sum(1).tolist()[1:]]
    assert given["completion_mask"] is batch["completion_mask"]
    assert "tool_mask" not in batch
    tokens = batch["completion_mask"].sum(1).tolist()
    assert memory.count() == sum(tokens)
    drifted = (tokens[0] + tokens[1]) * (1 - math.exp(-0.5))
    (point,) = memory.points("kc.drift.tv_token", kc_slice="all")
    assert point.sum == pytest.approx(drifted, rel=1e-6)
    counted = {
        outcome: [memory.points(f"kc.quarantine.{name}", kc_outcome=outcome)[0].value for name in NAMES]
        for outcome in ("kept", "quarantined")
    }
    tv = 1 - math.exp(-0.5)
    assert counted["quarantined"] == [1, tokens[0], pytest.approx(tokens[0] * tv, rel=1e-6)]
    assert counted["kept"] == [3, sum(tokens[1:]), pytest.approx(tokens[1] * tv, rel=1e-6)]
    assert recorder.stats().quarantined == 1
    assert recorder.stats().dropped == {}


NAMES = ("sequences", "tokens", "tv")


@pytest.mark.parametrize("slices", [None, dict, lambda: {"code": "why"}])
def test_without_a_breach_the_batch_is_the_trainers_own(in_quarantine, memory, slices):
    trainer, _, recorder = in_quarantine(slices)
    batch = batch_of(trainer, -0.5, 0.0, -0.5, 0.0)
    trainer.compute_loss(trainer.model, batch)
    assert trainer.given[0] is batch
    recorder.force_flush()
    assert recorder.stats().quarantined == 0
    asked = slices is not None and bool(slices())
    assert bool(memory.points("kc.quarantine.sequences")) is asked


def test_a_log_probability_that_is_no_number_does_not_reach_the_loss(in_quarantine):
    trainer, _, _ = in_quarantine(lambda: ["all"])
    batch = batch_of(trainer, 0.0, 0.0, 0.0, 0.0)
    batch["sampling_per_token_logps"][1, 0] = torch.nan
    batch["importance_sampling_ratio"][1, 0] = torch.nan
    trainer.compute_loss(trainer.model, batch)
    (given,) = trainer.given
    assert given["tool_mask"][1].sum() == 0
    assert not given["importance_sampling_ratio"].isnan().any()
    assert batch["importance_sampling_ratio"].isnan().any()


def test_tool_tokens_stay_out_of_the_loss_and_do_not_count(in_quarantine, memory):
    trainer, _, recorder = in_quarantine(lambda: ["all"])
    batch = batch_of(trainer, 0.0, -0.5, 0.0, 0.0)
    batch["tool_mask"] = torch.ones_like(batch["completion_mask"])
    batch["tool_mask"][:, 0] = 0
    trainer.compute_loss(trainer.model, batch)
    expected = batch["completion_mask"] * batch["tool_mask"]
    expected[1] = 0
    assert torch.equal(trainer.given[0]["tool_mask"], expected)
    recorder.force_flush()
    assert memory.count() == 6


def test_evaluation_is_left_alone(in_quarantine):
    trainer, _, _ = in_quarantine(lambda: ["all"])
    trainer.model.eval()
    batch = batch_of(trainer, -0.5, -0.5, -0.5, -0.5)
    trainer.compute_loss(trainer.model, batch)
    assert trainer.given[0] is batch


def test_without_log_probabilities_before_the_loss_it_says_so(in_quarantine, caplog):
    trainer, _, recorder = in_quarantine(lambda: ["all"])
    batch = trainer.generated(PROMPTS, TASKS)
    trainer.compute_loss(trainer.model, batch)
    assert trainer.given[0] is batch
    assert recorder.stats().dropped == {"rollout-unusable": 1}
    assert "steps_per_generation above gradient_accumulation_steps" in caplog.text


def test_training_goes_on_when_nobody_can_say_what_is_in_quarantine(in_quarantine):
    def broken():
        raise RuntimeError("no idea")

    trainer, _, recorder = in_quarantine(broken)
    trainer.compute_loss(trainer.model, batch_of(trainer, -0.5, 0.0, 0.0, 0.0))
    assert trainer.losses == 1
    assert recorder.stats().dropped == {"rollout-unusable": 1}


def test_a_contract_that_cannot_judge_a_sequence_is_refused(in_quarantine):
    lag = {"id": "lag", "metric": "weights_lag", "limit": 0}
    with pytest.raises(ValueError, match="no clause that a single sequence can be judged by"):
        in_quarantine(lambda: ["all"], clauses=[lag])
