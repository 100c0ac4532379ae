"""Drift of one operator: how far two kernels' outputs of an attention, a norm, a matrix product are apart, per row.

A row is one output vector, the last axis of the output: a token's, as a rule. The difference is taken in float64. Both
outputs are NumPy arrays or both torch tensors, on any device, of any floating dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kc_otel.record.measure.arrays import as_bool, is_tensor, largest, on_gpu

_BLOCK: Final = 1 << 17
"""Elements worked on at a time on a CPU: four float64 copies of them stay in cache."""
_DEVICE_BLOCK: Final = 1 << 22
"""The same on a GPU: four float64 copies are 128 MiB."""


@dataclass(frozen=True, slots=True, eq=False)
class OperatorDrift:
    """Difference of two outputs, one number per row, float64 [rows] in host memory.

    Attributes:
        max_abs: Largest |a - b| of the row, in the output's own unit.
        relative: ||a - b|| / ||a||, Euclidean; 0 where both are zero, inf where only a is.
        ulp: Largest |a - b| of the row in units in the last place of the row's largest |a|, in the dtype asked for:
            0.5 is what rounding alone costs. inf where a is zero throughout and b is not.
        cosine: 1 - cos(a, b), in [0, 2]; 0 where both are zero, 1 where one of them is.
        not_finite: Rows where one output is NaN or infinite and the other is not the same; they are left out of the
            numbers, which have fewer rows then.
        rows: Which row of the output, all axes but the last flattened, each number is about, int64 [rows].
    """

    max_abs: NDArray[np.float64]
    relative: NDArray[np.float64]
    ulp: NDArray[np.float64]
    cosine: NDArray[np.float64]
    not_finite: int
    rows: NDArray[np.intp]


def compare_outputs(train: Any, inference: Any, *, mask: Any = None, ulp_of: Any = None) -> OperatorDrift:
    """Compare two outputs of one operator.

    >>> import numpy as np
    >>> output = np.float32([[1.0, 2.0], [3.0, 4.0]])
    >>> compare_outputs(output, np.nextafter(output, np.float32(9))).ulp
    array([1., 1.])

    Units in the last place: Goldberg 1991, "What Every Computer Scientist Should Know About Floating-Point Arithmetic",
    1.2; norms and normwise errors: Higham 2002, "Accuracy and Stability of Numerical Algorithms", chapter 6.

    Args:
        train: The training kernel's output, [..., features].
        inference: The inference kernel's, of the same shape.
        mask: Which rows count, bool or int, of the output's first axes: [batch, tokens] for an output
            [batch, tokens, heads, features]; None for all. The padded never counts.
        ulp_of: dtype whose units in the last place count; None for that of `inference`.

    Raises:
        ValueError: If the shapes differ, there is nothing to compare, the mask does not fit, or the outputs do not
            hold floating numbers.
    """
    if tuple(train.shape) != tuple(inference.shape):
        raise ValueError(f"inference: shape {tuple(inference.shape)} is not that of train, {tuple(train.shape)}")
    if not train.shape or 0 in train.shape:
        raise ValueError(f"train: shape {tuple(train.shape)} has no rows to compare")
    if is_tensor(train) != is_tensor(inference):
        raise ValueError("train, inference: one is a torch tensor and the other is not; convert one of them")
    for name, values in (("train", train), ("inference", inference)):
        if not (values.dtype.is_floating_point if is_tensor(values) else values.dtype.kind == "f"):
            raise ValueError(f"{name}: dtype {values.dtype} does not hold floating numbers")
    rows = _counted(mask, tuple(train.shape[:-1]))
    train, inference = (side.reshape(-1, train.shape[-1]) for side in (train, inference))
    if rows.size < train.shape[0]:
        train, inference = (_picked(side, rows) for side in (train, inference))
    if not rows.size:
        nothing = np.zeros(0)
        return OperatorDrift(nothing, nothing, nothing, nothing, 0, rows)
    step = max((_DEVICE_BLOCK if on_gpu(train) else _BLOCK) // train.shape[1], 1)
    starts = range(0, train.shape[0], step)
    with np.errstate(all="ignore"):
        parts = [_rows(train[start : start + step], inference[start : start + step]) for start in starts]
    found = np.concatenate([part for part, _ in parts], axis=1)
    kept = np.concatenate([fine for _, fine in parts])
    max_abs, relative, cosine, most = found[:, kept]
    ulp = _in_ulps(max_abs, most, *_format(ulp_of or inference.dtype))
    return OperatorDrift(max_abs, relative, ulp, cosine, int(kept.size - kept.sum()), rows[kept])


def batch_outputs(operator: Callable[..., Any], inputs: Sequence[Any], *, rows: int | None = None) -> tuple[Any, Any]:
    """An operator's output for members of a batch, computed alone and in the batch, [rows, ...] each.

    The operator is called on the whole batch and on each of its first `rows` members alone; a kernel whose reductions
    are laid out by batch size gives different numbers. The call alone takes the place of the training kernel.

    Args:
        operator: Called with one positional argument per input; returns an array with the batch as its first axis.
        inputs: Arrays with the batch as their first axis, all of the same length there.
        rows: Members called alone; None for all.

    Raises:
        ValueError: If there is no input or batch, or their lengths differ.
    """
    sizes = {len(batch) for batch in inputs}
    if len(sizes) != 1 or not (size := sizes.pop()):
        raise ValueError(
            f"inputs: batches of {sorted({len(batch) for batch in inputs})}; give one length above 0 for all"
        )
    together = operator(*inputs)
    count = size if rows is None else min(rows, size)
    alone = [operator(*(batch[row : row + 1] for batch in inputs)) for row in range(count)]
    if is_tensor(together):
        import torch  # noqa: PLC0415 - a caller with a tensor has loaded it

        return torch.cat(alone), together[:count]
    return np.concatenate(alone), np.asarray(together)[:count]


def _counted(mask: Any, shape: tuple[int, ...]) -> NDArray[np.intp]:
    """Flat indices of the rows that count, of an output whose axes but the last are `shape`."""
    if mask is None:
        return np.arange(int(np.prod(shape, dtype=np.int64)))
    kept = as_bool(mask)
    if kept.shape != shape[: kept.ndim]:
        raise ValueError(f"mask: shape {kept.shape} is not that of the output's first axes, of {shape}")
    spread = kept.reshape(kept.shape + (1,) * (len(shape) - kept.ndim))
    return np.flatnonzero(np.broadcast_to(spread, shape))


def _picked(rows: Any, wanted: NDArray[np.intp]) -> Any:
    if not is_tensor(rows):
        return rows[wanted]
    import torch  # noqa: PLC0415 - a caller with a tensor has loaded it

    return rows.index_select(0, torch.from_numpy(wanted).to(rows.device))


def _format(dtype: Any) -> tuple[float, float]:
    """Distance from 1 to the next number, and the smallest normal number, of a floating dtype of NumPy or torch."""
    if type(dtype).__module__ == "torch":
        import torch  # noqa: PLC0415 - a caller with a dtype of torch has loaded it

        info = torch.finfo(dtype)
        return float(info.eps), float(info.tiny)
    known = np.finfo(dtype)
    return float(known.eps), float(known.tiny)


def _in_ulps(
    distance: NDArray[np.float64], largest: NDArray[np.float64], eps: float, tiny: float
) -> NDArray[np.float64]:
    """Distances in units in the last place of the largest magnitudes."""
    _, exponent = np.frexp(np.maximum(largest, tiny))
    with np.errstate(over="ignore"):
        found = np.where(distance > 0.0, distance / eps / np.ldexp(1.0, exponent - 1), 0.0)
    return np.where((largest == 0.0) & (distance > 0.0), np.inf, found)


def _rows(train: Any, inference: Any) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """[4, rows] of max_abs, relative, cosine and the largest |a|, and which rows are finite, in host memory."""
    if not is_tensor(train):
        found, fine = _reduced(train.astype(np.float64), inference.astype(np.float64), np)
        return found, fine
    import torch  # noqa: PLC0415 - a caller with a tensor has loaded it

    with torch.no_grad():
        a, b = (side.detach().to(train.device, torch.float64) for side in (train, inference))
        found, fine = _reduced(a, b, torch)
        return found.cpu().numpy(), fine.cpu().numpy()


def _reduced(a: Any, b: Any, library: Any) -> Any:
    finite = library.isfinite(a) & library.isfinite(b)
    # Both -inf, as in masked attention scores, is agreement.
    same = (a == b) | finite
    fine = same.all(-1)
    a, b = (library.where(finite, values, library.zeros_like(values)) for values in (a, b))
    difference = abs(a - b)
    apart, left, right = ((values * values).sum(-1) ** 0.5 for values in (difference, a, b))
    tiny = np.finfo(np.float64).tiny
    product = (a * b).sum(-1) / (left * right).clip(min=tiny)
    both, none = (left > 0) & (right > 0), (left == 0) & (right == 0)
    cosine = library.where(both, (1.0 - product).clip(min=0.0), 1.0 - library.where(none, product + 1.0, product * 0.0))
    relative = library.where(
        left > 0, apart / left.clip(min=tiny), library.where(apart > 0, apart * np.inf, apart * 0.0)
    )
    stack = library.stack([largest(difference), relative, cosine, largest(abs(a))])
    return stack, fine
