"""Faults of sampling processing that only show in how the two sides' numbers go together.

Nobody has to declare anything for these: a temperature or a truncation that one side lacks leaves a pattern that no
rounding leaves, whatever its size. Thresholds are far from both: see each constant for what was measured on kernels
that really differ and on kernels that do not.

With Q the other side at temperature T, log P(y) = T log Q(y) - log sum Q^T: a line in log Q but for the last term,
which depends on the position alone. Where that one differs much between positions no line fits; but a token that has
more than half of the mass is surer on the same side wherever it is, by (T - 1) (its log odds + the entropy of the
rest), and an unlikely one the less so the less likely it is: kernels that differ, or that training changed, are so at
some tokens and not at others, and noise that is the larger the less likely a token is has no side.
With Q the other side truncated to its largest tokens, log P(y) = log Q(y) + log m, m the mass that was kept: the same
sign at every token, and |l| < -log top_p.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kc_otel.contract.input_reasons import InvalidReason
from kc_otel.record.measure.blocks import DRIFT, Block, Found, RowFault, Seen
from kc_otel.record.measure.sampled import saturated

_TOKENS: Final = 64  # tokens from which a pattern of processing cannot be chance
_MIN_DIFFERENT_VALUES: Final = 128
"""Different values of log Q from which short sequences together show a temperature. Of a few prompts with answers of a
word, log Q has a few values, and a line through those fits whatever the drift."""
_LOOK_TOKENS: Final = 128
"""Tokens of a sequence that are looked at for a pattern of processing: it is in all of them or in none."""
_FIT_SHARE: Final = 0.85
"""Share of l's variance that a line in log Q explains. Median over sequences of 160 tokens, T of 0.7, 0.9 and 1.3
against 1: 0.93 to 0.99. Largest in any sequence of honest drift: 0.31 with int8 to int4 weights, clipped scales, an fp8
KV cache and weights of other steps; 0.76 over 64 tokens with weights that were trained to be surer of themselves, the
nearest thing to a temperature that training does. Where the entropy changes much from token to token the line fits a
temperature worse (0.5), which is then measured: better a drift that was a setting than a setting that was drift."""
_FIT_IN_COMPANY: Final = 0.4
"""The same where most other suspicious sequences of the block show the fault: text with few alternatives fits worse."""
_SURE_TOKENS: Final = 96
"""Different tokens that a side is sure of from which short sequences together show a temperature without a line."""
_SURE_ROW: Final = (8, 0.9)
"""Such tokens of a row, and the share of them that one side is surer of. With T = 0.6 of SmolLM all of 24 rows of 64
tokens show it; of its honest kernels, from bfloat16 to an fp8 cache, 9 of 1,056 rows, and those do not agree."""
_SURE_BETWEEN: Final = (math.log(0.6), math.log(0.98))
"""log-probability from which a side is sure of a token, and from which rounding decides what is left."""
_SURE_SPREAD: Final = 0.7
"""Deviation of the log odds of sure tokens from which an even change of them tells anything. Of texts 0.9 to 1.6; a
policy of a few states is about as sure of all its tokens, 0.15 to 0.6, and weights in few bits move them all alike."""
_UNLIKELY_LOGPROB: Final = math.log(0.3)  # log-probability below which, on both sides, a token is not the likeliest
_EVENNESS: Final = 0.3
"""Tenth percentile over median of what the log odds of sure tokens change by. Over 1,600 simulated tokens at positions
sure and open, T of 0.7 to 1.5 and logits with noise of 0.03: 0.48 to 0.84, and 0.30 with T = 0.9 and noise of 0.1.
Largest in honest drift: 0.22, where training made every likeliest token surer; below 0 with any noise of kernels."""
_UNLIKELY_AGREE: Final = 0.25
"""Quadrant correlation of l and log P + log Q of the unlikely tokens, in the direction of the sure ones. With T = 0.6
of SmolLM 0.32 to 0.35; llama.cpp's Q4_0, which flattens every sure token evenly, leaves 0.04; a constant 0; a
truncation bends the other way."""
_WELL_AGREED: Final = (0.4, 0.2)
"""The same from which this evenness is enough: with T = 0.9 of SmolLM in Q4_1 0.49 to 0.56, and 0.28 to 0.35."""
_SLOPE: Final = 0.02  # |slope - 1| of log P on log Q; 0.08 for T = 0.9
_AGREEMENT: Final = 0.5
"""`_agree` of a row that has a line. Median of 24 sequences of a trained model, T of 0.7 to 1.3 and weights in Q4_0:
0.75 to 0.94. Noise that grows with -log Q has a line in up to one sequence of eight, by its one or two least likely
tokens, or by the noise of the side that the line is in; the others' agreement, and the other side's, is chance."""
_AGREE_BY_CHANCE: Final = 4.0  # standard deviations, one over the root of the tokens, that an agreement is above 0
_ONE_SIDED: Final = 0.93
"""Share of sum |l| that has one sign. With top-p 0.9 and bf16 with an fp8 KV cache 0.99 in nine of ten sequences; in
honest drift at most 0.72 over 160 tokens and 0.77 over 64."""
_RELATIVE_DEVIATION: Final = 1e-3
"""Deviation of l in shares of mean |l|: the mass that a truncation keeps changes from token to token. An l that never
changes is no truncation but a constant that somebody added, and is measured as what it is."""
_MAX_SLOPE: Final = 2000.0
"""Slope, or one over it, beyond which one side is no multiple of the other (a length): one that says the same of every
token has 0."""
_FLAT_DEVIATION: Final = 1e-4
"""Deviation of log Q in shares of its mean, below which there is no line to fit, only rounding."""
_MAX_TRUNCATION_NATS: Final = 0.75
"""|l| that a truncation stays below: it keeps half of the mass at least. A broken kernel does not stay below it."""
_MAX_FAR_SHARE: Final = 0.02
"""Share of tokens that may be further away: those at the edge of the nucleus, in by one side's rounding alone."""
_EFFECTIVE_TOKENS: Final = 24.0
"""Tokens that sum |l| is made of, in effect, from which a row by itself shows a pattern. Of text that is nearly certain
most tokens have an l of nothing, and the few others agree by chance: in up to one of 18 honest sequences."""
_COMPANY_ROWS: Final = 4
"""Rows with the pattern, more than half of those that are looked at, that together show it with fewer."""


@dataclass(frozen=True, slots=True, eq=False)
class Pattern:
    """Joint pattern of log P and log Q in some rows, float64 [rows]."""

    slope: NDArray[np.float64]  # of the least-squares line of log P on log Q
    fit: NDArray[np.float64]  # share of the variance of l = log P - log Q that the line in log Q explains, 0 to 1
    upward: NDArray[np.float64]  # share of sum |l| that positive l have, each |l| at most what a truncation can do
    far: NDArray[np.float64]  # share of tokens with |l| above that
    spread: NDArray[np.float64]  # deviation of l in shares of mean |l|
    effective: NDArray[np.float64]  # tokens that sum |l| is made of, in effect: (sum |l|)^2 / sum l^2


def processing_faults(block: Block, seen: Seen) -> Found:
    """Faults of sampling processing in rows without a fault so far, from many tokens together."""
    found: Found = []
    drift, valid = block.drift, ~seen.rows

    def add(reason: InvalidReason, rows: NDArray[np.intp]) -> None:
        valid[rows] = False
        found.extend([RowFault(reason, rows)] if rows.size else [])

    if (look := (drift > DRIFT) & (block.lengths >= _TOKENS) & valid).any():
        part, rows = block.only(look), np.flatnonzero(look)
        pattern = patterns(part)
        colder = temperature_like(part, pattern)
        add(InvalidReason.TEMPERATURE_MISMATCH, rows[colder])
        add(InvalidReason.TRUNCATED_SAMPLING, rows[truncation_like(pattern) & ~colder])
    # Rows too short for a temperature of their own, if they are many tokens together and drift more than rounding.
    short, total = block.lengths < _TOKENS, drift * block.lengths
    tokens, left = int(block.lengths[short].sum()), short & valid
    many = tokens >= _MIN_DIFFERENT_VALUES and total[short].sum() > DRIFT * tokens
    if many and left.any() and together_temperature_like(block.only(left)):
        add(InvalidReason.TEMPERATURE_MISMATCH, np.flatnonzero(left))
    if (left := (drift > DRIFT) & valid).any():
        add(InvalidReason.TEMPERATURE_MISMATCH, np.flatnonzero(left)[surer_rows(block.only(left))])
    return found


def together_temperature_like(block: Block) -> bool:
    """Return True if short rows, as one, are the other side at another temperature."""
    known = np.isfinite(block.train) & np.isfinite(block.inference)
    train, inference = block.train[known], block.inference[known]
    different, first = np.unique(inference, return_index=True)
    if different.size < _MIN_DIFFERENT_VALUES:
        return False
    line = _one_line(train, inference) and _one_line(train[first], different)
    return line or _all_surer(train[first], different)


def _quadrants(left: NDArray[np.float64], right: NDArray[np.float64]) -> float:
    """Degree to which one rises with the other, from -1, always falling, over 0, by chance, to 1.

    The quadrant correlation (Blomqvist 1950): the mean product of the signs of what both are above their medians. Every
    token has one vote, so no few unlikely tokens make it, as they make a least-squares line.
    """
    return float(np.mean(np.sign(left - np.median(left)) * np.sign(right - np.median(right))))


def _agree(train: NDArray[np.floating], inference: NDArray[np.floating], least: float) -> float:
    """Degree to which l rises with log P and log Q, the smaller; 0 where these contradict each other or may be chance.

    Noise of one side goes with that side and not with the other; a multiple goes with both.
    """
    p, q = train.astype(np.float64), inference.astype(np.float64)
    with np.errstate(invalid="ignore"):
        found = _quadrants(p - q, p), _quadrants(p - q, q)
    size = min(map(abs, found))
    certain = size > max(least, _AGREE_BY_CHANCE / math.sqrt(train.size)) and found[0] * found[1] > 0.0
    return math.copysign(size, found[0]) if certain else 0.0


def surer_rows(block: Block) -> NDArray[np.bool_]:
    """Rows in which one side is surer of nearly every likely token, if together they show a temperature without a line.

    Each of these rows goes one way, and tells by that which rows have the temperature where others have none.
    """
    found = np.zeros(block.rows.size, dtype=np.bool_)
    p, q = (np.minimum(side.astype(np.float64), 0.0) for side in (block.train, block.inference))
    larger = np.maximum(p, q)
    sure = (np.minimum(p, q) < _SURE_BETWEEN[1]) & (larger < 0.0) & (larger > _SURE_BETWEEN[0])
    count, upward = block.count(sure), block.count(sure & (p > q))
    for one_way in (upward, count - upward):
        rows = (count >= _SURE_ROW[0]) & (one_way >= _SURE_ROW[1] * count)
        if count[rows].sum() < _SURE_TOKENS:
            continue
        part = block.only(rows)
        _, first = np.unique(part.inference, return_index=True)
        if _all_surer(part.train[first], part.inference[first]):
            found |= rows
    return found


def _all_surer(train: NDArray[np.floating], inference: NDArray[np.floating]) -> bool:
    """Return True if one side is surer of every likely token by much the same factor, and less sure of the others.

    Of the tokens that one side is sure of, noise makes the other less so: that side's own tokens have to agree. Weights
    in few bits flatten every sure token; a temperature bends the unlikely ones with them, in the order of what both
    sides say of them, with which the noise of neither goes.
    """
    p, q = (np.minimum(side.astype(np.float64), 0.0) for side in (train, inference))
    larger, smaller = np.maximum(p, q), np.minimum(p, q)
    between = (smaller < _SURE_BETWEEN[1]) & (larger < 0.0)
    sure = between & (larger > _SURE_BETWEEN[0])
    unlikely = larger < _UNLIKELY_LOGPROB
    if np.count_nonzero(sure) < _SURE_TOKENS or not unlikely.any():
        return False
    if np.std(_log_odds(larger[sure])) < _SURE_SPREAD:
        return False
    odds = np.zeros_like(p)
    odds[sure] = _log_odds(p[sure]) - _log_odds(q[sure])
    middle = float(np.median(odds[sure]))
    with np.errstate(invalid="ignore"):
        rises = _quadrants((p - q)[unlikely], (p + q)[unlikely]) * np.sign(middle)
    if rises <= max(_UNLIKELY_AGREE, _AGREE_BY_CHANCE / math.sqrt(np.count_nonzero(unlikely))):
        return False
    least = (_WELL_AGREED[1] if rises > _WELL_AGREED[0] else _EVENNESS) * abs(middle)
    groups = (sure, *(between & (side > _SURE_BETWEEN[0]) for side in (p, q)))
    return all(
        np.count_nonzero(which) >= _SURE_TOKENS // 4 and np.quantile(odds[which] * np.sign(middle), 0.1) > least
        for which in groups
    )


def _log_odds(logprobs: NDArray[np.float64]) -> NDArray[np.float64]:
    return logprobs - np.log(-np.expm1(logprobs))


def _one_line(train: NDArray[np.floating], inference: NDArray[np.floating]) -> bool:
    zero, tokens = np.zeros(1, dtype=np.intp), np.array([train.size], dtype=np.intp)
    if train.size == 0:
        return False
    block = Block(zero, zero, tokens, train, inference)
    return bool(temperature_like(block, patterns(block, train.size), train.size)[0])


def patterns(block: Block, look: int = _LOOK_TOKENS) -> Pattern:
    """Patterns of a block's rows, over `look` tokens of each; NaN, which matches nothing, where these are too few."""
    n = np.minimum(block.lengths, look)
    starts = np.cumsum(n) - n
    looked = np.repeat(block.starts - starts, n) + np.arange(int(n.sum()))
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        q = block.inference[looked].astype(np.float64)
        log_w = saturated(block.train[looked].astype(np.float64) - q)
        mean_q, mean_l = np.add.reduceat(q, starts) / n, np.add.reduceat(log_w, starts) / n
        q_off, l_off = q - np.repeat(mean_q, n), log_w - np.repeat(mean_l, n)
        # A token at the edge of the nucleus may be out on one side alone, l = -inf: it counts like any other.
        capped = log_w.clip(-_MAX_TRUNCATION_NATS, _MAX_TRUNCATION_NATS)
        size = np.add.reduceat(np.abs(capped), starts)
        upward = np.add.reduceat(np.maximum(capped, 0.0), starts) / size
        far = np.add.reduceat(np.abs(capped) == _MAX_TRUNCATION_NATS, starts, dtype=np.float64)
        both = np.add.reduceat(q_off * l_off, starts)
        of_q, of_l = np.add.reduceat(q_off * q_off, starts), np.add.reduceat(l_off * l_off, starts)
        varies = of_q > n * np.square(_FLAT_DEVIATION * mean_q)
        fit = np.where((n >= _TOKENS) & varies, both * both / (of_q * of_l), np.nan)
        spread = np.where(n >= _TOKENS, np.sqrt(of_l * n) / size, np.nan)
        effective = size * size / np.add.reduceat(capped * capped, starts)
        # Where tokens that are far make up half of what differs, they are a broken kernel's, however few.
        far = np.where(effective > 2.0 * far, far / n, 1.0)
        return Pattern(1.0 + both / of_q, fit, upward, far, spread, effective)


def temperature_like(block: Block, found: Pattern, look: int = _LOOK_TOKENS) -> NDArray[np.bool_]:
    """Rows in which one side is the other at another temperature, of their `patterns` over `look` tokens."""
    with np.errstate(invalid="ignore"):
        bent = (np.abs(found.slope - 1.0) > _SLOPE) & (found.spread > _RELATIVE_DEVIATION)
        bent &= (found.slope > 1.0 / _MAX_SLOPE) & (found.slope < _MAX_SLOPE) & (found.fit > _FIT_IN_COMPANY)
        for row in np.flatnonzero(bent):  # few rows that differ have a line: most of these have a temperature
            here = slice(int(block.starts[row]), int(block.starts[row] + min(block.lengths[row], look)))
            bent[row] = (found.slope[row] - 1.0) * _agree(block.train[here], block.inference[here], _AGREEMENT) > 0.0
        clear = bent & (found.fit > _FIT_SHARE)
        if _in_company(found, clear):
            return bent
        return clear & (found.effective >= _EFFECTIVE_TOKENS)


def truncation_like(found: Pattern) -> NDArray[np.bool_]:
    """Rows in which one side leaves out tokens that the other keeps."""
    with np.errstate(invalid="ignore"):
        one_sided = (found.upward > _ONE_SIDED) | (found.upward < 1.0 - _ONE_SIDED)
        clear = one_sided & (found.far <= _MAX_FAR_SHARE) & (found.spread > _RELATIVE_DEVIATION)
        return clear if _in_company(found, clear) else clear & (found.effective >= _EFFECTIVE_TOKENS)


def _in_company(found: Pattern, clear: NDArray[np.bool_]) -> bool:
    """Return True if most rows show a pattern: a sampler's setting affects all rows, chance only some."""
    many = int(np.count_nonzero(clear))
    return many >= _COMPANY_ROWS and 2 * many > int(np.count_nonzero(np.isfinite(found.spread)))
