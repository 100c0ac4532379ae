"""Arrays of NumPy and torch, of any floating dtype, in host memory. torch is imported only where there is a tensor."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating[Any]]


def is_tensor(data: Any) -> bool:
    """Return True if `data` is a torch tensor."""
    return type(data).__module__.partition(".")[0] == "torch" or hasattr(data, "__torch_function__")


def on_gpu(data: Any) -> bool:
    """Return True if `data` is a tensor that is measured in place: on CUDA, or ROCm, which torch calls CUDA too."""
    return is_tensor(data) and data.device.type == "cuda"


def on_host(data: Any) -> NDArray[Any]:
    """Numbers in host memory, a view where that is possible; a tensor's half precision as float32, which holds it.

    ValueError for a tensor that NumPy has no dtype or layout for.
    """
    if not is_tensor(data):
        return np.asarray(data)
    data = data.detach()
    if str(data.dtype) in {"torch.bfloat16", "torch.float16"} and str(data.layout) == "torch.strided":
        data = data.float()
    try:
        return _read_back(data) if on_gpu(data) else data.cpu().numpy()
    except TypeError as error:
        kind = data.dtype if str(data.layout) == "torch.strided" else data.layout
        raise ValueError(
            f"dtype: {kind} is not read on a CPU; pass a dense tensor of half precision or more"
        ) from error


def floats(data: Any) -> Floats:
    """Real numbers in host memory as float32, or as float64 where they are that; ValueError for anything else."""
    array = on_host(data)
    if array.dtype.name != "bfloat16" and array.dtype.kind not in "fiu":
        raise ValueError(
            f"dtype: {array.dtype} does not hold real numbers; pass floating-point log-probabilities or logits"
        )
    return array if array.dtype == np.float64 else array.astype(np.float32, copy=False)


def _read_back(data: Any) -> NDArray[Any]:
    """A tensor of a GPU through pinned memory: the thread sleeps until this stream's copy is done, and no other's."""
    import torch  # noqa: PLC0415 - a caller with a tensor has loaded it

    host = torch.empty(data.shape, dtype=data.dtype, pin_memory=True)
    host.copy_(data, non_blocking=True)
    done = torch.cuda.Event(blocking=True)
    done.record(torch.cuda.current_stream(data.device))
    done.synchronize()
    return host.numpy()  # type: ignore[no-any-return]


def as_bool(data: Any, *, whole: bool = False) -> NDArray[np.bool_]:
    """A mask as bool: values above 0 count, in full where a loss weighs by them; `whole` numbers alone if asked.

    ValueError for what no mask has: labels say -100 and additive masks -inf where a token does not count.
    """
    mask = on_host(data)
    if mask.dtype == np.bool_:
        return mask
    if mask.dtype.kind not in "fiu":
        raise ValueError(f"mask: is of dtype {mask.dtype}; pass truth values, or 0 and 1")
    wrong = ~((mask >= 0) & (mask < np.inf) & (not whole or mask == np.rint(mask)))
    if wrong.any():
        raise ValueError(
            f"mask: holds {mask[wrong][0]:g}; pass truth values, or 1 where a token counts and 0 where it does not"
        )
    counts: NDArray[np.bool_] = mask != 0
    return counts
