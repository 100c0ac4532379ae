"""The one line: a trainer and a contract in, an instrumented trainer out."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from typing import Any

from kc_otel._extras import extra
from kc_otel.contract.model import Contract
from kc_otel.contract.slices import Scalar
from kc_otel.integrations.trl.instrumented_trainer import InstrumentedTrainer
from kc_otel.record.engine import DriftLog
from kc_otel.record.kernel import Kernel
from kc_otel.record.recorder import Recorder
from kc_otel.record.telemetry.environment import resource_of_run
from kc_otel.record.work import Processing, Weights

__all__ = ["instrument"]


def instrument(
    trainer: Any,
    contract: Recorder | Contract | str | os.PathLike[str],
    *,
    attributes: Mapping[str, Scalar] | None = None,
    train: Kernel | None = None,
    inference: Kernel | None = None,
    processing: Processing | None = None,
    weights: Callable[[], Weights] | None = None,
    quarantine: Callable[[], Collection[str]] | None = None,
    log: DriftLog | None = None,
) -> InstrumentedTrainer:
    """Compare the two kernels of a TRL GRPO trainer on everything that it trains on.

    >>> instrument(trainer, "contract.yaml")                                             # a trl.GRPOTrainer
    >>> trainer.train()

    Slices are made of the dataset's columns that the contract names, and of `prompt_tokens`, `completion_tokens`,
    `advantage` and `mode` (train or eval). Where the sampler truncates (top-p, top-k, min-p) sequences are counted as
    `processing_mismatch` instead of being measured: TRL's training side does not truncate. In a distributed run every
    process records what it trains on.

    Args:
        trainer: A `trl.GRPOTrainer` that samples with vLLM or with a `rollout_func`, before `train` is called.
        contract: The contract or the path of its YAML file, or a recorder that has one.
        attributes: Further attributes, of all sequences alike.
        train: The training kernel; None for what the trainer reports. Not with a recorder, which has its own.
        inference: The kernel that samples; None for what the contract declares. Not with a recorder.
        processing: Temperature, top_p and the like that the log-probabilities of a `rollout_func` include.
        weights: Returns the optimizer step whose weights sample; called after each rollout. None to take it from TRL's
            own calls to vLLM. With a `rollout_func` that keeps another engine, only the caller knows the step.
        quarantine: Returns the slices whose rollouts should not be trained on, such as
            `lambda: router.quarantined("policy-7b")`; called before each loss. Sequences of these slices that break the
            contract by themselves, or fail an input check, then count in no loss; advantages and the loss's denominator
            are as TRL made them from the whole group, so the other sequences keep their weight. None for no quarantine.
        log: Such as a `kc_otel.TrainingLog`: its scalars are in whatever the trainer logs. Not with a recorder, which
            has its own.

    Returns:
        The instrumentation; `remove` it when it is no longer wanted.

    Raises:
        TypeError: If the trainer is not a GRPO trainer, or kernels or a log are given with a recorder.
        ValueError: If the trainer has no second kernel, if columns are wanted and no reward function can supply them,
            if no clause can judge a sequence for a quarantine, or if the contract is not valid.
        OSError: If the contract cannot be read.
    """
    for name in ("compute_loss", "reward_funcs", "use_vllm", "rollout_func"):
        if not hasattr(trainer, name):
            raise TypeError(
                f"trainer: {type(trainer).__name__} has no {name}; give a trl.GRPOTrainer of TRL 1.0 or newer "
                "(pip install 'kc-otel[trl]')"
            )
    if not trainer.use_vllm and trainer.rollout_func is None:
        raise ValueError(
            "trainer: it samples with the model that it trains, so there is no second kernel; "
            "set use_vllm=True or give a rollout_func that returns the sampler's log-probabilities"
        )
    if isinstance(contract, Recorder):
        if train is not None or inference is not None or log is not None:
            raise TypeError("train, inference, log: the recorder has its own; give them to the recorder")
        return InstrumentedTrainer(trainer, contract, attributes or {}, processing, weights, slices=quarantine)
    recorder = Recorder(
        contract,
        train=train or _training_kernel(trainer),
        inference=inference,
        log=log,
        resource=resource_of_run("trl", "grpo", getattr(_config_of(trainer), "_name_or_path", None)),
    )
    try:
        return InstrumentedTrainer(
            trainer, recorder, attributes or {}, processing, weights, slices=quarantine, owned=True
        )
    except BaseException:
        recorder.shutdown()
        raise


def _training_kernel(trainer: Any) -> Kernel:
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
        attention=getattr(_config_of(trainer), "_attn_implementation", None),
        parallelism=f"{accelerator.distributed_type.value.lower()}={processes}" if processes > 1 else None,
        hardware=torch.cuda.get_device_name(parameter.device) if cuda else parameter.device.type,
        extra={} if autocast is None else {"autocast": autocast},
    )


def _config_of(trainer: Any) -> Any:
    return getattr(trainer.model, "config", None)
