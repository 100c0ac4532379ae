"""What verl writes: `DataProto` pickles (`DataProto.save_to_disk`), and the same fields saved by `torch.save`.

Source: verl 0.9.1 as released: verl/protocol.py (`DataProto.__getstate__`: a batch of tensors, as the bytes of a
`torch.save`d TensorDict, or with VERL_DATAPROTO_SERIALIZATION_METHOD=numpy as dtype, shape and bytes; then
`non_tensor_batch` and `meta_info`), verl/trainer/ppo/ray_trainer.py (`old_log_probs` log P at the start of the step,
`rollout_log_probs` log Q with rollout.calculate_log_probs=True, `response_mask`, `responses`, `advantages`,
`meta_info["temperature"]`), verl/experimental/fully_async_policy/detach_utils.py (`min_global_steps` and
`max_global_steps`, the weight versions a response was sampled with). All of [sequences, response], whichever of FSDP or
Megatron trains. `trainer.rollout_data_dir` dumps text and scores, no log-probabilities: nothing can be measured of it.

A pickle runs whatever code it names. Only DataProto itself, NumPy arrays and tensors are let in here, each by name, so
that a file from elsewhere can do nothing; one that holds other classes is refused unless the caller trusts it.
"""

from __future__ import annotations

import importlib
import io
import pickle
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kc_otel._extras import MissingExtraError, extra
from kc_otel.recordings.importers.imported import Imported, ImportFileError, Refusals, plain

__all__ = ["ENDINGS", "is_text_dump", "read"]

ENDINGS: Final = (".pkl", ".pickle", ".pt", ".pth", ".dp")
_SIDES: Final = ("old_log_probs", "rollout_log_probs")
_ARRAYS: Final = {"_reconstruct", "ndarray", "dtype", "scalar", "_frombuffer"}
_NUMPY: Final = {
    "numpy",
    "numpy.core.multiarray",
    "numpy._core.multiarray",
    "numpy.core.numeric",
    "numpy._core.numeric",
}
_PLAIN: Final = {("collections", "OrderedDict"), ("_codecs", "encode"), ("builtins", "set"), ("builtins", "frozenset")}


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
            {**given, **_counted(batch, row, kept)},
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
    """Step of the trainer, and the oldest step whose weights sampled the response."""
    step, oldest = meta.get("global_steps"), given.get("min_global_steps")
    return step if isinstance(step, int) else None, oldest if isinstance(oldest, int) else None


def _loaded(path: Path, *, trust: bool) -> tuple[dict[str, NDArray[Any]], dict[str, Any], dict[str, Any]]:
    """Tensors as arrays, other columns, and what is said of the batch."""
    content = path.read_bytes()
    if content[:2] == b"PK":
        return _arrays(_torch_load(path, content, trust=trust)), {}, {}
    try:
        state = pickle.loads(content) if trust else _Restricted(io.BytesIO(content)).load()  # noqa: S301 - asked for
    except (pickle.UnpicklingError, EOFError, AttributeError, ImportError, IndexError, TypeError) as error:
        msg = f"{path}: {error}" if str(error).startswith("holds") else f"{path}: is no DataProto pickle ({error})"
        raise ImportFileError(msg) from None
    if trust and hasattr(state, "batch"):
        return _arrays(state.batch), dict(state.non_tensor_batch), dict(state.meta_info)
    if not isinstance(state, _DataProto) or not isinstance(state.state, tuple) or len(state.state) != 3:
        msg = f"{path}: holds {type(state).__name__}, not a DataProto; save the batch with DataProto.save_to_disk"
        raise ImportFileError(msg)
    tensors, others, meta = state.state
    if isinstance(tensors, bytes):
        tensors = _torch_load(path, tensors, trust=False)
    elif isinstance(tensors, tuple):
        tensors = {name: _from_bytes(path, name, part) for name, part in tensors[2].items()}
    return _arrays({} if tensors is None else tensors), dict(others or {}), dict(meta or {})


class _DataProto:
    """Stands in for verl's class, which need not be installed: keeps the state and does nothing."""

    state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Restricted(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name == "DataProto" and module.split(".", 1)[0] == "verl":
            return _DataProto
        if (module, name) == ("torch", "Size"):
            return tuple
        if (module in _NUMPY and name in _ARRAYS) or (module, name) in _PLAIN:
            return super().find_class(module, name)
        msg = f"holds {module}.{name}, which a batch needs not; --trust runs it, for files that you wrote yourself"
        raise pickle.UnpicklingError(msg)


def _torch_load(path: Path, content: bytes, *, trust: bool) -> Any:
    try:
        with extra("torch", "a file of tensors"):
            import torch  # noqa: PLC0415 - only where a file needs it
    except MissingExtraError as error:
        raise ImportFileError(f"{path}: {error}") from None
    try:
        importlib.import_module("tensordict")  # it tells torch which of its classes are harmless
    except ImportError:
        hint = "; a TensorDict needs: pip install tensordict"
    else:
        hint = ""
    try:
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=not trust)
    except (pickle.UnpicklingError, RuntimeError, AttributeError, ImportError) as error:
        named = re.search(r"GLOBAL (\S+)", str(error))
        msg = f"{path}: tensors cannot be read safely ({named[1] if named else type(error).__name__}){hint}"
        raise ImportFileError(msg) from None


def _from_bytes(path: Path, name: str, part: Any) -> Any:
    if len(part) != 3:
        msg = f"{path}: {name}: is a nested tensor; save padded tensors"
        raise ImportFileError(msg)
    dtype, shape, data = part
    if dtype == "bfloat16":
        wide = np.frombuffer(bytes(data), dtype=np.uint16).astype(np.uint32) << 16
        return wide.view(np.float32).reshape(tuple(shape))
    return np.frombuffer(bytes(data), dtype=dtype).reshape(tuple(shape))


def _arrays(batch: Any) -> dict[str, NDArray[Any]]:
    """Tensors of a TensorDict or a mapping, in host memory; bfloat16 becomes float32."""
    found = {}
    for name, value in batch.items():
        if hasattr(value, "detach"):
            wide = value.detach().cpu()
            found[str(name)] = (wide.float() if wide.dtype.is_floating_point else wide).numpy()
        elif isinstance(value, np.ndarray):
            found[str(name)] = value
    return found
