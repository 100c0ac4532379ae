"""The same as `_reduce` with torch, where the tensors are: only counts, sums and extremes cross to the host.

Rows keep their padding here, since a device reduces a rectangle faster than ragged rows, and a cell's number comes from
a binary search over all edges at once. Counts are those of the NumPy path exactly; sums agree to rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kc_otel._extras import extra
from kc_otel.record.measure.arrays import as_host
from kc_otel.record.measure.checks import (
    InvalidReason,
    RowStats,
    check_fillers,
    check_patterns,
    check_together,
    judged,
    looks_shifted,
)
from kc_otel.record.measure.packing import Block
from kc_otel.record.measure.processing import PAD_RUN, ends_like, looks_processed, looks_processed_together
from kc_otel.record.measure.sampled import LOWEST, TOKEN, advantage_drift, saturated
from kc_otel.record.telemetry.buckets import Partition
from kc_otel.record.telemetry.groups import Groups, count_groups
from kc_otel.record.telemetry.log_ratio_cells import LogRatioCells
from kc_otel.record.telemetry.reduce_host import AdvantageDrift, Reduced

with extra("torch", "a batch on a device"):
    import torch

__all__ = ["reduce_device"]

_CHUNK: Final = 1 << 22
"""Tokens, padding included, that are worked on at a time: float64 arrays of them take 32 MiB each."""
_KEYED: Final = 1 << 24
"""Most counters that are kept for groups of sequences before they are summed into slices."""


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """Some rows on the device; what is masked may be anything, NaN too.

    Attributes:
        index: Which rows of the batch they are, on the host.
        kept: Which tokens count.
        log_w: l, float64, saturated and rounded to float32.
        advantage: Advantages, [rows, tokens] or [rows, 1].
    """

    index: NDArray[np.intp]
    kept: Any
    log_w: Any
    advantage: Any


def reduce_device(
    train: Any,
    inference: Any,
    mask: Any,
    codes: NDArray[np.int8],
    groups: Groups,
    cells: LogRatioCells,
    advantages: Any,
    *,
    count_sides: bool = False,
) -> Reduced:
    """Check, measure and count a batch; see `reduce_host`.

    Args:
        train: log P(y), tensor [sequences, tokens].
        inference: log Q(y), on the same device or another one.
        mask: Which tokens count; None when all do.
        codes: What is known to be invalid, int8 [sequences].
        groups: Slices of each sequence.
        cells: The partition that tokens are counted in.
        advantages: [sequences] or [sequences, tokens]; None when there are none.
        count_sides: Whether to count each sequence's tokens with A > 0 and with A < 0.
    """
    with torch.no_grad():
        train, device = train.detach(), train.device
        inference = torch.as_tensor(inference, device=device)
        mask = None if mask is None else torch.as_tensor(mask, device=device) != 0
        lengths = np.full(train.shape[0], train.shape[1]) if mask is None else as_host(mask.sum(1))
        advantages = None if advantages is None else torch.as_tensor(advantages, device=device)
        codes = codes.copy()
        codes[(codes == InvalidReason.VALID) & (lengths == 0)] = InvalidReason.NO_TOKENS
        order = groups.order[codes[groups.order] == InvalidReason.VALID]
        step = max(1, _CHUNK // max(1, train.shape[1]))
        slices, drift_size = groups.members.shape[1], 2 * cells.slots.size
        counts = torch.zeros((slices, cells.size + 1), dtype=torch.int64, device=device)
        drift_counts = torch.zeros((slices, drift_size + 1), dtype=torch.int64, device=device)
        measured, stats, drifts = [], [np.zeros((3, 0, len(TOKEN)))], [np.zeros((3, 0, 2))]
        sides = [np.zeros((0, 2), dtype=np.intp)]
        for first in range(0, order.size, step):
            rows = _checked(train, inference, mask, advantages, order[first : first + step], lengths, codes)
            if not rows.index.size:
                continue
            measured.append(rows.index)
            stats.append(_row_stats(rows))
            found = torch.where(rows.kept, _locate(cells.partition, rows.log_w), cells.size)
            _count(counts, found, groups, rows.index)
            if advantages is not None:
                change = advantage_drift(rows.log_w, rows.advantage)
                drifts.append(_row_drifts(change, rows))
                if count_sides:
                    sides.append(_side_tokens(rows))
                slot = _locate(cells.slots.partition, change) + (rows.advantage < 0) * cells.slots.size
                slot = torch.where(rows.kept & (rows.advantage != 0), slot, drift_size)
                _count(drift_counts, slot, groups, rows.index)
        index = np.concatenate(measured) if measured else np.zeros(0, dtype=np.intp)
        totals, low, high = np.concatenate(stats, axis=1)
        drift = None
        if advantages is not None:
            slots = as_host(drift_counts)[:, :drift_size].reshape(slices, 2, -1)
            sums, least, most = np.concatenate(drifts, axis=1)
            drift = AdvantageDrift(sums, least, most, slots, np.concatenate(sides) if count_sides else None)
        return Reduced(codes, index, lengths[index], totals, low, high, as_host(counts)[:, : cells.size], drift)


def _checked(
    train: Any,
    inference: Any,
    mask: Any,
    advantages: Any,
    index: NDArray[np.intp],
    lengths: NDArray[np.intp],
    codes: NDArray[np.int8],
) -> _Rows:
    where = torch.as_tensor(index, device=train.device)
    wide = torch.float64 if torch.float64 in (train.dtype, inference.dtype) else torch.float32
    p, q = train[where].to(wide), inference[where].to(wide)
    kept = torch.ones_like(p, dtype=torch.bool) if mask is None else mask[where]
    log_w = saturated((p - q).float()).double()
    drift = torch.where(kept, log_w.abs(), 0.0).sum(1) / torch.as_tensor(lengths[index], device=train.device)
    sides = [
        f(torch.where(kept, side, rest), 1)
        for side in (p, q)
        for f, rest in ((torch.amin, torch.inf), (torch.amax, -torch.inf))
    ]
    finite = torch.ones_like(drift)
    advantage = None
    if advantages is not None:
        advantage = advantages[where].double()
        advantage = advantage[:, None] if advantage.ndim == 1 else advantage
        finite = (torch.isfinite(advantage) | ~kept).all(1).double()
    host = as_host(torch.stack([*(side.double() for side in sides), drift, finite, _ends_alike(p, q, kept)]))
    shifted = np.full(index.size, np.inf)
    suspicious = looks_shifted(host[4], lengths[index])
    if suspicious.any():
        part = torch.as_tensor(np.flatnonzero(suspicious), device=train.device)
        shifted[suspicious] = _shifted(p[part], q[part], kept[part])
    patterns = np.zeros(index.size, dtype=np.int8)
    suspicious = looks_processed(host[4], lengths[index])
    if suspicious.any():
        part = torch.as_tensor(np.flatnonzero(suspicious), device=train.device)
        patterns[suspicious] = check_patterns(_on_host(p[part], q[part], kept[part], lengths[index[suspicious]]))
    alike = (host[6] == 1) & (lengths[index] >= 2 * PAD_RUN) & ~suspicious
    if alike.any():
        part = torch.as_tensor(np.flatnonzero(alike), device=train.device)
        patterns[alike] = check_fillers(_on_host(p[part], q[part], kept[part], lengths[index[alike]]))
    filled = patterns == InvalidReason.PADDING_COUNTED
    if filled.any():
        end = (kept * torch.arange(kept.shape[1], device=kept.device)).amax(1, keepdim=True)
        patterns[ends_like(filled, *(as_host(side.gather(1, end)[:, 0]) for side in (p, q)))] = (
            InvalidReason.PADDING_COUNTED
        )
    short = looks_processed_together(host[4], lengths[index]) & (patterns == InvalidReason.VALID)
    if short.any():
        part = torch.as_tensor(np.flatnonzero(short), device=train.device)
        patterns[short] = check_together(_on_host(p[part], q[part], kept[part], lengths[index[short]]))
    found = judged(RowStats(host[0], host[1], host[2], host[3], host[4], shifted, patterns))
    found[(found == InvalidReason.VALID) & (host[5] == 0)] = InvalidReason.NAN_ADVANTAGE
    codes[index] = found
    if found.any():
        valid = np.flatnonzero(found == InvalidReason.VALID)
        part = torch.as_tensor(valid, device=train.device)
        advantage = None if advantage is None else advantage[part]
        return _Rows(index[valid], kept[part], log_w[part], advantage)
    return _Rows(index, kept, log_w, advantage)


def _ends_alike(p: Any, q: Any, kept: Any) -> Any:
    """1 for each row whose last PAD_RUN tokens that count are one number, the same on both sides; see `ends_alike`."""
    place = kept.cumsum(1)
    last = kept & (place > place[:, -1:] - PAD_RUN)
    most = torch.where(last, torch.maximum(p, q), -torch.inf).amax(1)
    least = torch.where(last, torch.minimum(p, q), torch.inf).amin(1)
    return (most == least).double()


def _on_host(p: Any, q: Any, kept: Any, lengths: NDArray[np.intp]) -> Block:
    """Rows that are suspicious, in host memory: patterns are looked for there, and few batches have any."""
    return Block(np.arange(lengths.size), np.cumsum(lengths) - lengths, lengths, as_host(p[kept]), as_host(q[kept]))


def _shifted(p: Any, q: Any, kept: Any) -> NDArray[np.float64]:
    # Neighbours among the tokens that count, which need not be neighbours in the row.
    row = torch.arange(p.shape[0], device=p.device)[:, None].expand_as(p)[kept]
    p, q, same = p[kept], q[kept], row[1:] == row[:-1]
    means = []
    for ahead, behind in ((p, q), (q, p)):
        apart = (ahead[1:] - behind[:-1]).clip(LOWEST, -LOWEST).abs().double()
        sums = torch.zeros(int(kept.shape[0]), dtype=torch.float64, device=p.device)
        sums.index_add_(0, row[1:][same], apart[same])
        means.append(sums / (kept.sum(1) - 1))
    return as_host(torch.minimum(*means))


def _row_stats(rows: _Rows) -> NDArray[np.float64]:
    columns = []
    for quantity in TOKEN.values():
        value = quantity(rows.log_w)
        columns.append(
            torch.stack(
                [
                    torch.where(rows.kept, value, 0.0).sum(1),
                    torch.where(rows.kept, value, torch.inf).amin(1),
                    torch.where(rows.kept, value, -torch.inf).amax(1),
                ]
            )
        )
    return as_host(torch.stack(columns, dim=2))


def _row_drifts(drift: Any, rows: _Rows) -> NDArray[np.float64]:
    columns = []
    for side in (rows.advantage > 0, rows.advantage < 0):
        here = side & rows.kept
        columns.append(
            torch.stack(
                [
                    torch.where(here, drift, 0.0).sum(1),
                    torch.where(here, drift, torch.inf).amin(1),
                    torch.where(here, drift, -torch.inf).amax(1),
                ]
            )
        )
    return as_host(torch.stack(columns, dim=2))


def _side_tokens(rows: _Rows) -> NDArray[np.intp]:
    sides = (rows.advantage > 0, rows.advantage < 0)
    return as_host(torch.stack([(side & rows.kept).sum(1) for side in sides], dim=1))


def _locate(partition: Partition, values: Any) -> Any:
    largest = float(np.finfo(np.float32).max)
    edges = torch.as_tensor(partition.edges, device=values.device)
    return torch.searchsorted(edges, values.clip(-largest, largest).float(), right=True)


def _count(counts: Any, codes: Any, groups: Groups, index: NDArray[np.intp]) -> None:
    """Add codes [rows, tokens] to counts [slices, size], where the last code is what does not count."""
    size = counts.shape[1]
    present, group = np.unique(groups.of[index], return_inverse=True)
    members = groups.members[present]
    tokens = np.bincount(group) * codes.shape[1]
    if present.size * size <= _KEYED and count_groups(members, tokens, size):
        key = codes + torch.as_tensor(group.reshape(-1, 1) * size, device=codes.device)
        per_group = torch.bincount(key.reshape(-1), minlength=present.size * size).reshape(-1, size)
        # Float64 products of counts are exact below 2^53; integers have no matrix product on a device.
        to_slices = torch.as_tensor(members.T.astype(np.float64), device=codes.device)
        counts += (to_slices @ per_group.double()).long()
        return
    for slice in np.flatnonzero(members.any(0)):
        rows = torch.as_tensor(np.flatnonzero(members[group, slice]), device=codes.device)
        counts[slice] += torch.bincount(codes[rows].reshape(-1), minlength=size)
