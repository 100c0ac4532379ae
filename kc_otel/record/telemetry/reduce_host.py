"""Reduce log-probabilities in host memory to counts per slice, in one pass over blocks that fit the cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kc_otel.contract.slices import PLACES
from kc_otel.record.measure.arrays import HostRows
from kc_otel.record.measure.checks import InvalidReason, check_block, difference
from kc_otel.record.measure.packing import Block, SampledBatch
from kc_otel.record.measure.places import BETWEEN
from kc_otel.record.measure.sampled import TOKEN, saturated
from kc_otel.record.telemetry.groups import Groups, LogRatioCells, count_by_slice, of_one_age
from kc_otel.stats.surplus import BET_COUNT, sureness, surplus, surplus_of_sums

_RATIO, _CHI2 = (list(TOKEN).index(quantity) for quantity in ("ratio", "chi2_token"))
_MIN_EXCESS_RATIO: Final = 0.03
"""Mean P/Q above 1 from which tokens are looked at one by one."""
_SAMPLED_BLOCKS: Final = 4
"""Blocks of which one is looked at for what a program does to all rows."""
_SURENESS_TOKENS: Final = 4096
"""Tokens of a block that are asked whether Q is too sure of them: any choice made beforehand bets as well."""
PLACE_COUNT: Final = len(PLACES)
ADVANTAGE: Final = ("advantage_drift_positive", "advantage_drift_negative")


@dataclass(frozen=True, slots=True, eq=False)
class Reduced:
    """Reduction of a batch of sampled log-probabilities.

    Attributes:
        codes: An `InvalidReason` per sequence, int8 [sequences].
        rows: Sequences that were measured, [n].
        tokens: Tokens of each, [n].
        totals: Sum over each one's tokens of every quantity of `TOKEN`, in its order, float64 [n, 6].
        low: Smallest value of each, float64 [n, 6].
        high: Largest value of each, float64 [n, 6].
        cells: Counts per slice and cell, int64 [slices, cells].
        drift: The same of the quantities of `ADVANTAGE`; None without advantages.
        why: Findings of the checks, in words, by reason.
        bets: Evidence that the measured tokens were not sampled from Q, [2, bets]; see `surplus` and `sureness`.
        places: Sum of (1-w)+ over each one's tokens in each of PLACES, and how many these are, float64 [2, n, places];
            None where nobody asked.
    """

    codes: NDArray[np.int8]
    rows: NDArray[np.intp]
    tokens: NDArray[np.intp]
    totals: NDArray[np.float64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]
    cells: NDArray[np.int64]
    drift: AdvantageDrift | None
    why: dict[InvalidReason, str]
    bets: NDArray[np.float64]
    places: NDArray[np.float64] | None = None

    @property
    def mean_ratio(self) -> float:
        """Mean of P(y)/Q(y) over the measured tokens; 0 where there are none."""
        tokens = int(self.tokens.sum())
        return float(self.totals[:, _RATIO].sum()) / tokens if tokens else 0.0

    def held(self, codes: NDArray[np.int8]) -> Reduced:
        """Nothing measured, with these codes instead."""
        drift = self.drift
        if drift is not None:
            sides = None if drift.tokens is None else drift.tokens[:0]
            none, slots = (drift.totals[:0], drift.low[:0], drift.high[:0]), np.zeros_like(drift.slots)
            drift = AdvantageDrift(none[0], none[1], none[2], slots, sides)
        return Reduced(
            codes,
            self.rows[:0],
            self.tokens[:0],
            self.totals[:0],
            self.low[:0],
            self.high[:0],
            np.zeros_like(self.cells),
            drift,
            self.why,
            np.zeros_like(self.bets),
            None if self.places is None else self.places[:, :0],
        )


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
    density: bool = False,
    bounds: NDArray[np.intp] | None = None,
) -> Reduced:
    """Check, measure and count a batch.

    Args:
        batch: Log-probabilities of [sequences, tokens].
        codes: Known invalid sequences, int8 [sequences]; the result adds the findings on log-probabilities.
        groups: Slices of each sequence.
        cells: The partition that tokens are counted in.
        advantages: [sequences] or [sequences, tokens].
        count_sides: Whether to count each sequence's tokens with A > 0 and with A < 0.
        density: Whether these are log-densities, which may exceed 0.
        bounds: `Places.bounds` of the batch, where its places are asked for.
    """
    codes = codes.copy()
    codes[(codes == InvalidReason.VALID) & (batch.lengths == 0)] = InvalidReason.NO_TOKENS
    order = groups.order[codes[groups.order] == InvalidReason.VALID]
    room = int(batch.lengths[order].sum())
    counted = np.empty(room, dtype=np.uint16)
    drift_slots = np.empty(0 if advantages is None else room, dtype=np.uint16)
    rows, stats, drifts, sides, places, done = [], [], [], [], [np.zeros((2, 0, PLACE_COUNT))], 0
    why: dict[InvalidReason, str] = {}
    bets = np.zeros((2, BET_COUNT))
    of_parts = (enumerate(batch.blocks(part)) for part in of_one_age(order, groups))
    for number, whole in chain.from_iterable(of_parts):
        block, log_w = whole, difference(whole)
        checked = check_block(block, log_w, sample=number % _SAMPLED_BLOCKS == 0 or any(why), density=density)
        found = checked.codes
        for reason, words in checked.why.items():
            why.setdefault(reason, words)
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
        bets[0] += bets_of(stats[-1][0], block.lengths, partial(np.asarray, change))
        bets[1] += sureness(block.inference[:_SURENESS_TOKENS])
        if advantages is not None:
            advantage = batch.packed(advantages, block.rows)
            drifts.append(_row_drifts(change, advantage, block, cells, drift_slots[here]))
            if count_sides:
                sides.append(_side_tokens(advantage, block))
        places.append(_place_sums(change, block, bounds, batch.mask))
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
    sums = None if bounds is None else np.concatenate(places, axis=1)
    cell_counts = count(counted, cells.size)
    return Reduced(codes, measured, lengths, totals, low, high, cell_counts, drift, why, bets, sums)


def bets_of(
    totals: NDArray[np.float64], tokens: NDArray[np.intp], changes: Callable[[], NDArray[np.float64]]
) -> NDArray[np.float64]:
    """Evidence against E_Q[P/Q] <= 1, [bets]: from sums over rows, and from tokens only where those give cause.

    Args:
        totals: Sums over each row's tokens of the quantities of `TOKEN`, [rows, 6].
        tokens: Tokens of each, [rows].
        changes: Returns P/Q - 1 of the tokens.
    """
    count = int(tokens.sum())
    over = float(totals[:, _RATIO].sum()) - count
    if over > _MIN_EXCESS_RATIO * count:
        return surplus(changes())
    return surplus_of_sums(over, float(totals[:, _CHI2].sum()), count)


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
    return np.stack([np.stack(columns, axis=1) for columns in (totals, low, high)])


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


def _place_sums(
    change: NDArray[np.float64], block: Block, bounds: NDArray[np.intp] | None, mask: NDArray[np.bool_] | None
) -> NDArray[np.float64]:
    """Sums of (1-w)+, from w - 1, over a block's tokens in each of PLACES, and their numbers [2, rows, places]."""
    if bounds is None:
        return np.zeros((2, block.rows.size, PLACE_COUNT))
    bounds = bounds[block.rows]
    if mask is not None:
        bounds = _tokens_before(bounds, mask[block.rows], block.lengths)
    running = np.zeros(change.size + 1)
    np.cumsum(np.minimum(change, 0.0), out=running[1:])
    return of_places(np.stack([-running[bounds + block.starts[:, None]], bounds]))


def _tokens_before(columns: NDArray[np.intp], mask: NDArray[np.bool_], lengths: NDArray[np.intp]) -> NDArray[np.intp]:
    """Numbers of tokens that count before some columns of each row, [rows, columns], of rows with `lengths` of them."""
    first = mask.argmax(1)
    found: NDArray[np.intp] = np.clip(columns - first[:, None], 0, lengths[:, None])
    several = np.flatnonzero(mask.shape[1] - mask[:, ::-1].argmax(1) - first != lengths)
    if several.size:
        before = np.zeros((several.size, mask.shape[1] + 1), dtype=np.int32)
        np.cumsum(mask[several], axis=1, out=before[:, 1:])
        found[several] = np.take_along_axis(before, columns[several], axis=1)
    return found


def of_places(at_bounds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Sums over each of PLACES [..., places], from running sums at `Places.bounds` [..., bounds]."""
    return np.maximum(np.delete(np.diff(at_bounds, axis=-1), BETWEEN, axis=-1), 0.0)


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
