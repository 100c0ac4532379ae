"""The same as `reduce_host` with torch, where the tensors are: only counts, sums and extremes cross to the host.

Rows keep their padding here, since a device reduces a rectangle faster than ragged rows, and a cell's number comes from
a binary search over all edges at once. Counts are those of the NumPy path exactly; sums agree to rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kc_otel._extras import extra
from kc_otel.contract.input_reasons import InvalidReason
from kc_otel.record.measure.arrays import BLOCK, SampledBatch, as_host
from kc_otel.record.measure.checks import LOWEST_LOGPROB, check_block, difference
from kc_otel.record.measure.fillers import EDGE_ROWS, SENTINEL
from kc_otel.record.measure.row_faults import DRIFT, RUN
from kc_otel.record.measure.sampled import TOKEN, advantage_drift, saturated
from kc_otel.record.telemetry.buckets import LogRatioCells, Partition
from kc_otel.record.telemetry.reduce_host import (
    NO_PLACES,
    NO_SIDES,
    Part,
    Reduced,
    bets_of,
    joined,
    of_one_age,
    of_places,
)
from kc_otel.stats.surplus import BET_COUNT, LIKELY, sureness_of_sums

with extra("torch", "a batch on a device"):
    import torch

_TOKENS_PER_CHUNK: Final = 1 << 22
"""Tokens, padding included, that are worked on at a time: float64 arrays of them take 32 MiB each."""


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """Rows on the device; masked values may be anything, NaN too."""

    index: NDArray[np.intp]  # which rows of the batch they are, on the host
    kept: Any  # which tokens count
    inference: Any  # log Q
    log_w: Any  # l, float64, saturated and rounded to float32
    advantage: Any  # [rows, tokens] or [rows, 1]


def reduce_device(
    train: Any,
    inference: Any,
    mask: Any,
    codes: NDArray[np.int8],
    membership: NDArray[np.bool_],
    cells: LogRatioCells,
    advantages: Any,
    *,
    density: bool = False,
    bounds: NDArray[np.intp] | None = None,
) -> Reduced:
    """Check, measure and count a batch of tensors; arguments as in `reduce_host`."""
    with torch.no_grad():
        train, device = train.detach(), train.device
        inference = torch.as_tensor(inference, device=device)
        mask = None if mask is None else torch.as_tensor(mask, device=device) != 0
        lengths = np.full(train.shape[0], train.shape[1]) if mask is None else as_host(mask.sum(1))
        advantages = None if advantages is None else torch.as_tensor(advantages, device=device)
        codes = codes.copy()
        codes[(codes == InvalidReason.VALID) & (lengths == 0)] = InvalidReason.NO_TOKENS
        order = np.flatnonzero(codes == InvalidReason.VALID)
        step = max(1, _TOKENS_PER_CHUNK // max(1, train.shape[1]))
        slices, drift_size = membership.shape[1], 2 * cells.slots.size
        counts = torch.zeros((slices, cells.size + 1), dtype=torch.int64, device=device)
        drift_counts = torch.zeros((slices, drift_size + 1), dtype=torch.int64, device=device)
        parts = list[Part]()
        why: dict[InvalidReason, str] = {}
        bets = np.zeros((2, BET_COUNT))
        for some in (
            part[first : first + step] for part in of_one_age(order, membership) for first in range(0, part.size, step)
        ):
            rows = _checked(train, inference, mask, advantages, some, lengths, codes, why, density)
            if not rows.index.size:
                continue
            columns = [_ends(value(rows.log_w), rows.kept) for value in TOKEN.values()]
            stats, sides = as_host(torch.stack(columns, dim=2)), NO_SIDES
            bets[0] += bets_of(stats[0], lengths[rows.index], partial(_changes, rows))
            bets[1] += sureness_of_sums(*_sureness(rows))
            found = torch.where(rows.kept, _locate(cells.partition, rows.log_w), cells.size)
            _count(counts, found, membership[rows.index])
            if advantages is not None:
                change = advantage_drift(rows.log_w, rows.advantage)
                signs = [side & rows.kept for side in (rows.advantage > 0, rows.advantage < 0)]
                drifts = as_host(torch.stack([_ends(change, side) for side in signs], dim=2))
                stats = np.concatenate([stats, drifts], axis=2)
                sides = as_host(torch.stack([side.sum(1) for side in signs], dim=1))
                slot = _locate(cells.slots.partition, change) + (rows.advantage < 0) * cells.slots.size
                slot = torch.where(rows.kept & (rows.advantage != 0), slot, drift_size)
                _count(drift_counts, slot, membership[rows.index])
            places = NO_PLACES if bounds is None else _place_sums(rows, bounds[rows.index])
            parts.append((rows.index, stats, sides, places))
        slots = None if advantages is None else as_host(drift_counts)[:, :drift_size].reshape(slices, 2, -1)
        counted = as_host(counts)[:, : cells.size]
        return joined(codes, lengths, parts, counted, slots, why, bets, placed=bounds is not None)


def _checked(
    train: Any,
    inference: Any,
    mask: Any,
    advantages: Any,
    index: NDArray[np.intp],
    lengths: NDArray[np.intp],
    codes: NDArray[np.int8],
    why: dict[InvalidReason, str],
    density: bool,
) -> _Rows:
    where = torch.as_tensor(index, device=train.device)
    wide = torch.float64 if torch.float64 in (train.dtype, inference.dtype) else torch.float32
    p, q = train[where].to(wide), inference[where].to(wide)
    kept = torch.ones_like(p, dtype=torch.bool) if mask is None else mask[where]
    log_w = saturated((p - q).float()).double()
    drift = torch.where(kept, log_w.abs(), 0.0).sum(1) / torch.as_tensor(lengths[index], device=train.device)
    finite = torch.ones_like(drift)
    advantage = None
    if advantages is not None:
        advantage = advantages[where].double()
        advantage = advantage[:, None] if advantage.ndim == 1 else advantage
        finite = (torch.isfinite(advantage) | ~kept).all(1).double()
    odd = (~(torch.isfinite(q) & (p < torch.inf)) & kept).any(1) if density else _odd(p, q, kept)
    host = as_host(torch.stack([drift, finite, odd.double()]))
    found = np.zeros(index.size, dtype=np.int8)
    few = np.arange(max(1, int(np.searchsorted(np.cumsum(lengths[index]), BLOCK))))[: index.size]
    part = torch.as_tensor(few, device=train.device)
    block = SampledBatch.of(as_host(p[part]), as_host(q[part]), as_host(kept[part])).block(few)
    if host[2].any() or (
        not density
        and (
            (host[0] > DRIFT).any()
            or _agree_in_runs(p, q, kept, lengths[index])
            or check_block(block, difference(block)).codes.any()
        )
    ):
        # The patterns of a fault are looked for in host memory, by the checks of the other path; those that a program
        # makes in all rows alike, in a block of them.
        batch = SampledBatch.of(as_host(p), as_host(q), as_host(kept))
        for block in batch.blocks(np.arange(index.size)):
            checked = check_block(block, difference(block), density=density)
            found[block.rows] = checked.codes
            for reason, words in checked.why.items():
                why.setdefault(reason, words)
    found[(found == InvalidReason.VALID) & (host[1] == 0)] = InvalidReason.NAN_ADVANTAGE
    codes[index] = found
    if found.any():
        valid = np.flatnonzero(found == InvalidReason.VALID)
        part = torch.as_tensor(valid, device=train.device)
        advantage = None if advantage is None else advantage[part]
        return _Rows(index[valid], kept[part], q[part], log_w[part], advantage)
    return _Rows(index, kept, q, log_w, advantage)


def _odd(p: Any, q: Any, kept: Any) -> Any:
    """Rows with a number that is no log-probability of a sampled token; all others pass that check on the host."""
    plain = (p <= 0) & (q <= 0) & (q >= LOWEST_LOGPROB) & ((p >= SENTINEL) | (p == -torch.inf))
    return (~plain & kept).any(1)


def _agree_in_runs(p: Any, q: Any, kept: Any, lengths: NDArray[np.intp]) -> bool:
    """Return True if some row has a run of one value, or of tokens in which both sides agree; as on the host."""
    p, q = p[kept], q[kept]
    if p.numel() < RUN:
        return False
    ends = torch.as_tensor(np.cumsum(lengths) - 1, device=p.device)
    starts, zero = ends[:-1], (p == 0) & (q == 0)
    edges = zero[ends], torch.cat([zero[:1], zero[starts + 1]])
    found = [edge.double().mean() >= EDGE_ROWS for edge in edges]
    for same, times in (
        (p[1:] == p[:-1], RUN - 1),
        (q[1:] == q[:-1], RUN - 1),
        ((p.float() == q.float()) & (q != 0), RUN),
    ):
        run = same.clone()
        if times < RUN:
            run[starts] = False
        width = 1
        while width < times and run.numel() > 1:
            step = min(width, times - width, run.numel() - 1)
            run, width = run[step:] & run[:-step], width + step
        found.append(run.any())
    return bool(torch.stack(found).any())


def _changes(rows: _Rows) -> NDArray[np.float64]:
    """P/Q - 1 of the tokens that count, on the host."""
    return as_host(rows.log_w[rows.kept].expm1())


def _sureness(rows: _Rows) -> tuple[float, int]:
    """Sum of -log q, each at most `LIKELY`, and how many are above."""
    capped = torch.where(rows.kept, -rows.inference, 0.0).clamp(max=LIKELY)
    found = torch.stack([capped.double().sum(), ((rows.inference <= -LIKELY) & rows.kept).sum().double()])
    likely, improbable = as_host(found).tolist()
    return likely, int(improbable)


def _ends(values: Any, here: Any) -> Any:
    """Sums, minima and maxima [3, rows] of the values that are here."""
    nothing = ((0.0, torch.sum), (torch.inf, torch.amin), (-torch.inf, torch.amax))
    return torch.stack([reduce(torch.where(here, values, other), 1) for other, reduce in nothing])


def _place_sums(rows: _Rows, bounds: NDArray[np.intp]) -> NDArray[np.float64]:
    """Sums of (1-w)+ over the tokens in each of PLACES, and their numbers [2, rows, places]."""
    at = torch.as_tensor(bounds, device=rows.log_w.device)
    terms = (torch.where(rows.kept, TOKEN["tv_token"](rows.log_w), 0.0), rows.kept.double())
    running = [torch.nn.functional.pad(values.cumsum(1), (1, 0)).gather(1, at) for values in terms]
    return of_places(as_host(torch.stack(running)))


def _locate(partition: Partition, values: Any) -> Any:
    largest = float(np.finfo(np.float32).max)
    edges = torch.as_tensor(partition.edges, device=values.device)
    return torch.searchsorted(edges, values.clip(-largest, largest).float(), right=True)


def _count(counts: Any, codes: Any, membership: NDArray[np.bool_]) -> None:
    """Add codes [rows, tokens] to counts [slices, size], where the last code is what does not count."""
    for column in np.flatnonzero(membership.any(0)):
        rows = torch.as_tensor(np.flatnonzero(membership[:, column]), device=codes.device)
        counts[column] += torch.bincount(codes[rows].reshape(-1), minlength=counts.shape[1])
