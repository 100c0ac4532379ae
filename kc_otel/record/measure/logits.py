"""Drift from full logits: every quantity of a next-token distribution, a few rows at a time.

Written naively this makes a dozen arrays as large as the logits. On a CPU, NumPy goes through them in float64, by parts
that stay in its cache. Tensors on a GPU stay there: the kernel of `logit_kernel` compares them where Triton is, and
torch, with the functions of NumPy, where it is not. All have the kernel's formulas, of the larger of p and q and
of |log p - log q|, where nothing is the difference of two nearly equal numbers.

Tokens whose logit is -inf on both sides are outside of both distributions. On one side only, the half range and one of
the divergences are infinite; they are returned, and recorded, as `SATURATION`, as is whatever else exceeds it.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kc_otel._extras import MissingExtraError
from kc_otel.record.measure.arrays import floats, is_tensor, on_gpu, on_host
from kc_otel.record.measure.sampled import LOWEST

LOGITS: Final = (
    "logit_half_range",
    "tv_exact",
    "kl_train_inference",
    "kl_inference_train",
    "js",
    "top1_disagreement",
    "entropy_difference",
)
"""Registry keys of what is measured, in the order of `LogitDrift.values`' columns."""
SATURATION: Final = -LOWEST  # largest half range or divergence that is told apart from larger ones

_BLOCK: Final = 8_192  # logits per block and side, of which a dozen arrays of float64 exist
_DEVICE_BLOCK: Final = 1 << 20  # the same of torch on a device
_LOG_OF_ZERO: Final = -1e300  # finite, so that its product with a probability of 0 is 0 and not NaN
_LANES: Final = 1024
_KERNEL_TYPES: Final = frozenset({"torch.bfloat16", "torch.float16", "torch.float32"})
_log: Final = logging.getLogger(__name__)
_failed: Final[list[bool]] = []  # not empty once the Triton kernel failed in this process: it is not tried again


@dataclass(frozen=True, slots=True, eq=False)
class LogitDrift:
    """Drift of each row of logits; log P and log Q are those of its target, float64 [rows]."""

    values: NDArray[np.float64]  # the quantities of `LOGITS`, float64 [rows, 7]; NaN in rows that are not valid
    valid: NDArray[np.bool_]  # rows without NaN and +inf, and with a logit above -inf on each side, bool [rows]
    train_logprob: NDArray[np.float64] | None  # None without targets
    inference_logprob: NDArray[np.float64] | None


def logit_drift(
    train: Any,
    inference: Any,
    *,
    at: tuple[NDArray[np.intp], ...] | None = None,
    targets: Any = None,
    _tensors: bool = False,
) -> LogitDrift:
    """Compare two kernels' logits, row by row.

    Logits are [..., vocab] after the same processing, NumPy or torch on any device, of any floating dtype but, on a
    CPU, 8 bits. `at` has indices of the rows to compare, one array [rows] per leading axis, None for all in order;
    `targets` a token of each of these.
    """
    if tuple(train.shape) != tuple(inference.shape) or len(train.shape) < 2 or not train.shape[-1]:
        raise ValueError(
            f"inference: shape {tuple(inference.shape)} is not train's {tuple(train.shape)}, or not [..., vocab]"
        )
    tokens = None if targets is None else on_host(targets).astype(np.intp)
    if tokens is not None:
        rows = math.prod(train.shape[:-1]) if at is None else at[0].size
        if tokens.shape != (rows,):
            raise ValueError(f"targets: shape {tokens.shape} is not one token for each of {rows} rows")
        if rows and not 0 <= tokens.min() <= tokens.max() < train.shape[-1]:
            wrong = int(tokens.min() if tokens.min() < 0 else tokens.max())
            raise ValueError(f"targets: {wrong} is not a token of a vocabulary of {train.shape[-1]}")
    if at is None:
        at = tuple(axis.reshape(-1) for axis in np.indices(train.shape[:-1]))
    if _tensors or on_gpu(train):
        return _on_device(train, inference, at, tokens)
    # Half precision is widened a block at a time.
    sides = [
        side.detach() if is_tensor(side) and side.element_size() == 2 else on_host(side) for side in (train, inference)
    ]
    with np.errstate(invalid="ignore", over="ignore", under="ignore", divide="ignore"):
        return _result(*_in_blocks(sides, floats, at, tokens, np, _BLOCK))


def _in_blocks(
    sides: Sequence[Any], read: Callable[[Any], Any], at: tuple[Any, ...], tokens: Any, library: Any, block: int
) -> tuple[Any, Any]:
    """Quantities [rows, 7] and, of targets, log-probabilities [rows, 2], with NumPy or torch.

    `read` makes float32 or float64 of some rows of a side.
    """
    values, logprobs, step = [], [], max(block // sides[0].shape[-1], 1)
    for first in range(0, max(len(at[0]), 1), step):
        some = slice(first, first + step)
        rows = tuple(axis[some] for axis in at)
        z = [read(side[rows]) for side in sides]
        found, of_targets = _measure(z, None if tokens is None else tokens[some], library, block)
        values.append(found)
        logprobs.append(of_targets)
    return library.concatenate(values), None if tokens is None else library.concatenate(logprobs)


def _on_device(
    train: Any, inference: Any, at: tuple[NDArray[np.intp], ...], targets: NDArray[np.intp] | None
) -> LogitDrift:
    """The same on the tensors' device, where only a row's few numbers leave it."""
    import torch  # noqa: PLC0415 - a caller with a tensor has loaded it

    def there(data: Any) -> Any:
        return torch.as_tensor(data, device=train.device)

    with torch.no_grad():
        rows, tokens = tuple(there(axis) for axis in at), None if targets is None else there(targets)
        values, logprobs = device_drift(train, there(inference), rows, tokens)
        host = on_host(values if logprobs is None else torch.cat([values, logprobs], 1))
    return _result(host[:, : len(LOGITS)], None if targets is None else host[:, len(LOGITS) :])


def device_drift(train: Any, inference: Any, at: tuple[Any, ...], targets: Any = None) -> tuple[Any, Any]:
    """Compare logits, in one launch where Triton is.

    Both are [..., vocab] on one device, of any floating types and strides; `at` has the rows, one int64 tensor for each
    leading axis, and `targets` a token of each. Nothing waits for the device. Returns the quantities of `LOGITS`,
    float64 [rows, 7], beyond their limits too and NaN in rows that are not valid; and both sides' log-probabilities of
    the targets, float64 [rows, 2].
    """
    import torch  # noqa: PLC0415 - a caller with a tensor has loaded it

    if train.is_complex() or inference.is_complex():
        raise ValueError("logits: complex numbers; pass real ones")
    sides = train.detach(), inference.detach()
    if at[0].numel() and by_kernel(*sides):
        try:
            return _launched(*sides, at, targets)
        except Exception:  # noqa: BLE001 - a kernel that cannot be built here must not fail its caller
            _failed.append(True)
            _log.warning("logits are compared by torch: the Triton kernel failed", exc_info=True)

    return _in_blocks(sides, torch.Tensor.double, at, targets, torch, _DEVICE_BLOCK)


def _launched(train: Any, inference: Any, at: tuple[Any, ...], targets: Any) -> tuple[Any, Any]:
    import torch  # noqa: PLC0415 - a caller with a tensor has loaded it

    rows, vocab, sides = at[0].numel(), train.shape[-1], (train, inference)
    values = torch.empty((rows, len(LOGITS)), dtype=torch.float64, device=train.device)
    logprobs = None if targets is None else values.new_empty((rows, 2))
    begins = [sum(axis * step for axis, step in zip(at, z.stride()[:-1], strict=True)) for z in sides]
    with torch.cuda.device_of(train):  # Triton launches on the current device
        _kernel().drift_kernel[(rows,)](
            *sides,
            *begins,
            *(z.stride(-1) for z in sides),
            vocab,
            begins[0] if targets is None else targets,
            values,
            values if logprobs is None else logprobs,
            TARGETS=targets is not None,
            ALIGNED=all(step % 8 == 0 for z in sides for step in z.stride()[:-1]),
            BLOCK=min(_LANES, 1 << max(vocab - 1, 15).bit_length()),
            num_warps=8,
        )
    return values, logprobs


def by_kernel(*logits: Any) -> bool:
    """Return True if the Triton kernel accepts these logits; with TRITON_INTERPRET=1, as in tests, on the host too."""
    if _failed or any(str(z.dtype) not in _KERNEL_TYPES for z in logits):
        return False
    return (logits[0].is_cuda or os.environ.get("TRITON_INTERPRET") == "1") and _kernel() is not None


@cache
def _kernel() -> Any:
    """Module `logit_kernel`; None where Triton is not installed or does not load."""
    try:
        from kc_otel.record.measure import logit_kernel  # noqa: PLC0415 - an extra
    except MissingExtraError:
        return None
    except Exception:  # noqa: BLE001 - as when it cannot be built
        _log.warning("logits are compared by torch: Triton does not load", exc_info=True)
        return None
    return logit_kernel


def _result(values: NDArray[np.float64], logprobs: NDArray[np.float64] | None) -> LogitDrift:
    low = np.array([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -SATURATION])
    high = np.array([SATURATION, 1.0, SATURATION, SATURATION, math.log(2.0), 1.0, SATURATION])
    return LogitDrift(
        np.clip(values, low, high),
        ~np.isnan(values[:, 0]),
        None if logprobs is None else logprobs[:, 0],
        None if logprobs is None else logprobs[:, 1],
    )


def _measure(sides: list[Any], tokens: Any, library: Any, block: int) -> tuple[Any, Any]:
    """Quantities of some rows, NaN where one is not valid, and the targets' log-probabilities, if there are targets."""
    tops = [library.asarray(library.amax(z, -1), dtype=library.float64)[:, None] for z in sides]
    parts = [slice(first, first + block) for first in range(0, sides[0].shape[-1], block)]
    log_masses = [
        library.log(sum(library.exp(z[:, part] - top).sum(-1) for part in parts))[:, None]
        for z, top in zip(sides, tops, strict=True)
    ]

    def logs(some: Iterable[Any]) -> list[Any]:
        return [z - top - log_mass for z, top, log_mass in zip(some, tops, log_masses, strict=True)]

    totals: Any = 0.0
    apart = tops[0] - tops[1]
    most = least = apart[:, 0]  # which lies between the ends of the differences
    for part in parts:
        z = [library.asarray(side[:, part], dtype=library.float64) for side in sides]
        gap = z[0] - z[1]
        gap = library.where(library.isnan(gap), apart, gap)  # where both are -inf
        most, least = library.maximum(most, library.amax(gap, -1)), library.minimum(least, library.amin(gap, -1))
        totals = totals + _sums(library, *logs(z))
    distance, kl_pq, kl_qp, js, entropy = totals
    # Of a token that one side cannot have, however little the other has of it.
    kl_pq, kl_qp = (library.where(library.isinf(end), math.inf, kl) for end, kl in ((most, kl_pq), (least, kl_qp)))
    differs = sides[0].argmax(-1) != sides[1].argmax(-1)
    columns = [(most - least) / 2, distance / 2, kl_pq, kl_qp, js / 2, differs + 0.0 * distance, entropy]
    values = library.where(library.isfinite(apart), library.stack(columns, -1), math.nan)
    if tokens is None:
        return values, None
    pick = np.take_along_axis if library is np else library.take_along_dim
    return values, library.concatenate(logs(pick(z, tokens[:, None], 1) for z in sides), 1)


def _sums(library: Any, log_p: Any, log_q: Any) -> Any:
    """Of some tokens, sums of |p - q|, of both KLs', twice JS's and the entropies' terms, float64 [5, rows]."""
    log_p, log_q = log_p.clip(min=_LOG_OF_ZERO), log_q.clip(min=_LOG_OF_ZERO)
    d, log_h = log_p - log_q, library.maximum(log_p, log_q)
    x, h = abs(d), library.exp(log_h)
    v = library.expm1(-x)
    hv, hx, rises = h * v, h * x, d > 0
    fading = hx * (1 + v)
    own, other = hv + hx, -hv - fading
    return library.stack(
        [
            -hv.sum(-1),
            library.where(rises, own, other).sum(-1),
            library.where(rises, other, own).sum(-1),
            -((2 * h + hv) * library.log1p(v / 2) + fading).sum(-1),
            (library.sign(d) * (hv * log_h - fading)).sum(-1),
        ]
    )
