"""Files of SkyRL with `trainer.dump_data_batch=true`: `dumped_data/global_step_N_training_input.pkl`.

Source: NovaSky-AI/SkyRL 0.3.0 at a9564572eb8e, skyrl/train/trainer.py (`dump_data`, after log-probabilities and
advantages are there; rewards are gone by then), skyrl/backends/skyrl_train/training_batch.py
(`TensorBatch.__getstate__`: bytes, shape and dtype of each tensor), skyrl/train/dataset/preprocess.py: `sequences`
[sequences, prompt and response] are padded on the left, and what is of responses alone, [sequences, response], too.
`action_log_probs` are log P at the start of the step, `rollout_logprobs` log Q where the engine was asked for them
(`generator.sampling_params.logprobs`); a token counts under `response_mask` and `loss_mask` both.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kc_otel.recordings.importers.imported import Imported, Refusals, batch_rows, needed
from kc_otel.recordings.importers.safe_pickle import arrays, names_in, torch_load, unpickled
from kc_otel.recordings.recording import RecordingError

_NAME: Final = re.compile(r"global_step_(\d+)_training_input\.pkl$")
_SIDES: Final = ("action_log_probs", "rollout_logprobs")


def looks_like(path: Path) -> bool:
    """Return True if a pickle is SkyRL's."""
    return names_in(path, b"skyrl", b"_rebuild_tensor_batch")


def read(path: Path, refusals: Refusals) -> Iterator[Imported]:
    """The sequences of a file; errors as `detect.read_file`."""
    batch = _loaded(path)
    hint = "set generator.sampling_params.logprobs=1 and let the trainer compute action_log_probs"
    train, inference, _ = needed(path, batch, (*_SIDES, "loss_mask"), hint)
    named = _NAME.search(path.name)
    step = int(named[1]) if named else None
    sequences, width = batch.get("sequences"), train.shape[-1]
    return batch_rows(
        path,
        refusals,
        dict(zip(_SIDES, (train, inference), strict=True)),
        {name: batch[name] for name in ("loss_mask", "response_mask") if name in batch},
        lambda _: ({} if step is None else {"step": step}, (step, None)),
        token_ids=None if sequences is None else sequences[:, -width:],
        advantages=batch.get("advantages"),
        prompt_ids=None if sequences is None else sequences[:, :-width],
    )


def _loaded(path: Path) -> dict[str, NDArray[Any]]:
    found = unpickled(path, path.read_bytes(), "skyrl")
    if isinstance(found, Mapping):  # SkyRL itself, which is a dict of tensors
        return arrays(found)
    state = getattr(found, "state", None)
    if not isinstance(state, dict) or not isinstance(state.get("batch_dict"), dict):
        raise RecordingError(f"{path}: holds {type(found).__name__}, not a TrainingInputBatch of SkyRL")
    batch: dict[str, NDArray[Any]] = {}
    for name, part in state["batch_dict"].items():
        if part is None or part.get("format") == "tensor_list":
            continue
        if part.get("format") == "torch":
            batch.update(arrays({name: torch_load(path, part["data"])}))
        else:
            batch[name] = np.frombuffer(part["data"], dtype=part["dtype"]).reshape(part["shape"])
    return batch
