"""Reduce log-probabilities to counts per slice, in one pass over blocks that fit the cache."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kc_otel.contract.input_reasons import InvalidReason
from kc_otel.contract.slices import PLACES
from kc_otel.record.measure.arrays import Floats
from kc_otel.record.measure.blocks import Block, SampledBatch
from kc_otel.record.measure.checks import check_block
from kc_otel.record.measure.sampled import TOKEN, saturated
from kc_otel.record.slice_table import BETWEEN, Places
from kc_otel.record.telemetry.buckets import LogRatioCells
from kc_otel.stats.surplus import BET_COUNT, sureness, surplus, surplus_of_sums

_RATIO, _CHI2 = (list(TOKEN).index(quantity) for quantity in ("ratio", "chi2_token"))
_MIN_EXCESS_RATIO: Final = 0.03  # mean P/Q above 1 from which tokens are looked at one by one
_SAMPLED_BLOCKS: Final = 4  # blocks of which one is looked at for what a program does to all rows
_SURENESS_TOKENS: Final = 4096
"""Tokens of a block that are asked whether Q is too sure of them: any choice made beforehand bets as well."""
ADVANTAGE: Final = ("advantage_drift_positive", "advantage_drift_negative")


@dataclass(frozen=True, slots=True, eq=False)
class Reduced:
    """Reduction of a batch of sampled log-probabilities, of which n sequences were measured.

    `stats` are totals, minima and maxima of every quantity of `TOKEN` over each one's tokens, float64 [3, n, 6].
    """

    codes: NDArray[np.int8]  # an `InvalidReason` per sequence, int8 [sequences]
    rows: NDArray[np.intp]  # sequences that were measured, [n]
    tokens: NDArray[np.intp]  # of each, [n]
    stats: NDArray[np.float64]
    cells: NDArray[np.int64]  # counts per slice and cell, int64 [slices, cells]
    drifts: NDArray[np.float64] | None  # of `ADVANTAGE`, (w - 1) A of the tokens, NaN for none [2, tokens]
    why: dict[InvalidReason, str]  # findings of the checks, in words
    bets: NDArray[np.float64]  # evidence that the tokens were not sampled from Q, [2, bets]: `surplus`, `sureness`
    places: NDArray[np.float64] | None = None  # sum of (1-w)+ in each of PLACES, and tokens [2, n, places]

    @property
    def mean_ratio(self) -> float:
        """Mean of P(y)/Q(y) over the measured tokens; 0 where there are none."""
        tokens = int(self.tokens.sum())
        return float(self.stats[0, :, _RATIO].sum()) / tokens if tokens else 0.0

    def held(self, codes: NDArray[np.int8]) -> Reduced:
        """Nothing measured, with these codes instead."""
        return replace(
            self,
            codes=codes,
            rows=self.rows[:0],
            tokens=self.tokens[:0],
            stats=self.stats[:, :0],
            cells=np.zeros_like(self.cells),
            drifts=None if self.drifts is None else self.drifts[:, :0],
            bets=np.zeros_like(self.bets),
            places=None if self.places is None else self.places[:, :0],
        )


def reduce(
    batch: SampledBatch,
    codes: NDArray[np.int8],
    membership: NDArray[np.bool_],
    cells: LogRatioCells,
    advantages: Floats | None,
    *,
    density: bool = False,
    places: Places | None = None,
) -> Reduced:
    """Check, measure and count a batch of sequences, of which some are known to be invalid (`codes`, int8 [sequences]).

    The result's codes add the findings on log-probabilities. `membership` is bool [sequences, slices]; `places`
    are given where they are asked for; with `density` they are log-densities, which may exceed 0.
    """
    codes = codes.copy()
    codes[(codes == InvalidReason.VALID) & (batch.lengths == 0)] = InvalidReason.NO_TOKENS
    order = np.flatnonzero(codes == InvalidReason.VALID)
    # Of each block, after one of no rows: its rows, their tokens' cells, their statistics, drifts and places.
    nothing = np.zeros((2, 0)), np.zeros((2, 0, len(PLACES)))
    parts = [(order[:0], np.zeros(0, dtype=np.uint16), np.zeros((3, 0, len(TOKEN))), *nothing)]
    why: dict[InvalidReason, str] = {}
    bets = np.zeros((2, BET_COUNT))
    # Checks compare the rows of a block with each other, and kernels that agree bit by bit drift on older weights
    # alone: rows outside of the first slice, which those sampled, come in blocks of their own.
    current = membership[order, 0]
    blocks = chain.from_iterable(enumerate(batch.blocks(part)) for part in (order[current], order[~current]))
    for number, block in blocks:
        checked = check_block(block, sample=number % _SAMPLED_BLOCKS == 0 or any(why), density=density)
        found = checked.codes
        for reason, words in checked.why.items():
            why.setdefault(reason, words)
        if advantages is not None:
            finite = np.logical_and.reduceat(np.isfinite(batch.packed(advantages, block.rows)), block.starts)
            found[(found == InvalidReason.VALID) & ~finite] = InvalidReason.NAN_ADVANTAGE
        if found.any():
            codes[block.rows] = found
            block = block.only(found == InvalidReason.VALID)  # noqa: PLW2901 - what is left of it
            if not block.rows.size:
                continue
        exact = saturated(block.log_w.astype(np.float32, copy=False))
        wide = exact.astype(np.float64)
        change = np.expm1(wide)
        of_rows = _row_stats(wide, change, block)
        bets[0] += _bets(of_rows[0], block.lengths, change)
        bets[1] += sureness(block.inference[:_SURENESS_TOKENS])
        drifts, of_places = nothing
        if advantages is not None:
            advantage = batch.packed(advantages, block.rows)
            drifts = np.where([advantage > 0, advantage < 0], change * advantage, np.nan)
        if places is not None:
            of_places = _place_sums(change, block, places.before[block.rows])
        parts.append((block.rows, cells.locate(exact), of_rows, drifts, of_places))
    columns = zip(*parts, strict=True)
    measured, every, stats, drifts, of_places = (np.concatenate(c, axis=int(c[0].ndim > 1)) for c in columns)
    counts = np.zeros((membership.shape[1], cells.size), dtype=np.int64)
    for column in np.flatnonzero(membership[measured].any(0)):
        inside = np.repeat(membership[measured, column], batch.lengths[measured])
        counts[column] = np.bincount(every if inside.all() else every[inside], minlength=cells.size)
    return Reduced(
        codes,
        measured,
        batch.lengths[measured],
        stats,
        counts,
        None if advantages is None else drifts,
        why,
        bets,
        None if places is None else of_places,
    )


def _bets(totals: NDArray[np.float64], tokens: NDArray[np.intp], change: NDArray[np.float64]) -> NDArray[np.float64]:
    """Evidence against E_Q[P/Q] <= 1, [bets]: from sums over rows [rows, 6], and from tokens where those give cause."""
    count = int(tokens.sum())
    over = float(totals[:, _RATIO].sum()) - count
    if over > _MIN_EXCESS_RATIO * count:
        return surplus(change)
    return surplus_of_sums(over, float(totals[:, _CHI2].sum()), count)


def _row_stats(log_w: NDArray[np.float64], change: NDArray[np.float64], block: Block) -> NDArray[np.float64]:
    """Sums, minima and maxima [3, rows, 6] from l and w - 1 of a block's tokens: a column for each key of TOKEN."""
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
    # Rising quantities take their extremes where l does, (1-w)+ the other way round; the others' maxima are at one end.
    ends = {key: (quantity(lowest), quantity(highest)) for key, quantity in TOKEN.items()}
    totals_and_minima = {
        "log_ratio": (sum_log_w, lowest),
        "abs_log_ratio": (sum_abs, least_abs),
        "ratio": (sum_change + block.lengths, ends["ratio"][0]),
        "tv_token": (sum_tv + 0.0, ends["tv_token"][1]),
        "k3": (sum_k3, least_k3),
        "chi2_token": (sum_chi2, least_chi2),
    }
    return np.stack([(*totals_and_minima[key], np.maximum(*ends[key])) for key in TOKEN], axis=-1)


def _place_sums(change: NDArray[np.float64], block: Block, before: NDArray[np.intp]) -> NDArray[np.float64]:
    """Sums of (1-w)+, from w - 1, over a block's tokens in each of PLACES, and their numbers [2, rows, places]."""
    running = np.zeros(change.size + 1)
    np.cumsum(np.minimum(change, 0.0), out=running[1:])
    up_to = np.stack([-running[before + block.starts[:, None]], before])
    return np.maximum(np.delete(np.diff(up_to, axis=-1), BETWEEN, axis=-1), 0.0)
