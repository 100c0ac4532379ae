"""Drift from full logits: every quantity of a next-token distribution, a few rows at a time.

Written naively this makes a dozen arrays as large as the logits. Here a block of rows that stays in cache goes through
all steps before the next is read, so that beyond the two inputs only a few rows' worth of memory is needed, also for
half precision, which is widened block by block. `logit_rows` does the same in C, in a fifth of the time, where the
package was installed with a compiler.

The difference of the log-probabilities, d = log p - log q, is taken from the difference of the logits, and p - q as
q expm1(d): nothing is obtained by subtracting two nearly equal numbers, so float32 is enough for kernels that differ
in the sixth digit. With A = sum(p - q), which is 0 but for rounding and cancels it:
KL(Q||P) = A - sum(q d), KL(P||Q) = sum(p d) - A, JS = (sum(p d) - sum((p + q) log((p/q + 1)/2)))/2.

Tokens whose logit is -inf on both sides are outside of both distributions. On one side only, the half range and one of
the divergences are infinite; they are returned, and recorded, as `SATURATION`, as is whatever else exceeds it.

Rows that the fast path cannot take go through `_guarded`: the same formulas with every product and logarithm guarded,
so that -inf and differences of any size come out as they should. Tensors on a GPU stay there: see `logit_device`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kc_otel import machine_code
from kc_otel.record.measure.arrays import HostRows, as_host, host_rows, on_gpu
from kc_otel.record.measure.logit_rows import LEFT, measure_rows
from kc_otel.record.measure.sampled import LOWEST

__all__ = ["LOGITS", "SATURATION", "CountedRows", "LogitDrift", "logit_drift"]

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
SATURATION: Final = -LOWEST
"""Largest half range or divergence that is told apart from larger ones."""

_BLOCK: Final = 32_768
"""Logits per block and side: six float32 arrays of them fit a core's second-level cache."""
_MAX_EXPONENT: Final = 60.0
"""Largest d for which exp(d) and its products stay ordinary float32 numbers."""
_FAR_APART: Final = 256.0
"""Largest difference of the sides' maxima beside which that of two logits keeps its digits."""


@dataclass(frozen=True, slots=True, eq=False)
class LogitDrift:
    """Drift of each row of logits.

    Attributes:
        values: The quantities of `LOGITS`, float64 [rows, 7]; NaN in rows that are not valid.
        valid: Rows without NaN and +inf, and with at least one logit above -inf on each side, bool [rows].
        train_logprob: log P of each row's target, float64 [rows]; None without targets.
        inference_logprob: log Q of each row's target, float64 [rows]; None without targets.
        counts: Rows that are valid by slice, quantity and bucket, int64 [slices, 7, buckets]; None where the host is to
            count them.
    """

    values: NDArray[np.float64]
    valid: NDArray[np.bool_]
    train_logprob: NDArray[np.float64] | None
    inference_logprob: NDArray[np.float64] | None
    counts: NDArray[np.int64] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class CountedRows:
    """Counting of rows in the place where they are measured.

    Attributes:
        group: Group of each row, [rows].
        members: Which slices a group belongs to, bool [groups, slices].
        edges: Edges of the buckets, ascending, float32, as `Partition.edges`.
    """

    group: NDArray[np.intp]
    members: NDArray[np.bool_]
    edges: NDArray[np.float32]


def logit_drift(
    train: Any,
    inference: Any,
    *,
    at: tuple[NDArray[np.intp], ...] | None = None,
    targets: Any = None,
    counted: CountedRows | None = None,
    _tensors: bool | None = None,
) -> LogitDrift:
    """Compare two kernels' logits, row by row.

    Args:
        train: Logits of the training kernel, [..., vocab], NumPy or torch, any device and, but for 8 bits on a CPU, any
            floating dtype.
        inference: Logits of the inference kernel after the same processing, same shape.
        at: Indices of the rows to compare, one array [rows] per leading axis; None for all, in order.
        targets: Token of each compared row, integers [rows].
        counted: Slices and buckets, where a GPU is to count many rows.

    Raises:
        ValueError: If the shapes differ, a target is not in the vocabulary, or the numbers are not real.
    """
    if tuple(train.shape) != tuple(inference.shape) or len(train.shape) < 2 or not train.shape[-1]:
        msg = f"inference: shape {tuple(inference.shape)} is not train's {tuple(train.shape)}, or not [..., vocab]"
        raise ValueError(msg)
    tokens = None if targets is None else as_host(targets).astype(np.intp)
    if tokens is not None:
        rows = math.prod(train.shape[:-1]) if at is None else at[0].size
        if tokens.shape != (rows,):
            msg = f"targets: shape {tokens.shape} is not one token for each of {rows} rows"
            raise ValueError(msg)
        if rows and not 0 <= tokens.min() <= tokens.max() < train.shape[-1]:
            wrong = int(tokens.min() if tokens.min() < 0 else tokens.max())
            msg = f"targets: {wrong} is not a token of a vocabulary of {train.shape[-1]}"
            raise ValueError(msg)
    if on_gpu(train) if _tensors is None else _tensors:
        return _on_device(train, inference, at, tokens, counted)
    if at is None:
        at = tuple(axis.reshape(-1) for axis in np.indices(train.shape[:-1]))
    left, right = host_rows(train), host_rows(inference)
    quick = np.float64 not in (left.data.dtype, right.data.dtype) and machine_code.is_available()
    with np.errstate(invalid="ignore", over="ignore", under="ignore", divide="ignore"):
        values, logprobs = (_by_machine_code if quick else _in_blocks)(left, right, at, tokens)
    return _result(values, None if targets is None else logprobs)


def _by_machine_code(
    left: HostRows, right: HostRows, at: tuple[NDArray[np.intp], ...], tokens: NDArray[np.intp] | None
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Compute what `_in_blocks` does with machine code, for every format but float64."""
    rows, vocab = at[0].size, left.shape[-1]
    out, logprobs, state = np.empty((rows, len(LOGITS))), np.zeros((rows, 2)), np.empty(rows, dtype=np.int8)
    wanted = np.full(rows, -1) if tokens is None else tokens
    arrays = left.data, right.data
    whole = all(array.flags.c_contiguous and array.flags.aligned and array.dtype.isnative for array in arrays)
    plain = not (left.bfloat16 or right.bfloat16) and all(array.dtype == np.float32 for array in arrays)
    if rows and whole and (plain or (left.bfloat16 and right.bfloat16)):
        flat = np.ravel_multi_index(at, left.shape[:-1])
        measure_rows(left.data.reshape(-1, vocab), right.data.reshape(-1, vocab), flat, wanted, out, logprobs, state)
    else:
        step = max(1, _BLOCK // vocab)
        for first in range(0, rows, step):
            part, here = tuple(axis[first : first + step] for axis in at), slice(first, first + step)
            z_p, z_q = (np.require(_read(side, part), np.float32, ("C", "A")) for side in (left, right))
            every = np.arange(part[0].size)
            measure_rows(z_p, z_q, every, wanted[here], out[here], logprobs[here], state[here])
    rest = np.flatnonzero(state == LEFT)
    if rest.size:
        some = None if tokens is None else tokens[rest]
        out[rest], of_targets = _in_blocks(left, right, tuple(axis[rest] for axis in at), some)
        logprobs[rest] = of_targets.T
    return out, logprobs.T


def _in_blocks(
    left: HostRows, right: HostRows, at: tuple[NDArray[np.intp], ...], tokens: NDArray[np.intp] | None
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Quantities [rows, 7] and, of targets, log-probabilities [2, rows], with NumPy."""
    rows, vocab = at[0].size, left.shape[-1]
    out = np.empty((rows, len(LOGITS)))
    logprobs = np.empty((2, rows))
    step = max(1, _BLOCK // vocab)
    buffers: list[NDArray[Any]] = []
    for first in range(0, rows, step):
        part = tuple(axis[first : first + step] for axis in at)
        z_train, z_inference = _read(left, part), _read(right, part)
        dtype = np.result_type(z_train, z_inference)
        buffers = buffers or [np.empty((step, vocab), dtype) for _ in range(6)]
        here = slice(first, first + part[0].size)
        out[here], logprobs[:, here] = _block(z_train, z_inference, None if tokens is None else tokens[here], buffers)
    return out, logprobs


def _read(rows: HostRows, at: tuple[NDArray[np.intp], ...]) -> NDArray[Any]:
    if at[0].size == 1:
        # A view; several rows may lie anywhere and are gathered.
        index = tuple(int(axis[0]) for axis in at)
        return rows.read((*index[:-1], slice(index[-1], index[-1] + 1)))
    return rows.read(at)


def _block(
    z_train: NDArray[Any], z_inference: NDArray[Any], targets: NDArray[np.intp] | None, buffers: list[NDArray[Any]]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Quantities [rows, 7] and, of targets, log-probabilities [2, rows] of a block of logits [rows, vocab]."""
    p, q, d, u, log_q, product = (buffer[: z_train.shape[0]] for buffer in buffers)
    top_train, top_inference = z_train.max(1, keepdims=True), z_inference.max(1, keepdims=True)
    valid = (np.isfinite(top_train) & np.isfinite(top_inference))[:, 0]
    np.subtract(z_train, z_inference, out=d)
    widest, narrowest, absent = d.max(1), d.min(1), None
    if np.isnan(widest).any():
        # -inf on both sides; or a row that is not valid.
        absent = np.isnan(d)
        widest, narrowest = np.fmax.reduce(d, axis=1), np.fmin.reduce(d, axis=1)
    np.exp(np.subtract(z_train, top_train, out=p), out=p)
    np.exp(np.subtract(z_inference, top_inference, out=log_q), out=q)
    sum_train, sum_inference = p.sum(1, keepdims=True), q.sum(1, keepdims=True)
    apart, ratio = top_train - top_inference, np.log(sum_train / sum_inference)
    p /= sum_train
    q /= sum_inference
    d -= apart  # by itself: beside large logits the ratio would be lost
    d -= ratio
    if absent is not None:
        np.copyto(d, 0.0, where=absent)
        np.copyto(log_q, 0.0, where=absent)
    np.expm1(d, out=u)

    p_d = np.multiply(p, d, out=product).sum(1)
    q_d = np.multiply(q, d, out=product).sum(1)
    p += q
    q *= u  # p - q from here on
    rest = q.sum(1)
    distance = np.abs(q, out=product).sum(1)
    # H(P) - H(Q) = -sum(p d) - sum((p - q) log q), where a constant in log q does not matter: that of P's likeliest
    # token takes out what rounding leaves of sum(p - q).
    likeliest = z_train.argmax(1)
    entropy = rest * log_q[np.arange(rest.size), likeliest] - p_d - np.multiply(q, log_q, out=product).sum(1)
    u *= 0.5
    np.log1p(u, out=u)
    mixture = np.multiply(p, u, out=product).sum(1)
    top1 = likeliest != z_inference.argmax(1)
    values = np.stack(
        [(widest - narrowest) / 2, distance / 2, p_d - rest, rest - q_d, (p_d - mixture) / 2, top1, entropy], axis=1
    ).astype(np.float64)
    steep = (widest - apart[:, 0] - ratio[:, 0] > _MAX_EXPONENT) | np.isinf(widest) | np.isinf(narrowest)
    steep = valid & (steep | (abs(apart[:, 0]) > _FAR_APART))
    for row in np.flatnonzero(steep):
        # Few rows, or few tokens that are not -inf on both sides.
        present = (z_train[row] > -np.inf) | (z_inference[row] > -np.inf)
        pair = (z[row, present][None].astype(np.float64) for z in (z_train, z_inference))
        values[row] = _guarded(*pair)[0]
    values[~valid] = np.nan
    logprobs = np.zeros((2, valid.size))
    if targets is not None:
        every = np.arange(valid.size)
        sides = (z_train, top_train, sum_train), (z_inference, top_inference, sum_inference)
        for side, (z, top, total) in enumerate(sides):
            logprobs[side] = z[every, targets] - top[:, 0].astype(np.float64) - np.log(total[:, 0].astype(np.float64))
    return values, logprobs


def _on_device(
    train: Any,
    inference: Any,
    at: tuple[NDArray[np.intp], ...] | None,
    targets: NDArray[np.intp] | None,
    counted: CountedRows | None,
) -> LogitDrift:
    """The same on the tensors' device, where only a row's few numbers leave it."""
    import torch  # noqa: PLC0415 - a caller with a tensor has loaded it

    from kc_otel.record.measure.logit_device import LogitCounts, device_drift  # noqa: PLC0415 - it needs torch

    def there(data: Any) -> Any:
        return torch.as_tensor(data, device=train.device)

    rows = None if at is None else tuple(there(axis) for axis in at)
    y = None if targets is None else there(targets)
    counters = None
    # Values come back anyway; their counts are quicker where there are more rows than counters.
    if counted is not None and counted.group.size >= counted.members.shape[0] * counted.edges.size:
        none = np.zeros(0, dtype=np.float32)
        counters = LogitCounts.empty(counted.group, counted.members.shape[0], counted.edges, none, train.device)
    with torch.no_grad():
        found = device_drift(train, there(inference), at=rows, targets=y, counters=counters)
        both = found.values if found.logprobs is None else torch.cat([found.values, found.logprobs], 1)
        host = as_host(both)
    drift = _result(host[:, : len(LOGITS)], None if targets is None else host[:, len(LOGITS) :].T)
    if counters is None or counted is None:
        return drift
    return replace(drift, counts=counters.by_slice(counted.members))


def _result(values: NDArray[np.float64], logprobs: NDArray[np.float64] | None) -> LogitDrift:
    low = np.array([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -SATURATION])
    high = np.array([SATURATION, 1.0, SATURATION, SATURATION, math.log(2.0), 1.0, SATURATION])
    return LogitDrift(
        np.clip(values, low, high),
        ~np.isnan(values[:, 0]),
        None if logprobs is None else logprobs[0],
        None if logprobs is None else logprobs[1],
    )


def _guarded(z_train: NDArray[Any], z_inference: NDArray[Any]) -> NDArray[np.float64]:
    """Quantities of `LOGITS` for logits [rows, vocab]: float64 [rows, 7], NaN in rows that are not valid.

    Args:
        z_train: Logits of the training kernel, float64.
        z_inference: Logits of the inference kernel.
    """
    top_train, top_inference = np.amax(z_train, -1)[:, None], np.amax(z_inference, -1)[:, None]
    valid = np.isfinite(top_train[:, 0]) & np.isfinite(top_inference[:, 0])
    absent = (z_train == -math.inf) & (z_inference == -math.inf)
    gap = z_train - z_inference
    half_range = (np.amax(np.where(absent, -math.inf, gap), -1) - np.amin(np.where(absent, math.inf, gap), -1)) / 2
    log_p, log_q = z_train - top_train, z_inference - top_inference
    p, q = np.exp(log_p), np.exp(log_q)
    sum_train, sum_inference = p.sum(-1)[:, None], q.sum(-1)[:, None]
    p, q, log_q = p / sum_train, q / sum_inference, log_q - np.log(sum_inference)
    # The logits' own difference keeps its digits unless one of them, or of the maxima, is far from the other.
    apart, below = top_train - top_inference, log_p - (z_inference - top_inference)
    near = abs(gap) + abs(apart) <= abs(log_p) + abs(z_inference - top_inference)
    d = np.where(absent, 0.0, np.where(near, gap - apart, below) - np.log(sum_train / sum_inference))

    # q expm1(d) keeps its digits where p and q nearly agree, p - q where they do not.
    rises = d > 1.0
    u = np.expm1(d.clip(max=1.0))
    change = np.where(rises, p - q, q * u)
    mixture = np.log1p(u / 2)  # log of ((p + q)/2) / q
    beyond = math.log(2.0) - np.log1p(np.exp(-d.clip(min=1.0)))  # log of p / ((p + q)/2), where d is large
    p_js = _product(p, np.where(rises, beyond, d - mixture))
    q_js = _product(q, np.where(rises, d - beyond, mixture))
    p_d, q_d = _product(p, d), _product(q, d)
    # H(P) - H(Q) = -sum(p d + (p - q) log q); where q is 0 that is -p log p.
    log_p = log_p - np.log(sum_train)
    entropy = np.where(q > 0, p_d + _product(change, log_q), _product(p, log_p))
    total = change.sum(-1)
    # The total is 0 but for rounding, which log q would weigh: take its share out again.
    rounding = total * _product(q, log_q).sum(-1)
    values = np.stack(
        [
            half_range,
            abs(change).sum(-1) / 2,
            p_d.sum(-1) - total,
            total - q_d.sum(-1),
            (p_js - q_js).sum(-1) / 2,
            np.where(z_train.argmax(-1) != z_inference.argmax(-1), 1.0, 0.0),
            rounding - entropy.sum(-1),
        ],
        -1,
    )
    return np.where(valid[:, None], values, math.nan)


def _product(weight: NDArray[np.float64], value: NDArray[np.float64]) -> NDArray[np.float64]:
    # 0 times infinity is 0 here: a token without probability contributes nothing.
    return np.where(weight == 0, 0.0, weight * value)
