"""Batches that trainers pickle or save with torch, read without running what they name.

A pickle runs whatever code it names: only the trainer's own container, NumPy arrays and tensors are let in, each by
name, and a file that holds other classes is refused.
"""

from __future__ import annotations

import io
import math
import pickle
import re
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kc_otel._extras import MissingExtraError, extra
from kc_otel.recordings.recording import RecordingError

Batch = tuple[dict[str, NDArray[Any]], Mapping[str, Any], Mapping[str, Any]]
"""Tensors as arrays, other columns, and what is said of the batch."""


def verl_batch(path: Path) -> Batch:
    """A `DataProto`, or the tensors alone.

    Source: verl/protocol.py (`DataProto.__getstate__`: the bytes of a `torch.save`d TensorDict, then
    `non_tensor_batch` and `meta_info`).
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
    if not isinstance(tensors, bytes):
        raise RecordingError(
            f"{path}: holds no tensors in the default serialization; unset VERL_DATAPROTO_SERIALIZATION_METHOD"
        )
    return arrays(torch_load(path, tensors)), others or {}, meta or {}


def skyrl_batch(path: Path) -> Batch:
    """Source: skyrl/backends/skyrl_train/training_batch.py (`TensorBatch.__getstate__`: bytes, shape and dtype)."""
    found = unpickled(path, path.read_bytes(), "skyrl")
    state = getattr(found, "state", None)
    if not isinstance(state, dict) or not isinstance(state.get("batch_dict"), dict):
        raise RecordingError(f"{path}: holds {type(found).__name__}, not a TrainingInputBatch of SkyRL")
    tensors = {}
    for name, part in state["batch_dict"].items():
        if part is None or part.get("format") == "tensor_list":
            continue
        if part.get("format") == "torch":
            tensors.update(arrays({name: torch_load(path, part["data"])}))
        else:
            tensors[name] = np.frombuffer(part["data"], dtype=part["dtype"]).reshape(part["shape"])
    return tensors, {}, {}


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
    ("torch", "Size"): tuple,
    ("torch", "device"): lambda *where: where,  # which is not needed
}
_HEAD_BYTES: Final = 1 << 16


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
    allowed = getattr(torch.serialization, "safe_globals", lambda _: nullcontext())  # torch 2.4 has none
    try:
        with allowed([_tensors_of]):
            return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except (
        pickle.UnpicklingError,
        RuntimeError,
        AttributeError,
        ImportError,
        LookupError,
        TypeError,
        ValueError,
    ) as error:
        named = re.search(r"GLOBAL (\S+)", str(error))
        said = named[1] if named else type(error).__name__
        raise RecordingError(f"{path}: tensors cannot be read safely ({said}); save plain tensors") from None


def _tensors_of(metadata: Mapping[str, Any], storage: Any) -> dict[str, Any]:
    """Tensors of the consolidated TensorDict that `DataProto` saves, instead of tensordict's own function.

    Source: tensordict 0.10.0, tensordict/_reductions.py: dtype, shape, begin, end and padding of each, in one storage.
    """
    import torch  # noqa: PLC0415 - its file is being loaded

    found = {}
    for name, (dtype, shape, begin, end, _) in metadata["leaves"].items():
        values = storage[begin:end].view(getattr(torch, dtype.removeprefix("torch.")))
        found[name] = values[: math.prod(shape)].view(shape)
    return found


_tensors_of.__module__, _tensors_of.__qualname__ = "tensordict._reductions", "_rebuild_tensordict_files_consolidated"


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
