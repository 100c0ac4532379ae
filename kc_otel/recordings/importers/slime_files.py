"""Files of slime with `--save-debug-train-data PATH` (or `--dump-details`): `{rollout_id}.pt`.

Source: THUDM/slime 0.3.1 at 624b824a898a, slime/observability/train_data_utils.py (`_build_dump_payload`, format
version 2: `samples`, a mapping for each, with tensors over the response's tokens), and actor.py beside the trainer:
`log_probs` are log P, from the forward before training or that of training itself, `rollout_log_probs` log Q; both at
the rollout's temperature. `raw_reward` is in the order of `rollout_position`. Weight versions are in the dump of
rollouts (`--save-debug-rollout-data`) alone, which has no log P.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from kc_otel.contract.slices import Scalar
from kc_otel.recordings.importers.imported import Imported, Refusals, cut, plain
from kc_otel.recordings.importers.safe_pickle import arrays, names_in, torch_load
from kc_otel.recordings.recording import RecordingError

_VERSION: Final = 2
_SIDES: Final = ("log_probs", "rollout_log_probs")
_REMEDY: Final = "dump with --save-debug-train-data, of rollouts that have log-probabilities (--use-tis or the like)"


def looks_like(path: Path) -> bool:
    """Return True if a file of tensors is slime's."""
    return names_in(path, b"rollout_id", b"samples")


def read(path: Path, refusals: Refusals) -> Iterator[Imported]:
    """The sequences of a file; errors as `detect.read_file`."""
    dump = torch_load(path, path.read_bytes())
    samples = dump.get("samples") if isinstance(dump, Mapping) else None
    if not isinstance(samples, list) or dump.get("format_version") != _VERSION:
        raise RecordingError(f"{path}: is no dump of slime's training data of format version {_VERSION}; {_REMEDY}")
    step, rewards = dump.get("rollout_id"), dump.get("raw_reward")
    for row, sample in enumerate(samples):
        if missing := [name for name in _SIDES if sample.get(name) is None]:
            refusals.add("no_logprobs", f"{path}: sample {row}: has no {' and no '.join(missing)}; {_REMEDY}")
            continue
        batch = arrays({name: _tensor(value) for name, value in sample.items()})
        train, inference = (batch[name].astype(np.float64) for name in _SIDES)
        mask = batch["loss_masks"] != 0 if "loss_masks" in batch else np.ones(train.shape, dtype=np.bool_)
        ids, place = batch.get("tokens"), sample.get("rollout_position", row)
        attributes: dict[str, Scalar] = {
            **plain({name: value for name, value in sample.items() if name != "data_parallel_rank"}),
            "prompt_tokens": 0 if ids is None else int(ids.size - mask.size),
        }
        if isinstance(rewards, list) and place < len(rewards) and isinstance(rewards[place], int | float):
            attributes["reward"] = float(rewards[place])
        weights = (step if isinstance(step, int) else None, None)
        own, prompt = (None, None) if ids is None else (ids[-mask.size :], ids[: -mask.size])
        try:
            found = cut(mask, train, inference, own, batch.get("advantages"), prompt, attributes, weights)
        except ValueError as error:
            refusals.add("shape_mismatch", f"{path}: sample {row}: {error}")
            continue
        if found is None:
            refusals.add("no_tokens", f"{path}: sample {row}: loss_masks leaves no token")
        else:
            yield found


def _tensor(value: Any) -> Any:
    """A list of numbers as an array; anything else as it is."""
    numbers = isinstance(value, list | tuple) and value and all(isinstance(item, int | float) for item in value)
    return np.asarray(value) if numbers else value
