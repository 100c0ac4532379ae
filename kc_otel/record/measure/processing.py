"""Faults of sampling processing and of masks that only show in how the two sides' numbers go together.

Nobody has to declare anything for these: a temperature that one side lacks, a truncation that one side lacks and a
padding that counts each leave a pattern that no rounding leaves, whatever its size. Thresholds are far from both: see
each constant for what was measured on kernels that really differ and on kernels that do not.

With Q the other side at temperature T, log P(y) = T log Q(y) - log sum Q^T: a line in log Q but for the last term,
which depends on the position alone. Where that one differs much between positions no line fits; but a token that has
more than half of the mass is surer on the same side wherever it is, by (T - 1) (its log odds + the entropy of the
rest), and unlikely tokens lose: kernels that differ, or that training changed, are so at some tokens and not at others.
With Q the other side truncated to its largest tokens, log P(y) = log Q(y) + log m, m the mass that was kept: the same
sign at every token, and |l| < -log top_p.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kc_otel.record.measure.packing import Block
from kc_otel.record.measure.sampled import saturated

__all__ = [
    "PAD_RUN",
    "Pattern",
    "ends_alike",
    "ends_like",
    "looks_processed",
    "looks_processed_together",
    "padded",
    "patterns",
    "temperature_like",
    "together_temperature_like",
    "truncation_like",
]

_DRIFT: Final = 0.03
"""Mean |l| from which a pattern is looked for; below, a fault of processing is no larger than bf16's rounding."""
_TOKENS: Final = 64
"""Tokens from which a pattern of processing cannot be chance."""
_TOGETHER: Final = 128
"""Different values of log Q from which short sequences together show a temperature. Of a few prompts with answers of a
word, log Q has a few values, and a line through those fits whatever the drift."""
_LOOK: Final = 128
"""Tokens of a sequence that are looked at for a pattern of processing: it is in all of them or in none."""
_FIT: Final = 0.85
"""Share of l's variance that a line in log Q explains. Median over sequences of 160 tokens, T of 0.7, 0.9 and 1.3
against 1: 0.93 to 0.99. Largest in any sequence of honest drift: 0.31 with int8 to int4 weights, clipped scales, an fp8
KV cache and weights of other steps; 0.76 over 64 tokens with weights that were trained to be surer of themselves, the
nearest thing to a temperature that training does. Where the entropy changes much from token to token the line fits a
temperature worse (0.5), which is then measured: better a drift that was a setting than a setting that was drift."""
_FIT_IN_COMPANY: Final = 0.4
"""The same where most other suspicious sequences of the block show the fault: text with few alternatives fits worse."""
_SURE: Final = 96
"""Different tokens that a side is sure of from which short sequences together show a temperature without a line."""
_SURE_BETWEEN: Final = (math.log(0.6), math.log(0.98))
"""log-probability from which a side is sure of a token, and from which rounding decides what is left."""
_UNLIKELY: Final = math.log(0.3)
"""log-probability below which, on both sides, a token is not the likeliest."""
_EVENLY: Final = 0.3
"""Tenth percentile over median of what the log odds of sure tokens change by. Over 1,600 simulated tokens at positions
sure and open, T of 0.7 to 1.5 and logits with noise of 0.03: 0.48 to 0.84, and 0.30 with T = 0.9 and noise of 0.1.
Largest in honest drift: 0.22, where training made every likeliest token surer; below 0 with any noise of kernels."""
_AGAINST: Final = 0.3
"""Share of sum |l| of the unlikely tokens whose sign is not that of the sure ones: at least 0.45 with a temperature, 0
with a constant or with a truncation."""
_SLOPE: Final = 0.02
"""|slope - 1| of log P on log Q; 0.08 for T = 0.9."""
_ONE_SIDED: Final = 0.93
"""Share of sum |l| that has one sign. With top-p 0.9 and bf16 with an fp8 KV cache 0.99 in nine of ten sequences; in
honest drift at most 0.72 over 160 tokens and 0.77 over 64."""
_SPREAD: Final = 1e-3
"""Deviation of l in shares of mean |l|: the mass that a truncation keeps changes from token to token. An l that never
changes is no truncation but a constant that somebody added, and is measured as what it is."""
_STEEPEST: Final = 10.0
"""Slope, or one over it, beyond which nobody has set a temperature: a side that says the same of every token has 0."""
_FLAT: Final = 1e-4
"""Deviation of log Q in shares of its mean, below which there is no line to fit, only rounding."""
_MOST: Final = 0.75
"""|l| that a truncation stays below: it keeps half of the mass at least. A broken kernel does not stay below it."""
_FAR: Final = 0.02
"""Share of tokens that may be further away: those at the edge of the nucleus, in by one side's rounding alone."""
_EFFECTIVE: Final = 24.0
"""Tokens that sum |l| is made of, in effect, from which a row by itself shows a pattern. Of text that is nearly certain
most tokens have an l of nothing, and the few others agree by chance: in up to one of 18 honest sequences."""
_COMPANY: Final = 4
"""Rows with the pattern, more than half of those that are looked at, that together show it with fewer."""
PAD_RUN: Final = 8
"""Equal numbers at a sequence's end that make a filler."""
_PAD_DRIFT: Final = 0.05
"""Mean |l| over the filler, or |log Q| where both sides have it: below, both kernels may be that sure."""
_CHANCE: Final = 1e-6
"""Chance of a run of tokens that both kernels are so sure of, as often as they are before it."""


@dataclass(frozen=True, slots=True, eq=False)
class Pattern:
    """How log P and log Q go together in some rows, float64 [rows].

    Attributes:
        slope: Of the least-squares line of log P on log Q.
        fit: Share of the variance of l = log P - log Q that the line in log Q explains, 0 to 1.
        upward: Share of sum |l| that positive l have, each |l| at most what a truncation can do.
        far: Share of tokens with |l| above that.
        spread: Deviation of l in shares of mean |l|.
        effective: Tokens that sum |l| is made of, in effect: (sum |l|)^2 / sum l^2.
    """

    slope: NDArray[np.float64]
    fit: NDArray[np.float64]
    upward: NDArray[np.float64]
    far: NDArray[np.float64]
    spread: NDArray[np.float64]
    effective: NDArray[np.float64]


def looks_processed(drift: NDArray[np.float64], lengths: NDArray[np.intp]) -> NDArray[np.bool_]:
    """Rows whose mean |l| is worth looking for a pattern in: above rounding, and over enough tokens for a filler."""
    return (drift > _DRIFT) & (lengths >= 2 * PAD_RUN)


def looks_processed_together(drift: NDArray[np.float64], lengths: NDArray[np.intp]) -> NDArray[np.bool_]:
    """Rows too short for a temperature of their own, if they are many tokens together and drift more than rounding."""
    short = lengths < _TOKENS
    tokens = lengths[short]
    with np.errstate(invalid="ignore"):
        many = tokens.sum() >= _TOGETHER and bool((drift[short] * tokens).sum() > _DRIFT * tokens.sum())
    return short if many else np.zeros_like(short)


def together_temperature_like(block: Block) -> bool:
    """Whether rows that are short (`looks_processed_together`) are, as one, the other side at another temperature."""
    known = np.isfinite(block.train) & np.isfinite(block.inference)
    train, inference = block.train[known], block.inference[known]
    different, first = np.unique(inference, return_index=True)
    if different.size < _TOGETHER:
        return False
    line = _one_line(train, inference) and _one_line(train[first], different)
    return line or _all_surer(train[first], different)


def _all_surer(train: NDArray[np.floating], inference: NDArray[np.floating]) -> bool:
    """Whether one side is surer of every likely token than the other by much the same, and less of unlikely ones.

    Of the tokens that one side is sure of, noise makes the other less so: that side's own tokens have to agree.
    """
    p, q = (np.minimum(side.astype(np.float64), 0.0) for side in (train, inference))
    larger, smaller = np.maximum(p, q), np.minimum(p, q)
    between = (smaller < _SURE_BETWEEN[1]) & (larger < 0.0)
    sure = between & (larger > _SURE_BETWEEN[0])
    unlikely = larger < _UNLIKELY
    if np.count_nonzero(sure) < _SURE or not unlikely.any():
        return False
    odds = np.zeros_like(p)
    odds[sure] = _log_odds(p[sure]) - _log_odds(q[sure])
    middle = float(np.median(odds[sure]))
    apart = (p - q)[unlikely] * -np.sign(middle)
    return bool(
        _evenly(odds[sure], middle)
        and all(_evenly(odds[between & (side > _SURE_BETWEEN[0])], middle) for side in (p, q))
        and np.maximum(apart, 0.0).sum() > _AGAINST * np.abs(apart).sum()
    )


def _evenly(odds: NDArray[np.float64], middle: float) -> bool:
    enough = odds.size >= _SURE // 4
    return enough and bool(np.quantile(odds * np.sign(middle), 0.1) > _EVENLY * abs(middle))


def _log_odds(logprobs: NDArray[np.float64]) -> NDArray[np.float64]:
    return logprobs - np.log(-np.expm1(logprobs))


def _one_line(train: NDArray[np.floating], inference: NDArray[np.floating]) -> bool:
    zero, tokens = np.zeros(1, dtype=np.intp), np.array([train.size], dtype=np.intp)
    return bool(tokens[0] and temperature_like(patterns(Block(zero, zero, tokens, train, inference), train.size))[0])


def patterns(block: Block, look: int = _LOOK) -> Pattern:
    """Patterns of a block's rows; NaN, which matches nothing, in short rows and where something is infinite or NaN.

    Args:
        block: The rows.
        look: Tokens of each row that are looked at, from its first one.
    """
    n = np.minimum(block.lengths, look)
    starts = np.cumsum(n) - n
    looked = np.repeat(block.starts - starts, n) + np.arange(int(n.sum()))
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        q = block.inference[looked].astype(np.float64)
        log_w = saturated(block.train[looked].astype(np.float64) - q)
        mean_q, mean_l = np.add.reduceat(q, starts) / n, np.add.reduceat(log_w, starts) / n
        q_off, l_off = q - np.repeat(mean_q, n), log_w - np.repeat(mean_l, n)
        # A token at the edge of the nucleus may be out on one side alone, l = -inf: it counts like any other.
        capped = log_w.clip(-_MOST, _MOST)
        size = np.add.reduceat(np.abs(capped), starts)
        upward = np.add.reduceat(np.maximum(capped, 0.0), starts) / size
        far = np.add.reduceat(np.abs(capped) == _MOST, starts, dtype=np.float64) / n
        both = np.add.reduceat(q_off * l_off, starts)
        of_q, of_l = np.add.reduceat(q_off * q_off, starts), np.add.reduceat(l_off * l_off, starts)
        varies = of_q > n * np.square(_FLAT * mean_q)
        fit = np.where((n >= _TOKENS) & varies, both * both / (of_q * of_l), np.nan)
        spread = np.where(n >= _TOKENS, np.sqrt(of_l * n) / size, np.nan)
        effective = size * size / np.add.reduceat(capped * capped, starts)
        return Pattern(1.0 + both / of_q, fit, upward, far, spread, effective)


def temperature_like(found: Pattern) -> NDArray[np.bool_]:
    """Rows in which one side is the other at another temperature."""
    with np.errstate(invalid="ignore"):
        bent = (np.abs(found.slope - 1.0) > _SLOPE) & (found.spread > _SPREAD)
        bent &= (found.slope > 1.0 / _STEEPEST) & (found.slope < _STEEPEST)
        clear = bent & (found.fit > _FIT)
        if _in_company(found, clear):
            return bent & (found.fit > _FIT_IN_COMPANY)
        return clear & (found.effective >= _EFFECTIVE)


def truncation_like(found: Pattern) -> NDArray[np.bool_]:
    """Rows in which one side leaves out tokens that the other keeps."""
    with np.errstate(invalid="ignore"):
        one_sided = (found.upward > _ONE_SIDED) | (found.upward < 1.0 - _ONE_SIDED)
        clear = one_sided & (found.far <= _FAR) & (found.spread > _SPREAD)
        return clear if _in_company(found, clear) else clear & (found.effective >= _EFFECTIVE)


def _in_company(found: Pattern, clear: NDArray[np.bool_]) -> bool:
    """Whether most rows show a pattern, so that none does by chance: what sets a sampler up does it for all of them."""
    many = int(np.count_nonzero(clear))
    return many >= _COMPANY and 2 * many > int(np.count_nonzero(np.isfinite(found.spread)))


def ends_alike(block: Block) -> NDArray[np.bool_]:
    """Rows in which both sides end in a run of one same number: worth asking `padded` about, however small the drift.

    A mask that was forgotten leaves the same filler on both sides, which looks like two kernels that agree.
    """
    ends = block.starts + block.lengths
    same: NDArray[np.bool_] = block.train[ends - 1] == block.inference[ends - 1]
    return same & np.logical_and(*_ends_constant(block))


def padded(block: Block) -> NDArray[np.bool_]:
    """Rows that end in a filler: one and the same number on a side, and no end that both kernels could be sure of."""
    ends = block.starts + block.lengths
    found = np.zeros(ends.size, dtype=np.bool_)
    for row in np.flatnonzero(np.logical_or(*_ends_constant(block))):
        here = slice(int(block.starts[row]), int(ends[row]))
        found[row] = _filled(block.train[here], block.inference[here])
    return found


def ends_like(
    filled: NDArray[np.bool_], train: NDArray[np.floating], inference: NDArray[np.floating]
) -> NDArray[np.bool_]:
    """Rows that end as the rows with a filler do, however short their own is: the mask is missing for all of them.

    Args:
        filled: Rows in which `padded` found a filler, [rows].
        train: Each row's last log P(y), [rows].
        inference: Each row's last log Q(y), [rows].
    """
    alike = filled.copy()
    for side in (train, inference):  # a filler may be on one side only
        values, count = np.unique(side[filled], return_counts=True)
        alike |= np.isin(side, values[count > 1])
    return alike


def _ends_constant(block: Block) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Per side, which rows are long and end in PAD_RUN equal numbers."""
    ends = block.starts + block.lengths
    long = np.flatnonzero(block.lengths >= 2 * PAD_RUN)
    last = ends[long, None] - np.arange(1, PAD_RUN + 1)
    sides = np.zeros((2, ends.size), dtype=np.bool_)
    for side, numbers in zip(sides, (block.train, block.inference), strict=True):
        side[long] = (numbers[last] == numbers[last[:, :1]]).all(1)
    return sides[0], sides[1]


def _filled(train: NDArray[np.floating], inference: NDArray[np.floating]) -> bool:
    runs = [_run(side) for side in (train, inference)]
    run, shared = max(runs), min(runs)
    if run < PAD_RUN or run == train.size:
        return False
    apart = np.abs(train[-run:].astype(np.float64) - inference[-run:])
    if apart.mean() > _PAD_DRIFT:
        return True
    if shared < PAD_RUN or abs(float(inference[-1])) > _PAD_DRIFT:
        return shared >= PAD_RUN
    # Both kernels may be sure of many tokens in a row, but not only of the last ones.
    rest = slice(0, train.size - shared)
    as_sure = int(np.count_nonzero((train[rest] == train[-1]) & (inference[rest] == inference[-1])))
    return bool(train[-1] == inference[-1] and _chance_of_run(as_sure, train.size - shared, shared) < _CHANCE)


def _chance_of_run(hits: int, tokens: int, run: int) -> float:
    """Probability of a run of hits after so many in so many tokens, where nothing else is known of their share.

    The share's prior is uniform, so that few tokens leave it open: B(hits + 1 + run, misses + 1) divided by
    B(hits + 1, misses + 1).
    """
    logs = math.lgamma(hits + 1 + run) - math.lgamma(hits + 1) + math.lgamma(tokens + 2) - math.lgamma(tokens + 2 + run)
    return math.exp(logs)


def _run(side: NDArray[np.floating]) -> int:
    """How many numbers at the end are the same."""
    other = np.flatnonzero(side != side[-1])
    return int(side.size - 1 - other[-1]) if other.size else int(side.size)
