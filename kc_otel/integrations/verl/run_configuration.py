"""Kernels, sampling parameters and the run, as verl's configuration has them."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from kc_otel.contract.slices import Scalar
from kc_otel.record.kernel import Kernel
from kc_otel.record.work import Processing
from kc_otel.recordings.request import effective

__all__ = ["kernels", "processings", "run_resource"]

_SAMPLING_NAMES: Final = ("temperature", "top_p", "top_k", "repetition_penalty")
_PROCESSED: Final = "processed"


def kernels(config: Any) -> tuple[Kernel, Kernel]:
    """The training and the inference kernel as `actor_rollout_ref` of verl's whole configuration has them."""
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    strategy = str(actor.get("strategy", "torch"))
    engine = actor.get("fsdp_config") or {}
    train = Kernel(
        strategy,
        version=_installed("torch"),
        dtype=engine.get("dtype") or engine.get("model_dtype"),
        parallelism=f"sp={actor.ulysses_sequence_parallel_size}"
        if actor.get("ulysses_sequence_parallel_size")
        else None,
        extra={"verl": _installed("verl")},
    )
    name = str(rollout.get("name", "vllm"))
    inference = Kernel(
        name,
        version=_installed(name),
        dtype=rollout.get("dtype"),
        quantization=rollout.get("quantization"),
        parallelism=f"tp={rollout.tensor_model_parallel_size}" if rollout.get("tensor_model_parallel_size") else None,
    )
    return train, inference


def run_resource(config: Any) -> dict[str, str]:
    """Resource attributes of the run, by the proposed names (open-telemetry/semantic-conventions-genai#88)."""
    said = {
        "rl.system": "verl",
        "rl.algorithm": config.get("algorithm", {}).get("adv_estimator"),
        "rl.model.name": config.actor_rollout_ref.get("model", {}).get("path"),
        "rl.run.id": os.environ.get("WANDB_RUN_ID") or os.environ.get("MLFLOW_RUN_ID"),
    }
    return {name: str(value) for name, value in said.items() if value}


def processings(config: Any) -> tuple[Processing, Processing]:
    """Return the sampling parameters that both sides' log-probabilities include.

    verl's trainer divides logits by the temperature; the engine's are from after all of its processing, unless
    `logprobs_mode` says otherwise.
    """
    rollout = config.actor_rollout_ref.rollout
    temperature: dict[str, Scalar] = {"temperature": float(rollout.get("temperature", 1.0))}
    sampled: dict[str, Scalar] = {name: rollout.get(name) for name in _SAMPLING_NAMES if rollout.get(name) is not None}
    processed = str(rollout.get("logprobs_mode") or _PROCESSED).startswith(_PROCESSED)
    return effective(temperature), effective(sampled if processed else {})


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
