"""Drift from full logits: every quantity of a next-token distribution, a few rows at a time.

Written naively this makes a dozen arrays as large as the logits. `logit_rows.c` goes through them a row at a time,
where the package was installed with a compiler; `guarded` has the same formulas in float64, every product and logarithm
guarded, so that -inf and differences of any size come out as they should. Tensors on a GPU stay there: the
kernel of `logit_kernel` compares them where Triton is, and torch where it is not.

The difference of the log-probabilities, d = log p - log q, is taken from the difference of the logits, and p - q as
q expm1(d): nothing is obtained by subtracting two nearly equal numbers, so float32 is enough for kernels that differ
in the sixth digit. With A = sum(p - q), which is 0 but for rounding and cancels it:
KL(Q||P) = A - sum(q d), KL(P||Q) = sum(p d) - A, JS = (sum(p d) - sum((p + q) log((p/q + 1)/2)))/2.

Tokens whose logit is -inf on both sides are outside of both distributions. On one side only, the half range and one of
the divergences are infinite; they are returned, and recorded, as `SATURATION`, as is whatever else exceeds it.

In C, with q = exp(z' - max z') and g = (z - z') - (max z - max z'), a first loop leaves q and w = expm1(g), whose sums
say what P is short of Q: log(sum p / sum q) = log1p(sum q w / sum q) =: c. Then d = log p - log q = g - c and
expm1(d) = w exp(-c) + expm1(-c), so that three transcendental functions a logit are enough. They are polynomials that a
compiler turns into vectors: exp and log after Cephes (expf.c, logf.c), 2 ulp.

Sums are of float32 within 4,096 logits and of float64 beyond. A row that float32 cannot hold like this, with -inf on
one side only, d above 60 or maxima far apart, is left to `guarded`.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kc_otel import machine_code
from kc_otel._extras import MissingExtraError
from kc_otel.machine_code import ADDRESS, NUMBER, function
from kc_otel.record.measure.arrays import Floats, floats, is_tensor, largest, on_gpu, on_host
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

_LEFT: Final = 2  # state of a row that is left to `guarded`
_ARGUMENTS: Final = (ADDRESS, ADDRESS, NUMBER, ADDRESS, ADDRESS, NUMBER, ADDRESS, ADDRESS, ADDRESS, ADDRESS)
_float32_rows: Final = function("kc_float32_rows", *_ARGUMENTS, long=True)
_bfloat16_rows: Final = function("kc_bfloat16_rows", *_ARGUMENTS, long=True)
_BLOCK: Final = 32_768  # logits per block and side, of which a dozen arrays of float64 exist
_DEVICE_BLOCK: Final = 1 << 20  # the same of torch on a device
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
    _tensors: bool | None = None,
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
    if on_gpu(train) if _tensors is None else _tensors:
        return _on_device(train, inference, at, tokens)
    left, right = _host_rows(train), _host_rows(inference)
    quick = np.float64 not in (left.data.dtype, right.data.dtype) and machine_code.is_available()
    with np.errstate(invalid="ignore", over="ignore", under="ignore", divide="ignore"):
        if quick:
            return _result(*_by_machine_code(left, right, at, tokens))
        return _result(*_by_numpy(left, right, at, tokens))


@dataclass(frozen=True, slots=True, eq=False)
class _HostRows:
    """Logits in host memory, of which rows are read as float32, or as float64 where they are that."""

    data: NDArray[Any]  # [rows, ...]; bfloat16 as its bits, uint16
    bfloat16: bool

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape

    def read(self, rows: Any) -> Floats:
        """Return the selected part; it may be a view, so never write into it."""
        part = self.data[rows]
        if not self.bfloat16:
            return floats(part)
        bits: NDArray[np.uint32] = part.astype(np.uint32) << np.uint32(16)
        return bits.view(np.float32)


def _host_rows(data: Any) -> _HostRows:
    """Rows of a NumPy array or a tensor, without a copy where they are on the host."""
    if is_tensor(data) and str(data.dtype) == "torch.bfloat16":
        import torch  # noqa: PLC0415 - a caller with a tensor has loaded it

        return _HostRows(on_host(data.detach().view(torch.int16)).view(np.uint16), bfloat16=True)
    array = on_host(data)
    if array.dtype.name == "bfloat16":
        return _HostRows(array.view(np.uint16), bfloat16=True)
    return _HostRows(array, bfloat16=False)


def _by_numpy(left: _HostRows, right: _HostRows, at: tuple[NDArray[np.intp], ...], tokens: Any) -> tuple[Any, Any]:
    def read(rows: Any) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        return left.read(rows).astype(np.float64), right.read(rows).astype(np.float64)

    return _in_blocks(read, at, tokens, np, _BLOCK // left.shape[-1])


def _by_machine_code(
    left: _HostRows, right: _HostRows, at: tuple[NDArray[np.intp], ...], tokens: NDArray[np.intp] | None
) -> tuple[NDArray[np.float64], NDArray[np.float64] | None]:
    """Compute what `_in_blocks` does with machine code, for every format but float64."""
    rows, vocab = at[0].size, left.shape[-1]
    out, logprobs, state = np.empty((rows, len(LOGITS))), np.zeros((rows, 2)), np.empty(rows, dtype=np.int8)
    wanted = np.full(rows, -1) if tokens is None else tokens
    arrays = left.data, right.data
    whole = all(array.flags.c_contiguous and array.flags.aligned and array.dtype.isnative for array in arrays)
    plain = not (left.bfloat16 or right.bfloat16) and all(array.dtype == np.float32 for array in arrays)
    if rows and whole and (plain or (left.bfloat16 and right.bfloat16)):
        flat = np.ravel_multi_index(at, left.shape[:-1])
        _measure_rows(left.data.reshape(-1, vocab), right.data.reshape(-1, vocab), flat, wanted, out, logprobs, state)
    else:
        step = max(1, _BLOCK // vocab)
        for first in range(0, rows, step):
            part, here = tuple(axis[first : first + step] for axis in at), slice(first, first + step)
            z_p, z_q = (np.require(side.read(part), np.float32, ("C", "A")) for side in (left, right))
            every = np.arange(part[0].size)
            _measure_rows(z_p, z_q, every, wanted[here], out[here], logprobs[here], state[here])
    rest = np.flatnonzero(state == _LEFT)
    if rest.size:
        some = None if tokens is None else tokens[rest]
        out[rest], of_targets = _by_numpy(left, right, tuple(axis[rest] for axis in at), some)
        logprobs[rest] = 0.0 if of_targets is None else of_targets
    return out, None if tokens is None else logprobs


def _measure_rows(
    z_p: NDArray[np.float32 | np.uint16],
    z_q: NDArray[np.float32 | np.uint16],
    at: NDArray[np.intp],
    targets: NDArray[np.intp],
    values: NDArray[np.float64],
    logprobs: NDArray[np.float64],
    state: NDArray[np.int8],
) -> None:
    """Measure rows `at` of logits [rows, vocab], float32 or the bits of bfloat16, with a target for each, -1 for none.

    Fills `values` [n, 7], where there is a target `logprobs` [n, 2], and `state` [n], _LEFT where a row was not
    measured. All arrays are C-contiguous, aligned, and of this machine's byte order.
    """
    half, vocab = z_p.dtype == np.uint16, z_p.shape[1]
    memory = np.empty((4 if half else 2) * vocab, np.float32)
    before = (z_p.ctypes.data, z_q.ctypes.data, vocab, at.ctypes.data, targets.ctypes.data, at.size)
    (_bfloat16_rows if half else _float32_rows)(*before, *(a.ctypes.data for a in (memory, values, logprobs, state)))


def _in_blocks(
    read: Callable[[Any], tuple[Any, Any]], at: tuple[Any, ...], tokens: Any, library: Any, rows_at_once: int
) -> tuple[Any, Any]:
    """Quantities [rows, 7] and, of targets, log-probabilities [rows, 2], with NumPy or torch.

    `read` returns some rows of both sides, float64 [n, vocab].
    """

    def chosen(z: Any, tokens: Any) -> Any:
        top = largest(z)
        pick = np.take_along_axis if library is np else library.take_along_dim
        return pick(z, tokens[:, None], 1)[:, 0] - top - library.log(library.exp(z - top[:, None]).sum(-1))

    values, logprobs, step = [], [], max(rows_at_once, 1)
    for first in range(0, max(len(at[0]), 1), step):
        some = slice(first, first + step)
        sides = read(tuple(axis[some] for axis in at))
        values.append(guarded(*sides, library))
        if tokens is not None:
            logprobs.append(library.stack([chosen(z, tokens[some]) for z in sides], 1))
    return library.concatenate(values), library.concatenate(logprobs) if logprobs else None


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

    def read(rows: Any) -> tuple[Any, Any]:
        return sides[0][rows].double(), sides[1][rows].double()

    return _in_blocks(read, at, targets, torch, _DEVICE_BLOCK // train.shape[-1])


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


def guarded(z_train: Any, z_inference: Any, library: Any) -> Any:
    """Quantities of `LOGITS` for float64 logits [rows, vocab] of NumPy or torch; NaN in rows that are not valid."""
    top_train, top_inference = largest(z_train)[:, None], largest(z_inference)[:, None]
    valid = library.isfinite(top_train[:, 0]) & library.isfinite(top_inference[:, 0])
    absent = (z_train == -math.inf) & (z_inference == -math.inf)
    gap = z_train - z_inference
    ends = [largest(library.where(absent, -math.inf, side)) for side in (gap, -gap)]
    log_p, log_q = z_train - top_train, z_inference - top_inference
    # The logits' own difference keeps its digits unless one of them, or of the maxima, is far from the other.
    apart, below = top_train - top_inference, log_p - log_q
    near = abs(gap) + abs(apart) <= abs(log_p) + abs(log_q)
    p, q = library.exp(log_p), library.exp(log_q)
    sum_train, sum_inference = p.sum(-1)[:, None], q.sum(-1)[:, None]
    p, q, log_q = p / sum_train, q / sum_inference, log_q - library.log(sum_inference)
    far = library.where(near, gap - apart, below) - library.log(sum_train / sum_inference)
    d = library.where(absent, 0.0, far)

    # q expm1(d) keeps its digits where p and q nearly agree, p - q where they do not.
    rises = d > 1.0
    u = library.expm1(d.clip(max=1.0))
    change = library.where(rises, p - q, q * u)
    mixture = library.log1p(u / 2)  # log of ((p + q)/2) / q
    beyond = math.log(2.0) - library.log1p(library.exp(-d.clip(min=1.0)))  # log of p / ((p + q)/2), where d is large

    def product(weight: Any, value: Any) -> Any:
        # 0 times infinity is 0 here: a token without probability contributes nothing.
        return library.where(weight == 0, 0.0, weight * value)

    p_js = product(p, library.where(rises, beyond, d - mixture))
    q_js = product(q, library.where(rises, d - beyond, mixture))
    p_d, q_d = product(p, d), product(q, d)
    # H(P) - H(Q) = -sum(p d + (p - q) log q); where q is 0 that is -p log p.
    log_p = log_p - library.log(sum_train)
    entropy = library.where(q > 0, p_d + product(change, log_q), product(p, log_p))
    total = change.sum(-1)
    # The total is 0 but for rounding, which log q would weigh: take its share out again.
    rounding = total * product(q, log_q).sum(-1)
    columns = [
        (ends[0] + ends[1]) / 2,
        abs(change).sum(-1) / 2,
        p_d.sum(-1) - total,
        total - q_d.sum(-1),
        (p_js - q_js).sum(-1) / 2,
        (z_train.argmax(-1) != z_inference.argmax(-1)) + 0.0 * total,
        rounding - entropy.sum(-1),
    ]
    return library.where(valid[:, None], library.stack(columns, -1), math.nan)
