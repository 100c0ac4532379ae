"""The plugin of verl without verl: what it takes from batches, and that it never raises into a trainer."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kc_otel.integrations.verl.shared import attributes_of, kernels, processings
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


@pytest.fixture
def watch(made):
    return TrainerWatch(CONTRACT, into(made))


def done(*_, **__):
    return "done"


def test_a_step_is_recorded_once_with_what_it_ends_with(watch, made):
    data = proto()
    mask = data.batch["response_mask"]

    def fit():
        assert watch.around_debug_metrics(done, None, (data,), {}) == "done"
        assert made == []
        data.batch.update(response_mask=mask * 0, advantages=torch.full((ROWS, WIDTH), 2.0))
        data.batch.update(token_level_scores=torch.eye(ROWS, WIDTH))
        assert watch.around_data_metrics(done, None, (), {"batch": data}) == "done"
        assert watch.around_data_metrics(done, None, (), {"batch": data}) == "done"

    trainer = SimpleNamespace(config=config(), global_steps=8)
    watch.around_fit(fit, trainer, (), {})
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


def test_what_never_gets_rewards_is_recorded_all_the_same(watch, made):
    def fit():
        watch.around_debug_metrics(done, None, (proto(),), {})
        watch.around_debug_metrics(done, None, (proto(),), {})
        assert len(made[0].calls) == 1
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        watch.around_fit(fit, SimpleNamespace(config=config(), global_steps=1), (), {})
    assert len(made[0].calls) == 2
    assert all(given["advantages"] is None for *_, given in made[0].calls)


def test_columns_are_read_as_the_queue_gives_them():
    wrapped = [SimpleNamespace(data="code"), SimpleNamespace(data="prose")]
    columns = {"data_source": wrapped, "level": np.array([1, 2]), "raw": [{}, []], "uid": ["a", "b"], "short": ["x"]}
    assert attributes_of(columns, 2) == [{"data_source": "code", "level": 1}, {"data_source": "prose", "level": 2}]


@pytest.mark.parametrize("data", [None, SimpleNamespace(batch={}), proto(data_source=[object()] * ROWS)])
def test_nothing_is_raised_into_a_trainer(watch, made, caplog, data):
    with caplog.at_level(logging.ERROR, "kc_otel"):
        for _ in range(3):
            assert watch.around_debug_metrics(done, None, (data,), {}) == "done"
            assert watch.around_data_metrics(done, None, (data,), {}) == "done"
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
def test_settings_that_leave_nothing_to_measure_are_said(watch, caplog, changed, said):
    with caplog.at_level(logging.WARNING, "kc_otel"):
        watch.around_fit(done, SimpleNamespace(config=config(**changed), global_steps=1), (), {})
    assert said in caplog.text
    assert bool(caplog.records) == bool(said)


def test_logprobs_of_before_processing_are_not_taken_for_processed_ones():
    train, inference = processings(config(logprobs_mode="raw_logprobs"))
    assert (train, inference) == ({"temperature": 0.7}, {})
    assert kernels(config(name="sglang"))[1].engine == "sglang"


def test_a_run_is_named_by_the_names_that_are_proposed(monkeypatch):
    """What is not known is left out."""
    monkeypatch.setenv("WANDB_RUN_ID", "r17")
    said = {"rl.system": "verl", "rl.algorithm": "grpo", "rl.model.name": "policy-7b", "rl.run.id": "r17"}
    assert resource_of_run("verl", "grpo", "policy-7b") == said
    monkeypatch.delenv("WANDB_RUN_ID")
    assert resource_of_run("verl", None, None) == {"rl.system": "verl"}
