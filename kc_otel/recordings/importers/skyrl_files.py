"""What SkyRL writes with `trainer.dump_data_batch=true`: `dumped_data/global_step_N_training_input.pkl`.

Source: NovaSky-AI/SkyRL 0.3.0 at a9564572eb8e, skyrl/train/trainer.py (`dump_data`, after log-probabilities and
advantages are there; rewards are gone by then), skyrl/backends/skyrl_train/training_batch.py
(`TensorBatch.__getstate__`: bytes, shape and dtype of each tensor), skyrl/train/dataset/preprocess.py: `sequences`
[sequences, prompt and response] are padded on the left, and what is of responses alone, [sequences, response], too.
`action_log_probs` are log P at the start of the step, `rollout_logprobs` log Q where the engine was asked for them
(`generator.sampling_params.logprobs`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kc_otel.recordings.importers.imported import Imported, ImportFileError, Refusals
from kc_otel.recordings.importers.safe_pickle import arrays, names_in, torch_load, unpickled

__all__ = ["looks_like", "read"]

_NAME: Final = re.compile(r"global_step_(\d+)_training_input\.pkl$")
_NEEDED: Final = ("action_log_probs", "rollout_logprobs", "loss_mask")


def looks_like(path: Path) -> bool:
    """Whether a pickle is SkyRL's."""
    return names_in(path, b"skyrl", b"_rebuild_tensor_batch")


def read(path: Path, refusals: Refusals, *, trust: bool = False) -> Iterator[Imported]:
    """The sequences of a file.

    Raises:
        ImportFileError: If it holds something else, or has not both kernels' log-probabilities.
        OSError: If it cannot be read.
    """
    batch = _loaded(path, trust=trust)
    if missing := [name for name in _NEEDED if name not in batch]:
        raise ImportFileError(
            f"{path}: has no {' and no '.join(missing)}, only {', '.join(sorted(batch))}; set "
            "generator.sampling_params.logprobs=1 and let the trainer compute action_log_probs"
        )
    train, inference = (batch[name].astype(np.float64) for name in _NEEDED[:2])
    mask = batch["loss_mask"] != 0
    if train.ndim != 2 or not train.shape == inference.shape == mask.shape:
        shapes = ", ".join(str(each.shape) for each in (train, inference, mask))
        raise ImportFileError(f"{path}: {', '.join(_NEEDED)} have shapes {shapes}, not one [sequences, response]")
    named = _NAME.search(path.name)
    step = int(named[1]) if named else None
    ids = batch["sequences"][:, -train.shape[1] :] if "sequences" in batch else None
    advantages = batch.get("advantages")
    for row, kept in enumerate(mask):
        if not kept.any():
            refusals.add("no_tokens", f"{path}: row {row}: loss_mask leaves no token")
            continue
        yield Imported(
            train[row][kept],
            inference[row][kept],
            None if ids is None else ids[row][kept].astype(np.int64),
            None if advantages is None else advantages[row][kept].astype(np.float64),
            {"tokens": int(kept.sum()), **({} if step is None else {"step": step})},
            (step, None),
        )


def _loaded(path: Path, *, trust: bool) -> dict[str, NDArray[Any]]:
    found = unpickled(path, path.read_bytes(), "skyrl", trust=trust)
    if isinstance(found, Mapping):  # SkyRL itself, which is a dict of tensors
        return arrays(found)
    state = getattr(found, "state", None)
    if not isinstance(state, dict) or not isinstance(state.get("batch_dict"), dict):
        raise ImportFileError(f"{path}: holds {type(found).__name__}, not a TrainingInputBatch of SkyRL")
    batch: dict[str, NDArray[Any]] = {}
    for name, part in state["batch_dict"].items():
        if part is None or part.get("format") == "tensor_list":
            continue
        if part.get("format") == "torch":
            batch.update(arrays({name: torch_load(path, part["data"], trust=False)}))
        else:
            batch[name] = np.frombuffer(part["data"], dtype=part["dtype"]).reshape(part["shape"])
    return batch
