"""A run of verl's fully asynchronous trainer on a CPU: its trainer, message queue, worker and FSDP engine.

    python _verl_fully_async_run.py [drift=0.5] [verl's overrides ...]

What is replaced is what needs an accelerator, as in `_verl_run`, and the rollouter, which starts servers: here
it fills the queue one transfer of the weights ahead of the trainer. Nothing in this file knows of kc-otel.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import _verl_run as colocated  # first: verl asks for its platform when it is imported
import numpy as np
import ray
import torch
import verl.experimental.fully_async_policy as fully_async
from _verl_run import COPIES, PROMPT, PROMPTS, STEPS
from hydra import compose, initialize_config_dir
from verl import DataProto
from verl.experimental.fully_async_policy.detach_utils import RolloutSample
from verl.experimental.fully_async_policy.fully_async_trainer import FullyAsyncTrainer
from verl.experimental.fully_async_policy.message_queue import MessageQueue, MessageQueueClient
from verl.experimental.separation.engine_workers import DetachActorWorker

WIDTH = 20 + COPIES
Trainer = FullyAsyncTrainer.__ray_metadata__.modified_class


class Engine(colocated.Engine):
    """Samples as rows that the agent loop pads: prompts on the left, responses on the right."""

    def _put(self, uid, source, _, prompt, responses, said):
        lengths, padding = torch.arange(20, WIDTH), PROMPT + 1 - len(prompt)
        mask = (torch.arange(WIDTH) < lengths[:, None]).long()
        attention = torch.cat([(torch.arange(PROMPT + 1) >= padding).long().repeat(COPIES, 1), mask], 1)
        left = torch.nn.functional.pad(prompt, (padding, 0)).repeat(COPIES, 1)
        responses = responses * mask
        scores = (responses == 7).float().mean(1, keepdim=True)
        tensors = {
            "prompts": left, "responses": responses, "response_mask": mask, "attention_mask": attention,
            "input_ids": torch.cat([left, responses], 1), "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
            "rollout_log_probs": said * mask,
            "rm_scores": torch.zeros(COPIES, WIDTH).scatter(1, lengths[:, None] - 1, scores),
        }  # fmt: skip
        versions = {"min_global_steps": self.version, "max_global_steps": self.version}
        columns = {"uid": uid, "data_source": source, **versions}
        rows = {name: np.array([value] * COPIES, dtype=object) for name, value in columns.items()}
        times = {"generate_sequences": 0.0, "tool_calls": 0.0}
        batch = DataProto.from_dict(tensors, rows, {"metrics": [times] * COPIES})
        sample = RolloutSample(batch, f"sample_{uid}", 0, {})
        assert ray.get(self.queue.put_sample.remote(ray.cloudpickle.dumps(sample)))


class Prompts(dict):
    def __len__(self):
        return PROMPTS


class Rollouter:
    """What the trainer asks of verl's rollouter, whose answers are objects of Ray."""

    def __init__(self, engine, batches):
        self.engine, self.batches, self.steps = engine, batches, 0
        self.get_total_produced_samples = self.get_completed_steps = self._remote(lambda: 0)
        self.reset_staleness = self._remote(self.sample)

    def _remote(self, answer):
        return SimpleNamespace(remote=lambda: ray.put(answer()))

    def sample(self):
        """The batches of one transfer, with the weights that the engine has; after the last of all steps the end."""
        for _ in range(self.batches):
            if self.steps < STEPS:
                names = [f"{self.steps}-{prompt}" for prompt in range(PROMPTS)]
                sources = ["code", "tables"] * (PROMPTS // 2)
                self.engine.generate_sequences(Prompts(uid=names, data_source=sources, global_steps=self.steps))
            if self.steps == STEPS:
                ray.get(self.engine.queue.put_sample.remote(None))
            self.steps += 1
        return {}


class Group(colocated.Group):
    """verl's group of actor workers of this trainer."""

    worker_class = DetachActorWorker


def main(*arguments):
    drift, overrides = colocated.drift_and_overrides(arguments)
    path = colocated.checkpoint()
    engine = colocated.InProcess.engine = Engine(path, drift)
    with initialize_config_dir(str(Path(fully_async.__file__).parent / "config"), version_base=None):
        config = compose("fully_async_ppo_trainer", overrides=[
            "async_training.trigger_parameter_sync_step=1", "trainer.device=cpu",
            *colocated.overrides_of(path), *overrides,
        ])  # fmt: skip
    ray.init("local", num_cpus=16, include_dashboard=False, log_to_driver=False)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tempfile.mkdtemp()}/group", rank=0, world_size=1)
    engine.queue = MessageQueue.remote(config, 1000)
    trainer = Trainer(
        config, SimpleNamespace(eos_token_id=1, pad_token_id=0), {}, SimpleNamespace(get_n_gpus=lambda: 1)
    )
    trainer.actor_wg = trainer.actor_rollout_wg = Group(config.actor_rollout_ref)
    trainer.rollouter = rollouter = Rollouter(engine, config.async_training.trigger_parameter_sync_step)
    trainer.set_message_queue_client(MessageQueueClient(engine.queue))
    trainer.set_total_train_steps(STEPS)

    async def update_weights(global_steps):
        await trainer.actor_wg.worker.update_weights(global_steps=global_steps, mode="in-process")

    async def run():
        trainer.checkpoint_manager = SimpleNamespace(update_weights=update_weights)
        await trainer._fit_update_weights()
        rollouter.sample()  # one transfer ahead
        await trainer.fit()

    asyncio.run(run())
    ray.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
