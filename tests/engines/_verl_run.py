"""A run of verl on a CPU: its trainer, loop, replay buffer, TransferQueue and GRPO; a tiny policy in two precisions.

What verl gives to GPU workers is done here, in this process: a linear policy samples in bfloat16, and is scored and
trained in float32. Nothing in this file knows of kc-otel.
"""

from __future__ import annotations

import sys
from functools import partial
from types import SimpleNamespace

import numpy as np
import ray
import torch
import transfer_queue as tq
from hydra import compose, initialize_config_module
from omegaconf import open_dict
from tensordict import TensorDict
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils import tensordict_utils as tu
from verl.utils.metric import reduce_metrics

VOCABULARY, WIDTH, PROMPT, STEPS, PROMPTS, COPIES = 32, 16, 4, 4, 8, 4
nested = partial(torch.nested.as_nested_tensor, layout=torch.jagged)


class Policy(torch.nn.Module):
    """The next token's logits from the last two tokens."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.head = torch.nn.Linear(2 * WIDTH, VOCABULARY)

    def logprobs(self, tokens, dtype=torch.float32):
        """[..., length - 1, vocabulary]: of what follows each pair of tokens, but for the first."""
        x = torch.cat([self.embedding(tokens[..., :-1]), self.embedding(tokens[..., 1:])], -1).to(dtype)
        weight, bias = self.head.weight.to(dtype), self.head.bias.to(dtype)
        return torch.nn.functional.linear(x, weight, bias).float().log_softmax(-1)


class Workers:
    """The actor's worker group: scores and trains what lies in the queue."""

    def __init__(self, policy):
        self.policy = policy
        self.optimizer = torch.optim.SGD(policy.parameters(), lr=0.5)
        self._dispatch_info = {"actor": [0]}

    def start_profile(self, **_):
        pass

    stop_profile = start_profile

    def _each(self, batch):
        names = ["prompts", "responses"]
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=names)
        for prompt, response in zip(data["prompts"].unbind(), data["responses"].unbind(), strict=True):
            row = torch.cat([prompt, response])
            scores = self.policy.logprobs(row)[:-1]  # of the tokens from the third on
            yield row, torch.nn.functional.pad(scores.gather(-1, row[2:, None])[:, 0], (1, 1)), scores

    def compute_log_prob(self, batch):
        # As verl has it: in the place of the token before, over prompt and response.
        with torch.no_grad():
            rows = [(values, torch.zeros(len(row))) for row, values, _ in self._each(batch)]
        fields = {"log_probs": nested([a for a, _ in rows]), "entropy": nested([b for _, b in rows])}
        tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=TensorDict(fields, len(rows)))
        return batch

    def update_actor(self, batch):
        names = ["advantages"]
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=names)
        terms = [
            -(values[PROMPT - 1 : -1] * advantage).sum()
            for (_, values, _), advantage in zip(self._each(batch), data["advantages"].unbind(), strict=True)
        ]
        self.optimizer.zero_grad()
        (sum(terms) / len(terms)).backward()
        self.optimizer.step()
        return {"metrics": {"loss": [0.0], "mfu": [0.0], "grad_norm": [1.0]}}


class Generation:
    """The agent loop's manager: samples in bfloat16 with the weights that were sent, and rewards."""

    def __init__(self, policy):
        self.policy, self.version = policy, 0
        self.rng = torch.Generator().manual_seed(1)

    def generate_sequences(self, prompts):
        for uid, source, step in zip(prompts["uid"], prompts["data_source"], [prompts["global_steps"]] * len(prompts),
                                     strict=True):  # fmt: skip
            rows = [self._sampled(str(uid), str(source), session, step) for session in range(COPIES)]
            keys, fields, tags = zip(*rows, strict=True)
            batch = tu.list_of_dict_to_tensordict(list(fields))
            tq.kv_batch_put(keys=list(keys), partition_id="train", fields=batch, tags=list(tags))
            tq.kv_put(key=str(uid), partition_id="train", tag={"status": "finished"})

    @torch.no_grad()
    def _sampled(self, uid, source, session, step):
        length = 24 + session
        row = torch.randint(VOCABULARY, (PROMPT,), generator=self.rng)
        said = []
        noise = 0.5 if source == "tables" else 0.0  # a kernel that is worse on one source
        for _ in range(length):
            scores = self.policy.logprobs(row[-2:], torch.bfloat16)[-1]
            scores = (scores + noise * torch.randn(VOCABULARY, generator=self.rng)).log_softmax(-1)
            token = scores.exp().multinomial(1, generator=self.rng)
            said.append(scores[token])
            row = torch.cat([row, token])
        response = row[PROMPT:]
        reward = torch.zeros(length)
        reward[-1] = (response == 7).float().mean()
        field = {
            "prompts": row[:PROMPT],
            "responses": response,
            "response_mask": torch.ones(length, dtype=torch.int64),
            "loss_mask": torch.ones(length, dtype=torch.int64),
            "input_ids": row,
            "position_ids": torch.arange(len(row)),
            "rollout_log_probs": torch.cat(said),
            "rm_scores": reward,
            "num_turns": 2,
            "uid": uid,
            "data_source": source,
        }
        tag = {"status": "success", "prompt_len": PROMPT, "response_len": length, "seq_len": PROMPT + length,
               "global_steps": step, "min_global_steps": self.version, "max_global_steps": self.version}  # fmt: skip
        return f"{uid}_{session}_0", field, tag


class Trainer(PPOTrainerSync):
    """verl's synchronous trainer, whose workers are in this process."""

    def _setup(self):
        self.policy = Policy()
        self.tokenizer = SimpleNamespace(eos_token_id=0, pad_token_id=0)
        self.actor_rollout_wg = Workers(self.policy)
        self.agent = Generation(self.policy)
        self.checkpoint_manager = SimpleNamespace(
            update_weights=lambda step: setattr(self.agent, "version", step), sleep_replicas=lambda: None
        )
        self.reward_loop_manager = SimpleNamespace(reward_loop_worker_handles=())
        rows = {"data_source": np.array(["code", "tables"] * (PROMPTS // 2)), "raw_prompt": np.array([""] * PROMPTS)}
        self.train_dataloader, self.train_dataloader_it = [rows] * STEPS, None
        self.steps_per_epoch = self.total_training_steps = STEPS
        self.global_steps = 0
        self.resource_pool_manager = SimpleNamespace(get_n_gpus=lambda: 1)
        self._init_dump_executor()

    def _get_n_gpus_for_throughput(self):
        return 1


def configured(*overrides):
    """The configuration of verl itself, with what a run without GPUs needs."""
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=[
            "algorithm.adv_estimator=grpo", f"actor_rollout_ref.rollout.n={COPIES}",
            f"data.train_batch_size={PROMPTS}", f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS}",
            "actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.rollout.calculate_log_probs=True",
            "actor_rollout_ref.actor.calculate_entropy=False", "trainer.val_before_train=False",
            "trainer.test_freq=-1", "trainer.save_freq=-1", "trainer.logger=[console]", *overrides,
        ])  # fmt: skip
    with open_dict(config):
        config.transfer_queue.enable = True
    return config


def main(overrides):
    ray.init("local", num_cpus=16, include_dashboard=False, log_to_driver=False)
    tq.init(configured(*overrides).transfer_queue)
    try:
        trainer = Trainer(configured(*overrides))
        trainer.init()
        trainer.fit(trainer.agent)
    finally:
        tq.close()
        ray.shutdown()


if __name__ == "__main__":
    assert reduce_metrics
    main(sys.argv[1:])
