"""Batches that trainers pickle or save with torch, read without running what they name.

What each of verl, SkyRL, ROLL and slime calls its columns. A pickle runs whatever code it names: only the trainer's own
container, NumPy arrays and tensors are let in, each by name, and a file that holds other classes is refused.
"""

from __future__ import annotations

import importlib
import io
import pickle
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kc_otel._extras import MissingExtraError, extra
from kc_otel.contract.slices import Scalar
from kc_otel.recordings.importers.imported import Imported, Records, imported, plain
from kc_otel.recordings.recording import RecordingError

_Arrays = dict[str, NDArray[Any]]
_SKYRL_NAME: Final = re.compile(r"global_step_(\d+)_training_input\.pkl$")
_SLIME_VERSION: Final = 2
_SLIME_REMEDY: Final = (
    "dump with --save-debug-train-data, of rollouts that have log-probabilities (--use-tis or the like)"
)


def verl(path: Path) -> Records:
    """A `DataProto` pickle of verl (`DataProto.save_to_disk`), or the same fields saved by `torch.save`.

    Source: verl 0.9.1 as released, and the same in verl-project/verl at 1dda039b9c63: verl/trainer/ppo/ray_trainer.py
    (`old_log_probs` log P at the start of the step, `rollout_log_probs` log Q with rollout.calculate_log_probs=True,
    `response_mask`, `responses`, `advantages`, `meta_info["temperature"]`), all of [sequences, response], whichever of
    FSDP or Megatron trains; verl/experimental/fully_async_policy/detach_utils.py (`min_global_steps` and
    `max_global_steps`, the oldest and the newest weights that a response was sampled with;
    workers/rollout/llm_server.py keeps no more of what it sampled in between, so that there is no version for each
    token, and the oldest stands for all). The weights are called by the step that made them: `old_log_probs` of step n
    are of version n - 1, which trainer/ppo/v1/trainer_base.py takes its staleness from.
    """
    batch, others, meta = _verl_batch(path)
    hint = "set rollout.calculate_log_probs=True and save the batch after old_log_probs are computed"
    sides = _needed(path, batch, ("old_log_probs", "rollout_log_probs"), hint)
    rows, width = len(sides["old_log_probs"]), sides["old_log_probs"].shape[-1]
    attention = batch.get("attention_mask")
    masks: _Arrays = {name: batch[name] for name in ("response_mask", "loss_mask") if name in batch}
    if not masks and attention is not None:
        masks["attention_mask"] = attention[:, -width:]
    if not masks:
        raise RecordingError(
            f"{path}: has neither response_mask nor attention_mask, so that padding would count; save one of them"
        )
    given_scores = (batch.get(name) for name in ("token_level_scores", "rm_scores"))
    scores = next((values for values in given_scores if values is not None and values.ndim == 2), None)
    step = _whole(meta.get("global_steps"))  # the one that the trainer is in, counted from 1
    attributes = _attributes(others, rows)
    for row, found in enumerate(attributes):
        if attention is not None:
            found["prompt_tokens"] = int((attention[row][:-width] != 0).sum())
        if scores is not None:
            found["reward"] = float(scores[row].sum())
        if step is not None:
            found["step"] = step
        found.update(plain({name: meta[name] for name in ("temperature",) if name in meta}) | found)
    trained = None if step is None else step - 1
    return _rows(
        path,
        sides,
        masks,
        attributes,
        [(trained, _whole(found.get("min_global_steps"))) for found in attributes],
        token_ids=batch.get("responses"),
        advantages=batch.get("advantages"),
        prompt_ids=batch.get("prompts"),
    )


def _verl_batch(path: Path) -> tuple[_Arrays, dict[str, Any], dict[str, Any]]:
    """Tensors as arrays, other columns, and what is said of the batch.

    Source: verl/protocol.py (`DataProto.__getstate__`: the bytes of a `torch.save`d TensorDict, or with
    VERL_DATAPROTO_SERIALIZATION_METHOD=numpy dtype, shape and bytes; then `non_tensor_batch` and `meta_info`).
    """
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


def skyrl(path: Path) -> Records:
    """A batch of SkyRL with `trainer.dump_data_batch=true`: `dumped_data/global_step_N_training_input.pkl`.

    Source: NovaSky-AI/SkyRL 0.3.0 at a9564572eb8e, skyrl/train/trainer.py (`dump_data`, after log-probabilities and
    advantages are there; rewards are gone by then), skyrl/train/dataset/preprocess.py: `sequences` [sequences, prompt
    and response] are padded on the left, and what is of responses alone, [sequences, response], too.
    `action_log_probs` are log P at the start of the step, `rollout_logprobs` log Q where the engine was asked for them
    (`generator.sampling_params.logprobs`); a token counts under `response_mask` and `loss_mask` both.
    """
    batch = _skyrl_batch(path)
    hint = "set generator.sampling_params.logprobs=1 and let the trainer compute action_log_probs"
    sides = _needed(path, batch, ("action_log_probs", "rollout_logprobs", "loss_mask"), hint)
    masks = {"loss_mask": sides.pop("loss_mask")}
    if "response_mask" in batch:
        masks["response_mask"] = batch["response_mask"]
    named = _SKYRL_NAME.search(path.name)
    step = int(named[1]) if named else None
    rows, width = len(sides["action_log_probs"]), sides["action_log_probs"].shape[-1]
    sequences = batch.get("sequences")
    return _rows(
        path,
        sides,
        masks,
        [{} if step is None else {"step": step}] * rows,
        [(step, None)] * rows,
        token_ids=None if sequences is None else sequences[:, -width:],
        advantages=batch.get("advantages"),
        prompt_ids=None if sequences is None else sequences[:, :-width],
    )


def _skyrl_batch(path: Path) -> _Arrays:
    """Source: skyrl/backends/skyrl_train/training_batch.py (`TensorBatch.__getstate__`: bytes, shape and dtype)."""
    found = unpickled(path, path.read_bytes(), "skyrl")
    if isinstance(found, Mapping):  # SkyRL itself, which is a dict of tensors
        return arrays(found)
    state = getattr(found, "state", None)
    if not isinstance(state, dict) or not isinstance(state.get("batch_dict"), dict):
        raise RecordingError(f"{path}: holds {type(found).__name__}, not a TrainingInputBatch of SkyRL")
    batch: _Arrays = {}
    for name, part in state["batch_dict"].items():
        if part is None or part.get("format") == "tensor_list":
            continue
        if part.get("format") == "torch":
            batch.update(arrays({name: torch_load(path, part["data"])}))
        else:
            batch[name] = np.frombuffer(part["data"], dtype=part["dtype"]).reshape(part["shape"])
    return batch


def roll(path: Path) -> Records:
    """A pickled `DataProto` of ROLL.

    Source: alibaba/ROLL 0.3.0 at 8eb27cc2dc34, roll/distributed/scheduler/protocol.py (`DataProto.__getstate__`: a
    `torch.save`d TensorDict in a BytesIO, other columns, remote ones, what is said of the batch),
    roll/pipeline/rlvr/rlvr_pipeline.py and agentic/agentic_pipeline.py: `old_log_probs` are log P at the start of the
    step, and zeros where `enable_old_logprobs_recompute` is off; `infer_logprobs` are log Q, both [sequences,
    tokens - 1] with entry t of token t + 1, under `response_mask` [sequences, tokens]. The correction of
    train_infer_corrections.py takes tokens out of that mask because the sides differ there; `origin_response_mask` is
    from before, as raw rewards are in `scores` or `episode_scores` once `response_level_rewards` are normalised.
    `traj_group_id` names what an environment's rollouts share. ROLL's own dumps (`rollout_mock` with mode `dump`) are
    from before the trainer has scored anything. Its text dumps (`rollout_dump_dir`) have no log-probabilities.
    """
    state = getattr(unpickled(path, path.read_bytes(), "roll"), "state", None)
    if not (isinstance(state, tuple) and len(state) == 4 and isinstance(state[0], io.BytesIO)):
        raise RecordingError(f"{path}: holds no DataProto of ROLL; pickle the batch itself")
    batch, others, meta = arrays(torch_load(path, state[0].getvalue())), dict(state[1] or {}), dict(state[3] or {})
    hint = (
        "rollout_mock dumps before the trainer has scored: pickle the batch after old_log_probs, of an engine that "
        "returns log-probabilities"
    )
    sides = _needed(path, batch, ("old_log_probs", "infer_logprobs", "response_mask"), hint)
    mask = batch.get("origin_response_mask", sides.pop("response_mask"))[:, 1:]
    if not sides["old_log_probs"].any():
        raise RecordingError(
            f"{path}: old_log_probs are all 0: ROLL computes none; set `enable_old_logprobs_recompute: true`"
        )
    raw = () if "origin_response_mask" in batch else ("response_level_rewards",)
    given_scores = [batch.get("scores"), others.get("episode_scores"), *(batch.get(name) for name in raw)]
    scores = next((values for values in given_scores if values is not None and values.ndim == 1), None)
    ids = batch.get("input_ids")
    attributes = _attributes(others, len(mask))
    for row, found in enumerate(attributes):
        if scores is not None:
            found["reward"] = float(scores[row])
        if "traj_group_id" in found:
            found["group"] = found["traj_group_id"]
    prompts = None if ids is None else [row[: int(kept.argmax()) + 1] for row, kept in zip(ids, mask, strict=True)]
    return _rows(
        path,
        sides,
        {"response_mask": mask},
        attributes,
        [(_whole(meta.get("global_step")), None)] * len(mask),
        token_ids=None if ids is None else ids[:, 1:],
        advantages=batch.get("advantages"),
        prompt_ids=prompts,
    )


def slime(path: Path) -> Records:
    """A dump of slime with `--save-debug-train-data PATH` (or `--dump-details`): `{rollout_id}.pt`.

    Source: THUDM/slime 0.3.1 at 624b824a898a, slime/observability/train_data_utils.py (`_build_dump_payload`, format
    version 2: `samples`, a mapping for each, with tensors over the response's tokens), and actor.py beside the trainer:
    `log_probs` are log P, from the forward before training or that of training itself, `rollout_log_probs` log Q; both
    at the rollout's temperature. `raw_reward` is in the order of `rollout_position`. Weight versions are in the dump of
    rollouts (`--save-debug-rollout-data`) alone, which has no log P.
    """
    dump = torch_load(path, path.read_bytes())
    samples = dump.get("samples") if isinstance(dump, Mapping) else None
    if not isinstance(samples, list) or dump.get("format_version") != _SLIME_VERSION:
        raise RecordingError(
            f"{path}: is no dump of slime's training data of format version {_SLIME_VERSION}; {_SLIME_REMEDY}"
        )
    for row, sample in enumerate(samples):
        place = sample.get("rollout_position", row)
        rewards = dump.get("raw_reward")
        reward = rewards[place] if isinstance(rewards, list) and place < len(rewards) else None
        yield f"{path}: sample {row}", partial(_slime_sample, sample, _whole(dump.get("rollout_id")), reward)


def _slime_sample(sample: Mapping[str, Any], step: int | None, reward: Any) -> Imported | None:
    names = ("log_probs", "rollout_log_probs")
    if missing := [name for name in names if sample.get(name) is None]:
        raise KeyError(f"{' and no '.join(missing)}; {_SLIME_REMEDY}")
    batch = arrays({name: _tensor(value) for name, value in sample.items()})
    train, inference = (batch[name].astype(np.float64) for name in names)
    mask = batch["loss_masks"] != 0 if "loss_masks" in batch else np.ones(train.shape, dtype=np.bool_)
    ids = batch.get("tokens")
    attributes: dict[str, Scalar] = {
        **plain({name: value for name, value in sample.items() if name != "data_parallel_rank"}),
        "prompt_tokens": 0 if ids is None else int(ids.size - mask.size),
    }
    if isinstance(reward, int | float):
        attributes["reward"] = float(reward)
    own, prompt = (None, None) if ids is None else (ids[-mask.size :], ids[: -mask.size])
    return imported(
        mask, train, inference, attributes, weights=(step, None), token_ids=own, advantages=batch.get("advantages"),
        prompt_ids=prompt,
    )  # fmt: skip


def _tensor(value: Any) -> Any:
    """A list of numbers as an array; anything else as it is."""
    numbers = isinstance(value, list | tuple) and value and all(isinstance(item, int | float) for item in value)
    return np.asarray(value) if numbers else value


def _needed(path: Path, batch: _Arrays, names: Sequence[str], hint: str) -> _Arrays:
    """Return tensors of a batch; a RecordingError names those that are missing, and says how to have them."""
    if missing := [name for name in names if name not in batch]:
        raise RecordingError(f"{path}: has no {' and no '.join(missing)}, only {', '.join(sorted(batch))}; {hint}")
    return {name: batch[name] for name in names}


def _attributes(columns: Mapping[str, Any], rows: int) -> list[dict[str, Scalar]]:
    """The plain values of each row in the columns that have one for each."""
    whole = {name: values for name, values in columns.items() if len(values) == rows}
    return [plain({name: values[row] for name, values in whole.items()}) for row in range(rows)]


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) else None


def _rows(
    path: Path,
    sides: _Arrays,
    masks: _Arrays,
    attributes: Sequence[Mapping[str, Scalar]],
    weights: Sequence[tuple[int | None, int | None]],
    *,
    token_ids: NDArray[Any] | None,
    advantages: NDArray[Any] | None,
    prompt_ids: NDArray[Any] | Sequence[NDArray[Any]] | None,
) -> Records:
    """The rows of a padded batch, [sequences, tokens]; a token counts where none of the masks is 0."""
    train, inference = (side.astype(np.float64) for side in sides.values())
    shapes = [array.shape for array in (train, inference, *masks.values())]
    if train.ndim != 2 or len(set(shapes)) > 1:
        said = ", ".join(map(str, shapes))
        raise RecordingError(f"{path}: {', '.join((*sides, *masks))} have shapes {said}, not one [sequences, tokens]")
    for row, kept in enumerate(np.logical_and.reduce([mask != 0 for mask in masks.values()])):
        ids, gains, prompt = (None if values is None else values[row] for values in (token_ids, advantages, prompt_ids))
        yield f"{path}: row {row}", partial(
            imported, kept, train[row], inference[row], attributes[row], weights=weights[row], token_ids=ids,
            advantages=gains, prompt_ids=prompt,
        )  # fmt: skip


_ARRAY_FUNCTIONS: Final = {"_reconstruct", "ndarray", "dtype", "scalar", "_frombuffer"}
_NUMPY: Final = {
    "numpy",
    "numpy.core.multiarray",
    "numpy._core.multiarray",
    "numpy.core.numeric",
    "numpy._core.numeric",
}
_PLAIN: Final = {("collections", "OrderedDict"), ("_codecs", "encode"), ("builtins", "set"), ("builtins", "frozenset")}
_CONTAINERS: Final = {"DataProto", "TrainingInputBatch", "_rebuild_tensor_batch"}
_STAND_INS: Final[Mapping[tuple[str, str], Callable[..., Any]]] = {
    ("_io", "BytesIO"): io.BytesIO,
    ("torch", "Size"): tuple,
    ("torch", "device"): lambda *where: where,  # which is not needed
}
_HEAD_BYTES: Final = 1 << 16
"""Bytes at a file's begin in which its trainer's name is looked for."""


class Container:
    """Stands in for a trainer's class, or SkyRL's `_rebuild_tensor_batch`: keeps the state and does nothing."""

    def __init__(self, _: object = None, state: Any = None) -> None:
        self.state = state

    def __setstate__(self, state: Any) -> None:
        self.state = state


def unpickled(path: Path, content: bytes, package: str) -> Any:
    """Unpickle a file, with the container of a trainer's top-level package as a `Container`, and no other class."""
    try:
        return _Restricted(content, package).load()
    except (pickle.UnpicklingError, EOFError, AttributeError, ImportError, IndexError, TypeError) as error:
        raise RecordingError(
            f"{path}: {error}" if str(error).startswith("holds") else f"{path}: is no batch's pickle ({error})"
        ) from None


def names_in(path: Path, *names: bytes) -> bool:
    """Return True if all of these names (of classes or keys) are in a file's first bytes."""
    with path.open("rb") as file:
        begin = file.read(_HEAD_BYTES)
    return all(name in begin for name in names)


class _Restricted(pickle.Unpickler):
    def __init__(self, content: bytes, package: str) -> None:
        super().__init__(io.BytesIO(content))
        self._package = package

    def find_class(self, module: str, name: str) -> Any:
        if module.split(".", 1)[0] == self._package and name in _CONTAINERS:
            return Container
        if (found := _STAND_INS.get((module, name))) is not None:
            return found
        if (module in _NUMPY and name in _ARRAY_FUNCTIONS) or (module, name) in _PLAIN:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"holds {module}.{name}, which a batch needs not; save it without that")


def torch_load(path: Path, content: bytes) -> Any:
    """Load a file of `torch.save`: tensors, numbers, texts and containers of them, and nothing else."""
    try:
        with extra("torch", "a file of tensors"):
            import torch  # noqa: PLC0415 - only where a file needs it
    except MissingExtraError as error:
        raise RecordingError(f"{path}: {error}") from None
    try:
        importlib.import_module("tensordict")  # it tells torch which of its classes are harmless
    except ImportError:
        hint = "; a TensorDict needs: pip install tensordict"
    else:
        hint = ""
    try:
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, AttributeError, ImportError) as error:
        named = re.search(r"GLOBAL (\S+)", str(error))
        raise RecordingError(
            f"{path}: tensors cannot be read safely ({named[1] if named else type(error).__name__}){hint}"
        ) from None


def arrays(batch: Any) -> dict[str, NDArray[Any]]:
    """Tensors of a TensorDict or a mapping, in host memory; bfloat16 becomes float32."""
    found = {}
    for name, value in batch.items():
        if hasattr(value, "detach"):
            wide = value.detach().cpu()
            found[str(name)] = (wide.float() if wide.dtype.is_floating_point else wide).numpy()
        elif isinstance(value, np.ndarray):
            found[str(name)] = value
    return found
