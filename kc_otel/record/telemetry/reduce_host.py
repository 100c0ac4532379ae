"""From a batch of log-probabilities in host memory to counts per slice, in one pass over blocks that stay in cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kc_otel.record.measure.arrays import HostRows
from kc_otel.record.measure.checks import InvalidReason, check_block, difference
from kc_otel.record.measure.packing import Block, SampledBatch
from kc_otel.record.measure.sampled import TOKEN, saturated
from kc_otel.record.telemetry.groups import Groups, count_by_slice
from kc_otel.record.telemetry.log_ratio_cells import LogRatioCells

__all__ = ["ADVANTAGE", "Reduced", "reduce_host"]

ADVANTAGE: Final = ("advantage_drift_positive", "advantage_drift_negative")


@dataclass(frozen=True, slots=True, eq=False)
class Reduced:
    """What is left of a batch of sampled log-probabilities.

    Attributes:
        codes: An `InvalidReason` per sequence, int8 [sequences].
        rows: Sequences that were measured, [n].
        tokens: Tokens of each, [n].
        totals: Sum over each one's tokens of every quantity of `TOKEN`, in its order, float64 [n, 6].
        low: Smallest value of each, float64 [n, 6].
        high: Largest value of each, float64 [n, 6].
        cells: Counts per slice and cell, int64 [slices, cells].
        drift: The same of the quantities of `ADVANTAGE`; None without advantages.
    """

    codes: NDArray[np.int8]
    rows: NDArray[np.intp]
    tokens: NDArray[np.intp]
    totals: NDArray[np.float64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]
    cells: NDArray[np.int64]
    drift: AdvantageDrift | None


@dataclass(frozen=True, slots=True, eq=False)
class AdvantageDrift:
    """Advantage-weighted drift, positive advantages first, then negative ones.

    Attributes:
        totals: Sums over each sequence's tokens, float64 [n, 2].
        low: Smallest values; inf where there is none, float64 [n, 2].
        high: Largest values; -inf where there is none, float64 [n, 2].
        slots: Counts per slice and bucket, int64 [slices, 2, slots].
        tokens: Tokens of each sequence with such an advantage, [n, 2]; None where nobody asked.
    """

    totals: NDArray[np.float64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]
    slots: NDArray[np.int64]
    tokens: NDArray[np.intp] | None


def reduce_host(
    batch: SampledBatch,
    codes: NDArray[np.int8],
    groups: Groups,
    cells: LogRatioCells,
    advantages: HostRows | None,
    *,
    count_sides: bool = False,
) -> Reduced:
    """Check, measure and count a batch.

    Args:
        batch: Log-probabilities of [sequences, tokens].
        codes: What is known to be invalid, int8 [sequences]; the result has what the log-probabilities showed besides.
        groups: Slices of each sequence.
        cells: The partition that tokens are counted in.
        advantages: [sequences] or [sequences, tokens].
        count_sides: Whether to count each sequence's tokens with A > 0 and with A < 0.
    """
    codes = codes.copy()
    codes[(codes == InvalidReason.VALID) & (batch.lengths == 0)] = InvalidReason.NO_TOKENS
    order = groups.order[codes[groups.order] == InvalidReason.VALID]
    room = int(batch.lengths[order].sum())
    counted = np.empty(room, dtype=np.uint16)
    drift_slots = np.empty(0 if advantages is None else room, dtype=np.uint16)
    rows, stats, drifts, sides, done = [], [], [], [], 0
    for whole in batch.blocks(order):
        block, log_w = whole, difference(whole)
        found = check_block(block, log_w)
        if advantages is not None:
            finite = np.logical_and.reduceat(np.isfinite(batch.packed(advantages, block.rows)), block.starts)
            found[(found == InvalidReason.VALID) & ~finite] = InvalidReason.NAN_ADVANTAGE
        if found.any():
            codes[block.rows] = found
            block = block.only(found == InvalidReason.VALID)
            if not block.rows.size:
                continue
            log_w = difference(block)
        exact = saturated(log_w.astype(np.float32, copy=False))
        here = slice(done, done + exact.size)
        counted[here] = cells.partition.locate(exact)
        wide = exact.astype(np.float64)
        change = np.expm1(wide)
        stats.append(_row_stats(wide, change, block))
        if advantages is not None:
            advantage = batch.packed(advantages, block.rows)
            drifts.append(_row_drifts(change, advantage, block, cells, drift_slots[here]))
            if count_sides:
                sides.append(_side_tokens(advantage, block))
        rows.append(block.rows)
        done += exact.size
    measured = np.concatenate(rows) if rows else np.zeros(0, dtype=np.intp)
    lengths, group = batch.lengths[measured], groups.of[measured]

    def count(what: NDArray[np.uint16], size: int) -> NDArray[np.int64]:
        return count_by_slice(what[:done], size, group, lengths, groups)

    totals, low, high = _stacked(stats, len(TOKEN))
    drift = None
    if advantages is not None:
        tokens = np.concatenate([np.zeros((0, 2), dtype=np.intp), *sides]) if count_sides else None
        drift = _advantage_drift(_stacked(drifts, 2), drift_slots, count, cells, tokens)
    return Reduced(codes, measured, lengths, totals, low, high, count(counted, cells.size), drift)


def _row_stats(log_w: NDArray[np.float64], change: NDArray[np.float64], block: Block) -> NDArray[np.float64]:
    """Sums, minima and maxima [3, rows, 6] from l and w - 1 of a block's tokens, in the order of TOKEN."""
    starts, add, least = block.starts, np.add.reduceat, np.minimum.reduceat
    lowest, highest = least(log_w, starts), np.maximum.reduceat(log_w, starts)
    sum_log_w, sum_change = add(log_w, starts), add(change, starts)
    scratch = np.abs(log_w)
    sum_abs, least_abs = add(scratch, starts), least(scratch, starts)
    np.minimum(change, 0.0, out=scratch)
    sum_tv = -add(scratch, starts)
    np.subtract(change, log_w, out=scratch)
    sum_k3, least_k3 = add(scratch, starts), least(scratch, starts)
    np.multiply(change, change, out=scratch)
    sum_chi2, least_chi2 = add(scratch, starts), least(scratch, starts)
    totals = (sum_log_w, sum_abs, sum_change + block.lengths, sum_tv + 0.0, sum_k3, sum_chi2)
    # Rising quantities take their extremes where l does, (1-w)+ the other way round; the others' maxima are at one end.
    ends = {key: (quantity(lowest), quantity(highest)) for key, quantity in TOKEN.items()}
    low = (lowest, least_abs, ends["ratio"][0], ends["tv_token"][1], least_k3, least_chi2)
    high = tuple(np.maximum(*ends[key]) for key in TOKEN)
    return np.stack([np.stack(each, axis=1) for each in (totals, low, high)])


def _row_drifts(
    change: NDArray[np.float64],
    advantage: NDArray[Any],
    block: Block,
    cells: LogRatioCells,
    slots: NDArray[np.uint16],
) -> NDArray[np.float64]:
    """Sums, minima and maxima [3, rows, 2] of (w-1) A for A > 0 and A < 0; fills in the tokens' slots."""
    drift = change * advantage
    size = cells.slots.size
    slots[:] = cells.slots.locate(drift)
    slots[advantage < 0] += np.uint16(size)
    slots[advantage == 0] = 2 * size
    starts, sides = block.starts, (advantage > 0, advantage < 0)
    totals = [np.add.reduceat(np.where(side, drift, 0.0), starts) for side in sides]
    low = [np.minimum.reduceat(np.where(side, drift, np.inf), starts) for side in sides]
    high = [np.maximum.reduceat(np.where(side, drift, -np.inf), starts) for side in sides]
    return np.array([totals, low, high]).transpose(0, 2, 1)


def _side_tokens(advantage: NDArray[Any], block: Block) -> NDArray[np.intp]:
    """Tokens of each row with A > 0 and with A < 0, [rows, 2]."""
    sides = (advantage > 0, advantage < 0)
    return np.stack([np.add.reduceat(side, block.starts, dtype=np.intp) for side in sides], axis=1)


def _advantage_drift(
    stats: NDArray[np.float64],
    slots: NDArray[np.uint16],
    count: Callable[[NDArray[np.uint16], int], NDArray[np.int64]],
    cells: LogRatioCells,
    tokens: NDArray[np.intp] | None,
) -> AdvantageDrift:
    size = cells.slots.size
    counts = count(slots, 2 * size + 1)[:, : 2 * size].reshape(-1, 2, size)
    totals, low, high = stats
    return AdvantageDrift(totals, low, high, counts, tokens)


def _stacked(parts: list[NDArray[np.float64]], width: int) -> NDArray[np.float64]:
    return np.concatenate(parts, axis=1) if parts else np.zeros((3, 0, width))
