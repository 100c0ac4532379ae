"""Functions that slime calls with both kernels' log-probabilities; they change nothing and never raise into it.

Source: THUDM/slime 0.3.1 at 624b824a898a, slime/backends/megatron_utils/actor.py (`rollout_data_postprocess(args,
rollout_id, rollout_data)`, after log-probabilities and advantages), slime/backends/megatron_utils/loss.py
(`custom_tis_function`: pg_loss, masks, metrics). Every rank of a tensor-parallel group has the same values, and only
the first of the last pipeline stage records.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from kc_otel.contract.load import load
from kc_otel.record.kernel import Kernel, parallelism_of
from kc_otel.record.recorder import Recorder
from kc_otel.record.worker import ReasonCounts

__all__ = ["record_mismatch", "record_rollout"]

_RECORDERS: Final[dict[str, Recorder | None]] = {}
_FAULTS: Final = ReasonCounts("kc-otel: %s")


def record_rollout(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    """Record a rollout with its log-probabilities, advantages and rewards (`--rollout-data-postprocess-path`).

    Without log-probabilities of the trainer, which slime leaves to the training forward where it can, there is nothing
    to compare: `--get-mismatch-metrics` has them computed, or take `record_mismatch`.
    """
    with _guarded("slime's rollout is not recorded"):
        recorder = _recorder(args)
        if recorder is None or not _first_of_its_group():
            return
        train, inference = rollout_data.get("log_probs"), rollout_data.get("rollout_log_probs")
        if not train or not inference:
            missing = "log_probs of the trainer" if inference else "rollout_log_probs"
            recorder.drop("no-logprobs", f"slime's rollout has no {missing}; give it --get-mismatch-metrics")
            return
        rewards = rollout_data.get("local_raw_reward") or rollout_data.get("raw_reward")
        advantages, sources = rollout_data.get("advantages"), rollout_data.get("source_names")
        masks, tokens = rollout_data["loss_masks"], rollout_data["tokens"]
        prompts = [ids[: -len(mask)] for ids, mask in zip(tokens, masks, strict=True)]
        recorder.compare(
            _own(train),
            _own(inference),
            mask=_own(masks),
            advantages=_own(advantages) if advantages is not None and len(advantages) == len(train) else None,
            rewards=list(rewards) if rewards is not None and len(rewards) == len(train) else None,
            token_ids=[ids[-len(mask) :] for ids, mask in zip(tokens, masks, strict=True)],
            attributes=[
                {"prompt_tokens": len(prompt), **({} if sources is None else {"source": str(sources[row])})}
                for row, prompt in enumerate(prompts)
            ],
            processing=_processing(args),
            weights=(rollout_id, None),
            prompt_ids=prompts,
            group_size=getattr(args, "n_samples_per_prompt", None),
        )


def record_mismatch(
    args: Any, *, pg_loss: Any, train_log_probs: Any, rollout_log_probs: Any, loss_masks: Any, **_: Any
) -> tuple[Any, Any, dict[str, Any]]:
    """Record a micro-batch and leave the loss unchanged (`--custom-tis-function-path`, `--get-mismatch-metrics`)."""
    with _guarded("slime's micro-batch is not recorded"):
        recorder = _recorder(args)
        if recorder is not None and _first_of_its_group():
            recorder.compare(
                _own(train_log_probs), _own(rollout_log_probs), mask=_own(loss_masks), processing=_processing(args)
            )
    return pg_loss, loss_masks, {}


def _own(values: Any) -> list[Any]:
    """Tensors without their graph, as a list with one for each sequence."""
    return [value.detach() if hasattr(value, "detach") else value for value in values]


def _processing(args: Any) -> tuple[dict[str, float], dict[str, float]]:
    """Return the processing of both sides: the rollout's temperature, without truncation."""
    found = {"temperature": float(getattr(args, "rollout_temperature", 1.0))}
    return found, dict(found)


def _recorder(args: Any) -> Recorder | None:
    """Return this process's recorder for the contract in KC_OTEL_CONTRACT; None without one."""
    path = os.environ.get("KC_OTEL_CONTRACT")
    if not path:
        return None
    if path not in _RECORDERS:
        _RECORDERS[path] = None  # a contract that cannot be read is said once
        train, inference = _kernels(args)
        _RECORDERS[path] = Recorder(load(path), train=train, inference=inference)
    return _RECORDERS[path]


def _kernels(args: Any) -> tuple[Kernel, Kernel]:
    dtype = "bfloat16" if getattr(args, "bf16", False) else "float16" if getattr(args, "fp16", False) else "float32"
    split = parallelism_of(args, tp="tensor_model_parallel_size", pp="pipeline_model_parallel_size")
    return (
        Kernel("megatron", dtype=dtype, quantization=getattr(args, "fp8", None), parallelism=split),
        Kernel(
            "sglang",
            dtype=getattr(args, "sglang_dtype", None),
            quantization=getattr(args, "sglang_quantization", None),
            kv_cache_dtype=getattr(args, "sglang_kv_cache_dtype", None),
            attention=getattr(args, "sglang_attention_backend", None),
        ),
    )


def _first_of_its_group() -> bool:
    try:
        from megatron.core import mpu  # type: ignore[import-not-found, unused-ignore]  # noqa: PLC0415
    except ImportError:
        return True
    last = mpu.is_pipeline_last_stage(ignore_virtual=True)
    return bool(last and mpu.get_tensor_model_parallel_rank() == 0)


@contextmanager
def _guarded(what: str) -> Iterator[None]:
    """Log the first fault of a kind, and let training go on."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - whatever it is, training goes on
        _FAULTS.add(what, error)
