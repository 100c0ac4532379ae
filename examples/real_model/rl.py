"""GRPO on the real model.

TRL's trainer in float32, of whose layers the last six are trained, and vLLM's rollouts of the same weights. Runs
`corrected` and `uncorrected` have keys and values in fp8, and TRL's own correction by truncated importance ratios, or
not. The others have a fault from a step on, which is in what the sampler is sent and nobody is told of: `stale`
weights, `rope` angles of half the positions, and `fp8` weights that were cast to e4m3 without scales. An evaluator
judges them by grpo.yaml, and what it decides is carried out; these runs end with the first PASS after the repair.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from examples.real_model.measure import ENVIRONMENT, fp8_cache_in_vllm, model_here

os.environ.update(ENVIRONMENT, TRL_EXPERIMENTAL_SILENCE="1")

from examples.demo.__main__ import export_to
from examples.demo.evaluator import Evaluator, evaluating
from examples.trl_grpo.sampler import VllmSampler
from kc_otel.client.router import Router
from kc_otel.client.webhooks import new_secret
from kc_otel.integrations.trl import FollowDirectives, instrument

CONTRACT: Final = Path(__file__).with_name("grpo.yaml")
TRAINED_LAYERS: Final = 6
STEPS, FAULT_STEPS, FAULT_AT = 30, 60, 6
FAULTS: Final = ("stale", "rope", "fp8")
BEGINNINGS: Final = (
    "In spring the farmers", "The old bridge over the river", "A good teacher", "When the train arrived,",
    "The recipe begins with", "On the top shelf there was", "Our neighbours have", "The first snow",
    "Every morning the baker", "The museum shows", "A small boat", "During the storm", "The children found",
    "Behind the school", "The doctor said that", "In the middle of the night",
)  # fmt: skip


class Sender:
    """What weights are sent through; from a step on something happens to them on the way, until it is repaired."""

    def __init__(self, kernel: VllmSampler, fault: str | None, at: int) -> None:
        self.kernel, self.fault, self.at, self.broken, self.step = kernel, fault, at, False, 0

    def send(self, model: Any, step: int) -> None:
        """Send the weights of a step."""
        self.broken |= self.fault is not None and step >= self.at
        if self.broken and self.fault == "stale":
            return
        self.kernel.load(in_e4m3(model) if self.broken and self.fault == "fp8" else model)
        if self.fault == "rope":
            self.kernel.llm.apply_model(partial(turned, divided_by=2.0 if self.broken else 1.0))
        self.step = step

    def repair(self, trainer: Any) -> None:
        """What `resync-weights` asks for."""
        self.broken, self.at = False, sys.maxsize
        self.send(trainer.model, trainer.state.global_step)


def in_e4m3(model: Any) -> Any:
    """The model with its matrices cast to e4m3 and back, without a scale: what is small is lost."""
    import torch  # noqa: PLC0415

    def state() -> dict[str, Any]:
        return {
            name: tensor.to(torch.float8_e4m3fn).to(tensor.dtype) if name.endswith("_proj.weight") else tensor
            for name, tensor in model.state_dict().items()
        }

    return SimpleNamespace(save_pretrained=lambda folder: model.save_pretrained(folder, state_dict=state()))


def turned(model: Any, divided_by: float) -> None:
    """Turn queries and keys of vLLM's model by the checkpoint's angles, divided: rope scaling that it never had."""
    import torch  # noqa: PLC0415

    for rotary in {module.rotary_emb for module in model.modules() if hasattr(module, "rotary_emb")}:
        held = rotary.cos_sin_cache
        inverse = 1.0 / rotary.base ** (torch.arange(0, rotary.rotary_dim, 2).float() / rotary.rotary_dim)
        angles = torch.arange(held.shape[0]).float()[:, None] / divided_by * inverse
        held.copy_(torch.cat([angles.cos(), angles.sin()], -1).to(held.dtype))


def lower_case(completions: list[str], **_: Any) -> list[float]:
    """The share of characters that are lower-case letters: a reward that anybody can check."""
    return [sum(map(str.islower, text)) / max(len(text), 1) for text in completions]


def train(name: str) -> dict[str, Any]:
    """Do one of the runs; returns what was seen at each step."""
    fault = name if name in FAULTS else None
    with tempfile.TemporaryDirectory(prefix="kc-otel-rl-") as folder:
        return _train(Path(folder), name, fault, FAULT_STEPS if fault else STEPS)


def _train(folder: Path, name: str, fault: str | None, steps: int) -> dict[str, Any]:
    corrected = name == "corrected"
    checkpoint = shutil.copytree(model_here()[1], folder / "model")
    cache = "fp8" if fault is None and fp8_cache_in_vllm() else "auto"
    sender = Sender(VllmSampler(checkpoint, kv_cache_dtype=cache), fault, FAULT_AT)
    seen: list[dict[str, Any]] = []
    began = time.monotonic()

    def rollout(texts: list[str], trainer: Any) -> dict[str, Any]:
        sender.send(trainer.model, trainer.state.global_step)
        ids = [trainer.processing_class(text)["input_ids"] for text in texts]
        tokens, logprobs = sender.kernel.sample(ids)
        at = time.monotonic() - began
        seen.append({"step": trainer.state.global_step, "broken": sender.broken, "at": at})
        print(f"GRPO, {name}: step {trainer.state.global_step} of at most {steps}, {at / 60:.0f} min", flush=True)
        return {"prompt_ids": ids, "completion_ids": tokens, "logprobs": logprobs}

    def reward(completions: list[str], **_: Any) -> list[float]:
        seen[-1]["reward"] = sum(lower_case(completions)) / len(completions)
        return lower_case(completions)

    trainer = grpo(checkpoint, folder, rollout, reward, steps, corrected=corrected)
    with ExitStack() as stack:
        if fault is not None:
            evaluator = stack.enter_context(evaluating(CONTRACT, folder, "http://127.0.0.1:9/", new_secret()))
            export_to(evaluator.otlp)
            router = stack.enter_context(Router(evaluator.api, refresh=0.2))
            watch = instrument(trainer, CONTRACT, quarantine=lambda: router.quarantined("real-grpo"))
            stack.enter_context(watch)
            trainer.add_callback(judged(seen, watch, evaluator, began))
            trainer.add_callback(FollowDirectives(watch.recorder, router, lambda _: sender.repair(trainer)))
        trainer.train()
    return {"fault": fault, "fault_at": FAULT_AT, "kv_cache": cache, "corrected": corrected, "steps": seen}


def grpo(checkpoint: Path, folder: Path, rollout: Any, reward: Any, steps: int, *, corrected: bool) -> Any:
    """TRL's trainer; its correction is for its own vLLM, which does not run on a CPU, so it is told of ours."""
    from datasets import Dataset  # noqa: PLC0415
    from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback  # noqa: PLC0415
    from trl import GRPOConfig, GRPOTrainer  # noqa: PLC0415

    config = GRPOConfig(
        output_dir=str(folder), per_device_train_batch_size=16, num_generations=8, steps_per_generation=2,
        max_completion_length=32, max_steps=steps, learning_rate=5e-5, lr_scheduler_type="constant", bf16=False,
        use_cpu=True, report_to="none", logging_strategy="no", save_strategy="no", disable_tqdm=True, seed=1,
        gradient_checkpointing=False, vllm_importance_sampling_correction=corrected,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="float32")
    for name, parameter in model.named_parameters():
        place = name.split(".")[2]
        parameter.requires_grad_(place.isdigit() and int(place) >= model.config.num_hidden_layers - TRAINED_LAYERS)
    rows = Dataset.from_list([{"prompt": text} for text in BEGINNINGS])
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    trainer = GRPOTrainer(model, reward, config, rows, processing_class=tokenizer, rollout_func=rollout)
    trainer.remove_callback(PrinterCallback)
    trainer.use_vllm, trainer.vllm_mode = corrected, "server"
    trainer.vllm_generation = SimpleNamespace(sync_weights=lambda: None)
    trainer._last_loaded_step = -1  # noqa: SLF001 - what it sets beside its own vLLM
    return trainer


def judged(seen: list[dict[str, Any]], watch: Any, evaluator: Evaluator, began: float) -> Any:
    """Waits for the verdict on each step, as a run of days would have it before the next."""
    from transformers import TrainerCallback  # noqa: PLC0415

    class Judged(TrainerCallback):
        def on_step_end(self, _arguments: Any, _state: Any, control: Any, **__: Any) -> None:
            watch.recorder.force_flush()
            flushed, deadline = time.time(), time.monotonic() + 10
            while (cells := evaluator.verdicts()) and min(cell["at"] for cell in cells) <= flushed:
                if time.monotonic() > deadline:
                    break
                time.sleep(0.1)
            for cell in cells:
                known = {"status": cell["status"], "estimate": cell.get("estimate")}
                # The first FAIL of a step's rollouts counts, not the verdict on the step after.
                if seen[-1].get("status") != "FAIL":
                    seen[-1] |= {**known, "judged_at": time.monotonic() - began}
            repaired = any(step["broken"] for step in seen) and not seen[-1]["broken"]
            control.should_training_stop |= repaired and seen[-1].get("status") == "PASS"

    return Judged()
