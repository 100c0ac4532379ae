"""The plugin of verl without verl, in a trainer and in a worker: what it takes of batches, and that it never raises."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kc_otel.integrations.verl.first_pass import FirstPassWatch
from kc_otel.integrations.verl.logged_batch import attributes_of, kernels, processings
from kc_otel.integrations.verl.watch import TrainerWatch
from kc_otel.record.telemetry.environment import resource_of_run
from tests.tools.contracts import contract_of

CONTRACT = contract_of(
    slices={"code": {"where": {"data_source": "code"}}},
    assumptions={"reward_range": [0, 1]},
    statistical=[{"id": "token-tv", "metric": "tv_token", "limit": 0.05}],
)
ROWS, WIDTH = 6, 5


class Recorded:
    """Stands for the recorder: keeps what it is given."""

    def __init__(self, _=None, **kernels):
        self.calls, self.dropped, self.kernels = [], [], kernels

    def compare(self, train, inference, **given):
        self.calls.append((train, inference, given))

    def drop(self, reason, why):
        self.dropped.append((reason, why))

    def force_flush(self):
        return True

    shutdown = force_flush


def proto(**columns):
    """A `verl.DataProto` as far as it is read."""
    said = -torch.rand(ROWS, WIDTH)
    batch = {
        "responses": torch.arange(ROWS * WIDTH).view(ROWS, WIDTH),
        "rollout_log_probs": said,
        "old_log_probs": said + 0.01,
        "response_mask": torch.ones(ROWS, WIDTH, dtype=torch.int64).tril(2),
        "attention_mask": torch.ones(ROWS, WIDTH + 3),
    }
    columns = {"data_source": np.array(["code", "prose"] * 3, dtype=object), **columns}
    return SimpleNamespace(batch=SizedDict(batch), non_tensor_batch=columns)


class SizedDict(dict):
    """As long as its tensors."""

    def __len__(self):
        return ROWS


class Given(dict):
    """As an `omegaconf.DictConfig` is read."""

    __getattr__ = dict.__getitem__


def config(**rollout):
    rollout = {"name": "vllm", "dtype": "bfloat16", "temperature": 0.7, "top_p": 0.9, "top_k": -1,
               "tensor_model_parallel_size": 2, "calculate_log_probs": True, **rollout}  # fmt: skip
    actor = Given(strategy="fsdp", fsdp_config=Given(dtype="float32"))
    correction = Given(rollout_correction=Given(bypass_mode=rollout.pop("bypass", False)))
    return Given(algorithm=correction, actor_rollout_ref=Given(actor=actor, rollout=Given(rollout)))


def into(made):
    """Makes recorders that keep what they are given, in a list."""

    def make(*given, **kernels):
        made.append(Recorded(*given, **kernels))
        return made[-1]

    return make


@pytest.fixture
def made():
    return []


class Trainer(SimpleNamespace):
    """verl's trainer, as far as it is watched."""

    def fit(self, step):
        return step()


@pytest.fixture
def verl(made):
    """The functions of verl's trainer that are watched."""
    watch, done = TrainerWatch(CONTRACT, into(made)), lambda *_, **__: "done"
    metrics = SimpleNamespace(__name__="verl.utils.debug.metrics", calculate_debug_metrics=done)
    data = SimpleNamespace(__name__="verl.trainer.ppo.metric_utils", compute_data_metrics=done)
    trainer = SimpleNamespace(__name__="verl.trainer.ppo.ray_trainer", RayPPOTrainer=type("RayPPO", (Trainer,), {}))
    for module in (metrics, data, trainer):
        watch.attach(module)
    return SimpleNamespace(**vars(metrics) | vars(data) | vars(trainer))


def test_a_step_is_recorded_once_with_what_it_ends_with(verl, made):
    data = proto()
    mask = data.batch["response_mask"]

    def step():
        assert verl.calculate_debug_metrics(data) == "done"
        assert made == []
        data.batch.update(response_mask=mask * 0, advantages=torch.full((ROWS, WIDTH), 2.0))
        data.batch.update(token_level_scores=torch.eye(ROWS, WIDTH))
        assert verl.compute_data_metrics(batch=data) == "done"
        assert verl.compute_data_metrics(data, use_critic=False) == "done"

    verl.RayPPOTrainer(config=config(), global_steps=8).fit(step)
    ((train, inference, given),) = made[0].calls
    assert torch.equal(train, data.batch["old_log_probs"])
    assert torch.equal(inference, data.batch["rollout_log_probs"])
    assert torch.equal(given["mask"], mask)
    assert torch.equal(given["token_ids"], data.batch["responses"])
    assert (given["advantages"] == 2).all()
    assert given["rewards"].tolist() == [1, 1, 1, 1, 1, 0]
    assert given["weights"] == (7, None)
    assert given["attributes"][1] == {"data_source": "prose", "prompt_tokens": 3}
    assert given["processing"] == ({"temperature": 0.7}, {"temperature": 0.7, "top_p": 0.9})
    kernel = made[0].kernels["inference"]
    assert (kernel.engine, kernel.dtype, kernel.parallelism) == ("vllm", "bfloat16", "tp=2")
    assert (made[0].kernels["train"].engine, made[0].kernels["train"].dtype) == ("fsdp", "float32")


def test_what_never_gets_rewards_is_recorded_all_the_same(verl, made):
    def step():
        verl.calculate_debug_metrics(proto())
        verl.calculate_debug_metrics(data=proto())
        assert len(made[0].calls) == 1
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        verl.RayPPOTrainer(config=config(), global_steps=1).fit(step)
    assert len(made[0].calls) == 2
    assert all(given["advantages"] is None for *_, given in made[0].calls)


def test_columns_are_read_as_the_queue_gives_them():
    wrapped = [SimpleNamespace(data="code"), SimpleNamespace(data="prose")]
    columns = {"data_source": wrapped, "level": np.array([1, 2]), "raw": [{}, []], "uid": ["a", "b"], "short": ["x"]}
    assert attributes_of(columns, 2) == [{"data_source": "code", "level": 1}, {"data_source": "prose", "level": 2}]


@pytest.mark.parametrize("data", [None, SimpleNamespace(batch={}), proto(data_source=[object()] * ROWS)])
def test_nothing_is_raised_into_a_trainer(verl, made, caplog, data):
    with caplog.at_level(logging.WARNING, "kc_otel"):
        for _ in range(3):
            assert verl.calculate_debug_metrics(data) == verl.compute_data_metrics(data) == "done"
    if made:
        assert made[0].calls
    else:
        assert len(caplog.records) == 1
        assert "a batch of verl was not recorded" in caplog.text


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"bypass": True}, ""),
        ({"calculate_log_probs": False}, "set actor_rollout_ref.rollout.calculate_log_probs=True"),
        ({}, ""),
    ],
)
def test_settings_that_leave_nothing_to_measure_are_said(verl, caplog, changed, said):
    with caplog.at_level(logging.WARNING, "kc_otel"):
        assert verl.RayPPOTrainer(config=config(**changed), global_steps=1).fit(lambda: "done") == "done"
    assert said in caplog.text
    assert bool(caplog.records) == bool(said)


def test_logprobs_of_before_processing_are_not_taken_for_processed_ones():
    train, inference = processings(config(logprobs_mode="raw_logprobs"))
    assert (train, inference) == ({"temperature": 0.7}, {})


def test_the_engines_own_arguments_are_fields_of_its_kernel_version():
    assert kernels(config(name="sglang"))[1].engine == "sglang"
    arguments = Given(kv_cache_dtype="fp8", attention_backend="FLASHINFER")
    kernel = kernels(config(engine_kwargs=Given(vllm=arguments), enforce_eager=True))[1]
    assert (kernel.kv_cache_dtype, kernel.attention, kernel.compile) == ("fp8", "FLASHINFER", "eager")
    assert kernel.fingerprint != kernels(config())[1].fingerprint


def test_a_run_is_named_by_the_names_that_are_proposed(monkeypatch):
    """What is not known is left out."""
    monkeypatch.setenv("WANDB_RUN_ID", "r17")
    said = {"rl.system": "verl", "rl.algorithm": "grpo", "rl.model.name": "policy-7b", "rl.run.id": "r17"}
    assert resource_of_run("verl", "grpo", "policy-7b") == said
    monkeypatch.delenv("WANDB_RUN_ID")
    assert resource_of_run("verl", None, None) == {"rl.system": "verl"}


SEQUENCES, TOKENS = 8, 6
nested = partial(torch.nested.as_nested_tensor, layout=torch.jagged)


class Batch(dict):
    """A `TensorDict` as far as it is read."""

    def __len__(self):
        return len(self["uid"])

    def __getitem__(self, name):
        rows = name if isinstance(name, slice) else None
        if rows is None:
            return super().__getitem__(name)
        found = {
            key: nested(list(value.unbind())[rows]) if isinstance(value, torch.Tensor) else value[rows]
            for key, value in self.items()
        }
        return Batch(found)


def batch(**changed):
    lengths = [3 + row % 4 for row in range(SEQUENCES)]
    said = nested([-torch.rand(length) for length in lengths])
    return Batch({
        "uid": [f"prompt {row // 4}" for row in range(SEQUENCES)],
        "data_source": ["code", "prose"] * 4,
        "extra_fields": [{"min_global_steps": 5 - row // 6} for row in range(SEQUENCES)],
        "responses": nested([torch.arange(length) for length in lengths]),
        "response_mask": nested([torch.ones(length, dtype=torch.int64) for length in lengths]),
        "rm_scores": nested([torch.eye(1, length)[0] for length in lengths]),
        "rollout_log_probs": said, "old_log_probs": said, **changed,
    })  # fmt: skip


class Engine:
    """One rank's engine."""

    def __init__(self, rank=0, ranks=1, first=True):
        self.rank, self.ranks, self.first = rank, ranks, first

    def is_mp_src_rank_with_outputs(self):
        return self.first

    def get_data_parallel_rank(self):
        return self.rank

    def get_data_parallel_size(self):
        return self.ranks


def worker_modules():
    """Verl's two modules, with the calls that a step makes."""

    def get_policy_loss_fn(_):
        return lambda **given: given["log_prob"].sum()

    losses = SimpleNamespace(__name__="verl.workers.utils.losses", get_policy_loss_fn=get_policy_loss_fn)

    def ppo_loss(config, model_output, data, _=None):
        shape = (len(data), TOKENS)
        old = data["old_log_probs"].to_padded_tensor(0.0, output_size=shape)
        mask = data["response_mask"].to_padded_tensor(0, output_size=shape)
        policy_loss = losses.get_policy_loss_fn("vanilla")
        given = {"old_log_prob": old, "log_prob": old + model_output, "response_mask": mask, "advantages": old * 0 + 1}
        return policy_loss(**given, config=config)

    losses.ppo_loss = ppo_loss

    class TrainingWorker:
        def __init__(self, engine):
            self.engine, self.weight = engine, torch.zeros((), requires_grad=True)

        def train_mini_batch(self, data):
            return [self.train_batch(data[:4]), self.train_batch(data[4:])]

        def train_batch(self, data):
            for micro_batch in (data[:2], data[2:]):
                losses.ppo_loss(config=None, model_output=self.weight, data=micro_batch).backward()
            return "done"

    class ActorRolloutRefWorker:
        def __init__(self, engine=None):
            self.actor = TrainingWorker(engine or Engine())
            self.config = Given(config().actor_rollout_ref, model=Given(path="policy"))

        def update_actor(self, data):
            return self.actor.train_mini_batch(data)

        async def update_weights(self, *_, mode="auto", **__):
            return {"mode": mode}

    ours = {"TrainingWorker": TrainingWorker, "ActorRolloutRefWorker": ActorRolloutRefWorker}
    return losses, SimpleNamespace(__name__="verl.workers.engine_workers", **ours)


@pytest.fixture
def workers(made):
    losses, workers = worker_modules()
    watch = FirstPassWatch(CONTRACT, into(made))
    watch.attach(losses)
    watch.attach(workers)
    return workers


@pytest.mark.slow
def test_the_first_mini_batch_of_an_update_is_compared(workers, made, caplog):
    worker, data = workers.ActorRolloutRefWorker(), batch()
    assert asyncio.run(worker.update_weights(5, mode="nccl")) == {"mode": "nccl"}
    with caplog.at_level(logging.WARNING, "kc_otel"):
        assert worker.update_actor(data) == ["done", "done"]
    calls = made[0].calls
    assert [len(train) for train, *_ in calls] == [2, 2]
    assert not any(train.requires_grad for train, *_ in calls)
    rows = [row.tolist() for _, said, given in calls for row in (said * given["mask"])]
    expected = batch(rollout_log_probs=data["rollout_log_probs"])["rollout_log_probs"]
    assert rows == expected.to_padded_tensor(0.0, output_size=(SEQUENCES, TOKENS))[:4].tolist()
    _, _, given = calls[0]
    assert given["weights"] == (5, 5)
    assert given["groups"] == ["prompt 0"] * 2
    assert given["group_size"] == [4, 4]
    assert given["attributes"] == [{"data_source": "code"}, {"data_source": "prose"}]
    assert given["rewards"].tolist() == [1, 1]
    assert given["processing"] == ({"temperature": 0.7}, {"temperature": 0.7, "top_p": 0.9})
    assert made[0].kernels["inference"].engine == "vllm"
    assert "here 4 of 8 sequences" in caplog.text
    worker.update_actor(data)
    assert caplog.text.count("bypass mode") == 1


@pytest.mark.slow
def test_weights_that_have_moved_on_are_no_longer_those_that_were_sent(workers, made):
    worker = workers.ActorRolloutRefWorker()
    worker.update_actor(batch())
    assert {given["weights"][0] for *_, given in made[0].calls} == {None}
    asyncio.run(worker.update_weights(global_steps=7))
    made[0].calls.clear()
    worker.update_actor(batch())
    worker.update_actor(batch())
    asyncio.run(worker.update_weights(global_steps=8))
    worker.update_actor(batch(extra_fields=[{}] * SEQUENCES))
    assert [given["weights"] for *_, given in made[0].calls[::2]] == [(7, 5), (8, 5), (8, None)]


@pytest.mark.slow
def test_a_run_whose_trainer_scores_is_left_to_the_trainer(workers, made):
    worker, data = workers.ActorRolloutRefWorker(), batch()
    scored = nested([row - 0.01 for row in data["rollout_log_probs"].unbind()])
    without = batch()
    del without["rollout_log_probs"]
    for update in (batch(old_log_probs=scored), batch(entropy=scored), without):
        worker.update_actor(update)
    assert made == []


@pytest.mark.slow
def test_each_prompt_is_counted_by_one_rank(workers, made):
    data = batch(uid=["a", "b", "c", "d"] * 2)
    for rank in (0, 1):
        workers.ActorRolloutRefWorker(Engine(rank, 2)).update_actor(data)
    workers.ActorRolloutRefWorker(Engine(first=False)).update_actor(data)
    names = [name for *_, given in made[0].calls for name in given["groups"]]
    assert sorted(names) == ["a", "b", "c", "d"]
    empty = nested([row * (place != 0) for place, row in enumerate(data["response_mask"].unbind())])
    made[0].calls.clear()
    workers.ActorRolloutRefWorker().update_actor(Batch(data, response_mask=empty))
    assert sorted(name for *_, given in made[0].calls for name in given["groups"]) == ["b", "c", "d"]


@pytest.mark.slow
def test_prompts_that_the_driver_has_scored_are_left_out_of_that_update(workers, made):
    worker, data = workers.ActorRolloutRefWorker(), batch(uid=["a", "b"] * 4)
    worker.update_actor(update := Batch(data, kc_otel_audited_prompts=frozenset({"a"})))
    assert update.keys() == data.keys()
    assert [name for *_, given in made[0].calls for name in given["groups"]] == ["b"] * 2
    made[0].calls.clear()
    worker.update_actor(data)
    assert [name for *_, given in made[0].calls for name in given["groups"]] == ["a", "b"] * 2


def test_nothing_is_raised_into_a_worker(workers, made, caplog):
    data = batch()
    del data["responses"]
    worker = workers.ActorRolloutRefWorker()
    with caplog.at_level(logging.WARNING, "kc_otel"):
        assert worker.update_actor(data) == ["done", "done"]
    assert "a mini-batch of verl was not recorded: KeyError" in caplog.text
    assert not made


def test_modules_that_have_changed_are_said(caplog):
    FirstPassWatch(CONTRACT).attach(SimpleNamespace(__name__="verl.workers.utils.losses", ppo_loss=print))
    assert "kc-otel: verl.workers.utils.losses is not as expected, and is not watched" in caplog.text
    assert "get_policy_loss_fn" in caplog.text
