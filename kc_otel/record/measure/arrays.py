"""Arrays as they come: NumPy or torch, any floating dtype, any device, read without copying more than a block.

Half precision becomes float32, which holds it exactly, only for the rows that are being worked on; float64 stays.
torch is imported only where somebody passed a tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
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


def largest(values: Any) -> Any:
    """Largest value along the last axis, NaN where one is."""
    return values.amax(-1) if is_tensor(values) else values.max(-1)


def as_host(data: Any) -> NDArray[Any]:
    """A NumPy view of an array of numbers that NumPy has a dtype for; a copy only from another device.

    Args:
        data: Anything but a bfloat16 tensor; see `host_rows` for those.
    """
    if on_gpu(data):
        return _read_back(data.detach())
    if is_tensor(data):
        return data.detach().cpu().numpy()  # type: ignore[no-any-return]
    return np.asarray(data)


def _read_back(data: Any) -> NDArray[Any]:
    """A tensor of a GPU through pinned memory: the thread sleeps until this stream's copy is done, and no other's."""
    import torch  # noqa: PLC0415 - a caller with a tensor has loaded it

    host = torch.empty(data.shape, dtype=data.dtype, pin_memory=True)
    host.copy_(data, non_blocking=True)
    done = torch.cuda.Event(blocking=True)
    done.record(torch.cuda.current_stream(data.device))
    done.synchronize()
    return host.numpy()  # type: ignore[no-any-return]


def as_bool(data: Any) -> NDArray[np.bool_]:
    """A mask as bool: values above 0 count.

    Raises:
        ValueError: If it holds anything else than truth values or numbers, or such as no mask has: labels say -100 and
            additive masks -inf where a token does not count.
    """
    mask = as_host(data)
    if mask.dtype == np.bool_:
        return mask
    if mask.dtype.kind not in "fiu":
        msg = f"mask: is of dtype {mask.dtype}; pass truth values, or 0 and 1"
        raise ValueError(msg)
    wrong = ~((mask >= 0) & (mask < np.inf))
    if wrong.any():
        msg = f"mask: holds {mask[wrong][0]:g}; pass truth values, or 1 where a token counts and 0 where it does not"
        raise ValueError(msg)
    counts: NDArray[np.bool_] = mask != 0
    return counts


@dataclass(frozen=True, slots=True, eq=False)
class HostRows:
    """A floating array in host memory whose rows are read as float32, or float64 where they are float64.

    Attributes:
        data: The array, [rows, ...]; bfloat16 as its bits, uint16.
        bfloat16: Whether `data` holds bits of bfloat16.
    """

    data: NDArray[Any]
    bfloat16: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        return self.data.shape

    def read(self, rows: Any) -> Floats:
        """Return the selected part as float32 or float64; it may be a view, so never write into it."""
        part = self.data[rows]
        if self.bfloat16:
            bits: NDArray[np.uint32] = part.astype(np.uint32) << np.uint32(16)
            return bits.view(np.float32)
        floats: Floats = part if part.dtype == np.float64 else part.astype(np.float32, copy=False)
        return floats


def host_rows(data: Any) -> HostRows:
    """Rows of a NumPy array, a tensor on any device or nested lists, without a copy where there is one on the host.

    Raises:
        ValueError: If it does not hold real numbers.
    """
    if is_tensor(data):
        data = data.detach().cpu()
        if str(data.dtype) == "torch.bfloat16":
            import torch  # noqa: PLC0415 - a caller with a tensor has loaded it

            return HostRows(data.view(torch.int16).numpy().view(np.uint16), bfloat16=True)
        try:
            data = data.numpy()
        except TypeError as error:
            kind = data.dtype if str(data.layout) == "torch.strided" else data.layout
            raise ValueError(
                f"dtype: {kind} is not read on a CPU; pass a dense tensor of half precision or more"
            ) from error
    array = np.asarray(data)
    if array.dtype.name == "bfloat16":
        return HostRows(array.view(np.uint16), bfloat16=True)
    if array.dtype.kind not in "fiu":
        msg = f"dtype: {array.dtype} does not hold real numbers; pass floating-point log-probabilities or logits"
        raise ValueError(msg)
    return HostRows(array, bfloat16=False)
