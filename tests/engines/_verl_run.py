"""A run of verl on a CPU: its own trainers, TransferQueue, worker and FSDP engine; a tiny Llama.

    python _verl_run.py sync|colocate_async|separate_async [drift=0.5] [verl's overrides ...]

It is in bypass mode unless an override says otherwise. `drift` disturbs what the engine samples on one data source.
What is replaced is what needs an accelerator: verl's platform, by its registry of platforms; its inference engine; and
the transport of weights, by its registry of those. Nothing in this file knows of kc-otel.
"""

from __future__ import annotations

import sys
import tempfile
from types import SimpleNamespace

import _verl_cpu  # first: verl asks for its platform when it is imported
import numpy as np
import ray
import torch
import transfer_queue as tq
import verl.models.transformers.monkey_patch
from hydra import compose, initialize_config_module
from omegaconf import open_dict
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from verl.checkpoint_engine.base import CheckpointEngineRegistry
from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync
from verl.trainer.ppo.v1.trainer_separate_async import HybridEngineMode, PPOTrainerSeparateAsync
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils import tensordict_utils as tu
from verl.workers.engine_workers import ActorRolloutRefWorker

assert _verl_cpu
verl.models.transformers.monkey_patch.is_trl_available = lambda: False  # it patches a class that TRL has no more

VOCABULARY, PROMPT, STEPS, PROMPTS, COPIES = 32, 4, 4, 8, 4


class Engine:
    """Samples in bfloat16 with the weights that it was last sent, and rewards."""

    def __init__(self, path, drift):
        self.model = LlamaForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
        self.drift, self.version = drift, 0
        self.rng = torch.Generator().manual_seed(1)

    def load(self, weights, step):
        """Take weights, named as in a checkpoint."""
        given = {name: tensor.to(torch.bfloat16) for name, tensor in weights}
        self.model.load_state_dict(given, strict=False)
        self.version = step

    @torch.no_grad()
    def generate_sequences(self, prompts):
        for uid, source, step in zip(prompts["uid"], prompts["data_source"], [prompts["global_steps"]] * len(prompts),
                                     strict=True):  # fmt: skip
            first = torch.randint(VOCABULARY, (PROMPT + len(str(source)) % 2,), generator=self.rng)
            rows, said = first.repeat(COPIES, 1), []
            for _ in range(24):
                scores = self.model(input_ids=rows).logits[:, -1].float()
                noise = self.drift * (source == "tables")
                scores = (scores + noise * torch.randn(scores.shape, generator=self.rng)).log_softmax(-1)
                token = scores.exp().multinomial(1, generator=self.rng)
                said.append(scores.gather(-1, token))
                rows = torch.cat([rows, token], 1)
            self._put(str(uid), str(source), step, first, rows[:, len(first) :], torch.cat(said, 1))

    def _put(self, uid, source, step, prompt, responses, said):
        keys, fields, tags = [], [], []
        for session in range(COPIES):
            response, logprobs = responses[session, : 20 + session], said[session, : 20 + session]
            length, reward = len(response), torch.zeros(len(response))
            reward[-1] = (response == 7).float().mean()
            versions = {"min_global_steps": self.version, "max_global_steps": self.version}
            fields.append({
                "prompts": prompt, "responses": response, "response_mask": torch.ones(length, dtype=torch.int64),
                "loss_mask": torch.ones(length, dtype=torch.int64), "input_ids": torch.cat([prompt, response]),
                "position_ids": torch.arange(len(prompt) + length), "rollout_log_probs": logprobs,
                "rm_scores": reward, "num_turns": 2, "uid": uid, "data_source": source, "extra_fields": versions,
                "multi_modal_inputs": {},
            })  # fmt: skip
            keys.append(f"{uid}_{session}_0")
            tags.append({"status": "success", "prompt_len": len(prompt), "response_len": length,
                         "seq_len": len(prompt) + length, "global_steps": step, **versions})  # fmt: skip
        batch = tu.list_of_dict_to_tensordict(fields)
        tq.kv_batch_put(keys=keys, partition_id="train", fields=batch, tags=tags)
        tq.kv_put(key=uid, partition_id="train", tag={"status": "finished"})


@CheckpointEngineRegistry.register("in-process")
class InProcess:
    """Weights from the worker to the engine, both in this process."""

    engine: Engine

    def __init__(self, **_):
        pass

    async def send_weights(self, weights, global_steps=None):
        self.engine.load(weights, global_steps)


class Group:
    """verl's group of actor workers: one, in this process."""

    worker_class = ActorRolloutRefWorker

    def __init__(self, config):
        self.worker = self.worker_class(config, "actor")
        self.worker.init_model()
        self._dispatch_info, self.world_size = {"actor": [0]}, 1

    def compute_log_prob(self, batch):
        return self.worker.compute_log_prob(batch)

    def update_actor(self, batch):
        return self.worker.update_actor(batch)

    def start_profile(self, **_):
        pass

    stop_profile = start_profile


class InThisProcess:
    """What a trainer of verl sets up, without processes, servers and accelerators."""

    def _setup(self):
        self.tokenizer = SimpleNamespace(eos_token_id=1, pad_token_id=0)
        self.actor_rollout_wg = Group(self.config.actor_rollout_ref)
        self.agent = InProcess.engine
        self.checkpoint_manager = self.standalone_checkpoint_manager = SimpleNamespace(
            update_weights=self._update_weights, sleep_replicas=lambda: None, abort_replicas=lambda: None,
            resume_generation_replicas=lambda: None,
        )  # fmt: skip
        self.current_mode = HybridEngineMode.TRAINER
        self.reward_loop_manager = SimpleNamespace(reward_loop_worker_handles=())
        rows = {"data_source": np.array(["code", "tables"] * (PROMPTS // 2)), "raw_prompt": np.array([""] * PROMPTS)}
        self.train_dataloader, self.train_dataloader_it = [rows] * (STEPS + 2), None
        self.steps_per_epoch = self.total_training_steps = STEPS
        self.global_steps = 0
        self.resource_pool_manager = SimpleNamespace(get_n_gpus=lambda: 1)
        self._init_dump_executor()

    def _update_weights(self, step=None):
        import asyncio

        asyncio.run(self.actor_rollout_wg.worker.update_weights(global_steps=step, mode="in-process"))

    def _get_n_gpus_for_throughput(self):
        return 1


class Synchronous(InThisProcess, PPOTrainerSync):
    pass


class Colocated(InThisProcess, PPOTrainerColocateAsync):
    pass


class Separate(InThisProcess, PPOTrainerSeparateAsync):
    pass


def checkpoint():
    """Write a tiny random Llama and its tokenizer."""
    path = tempfile.mkdtemp()
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=64, **shape)).save_pretrained(path)
    words = models.WordLevel({str(word): word for word in range(VOCABULARY)}, unk_token="0")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), pad_token="0", eos_token="1").save_pretrained(path)
    return path


def overrides_of(path):
    """What a short run needs, an actor that is trained without an accelerator, and its engine."""
    return [
        "algorithm.adv_estimator=grpo", f"actor_rollout_ref.rollout.n={COPIES}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS}", "actor_rollout_ref.actor.calculate_entropy=False",
        "trainer.val_before_train=False", "trainer.test_freq=-1", "trainer.save_freq=-1", "trainer.logger=[console]",
        f"actor_rollout_ref.model.path={path}",
        "actor_rollout_ref.actor.strategy=fsdp2", "actor_rollout_ref.actor.fsdp_config.strategy=fsdp2",
        "actor_rollout_ref.actor.fsdp_config.dtype=float32", "actor_rollout_ref.model.use_remove_padding=False",
        "actor_rollout_ref.model.enable_gradient_checkpointing=False",
        "+actor_rollout_ref.model.override_config.attn_implementation=eager",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8", "actor_rollout_ref.actor.optim.lr=0.01",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8", "actor_rollout_ref.hybrid_engine=False",
        "actor_rollout_ref.rollout.checkpoint_engine.backend=in-process", "actor_rollout_ref.rollout.nnodes=1",
        "actor_rollout_ref.rollout.n_gpus_per_node=1",
    ]  # fmt: skip


def configured(*overrides):
    """The configuration of verl itself, with what a run without GPUs needs."""
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=[
            f"data.train_batch_size={PROMPTS}", "actor_rollout_ref.rollout.name=vllm",
            "actor_rollout_ref.rollout.calculate_log_probs=True", *overrides,
        ])  # fmt: skip
    with open_dict(config):
        config.transfer_queue.enable = True
    return config


def drift_and_overrides(arguments):
    drift = [argument for argument in arguments if argument.startswith("drift=")]
    said = float(drift[0].removeprefix("drift=")) if drift else 0.0
    return said, [argument for argument in arguments if argument not in drift]


def main(kind, *arguments):
    drift, overrides = drift_and_overrides(arguments)
    path = checkpoint()
    InProcess.engine = Engine(path, drift)
    config = configured(
        "algorithm.rollout_correction.bypass_mode=True", f"trainer.v1.trainer_mode={kind}",
        *overrides_of(path), *overrides,
    )  # fmt: skip
    ray.init("local", num_cpus=16, include_dashboard=False, log_to_driver=False)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tempfile.mkdtemp()}/group", rank=0, world_size=1)
    tq.init(config.transfer_queue)
    try:
        trainer = {"sync": Synchronous, "colocate_async": Colocated, "separate_async": Separate}[kind](config)
        trainer.init()
        trainer.fit(trainer.agent)
    finally:
        tq.close()
        ray.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
