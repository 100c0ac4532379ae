"""Files of verl: `DataProto` pickles (`DataProto.save_to_disk`), and the same fields saved by `torch.save`.

Source: verl 0.9.1 as released, and the same in verl-project/verl at 1dda039b9c63: verl/protocol.py
(`DataProto.__getstate__`: a batch of tensors, as the bytes of a `torch.save`d TensorDict, or with
VERL_DATAPROTO_SERIALIZATION_METHOD=numpy as dtype, shape and bytes; then `non_tensor_batch` and `meta_info`),
verl/trainer/ppo/ray_trainer.py (`old_log_probs` log P at the start of the step, `rollout_log_probs` log Q
with rollout.calculate_log_probs=True, `response_mask`, `responses`, `advantages`, `meta_info["temperature"]`),
verl/experimental/fully_async_policy/detach_utils.py (`min_global_steps` and
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

from kc_otel.contract.slices import Scalar
from kc_otel.recordings.importers.imported import Imported, Refusals, batch_rows, needed, plain
from kc_otel.recordings.importers.safe_pickle import Container, arrays, torch_load, unpickled
from kc_otel.recordings.recording import RecordingError

ENDINGS: Final = (".pkl", ".pickle", ".pt", ".pth", ".dp")
_SIDES: Final = ("old_log_probs", "rollout_log_probs")


def is_text_dump(record: Mapping[str, Any] | None) -> bool:
    """Return True for a record of `trainer.rollout_data_dir` or `validation_data_dir`: text and scores only."""
    return record is not None and {"input", "output", "step"} <= set(record) and not any(s in record for s in _SIDES)


def read(path: Path, refusals: Refusals) -> Iterator[Imported]:
    """The sequences of a file; errors as `detect.read_file`."""
    batch, others, meta = _loaded(path)
    hint = "set rollout.calculate_log_probs=True and save the batch after old_log_probs are computed"
    train, inference = needed(path, batch, _SIDES, hint)

    def about(row: int) -> tuple[dict[str, Scalar], tuple[int | None, int | None]]:
        given = plain({name: values[row] for name, values in others.items() if len(values) == train.shape[0]})
        return {**given, **_counted(batch, row, train.shape[-1]), **_step(meta)}, _weights(given, meta)

    return batch_rows(
        path,
        refusals,
        dict(zip(_SIDES, (train, inference), strict=True)),
        _masks(path, batch, train.shape),
        about,
        token_ids=batch.get("responses"),
        advantages=batch.get("advantages"),
        prompt_ids=batch.get("prompts"),
        processing=plain({"temperature": meta["temperature"]}) if "temperature" in meta else None,
    )


def _masks(path: Path, batch: Mapping[str, NDArray[Any]], shape: tuple[int, ...]) -> dict[str, NDArray[Any]]:
    found = {name: batch[name] for name in ("response_mask", "loss_mask") if name in batch}
    if not found and "attention_mask" in batch:
        found["attention_mask"] = batch["attention_mask"][:, -shape[-1] :]
    if not found:
        raise RecordingError(
            f"{path}: has neither response_mask nor attention_mask, so that padding would count; save one of them"
        )
    return found


def _counted(batch: Mapping[str, NDArray[Any]], row: int, width: int) -> dict[str, int | float]:
    """Return a response's usual attributes for slices."""
    found: dict[str, int | float] = {}
    if "attention_mask" in batch:
        found["prompt_tokens"] = int((batch["attention_mask"][row][:-width] != 0).sum())
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


def _loaded(path: Path) -> tuple[dict[str, NDArray[Any]], dict[str, Any], dict[str, Any]]:
    """Tensors as arrays, other columns, and what is said of the batch."""
    content = path.read_bytes()
    if content[:2] == b"PK":
        return arrays(torch_load(path, content)), {}, {}
    state = unpickled(path, content, "verl")
    if not isinstance(state, Container) or not isinstance(state.state, tuple) or len(state.state) != 3:
        raise RecordingError(
            f"{path}: holds {type(state).__name__}, not a DataProto; save the batch with DataProto.save_to_disk"
        )
    tensors, others, meta = state.state
    if isinstance(tensors, bytes):
        tensors = torch_load(path, tensors)
    elif isinstance(tensors, tuple):
        tensors = {name: _from_bytes(path, name, part) for name, part in tensors[2].items()}
    return arrays({} if tensors is None else tensors), dict(others or {}), dict(meta or {})


def _from_bytes(path: Path, name: str, part: Any) -> Any:
    if len(part) != 3:
        raise RecordingError(f"{path}: {name}: is a nested tensor; save padded tensors")
    dtype, shape, data = part
    if dtype == "bfloat16":
        wide = np.frombuffer(bytes(data), dtype=np.uint16).astype(np.uint32) << 16
        return wide.view(np.float32).reshape(tuple(shape))
    return np.frombuffer(bytes(data), dtype=dtype).reshape(tuple(shape))
