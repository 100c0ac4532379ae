"""Batches of sampled log-probabilities, NumPy or torch of any floating dtype, in blocks that stay in cache.

Half precision becomes float32, which holds it exactly, only for the rows that are being worked on; float64 stays. Every
step after this reads a block's tokens as one flat array, row after row: padding costs nothing, and never counts. torch
is imported only where somebody passed a tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating[Any]]
BLOCK: Final = 32_768
"""Tokens per block: enough to spread the cost of a NumPy call, few enough that a block's arrays stay in cache."""


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
    """A NumPy view of an array of numbers that NumPy has a dtype for, not bfloat16; a copy only from another device."""
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

    ValueError for what no mask has: labels say -100 and additive masks -inf where a token does not count.
    """
    mask = as_host(data)
    if mask.dtype == np.bool_:
        return mask
    if mask.dtype.kind not in "fiu":
        raise ValueError(f"mask: is of dtype {mask.dtype}; pass truth values, or 0 and 1")
    wrong = ~((mask >= 0) & (mask < np.inf))
    if wrong.any():
        raise ValueError(
            f"mask: holds {mask[wrong][0]:g}; pass truth values, or 1 where a token counts and 0 where it does not"
        )
    counts: NDArray[np.bool_] = mask != 0
    return counts


@dataclass(frozen=True, slots=True, eq=False)
class HostRows:
    """A floating array in host memory whose rows are read as float32, or float64 where they are float64."""

    data: NDArray[Any]  # [rows, ...]; bfloat16 as its bits, uint16
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
    """Rows of a NumPy array, a tensor on any device or nested lists, without a copy where there is one on the host."""
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
        raise ValueError(
            f"dtype: {array.dtype} does not hold real numbers; pass floating-point log-probabilities or logits"
        )
    return HostRows(array, bfloat16=False)


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Some rows of a batch, their unmasked tokens packed one row after the other."""

    rows: NDArray[np.intp]  # index of each row in the batch, [n]; none of them is empty
    starts: NDArray[np.intp]  # where each row begins in the packed arrays, [n]
    lengths: NDArray[np.intp]  # tokens of each row, [n]
    train: Floats  # log P(y), float32 or float64 [tokens]
    inference: Floats  # log Q(y)

    @property
    def sides(self) -> tuple[tuple[Floats, Floats, str], ...]:
        """Each side, the other one, and its name."""
        return (self.train, self.inference, "training"), (self.inference, self.train, "inference")

    def only(self, kept: NDArray[np.bool_]) -> Block:
        """The rows that are kept, [n]."""
        tokens = np.repeat(kept, self.lengths)
        lengths = self.lengths[kept]
        return Block(self.rows[kept], _starts(lengths), lengths, self.train[tokens], self.inference[tokens])


@dataclass(frozen=True, slots=True, eq=False)
class SampledBatch:
    """Log-probabilities of sampled tokens from both kernels, [sequences, tokens], in host memory."""

    train: HostRows
    inference: HostRows
    mask: NDArray[np.bool_] | None  # which tokens count; None when all do
    lengths: NDArray[np.intp]  # tokens of each sequence that count

    @classmethod
    def of(cls, train: Any, inference: Any, mask: Any = None) -> SampledBatch:
        """Pack arrays of one shape [sequences, tokens]."""
        left, right = host_rows(train), host_rows(inference)
        kept = None if mask is None else as_bool(mask)
        for name, shape in (("inference", right.shape), ("mask", left.shape if kept is None else kept.shape)):
            if shape != left.shape:
                raise ValueError(f"{name}: shape {shape} differs from train's {left.shape}")
        if len(left.shape) != 2:
            raise ValueError(f"train: shape {left.shape} is not [sequences, tokens]")
        sequences, width = left.shape
        if kept is not None and not kept.all():
            return cls(left, right, kept, np.count_nonzero(kept, axis=1).astype(np.intp))
        return cls(left, right, None, np.full(sequences, width, dtype=np.intp))

    def blocks(self, order: NDArray[np.intp]) -> Iterator[Block]:
        """The rows in this order, empty ones left out."""
        order = order[self.lengths[order] > 0]
        step = max(1, BLOCK // max(1, self.train.shape[1]))
        for first in range(0, order.size, step):
            rows = order[first : first + step]
            yield self.block(rows)

    def block(self, rows: NDArray[np.intp]) -> Block:
        """Some rows, none of them empty."""
        lengths = self.lengths[rows]
        # Neighbouring rows are read through a view; others are gathered.
        where = slice(int(rows[0]), int(rows[-1]) + 1) if (np.diff(rows) == 1).all() else rows
        train, inference = self.train.read(where), self.inference.read(where)
        if self.mask is None:
            return Block(rows, _starts(lengths), lengths, train.reshape(-1), inference.reshape(-1))
        mask = self.mask[where]
        return Block(rows, _starts(lengths), lengths, train[mask], inference[mask])

    def packed(self, values: HostRows, rows: NDArray[np.intp]) -> Floats:
        """Other numbers, [sequences] or [sequences, tokens], one per packed token of these rows."""
        part = values.read(rows)
        if part.ndim == 1:
            return np.repeat(part, self.lengths[rows])
        return part.reshape(-1) if self.mask is None else part[self.mask[rows]]

    def position(self, row: int, index: int) -> int:
        """Return the position in its row of the token with number `index` among the row's packed tokens."""
        return index if self.mask is None else int(np.flatnonzero(self.mask[row])[index])


def _starts(lengths: NDArray[np.intp]) -> NDArray[np.intp]:
    starts = np.zeros_like(lengths)
    np.cumsum(lengths[:-1], out=starts[1:])
    return starts
