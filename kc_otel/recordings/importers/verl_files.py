"""What verl writes: `DataProto` pickles (`DataProto.save_to_disk`), and the same fields saved by `torch.save`.

Source: verl 0.9.1 as released: verl/protocol.py (`DataProto.__getstate__`: a batch of tensors, as the bytes of a
`torch.save`d TensorDict, or with VERL_DATAPROTO_SERIALIZATION_METHOD=numpy as dtype, shape and bytes; then
`non_tensor_batch` and `meta_info`), verl/trainer/ppo/ray_trainer.py (`old_log_probs` log P at the start of the step,
`rollout_log_probs` log Q with rollout.calculate_log_probs=True, `response_mask`, `responses`, `advantages`,
`meta_info["temperature"]`), verl/experimental/fully_async_policy/detach_utils.py (`min_global_steps` and
`max_global_steps`, the oldest and the newest weights that a response was sampled with; workers/rollout/llm_server.py
keeps no more of what it sampled in between, so that there is no version for each token, and the oldest stands for all).
The weights are called by the step that made them: `old_log_probs` of step n are of version n - 1, which
trainer/ppo/v1/trainer_base.py takes its staleness from. All of [sequences, response], whichever of FSDP or Megatron
trains. `trainer.rollout_data_dir` dumps text and scores, no log-probabilities: nothing can be measured of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kc_otel.recordings.importers.imported import Imported, ImportFileError, Refusals, plain
from kc_otel.recordings.importers.safe_pickle import Container, arrays, torch_load, unpickled

__all__ = ["ENDINGS", "is_text_dump", "read"]

ENDINGS: Final = (".pkl", ".pickle", ".pt", ".pth", ".dp")
_SIDES: Final = ("old_log_probs", "rollout_log_probs")


def is_text_dump(record: Mapping[str, Any] | None) -> bool:
    """Whether a record is of `trainer.rollout_data_dir` or `validation_data_dir`: text and scores."""
    return record is not None and {"input", "output", "step"} <= set(record) and not any(s in record for s in _SIDES)


def read(path: Path, refusals: Refusals, *, trust: bool = False) -> Iterator[Imported]:
    """The sequences of a file.

    Args:
        path: The file.
        refusals: Where sequences without tokens are counted.
        trust: Whether to unpickle whatever the file holds, which runs the code that it names.

    Raises:
        ImportFileError: If it holds something else, has not both kernels' log-probabilities, or shapes do not fit.
        OSError: If it cannot be read.
    """
    batch, others, meta = _loaded(path, trust=trust)
    missing = [name for name in _SIDES if name not in batch]
    if missing:
        msg = (
            f"{path}: has no {' and no '.join(missing)}, only {', '.join(sorted(batch))}; set "
            f"rollout.calculate_log_probs=True and save the batch after old_log_probs are computed"
        )
        raise ImportFileError(msg)
    train, inference = batch["old_log_probs"].astype(np.float64), batch["rollout_log_probs"].astype(np.float64)
    mask = _mask(path, batch, train.shape)
    if train.ndim != 2 or not train.shape == inference.shape == mask.shape:
        shapes = ", ".join(str(each.shape) for each in (train, inference, mask))
        msg = f"{path}: {', '.join(_SIDES)}, response_mask have shapes {shapes}, not one [sequences, response]"
        raise ImportFileError(msg)
    processing = plain({"temperature": meta["temperature"]}) if "temperature" in meta else None
    for row in range(train.shape[0]):
        kept = mask[row]
        if not kept.any():
            refusals.add("no_tokens", f"{path}: row {row}: response_mask leaves no token")
            continue
        given = plain({name: values[row] for name, values in others.items() if len(values) == train.shape[0]})
        yield Imported(
            train[row][kept],
            inference[row][kept],
            batch["responses"][row][kept].astype(np.int64) if _fits(batch, "responses", train) else None,
            batch["advantages"][row][kept].astype(np.float64) if _fits(batch, "advantages", train) else None,
            {**given, **_counted(batch, row, kept), **_step(meta)},
            _weights(given, meta),
            processing,
        )


def _fits(batch: Mapping[str, NDArray[Any]], name: str, like: NDArray[Any]) -> bool:
    return name in batch and batch[name].shape == like.shape


def _mask(path: Path, batch: Mapping[str, NDArray[Any]], shape: tuple[int, ...]) -> NDArray[np.bool_]:
    if "response_mask" in batch:
        return np.asarray(batch["response_mask"] != 0)
    if "attention_mask" in batch:
        return np.asarray(batch["attention_mask"][:, -shape[-1] :] != 0)
    msg = f"{path}: has neither response_mask nor attention_mask, so that padding would count; save one of them"
    raise ImportFileError(msg)


def _counted(batch: Mapping[str, NDArray[Any]], row: int, kept: NDArray[np.bool_]) -> dict[str, int | float]:
    """What a response's slices are usually made of."""
    found: dict[str, int | float] = {"tokens": int(kept.sum())}
    if "attention_mask" in batch:
        found["prompt_tokens"] = int((batch["attention_mask"][row][: -kept.size] != 0).sum())
    for name in ("token_level_scores", "rm_scores"):
        if name in batch and batch[name].ndim == 2:
            found.setdefault("reward", float(batch[name][row].sum()))
    return found


def _weights(given: Mapping[str, Any], meta: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Optimizer steps done when the response was scored, and those of the oldest weights that sampled it."""
    step, oldest = _step(meta).get("step"), given.get("min_global_steps")
    return None if step is None else step - 1, oldest if isinstance(oldest, int) else None


def _step(meta: Mapping[str, Any]) -> dict[str, int]:
    """The step that the trainer is in, which it counts from 1."""
    step = meta.get("global_steps")
    return {"step": step} if isinstance(step, int) else {}


def _loaded(path: Path, *, trust: bool) -> tuple[dict[str, NDArray[Any]], dict[str, Any], dict[str, Any]]:
    """Tensors as arrays, other columns, and what is said of the batch."""
    content = path.read_bytes()
    if content[:2] == b"PK":
        return arrays(torch_load(path, content, trust=trust)), {}, {}
    state = unpickled(path, content, "verl", trust=trust)
    if trust and hasattr(state, "batch"):
        return arrays(state.batch), dict(state.non_tensor_batch), dict(state.meta_info)
    if not isinstance(state, Container) or not isinstance(state.state, tuple) or len(state.state) != 3:
        msg = f"{path}: holds {type(state).__name__}, not a DataProto; save the batch with DataProto.save_to_disk"
        raise ImportFileError(msg)
    tensors, others, meta = state.state
    if isinstance(tensors, bytes):
        tensors = torch_load(path, tensors, trust=False)
    elif isinstance(tensors, tuple):
        tensors = {name: _from_bytes(path, name, part) for name, part in tensors[2].items()}
    return arrays({} if tensors is None else tensors), dict(others or {}), dict(meta or {})


def _from_bytes(path: Path, name: str, part: Any) -> Any:
    if len(part) != 3:
        msg = f"{path}: {name}: is a nested tensor; save padded tensors"
        raise ImportFileError(msg)
    dtype, shape, data = part
    if dtype == "bfloat16":
        wide = np.frombuffer(bytes(data), dtype=np.uint16).astype(np.uint32) << 16
        return wide.view(np.float32).reshape(tuple(shape))
    return np.frombuffer(bytes(data), dtype=dtype).reshape(tuple(shape))
