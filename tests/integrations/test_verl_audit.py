"""Audit forwards of verl's driver: what they choose, what they cost, and that verl's batch stays as it was."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kc_otel.integrations.verl.first_pass import FirstPassWatch, pop_audited
from kc_otel.integrations.verl.watch import TrainerWatch, audited
from tests.integrations.test_verl_watch import CONTRACT, Batch, config, into, nested

pytestmark = pytest.mark.slow

MICRO_BATCH = 5
ROWS, COPIES, WORDS = 40, 4, 16


class Fields(Batch):
    """A batch that is read by row and without some columns, too."""

    def rows(self, rows):
        return Fields({
            key: nested([value.unbind()[row] for row in rows]) if isinstance(value, torch.Tensor)
            else [value[row] for row in rows]
            for key, value in self.items()
        })  # fmt: skip

    def exclude(self, *names):
        return Fields({key: value for key, value in self.items() if key not in names})


class Meta(SimpleNamespace):
    """A `KVBatchMeta`."""

    def __len__(self):
        return len(self.keys)

    def select_keys(self, keys):
        at = [self.keys.index(key) for key in keys]
        return Meta(keys=keys, tags=[self.tags[row] for row in at], partition_id=self.partition_id, extra_info={})


class Queue:
    """Verl's TransferQueue: rows by partition and key."""

    def __init__(self):
        self.partitions = {}

    def kv_batch_put(self, keys, partition_id, fields, tags=None):
        held = self.partitions.setdefault(partition_id, {})
        for row, key in enumerate(keys):
            held.setdefault(key, {}).update(
                {name: value[row] if isinstance(value, list) else value.unbind()[row] for name, value in fields.items()}
            )
        return Meta(keys=keys, tags=tags, partition_id=partition_id, extra_info={})

    def kv_batch_get(self, keys, partition_id, select_fields=None):
        held = [self.partitions[partition_id][key] for key in keys]
        names = select_fields or list(held[0])
        columns = {name: [row[name] for row in held] for name in names}
        tensors = {name: isinstance(values[0], torch.Tensor) for name, values in columns.items()}
        return Fields({name: nested(values) if tensors[name] else values for name, values in columns.items()})

    def kv_clear(self, keys, partition_id):
        for key in keys:
            del self.partitions[partition_id][key]


class Workers:
    """Verl's actor workers: a torch model that scores what lies in the queue."""

    world_size = 3

    def __init__(self, queue, clock):
        self.queue, self.clock, self.sizes, self.fails = queue, clock, [], False
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Embedding(WORDS, 8), torch.nn.Linear(8, WORDS))

    @torch.no_grad()
    def compute_log_prob(self, meta):
        assert meta.extra_info["compute_loss"] is False
        assert len(meta.keys) % (self.world_size * MICRO_BATCH) == 0, "verl's assertion"
        self.sizes.append(len(meta.keys))
        self.clock.now += 2.0
        if self.fails:
            raise RuntimeError("out of memory")
        rows = self.queue.kv_batch_get(meta.keys, meta.partition_id, ["input_ids"])["input_ids"].unbind()
        scores = []
        for row in rows:
            found = self.model(row).log_softmax(-1)[:-1].gather(-1, row[1:, None])[:, 0]
            scores.append(torch.cat([found, found.new_zeros(1)]))  # verl's are left-shifted by one token
        self.queue.kv_batch_put(meta.keys, meta.partition_id, {"log_probs": nested(scores)})


def response_from_nested(scores, mask):
    return nested([row[-1 - len(kept) : -1] for row, kept in zip(scores.unbind(), mask.unbind(), strict=True)])


@pytest.fixture
def run(monkeypatch):
    """A trainer in bypass mode whose step has ten prompts of four rollouts."""
    queue, clock, made = Queue(), SimpleNamespace(now=0.0), []
    modules = {
        "transfer_queue": queue,
        **dict.fromkeys(("verl", "verl.utils", "verl.workers", "verl.workers.utils"), SimpleNamespace()),
        "verl.utils.tensordict_utils": SimpleNamespace(index_select_tensor_dict=Fields.rows),
        "verl.workers.utils.padding": SimpleNamespace(response_from_nested=response_from_nested),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv("KC_OTEL_AUDIT_SHARE", "0.5")

    watch = TrainerWatch(CONTRACT, into(made))
    watch.audits._clock = lambda: clock.now
    settings = config(bypass=True, log_prob_use_dynamic_bsz=False, log_prob_micro_batch_size_per_gpu=MICRO_BATCH)
    own = dict.fromkeys(("_compute_old_log_prob", "_update_actor"), lambda _, batch, metrics: batch)  # noqa: ARG005
    own |= dict.fromkeys(("fit", "_compute_advantage"), print)
    v1 = SimpleNamespace(__name__="verl.trainer.ppo.v1.trainer_base", PPOTrainer=type("PPO", (SimpleNamespace,), own))
    watch.attach(v1)
    trainer = v1.PPOTrainer(config=settings, global_steps=8, actor_rollout_wg=Workers(queue, clock))

    def step(number=0, **changed):
        lengths = [3 + row % 4 for row in range(ROWS)]
        names = [f"step {number} prompt {row // COPIES}" for row in range(ROWS)]
        rows = [torch.randint(WORDS, (5 + length,)) for length in lengths]
        fields = {
            "uid": names,
            "data_source": ["code", "prose"] * (ROWS // 2),
            "input_ids": nested(rows),
            "responses": nested([row[-length:] for row, length in zip(rows, lengths, strict=True)]),
            "response_mask": nested([torch.ones(length, dtype=torch.int64) for length in lengths]),
            "rollout_log_probs": nested([-torch.rand(length) for length in lengths]),
            "entropy": nested([torch.zeros(length) for length in lengths]),
        }
        keys = [f"{number}_{row}" for row in range(ROWS)]
        tags = [{"prompt_len": 5, "min_global_steps": 7 - row % 2} for row in range(ROWS)]
        meta = queue.kv_batch_put(keys, "train", fields, tags)
        metrics = {}
        for name, value in changed.items():
            setattr(trainer, name, value)
        assert trainer._compute_old_log_prob(meta, metrics=metrics) is meta
        assert trainer._update_actor(meta, metrics=metrics) is meta
        return names, meta, metrics

    step.trainer, step.queue, step.made, step.settings = trainer, queue, made, settings
    return step


def counted_by_a_worker(names, meta):
    """Names of the sequences that a worker counts of an update whose meta has gone to it."""
    worker = FirstPassWatch(CONTRACT)
    worker._audited = pop_audited(dict(meta.extra_info))
    return [name for name in names if worker._counts(name)]


def test_whole_prompts_are_scored_at_the_weights_of_the_step(run):
    names, meta, metrics = run()
    chosen = [row for row, name in enumerate(names) if audited(name, 0.5)]
    assert 0 < len(chosen) < ROWS
    assert metrics["kc/audit/sequences"] == len(chosen)
    assert metrics["kc/audit/ms"] == 2000
    (recorded,) = run.made
    ((train, inference, given),) = recorded.calls
    trained, sampled = given["weights"]
    assert (trained, sampled.tolist()) == (7, [7 - row % 2 for row in chosen])
    assert given["groups"] == [names[row] for row in chosen]
    assert {row["audit"] for row in given["attributes"]} == {True}
    assert {row["data_source"] for row in given["attributes"]} <= {"code", "prose"}
    assert inference.shape == train.shape
    for place, row, tokens, kept in zip(chosen, train, given["token_ids"], given["mask"], strict=True):
        held, count = run.queue.partitions["train"][meta.keys[place]], int(kept.sum())
        assert torch.equal(held["responses"], tokens[:count])
        ids = held["input_ids"]
        truth = run.trainer.actor_rollout_wg.model(ids).log_softmax(-1)[:-1].gather(-1, ids[1:, None])[:, 0]
        torch.testing.assert_close(row[:count], truth[-count:].detach())
    assert counted_by_a_worker(names, meta) == [names[row] for row in range(ROWS) if row not in chosen]


def test_verls_batch_stays_as_it_was_and_every_rank_has_as_many_copies(run):
    _, meta, _ = run()
    assert run.queue.partitions["kc-otel-audit"] == {}
    assert not any("log_probs" in run.queue.partitions["train"][key] for key in meta.keys)
    assert run.trainer.actor_rollout_wg.sizes[0] % (3 * MICRO_BATCH) == 0
    run.trainer.actor_rollout_wg.fails = True
    for number in range(1, 6):
        _, meta, _ = run(number)
        assert not meta.extra_info
    assert len(run.trainer.actor_rollout_wg.sizes) == 2
    assert run.queue.partitions["kc-otel-audit"] == {}


def test_time_is_capped_and_skips_depend_on_earlier_steps_alone(run):
    steps = [run(number) for number in range(24)]
    metrics = [scalars for *_, scalars in steps]
    pattern = [scalars["kc/audit/sequences"] > 0 for scalars in metrics]
    assert pattern == [True, False, False, *([True, False, False, False] * 5), True]
    assert [bool(meta.extra_info) for _, meta, _ in steps] == pattern
    assert metrics[-1]["kc/audit/skipped_steps"] == 17
    assert sum(scalars["kc/audit/ms"] for scalars in metrics) <= 24 * 500 + 2000


def test_only_the_first_update_of_a_step_in_bypass_mode_is_audited(run):
    _, meta, _ = run(0, local_trigger_step=1)
    assert not meta.extra_info
    run.settings["algorithm"]["rollout_correction"]["bypass_mode"] = False
    run(1, local_trigger_step=0)
    assert run.made == []


def test_the_mean_over_audited_prompts_has_the_steps_mean_as_its_expectation():
    drift = np.linspace(0.0, 0.2, 64) ** 2
    names = np.array([[f"{draw}-{prompt}" for prompt in range(64)] for draw in range(600)])
    chosen = np.vectorize(lambda name: audited(name, 0.05))(names)
    assert abs(chosen.mean() - 0.05) < 4 * np.sqrt(0.05 * 0.95 / chosen.size)
    means = [drift[row].mean() for row in chosen if row.any()]
    assert abs(np.mean(means) - drift.mean()) < 4 * np.std(means) / np.sqrt(len(means))
    assert abs(drift[:16].mean() - drift.mean()) > 20 * np.std(means) / np.sqrt(len(means))
    assert not audited("any", 0.0)
    assert audited("any", 1.0)


@pytest.mark.parametrize("wrong", [{"KC_OTEL_AUDIT_SHARE": "2"}, {"KC_OTEL_AUDIT_BUDGET": "soon"}])
def test_settings_that_are_none_are_refused(monkeypatch, wrong):
    """The plugin says so, and the run goes on without it."""
    for name, value in wrong.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="KC_OTEL_AUDIT"):
        TrainerWatch(CONTRACT)
