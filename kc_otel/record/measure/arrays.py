"""Batches of sampled log-probabilities, NumPy or torch of any floating dtype, in blocks that stay in cache.

They are measured in host memory, wherever they come from: two numbers a token are little to read back, and a trainer's
device has better to do. Every step after this reads a block's tokens as one flat array, row after row: padding costs
nothing, and never counts. torch is imported only where somebody passed a tensor.
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


def as_bool(data: Any) -> NDArray[np.bool_]:
    """A mask as bool: values above 0 count.

    ValueError for what no mask has: labels say -100 and additive masks -inf where a token does not count.
    """
    mask = on_host(data)
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

    train: Floats
    inference: Floats
    mask: NDArray[np.bool_] | None  # which tokens count; None when all do
    lengths: NDArray[np.intp]  # tokens of each sequence that count

    @classmethod
    def of(cls, train: Any, inference: Any, mask: Any = None) -> SampledBatch:
        """Pack arrays of one shape [sequences, tokens]."""
        left, right = floats(train), floats(inference)
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
        train, inference = self.train[where], self.inference[where]
        if self.mask is None:
            return Block(rows, _starts(lengths), lengths, train.reshape(-1), inference.reshape(-1))
        mask = self.mask[where]
        return Block(rows, _starts(lengths), lengths, train[mask], inference[mask])

    def packed(self, values: Floats, rows: NDArray[np.intp]) -> Floats:
        """Other numbers, [sequences] or [sequences, tokens], one per packed token of these rows."""
        part = values[rows]
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
