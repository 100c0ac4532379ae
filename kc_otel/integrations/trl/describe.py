"""Properties of a TRL trainer's two kernels: versions, and the processing in their log-probabilities."""

from __future__ import annotations

import os
from typing import Any, Final

from kc_otel._extras import extra
from kc_otel.record.kernel import Kernel
from kc_otel.record.work import Processing
from kc_otel.recordings.comparable import effective

__all__ = ["processings", "run_resource", "training_kernel"]

_SAMPLING_NAMES: Final = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def training_kernel(trainer: Any) -> Kernel:
    """The trainer's model as a kernel version: number formats, attention, how it is split over devices."""
    with extra("trl", "a trainer's kernel version"):
        import torch  # noqa: PLC0415 - the core does without torch

    args, accelerator = trainer.args, trainer.accelerator
    parameter = next(trainer.model.parameters())
    autocast = "bfloat16" if args.bf16 else "float16" if args.fp16 else None
    processes = accelerator.num_processes
    cuda = parameter.device.type == "cuda"
    return Kernel(
        "torch",
        version=torch.__version__,
        dtype=parameter.dtype,
        attention=getattr(getattr(trainer.model, "config", None), "_attn_implementation", None),
        parallelism=f"{accelerator.distributed_type.value.lower()}={processes}" if processes > 1 else None,
        hardware=torch.cuda.get_device_name(parameter.device) if cuda else parameter.device.type,
        extra={} if autocast is None else {"autocast": autocast},
    )


def run_resource(trainer: Any) -> dict[str, str]:
    """Resource attributes of the run, by the proposed names (open-telemetry/semantic-conventions-genai#88)."""
    said = {
        "rl.system": "trl",
        "rl.algorithm": "grpo",
        "rl.model.name": getattr(getattr(trainer.model, "config", None), "_name_or_path", None),
        "rl.run.id": os.environ.get("WANDB_RUN_ID") or os.environ.get("MLFLOW_RUN_ID"),
    }
    return {name: str(value) for name, value in said.items() if value}


def processings(trainer: Any, inference: Processing | None) -> tuple[Processing, Processing] | None:
    """Return the processing in the log-probabilities of both sides; None if the inference side's is unknown.

    TRL divides the training kernel's logits by the temperature and does nothing else to them, while its vLLM returns
    log-probabilities from after top-p and all other processing. Where these are used the two are of different
    distributions.

    Args:
        trainer: The trainer.
        inference: Processing of the user's own `rollout_func`; None where TRL samples, or where it is not known.
    """
    args = trainer.args
    if inference is None and trainer.rollout_func is not None:
        return None
    if inference is None:
        asked = {**{name: getattr(args, name, None) for name in _SAMPLING_NAMES}, **(args.generation_kwargs or {})}
        inference = {name: asked[name] for name in _SAMPLING_NAMES if asked[name] is not None}
    return effective({"temperature": args.temperature}), effective(inference)
