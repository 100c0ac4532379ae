"""Reduce log-probabilities in host memory to counts per slice, in one pass over blocks that fit the cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kc_otel.contract.input_reasons import InvalidReason
from kc_otel.contract.slices import PLACES
from kc_otel.record.measure.arrays import Block, HostRows, SampledBatch
from kc_otel.record.measure.checks import check_block, difference
from kc_otel.record.measure.places import BETWEEN
from kc_otel.record.measure.sampled import TOKEN, saturated
from kc_otel.record.telemetry.buckets import LogRatioCells
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
    """Reduction of a batch of sampled log-probabilities, of which n sequences were measured.

    Totals, low and high are of every quantity of `TOKEN` over each one's tokens, float64 [n, 6], and with advantages of
    those of `ADVANTAGE` too, [n, 8]; a sequence without such a token has inf and -inf for its ends.
    """

    codes: NDArray[np.int8]  # an `InvalidReason` per sequence, int8 [sequences]
    rows: NDArray[np.intp]  # sequences that were measured, [n]
    tokens: NDArray[np.intp]  # of each, [n]
    totals: NDArray[np.float64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]
    cells: NDArray[np.int64]  # counts per slice and cell, int64 [slices, cells]
    slots: NDArray[np.int64] | None  # of `ADVANTAGE`, counts per slice and bucket [slices, 2, slots]; None without
    sides: NDArray[np.intp]  # tokens of each with a positive, and with a negative advantage, [n, 2]
    why: dict[InvalidReason, str]  # findings of the checks, in words
    bets: NDArray[np.float64]  # evidence that the tokens were not sampled from Q, [2, bets]: `surplus`, `sureness`
    places: NDArray[np.float64] | None = None  # sum of (1-w)+ in each of PLACES, and tokens [2, n, places]

    @property
    def mean_ratio(self) -> float:
        """Mean of P(y)/Q(y) over the measured tokens; 0 where there are none."""
        tokens = int(self.tokens.sum())
        return float(self.totals[:, _RATIO].sum()) / tokens if tokens else 0.0

    def held(self, codes: NDArray[np.int8]) -> Reduced:
        """Nothing measured, with these codes instead."""
        slots = None if self.slots is None else np.zeros_like(self.slots)
        cells, bets, placed = np.zeros_like(self.cells), np.zeros_like(self.bets), self.places is not None
        return joined(codes, self.tokens, (), cells, slots, self.why, bets, placed=placed)


NO_SIDES: Final = np.zeros((0, 2), dtype=np.intp)
NO_PLACES: Final = np.zeros((2, 0, PLACE_COUNT))
Part = tuple[NDArray[Any], ...]
"""Of some rows of a batch: which they are; their totals, low and high as in `Reduced`, stacked; `sides`; `places`."""


def joined(
    codes: NDArray[np.int8],
    lengths: NDArray[np.intp],
    parts: Sequence[Part],
    cells: NDArray[np.int64],
    slots: NDArray[np.int64] | None,
    why: dict[InvalidReason, str],
    bets: NDArray[np.float64],
    *,
    placed: bool,
) -> Reduced:
    """The reduction of a batch from that of its parts and from its counts; `lengths` are of all sequences."""
    width = len(TOKEN) + (0 if slots is None else len(ADVANTAGE))
    none: Part = (np.zeros(0, dtype=np.intp), np.zeros((3, 0, width)), NO_SIDES, NO_PLACES)
    columns = zip(zip(none, *parts, strict=True), (0, 1, 0, 1), strict=True)
    rows, stats, sides, places = (np.concatenate(column, axis=axis) for column, axis in columns)
    totals, low, high = stats
    some = places if placed else None
    return Reduced(codes, rows, lengths[rows], totals, low, high, cells, slots, sides, why, bets, some)


def of_one_age(rows: NDArray[np.intp], membership: NDArray[np.bool_]) -> list[NDArray[np.intp]]:
    """Rows parted in those in `all`, the first slice, and those that older weights sampled.

    Checks compare the rows of a block with each other, and kernels that agree bit by bit drift on older weights alone.
    """
    current = membership[rows, 0]
    return [part for part in (rows[current], rows[~current]) if part.size]


def reduce_host(
    batch: SampledBatch,
    codes: NDArray[np.int8],
    membership: NDArray[np.bool_],
    cells: LogRatioCells,
    advantages: HostRows | None,
    *,
    density: bool = False,
    bounds: NDArray[np.intp] | None = None,
) -> Reduced:
    """Check, measure and count a batch of sequences, of which some are known to be invalid (`codes`, int8 [sequences]).

    The result's codes add the findings on log-probabilities. `membership` is bool [sequences, slices], `bounds` the
    batch's `Places.bounds`, where its places are asked for; with `density` they are log-densities, which may exceed 0.
    """
    codes = codes.copy()
    codes[(codes == InvalidReason.VALID) & (batch.lengths == 0)] = InvalidReason.NO_TOKENS
    order = np.flatnonzero(codes == InvalidReason.VALID)
    room = int(batch.lengths[order].sum())
    counted = np.empty(room, dtype=np.uint16)
    drift_slots = np.empty(0 if advantages is None else room, dtype=np.uint16)
    parts, done = list[Part](), 0
    why: dict[InvalidReason, str] = {}
    bets = np.zeros((2, BET_COUNT))
    of_parts = (enumerate(batch.blocks(part)) for part in of_one_age(order, membership))
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
        stats, sides, places = _row_stats(wide, change, block), NO_SIDES, NO_PLACES
        bets[0] += bets_of(stats[0], block.lengths, partial(np.asarray, change))
        bets[1] += sureness(block.inference[:_SURENESS_TOKENS])
        if advantages is not None:
            advantage = batch.packed(advantages, block.rows)
            drifts, sides = _row_drifts(change, advantage, block, cells, drift_slots[here])
            stats = np.concatenate([stats, drifts], axis=2)
        if bounds is not None:
            places = _place_sums(change, block, bounds[block.rows], batch.mask)
        parts.append((block.rows, stats, sides, places))
        done += exact.size

    def count(what: NDArray[np.uint16], size: int) -> NDArray[np.int64]:
        """Count each code of some size in each slice, int64 [slices, size]."""
        rows = np.concatenate([order[:0], *(part[0] for part in parts)])
        counts = np.zeros((membership.shape[1], size), dtype=np.int64)
        for column in np.flatnonzero(membership[rows].any(0)):
            inside = np.repeat(membership[rows, column], batch.lengths[rows])
            counts[column] = np.bincount(what[:done] if inside.all() else what[:done][inside], minlength=size)
        return counts

    size = cells.slots.size
    slots = None if advantages is None else count(drift_slots, 2 * size + 1)[:, : 2 * size].reshape(-1, 2, size)
    return joined(codes, batch.lengths, parts, count(counted, cells.size), slots, why, bets, placed=bounds is not None)


def bets_of(
    totals: NDArray[np.float64], tokens: NDArray[np.intp], changes: Callable[[], NDArray[np.float64]]
) -> NDArray[np.float64]:
    """Evidence against E_Q[P/Q] <= 1, [bets]: from sums over rows, and from tokens only where those give cause.

    `totals` are of the quantities of `TOKEN`, [rows, 6]; `changes` returns P/Q - 1 of the tokens.
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
) -> tuple[NDArray[np.float64], NDArray[np.intp]]:
    """Sums, minima and maxima [3, rows, 2] of (w-1) A for A > 0 and A < 0, and such tokens; fills in their slots."""
    drift = change * advantage
    size = cells.slots.size
    slots[:] = cells.slots.locate(drift)
    slots[advantage < 0] += np.uint16(size)
    slots[advantage == 0] = 2 * size
    starts, sides = block.starts, (advantage > 0, advantage < 0)
    totals = [np.add.reduceat(np.where(side, drift, 0.0), starts) for side in sides]
    low = [np.minimum.reduceat(np.where(side, drift, np.inf), starts) for side in sides]
    high = [np.maximum.reduceat(np.where(side, drift, -np.inf), starts) for side in sides]
    tokens = np.stack([np.add.reduceat(side, starts, dtype=np.intp) for side in sides], axis=1)
    return np.array([totals, low, high]).transpose(0, 2, 1), tokens


def _place_sums(
    change: NDArray[np.float64], block: Block, bounds: NDArray[np.intp], mask: NDArray[np.bool_] | None
) -> NDArray[np.float64]:
    """Sums of (1-w)+, from w - 1, over a block's tokens in each of PLACES, and their numbers [2, rows, places]."""
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
