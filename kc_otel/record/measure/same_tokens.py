"""Checks that both sides score the same tokens, and that those are the sampled ones.

Over windows, rows and all rows together log P and log Q go together, also of a kernel in 4 bits (rank correlation 0.76
and more); of other tokens they do not (0.5 at most).

A broken kernel must not pass for a broken pairing. It gives its own tokens probabilities that the other kernel does
not, so that P/Q is small; tokens that belong elsewhere have a mean P/Q far above 1 (E[p] E[1/q] >= 1), and a finding
asks for that or for a lag under which the sides agree.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kc_otel.contract.input_reasons import InvalidReason
from kc_otel.record.measure.arrays import Floats
from kc_otel.record.measure.blocks import (
    DRIFT,
    RUN,
    Block,
    Found,
    Mask,
    RowFault,
    Seen,
    every_row,
    improbable,
    runs_of,
    surely_more,
)
from kc_otel.stats.surplus import RATIO_CUT

_WINDOW: Final = 64
_LOWEST: Final = -8.0  # lower cut of log-probabilities in a correlation, so that no single token determines it
_UNLIKE_CORRELATION: Final = 0.6
"""Correlation below which two sides are not one text. Smallest over windows of 64 tokens of drift (8 to 4 bits, stale
weights; up to 97 % of tokens sure): 0.70, by rank 0.76. Median of tokens that belong elsewhere: 0, 95 % below 0.25."""
_HONEST_CORRELATION: Final = math.atanh(0.8)  # least correlation of drift in the long run
_SIGMAS: Final = 3.5
_MIN_EFFECTIVE_TOKENS: Final = 12.0  # tokens, in effect, that a correlation is made of, from which it says something
_SURPLUS: Final = 1.15  # mean P/Q, cut at 10, from which tokens that do not go together are tokens of different places
_RARE_BET: Final = (0.005, 1000.0, math.log(1e6))
"""The same where the few tokens with P/Q above 10 tell it: a bet's share, its cut of P/Q, and log of what it wins."""
_LAGGED_CORRELATION: Final = 0.8
"""Correlation from which a lag explains two sides, and below which no row is alike among many that are not."""
_ALIKE_WINDOW_CORRELATION: Final = 0.7  # the same for a row's least window
_MIN_UNLIKE_ROWS: Final = 4
_UNLIKE_ROW_SHARE: Final = 0.25
"""Share of rows whose sides do not go together from which those that cannot be told are taken to be like them."""
_PLACE_ROWS: Final = 8  # rows that show a fault of a place, at least
_FAR_EDGE: Final = 1.0
_EDGE_DIFFERENCE: Final = 0.04
"""Nats that an edge's token differs by in most rows, and share of other tokens that do; of int8 4 and 1 %."""
_LAST_NATS: Final = (3.0, 6.0, 1.5)
"""Nats by which some rows' last tokens differ where they are others, at least and on average, and their deviation.
Where weights take 99 % from the end of answers it is 5; of tokens from nowhere 12, and 4."""
_EARLY_RATIOS: Final = (0.4, 2.5, 2.0)
"""Mean |l| of a row's first tokens after another prompt, over that of its last ones, and the same in shares of -log Q.
Where half of the prompt was lost 0.56, 2.8 and 3; over all rows of real kernels at most 0.34, 1.3 and 1.5."""
_FORGOTTEN: Final = 0.27
"""Share of what the first 8 tokens differ by, beyond the last ones, that the next 16 still do after another prompt: of
SmolLM 0.28 to 0.47; 0.17 to 0.25 of noise on the logits that decays over 8 tokens."""
_MISSING: Final = 6.0
"""Standard errors by which a mean P/Q is surely below 1. Of real kernels from bfloat16 to int8 it is within 2 of 1, and
7 to 15 below for int8 and an fp8 cache once the sides were averaged."""
_UNRELATED: Final = (0.5, 2.5)
"""Rank correlation over rows of one place's log P and log Q surely below which they are not one token's, and sigmas."""
_LAG_ROWS: Final = 8
_ONE_SIDED: Final = 0.9
"""Share of sum |l| of one sign where a side has the likeliest tokens'; a kernel's own are balanced by E_Q[P/Q] = 1."""
_MIN_ONE_SIDED_TOKENS: Final = 16.0
"""Tokens, in effect, that sum |l| of a row is made of, from which it has one sign by more than chance."""
_FAR_NATS: Final = 0.5
_SAME_NATS: Final = 0.15  # median |l| of the tokens that were the likeliest
_MIN_LIKELIEST_TOKENS: Final = 200
_RARE_LOGPROB: Final = -4.0
"""log-probability below which hardly any position's likeliest token is; of sampled tokens several percent are."""


def other_tokens(whole: Block, seen: Seen) -> Found:
    """Find other tokens on one side, by window, by row, and over all rows, apart from tokens that are no numbers."""
    block = whole.without(seen.tokens)
    look = (whole.drift[block.rows] > DRIFT) & (block.lengths >= 2)
    if not look.any():
        return []
    part = block.only(look)
    unlike, by_row = _unlike_rows(part)
    rows = np.flatnonzero(unlike)
    if not rows.size:
        return []
    onset = np.array([_onset(*_cut(part, int(row))) for row in rows])
    lag = _common_lag(part, rows, onset)
    begin = np.zeros(unlike.size, dtype=np.intp)
    begin[rows] = onset
    tokens = part.by_token(unlike) & (part.place >= part.by_token(begin))
    ratio = np.exp(part.exact_log_w[tokens].clip(-16.0, 7.0))
    won = np.log1p(_RARE_BET[0] * (np.minimum(ratio, _RARE_BET[1]) - 1.0)).sum() > _RARE_BET[2]
    if float(np.minimum(ratio, RATIO_CUT).mean()) <= _SURPLUS and not won and lag is None:
        return []
    where = part.rows[rows]
    at = np.flatnonzero(~seen.tokens[whole.span(where[0])])  # as the row was given, with what is no number in it
    first = int(at[onset[0]] - at[0])
    since = f"from token {first} of the first on" if np.median(onset) else "from the first token on"
    until = [_onset(*(side[::-1] for side in _cut(part, int(row)))) for row in rows]
    if not np.median(onset) and np.median(until):
        since = f"up to about token {int(part.lengths[rows[0]]) - until[0]} of the first"
    shift = "" if lag is None else f" (lag {lag})"
    known = by_row[rows][np.isfinite(by_row[rows])]
    said = f"{since} the sides do not score the same tokens{shift}"
    if known.size:
        said += f"; correlation of log P and log Q {np.median(known):.2f}"
    return [RowFault(InvalidReason.NOT_SAME_TOKENS, where, said)]


def _unlike_rows(part: Block) -> tuple[Mask, NDArray[np.float64]]:
    """Rows whose sides do not go together, and each row's correlation; NaN where a side does not vary."""
    p, q = (np.maximum(side, _LOWEST).astype(np.float64) for side in (part.train, part.inference))
    starts, of_row = _windows(part)
    first = np.flatnonzero(np.diff(of_row, prepend=-1))
    length = np.diff(starts, append=p.size).astype(np.float64)
    sum_p, sum_q, pp, qq, pq = (np.add.reduceat(values, starts) for values in (p, q, p * p, q * q, p * q))
    sums = np.stack([pp - sum_p * sum_p / length, qq - sum_q * sum_q / length, pq - sum_p * sum_q / length])
    by_window, by_row, pooled = (_correlation(sums, at) for at in (np.arange(starts.size), first, first[:1]))
    unlike = np.zeros(part.rows.size, dtype=np.bool_)
    # Of drift no window is near it, and what follows is for the others.
    if not (by_window < _UNLIKE_CORRELATION).any() and not pooled[0] < _UNLIKE_CORRELATION:
        return unlike, by_row
    effective = _effective(p, q, starts, length)
    for window in np.flatnonzero(_surely_unlike(by_window, effective)):
        here = slice(int(starts[window]), int(starts[window] + length[window]))
        unlike[of_row[window]] |= _rank_correlation(part.train[here], part.inference[here]) < _UNLIKE_CORRELATION
    row_effective = np.add.reduceat(effective, first)
    for row in np.flatnonzero(_surely_unlike(by_row, row_effective) & ~unlike):
        here = part.span(int(row))
        unlike[row] = _rank_correlation(part.train[here], part.inference[here]) < _UNLIKE_CORRELATION
    low = (by_row < _UNLIKE_CORRELATION) | ~np.isfinite(by_row)
    alike = np.count_nonzero(unlike)
    if _surely_unlike(pooled, row_effective.sum(keepdims=True))[0]:
        unlike |= low
    if alike >= _MIN_UNLIKE_ROWS and alike >= _UNLIKE_ROW_SHARE * part.rows.size:
        # Too short or too sure to tell, in the company of rows that do.
        worst = np.minimum.reduceat(np.where(np.isfinite(by_window), by_window, 1.0), first)
        unlike |= low | (by_row < _LAGGED_CORRELATION) | (worst < _ALIKE_WINDOW_CORRELATION)
    return unlike, by_row


def _windows(block: Block) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Starts of windows of about `_WINDOW` tokens, none across two rows, and the row of each."""
    count = np.maximum((block.lengths + _WINDOW // 2) // _WINDOW, 1)
    of_row = np.repeat(np.arange(count.size), count)
    number = np.arange(of_row.size) - np.repeat(np.cumsum(count) - count, count)
    return block.starts[of_row] + number * block.lengths[of_row] // count[of_row], of_row


def _correlation(sums: NDArray[np.float64], starts: NDArray[np.intp]) -> NDArray[np.float64]:
    """Correlation of log P and log Q over groups of windows that start there; NaN where a side does not vary.

    `sums` are pp, qq and pq of each window, about its own means, [3, windows].
    """
    pp, qq, pq = np.add.reduceat(sums, starts, axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        found = pq / np.sqrt(pp * qq)
    return np.where((pp > 1e-9) & (qq > 1e-9), found, np.nan)


def _effective(
    p: NDArray[np.float64], q: NDArray[np.float64], starts: NDArray[np.intp], length: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Tokens that a window's correlation is made of, in effect: (sum e)^2 / sum e^2 of squared distances e."""
    repeat = length.astype(np.intp)
    far = sum(np.square(side - np.repeat(np.add.reduceat(side, starts) / length, repeat)) for side in (p, q))
    with np.errstate(invalid="ignore", divide="ignore"):
        found = np.square(np.add.reduceat(far, starts)) / np.add.reduceat(np.square(far), starts)
    return np.where(np.isfinite(found), found, 0.0)


def _surely_unlike(correlation: NDArray[np.float64], effective: NDArray[np.float64]) -> Mask:
    """Return a mask of correlations too low for drift by chance (Fisher's z), [n]."""
    with np.errstate(invalid="ignore"):
        at_least = np.tanh(_HONEST_CORRELATION - _SIGMAS / np.sqrt(np.maximum(effective - 3.0, 1e-9)))
        return (correlation < np.minimum(at_least, _UNLIKE_CORRELATION)) & (effective >= _MIN_EFFECTIVE_TOKENS)


def _rank_correlation(train: Floats, inference: Floats) -> float:
    ranks = [_ranks(side) for side in (train, inference)]
    if min(np.ptp(rank) for rank in ranks) == 0.0:
        return 0.0
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def _ranks(values: Floats) -> NDArray[np.float64]:
    """Ranks, those of equal values their mean."""
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(count)
    return np.asarray((last - (count - 1) / 2)[place], dtype=np.float64)


def _cut(block: Block, row: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """A row's log P and log Q as they are correlated."""
    here = block.span(row)
    p, q = (np.maximum(side[here], _LOWEST).astype(np.float64) for side in (block.train, block.inference))
    return p, q


def _common_lag(block: Block, rows: NDArray[np.intp], onset: NDArray[np.intp]) -> int | None:
    """The lag that most of the first rows show from their onset on; None where they show none."""
    votes = [
        _lag(*(side[begin:] for side in _cut(block, int(row))))
        for row, begin in zip(rows[:_LAG_ROWS], onset, strict=False)
    ]
    lags, count = np.unique([vote for vote in votes if vote], return_counts=True)
    return int(lags[np.argmax(count)]) if lags.size and 2 * count.max() >= len(votes) else None


def _onset(p: NDArray[np.float64], q: NDArray[np.float64]) -> int:
    """The token from which on the sides differ, where they agree before it; 0 where they do not."""
    apart = np.minimum(np.abs(p - q), 3.0)
    path = np.cumsum(apart - apart.mean())
    turn = int(np.argmin(path)) + 1
    if turn < RUN or apart.size - turn < RUN or apart[:turn].mean() > 0.35 * apart[turn:].mean():
        return 0
    return turn


def _lag(p: NDArray[np.float64], q: NDArray[np.float64]) -> int:
    """The lag under which two sequences agree, positive where p is ahead of q; 0 where none is."""
    n = p.size
    if n < RUN:
        return 0
    best, found = _LAGGED_CORRELATION, 0
    for lag in range(1, min(n - RUN, _WINDOW) + 1):
        for signed, left, right in ((lag, p[lag:], q[:-lag]), (-lag, p[:-lag], q[lag:])):
            spread = float(np.std(left) * np.std(right))
            if spread > 1e-6:
                value = float(np.mean((left - left.mean()) * (right - right.mean()))) / spread
                if value > best:
                    best, found = value, signed
    return found


def other_places(block: Block, _: Seen) -> Found:
    """Find faults of a place: tokens at an edge, or at the same places of all rows, that are others, and other prompts.

    What was said since weighs more than the prompt, so that answers scored after another one differ the less the
    longer they get. Kernels differ at each place by as much as their tokens are improbable.
    """
    low = block.inference < _LOWEST
    begin, length = runs_of(low, opening=False)
    tokens = improbable(block, low, begin, length, sure=False) if begin.size else None
    if tokens is not None:
        said = f"{np.count_nonzero(tokens):,} tokens in runs of up to {length.max():,} have a probability below "
        said += f"{math.exp(_LOWEST):.1g}: mask padding, the prompt and tool output"
        rows = np.unique(block.row_of(np.flatnonzero(tokens)))
        return [RowFault(InvalidReason.NOT_SAMPLED, rows, said)]
    far = np.minimum(np.abs(block.exact_log_w), 3.0)
    wide, last = far > _FAR_EDGE, block.last[block.lengths >= RUN]
    for name, edge in (("last token is another one: it differs", last), _odd_places(block, wide)):
        rest = np.count_nonzero(wide) - np.count_nonzero(wide[edge])
        if edge.size < _PLACE_ROWS or np.mean(wide[edge]) <= 0.5 or rest >= _EDGE_DIFFERENCE * (far.size - edge.size):
            continue
        if _unrelated(block.train[edge], block.inference[edge]):
            said = f"only the {name} by {far[edge].mean():.2g} nats on average, all tokens by {far.mean():.2g}"
            return every_row(block, InvalidReason.NOT_SAME_TOKENS, said)
    if said := _some_last(block, last):
        return every_row(block, InvalidReason.NOT_SAME_TOKENS, said)
    begins, decays = _beginnings(block)
    if begins and decays:
        said = f"{begins}: they were scored after other prompts, or without (chat template, order of the rows, prefix "
        return every_row(block, InvalidReason.PROMPT_MISMATCH, said + "cache)")
    return []


def _some_last(block: Block, last: NDArray[np.intp]) -> str:
    """Say that the last tokens of some rows are others; empty where they are not.

    Weights that end answers otherwise, and a bias of the end's logit, change the last tokens of all that end by much
    the same, or by anything from little to much.
    """
    far, here = np.abs(block.exact_log_w) > _LAST_NATS[0], block.exact_log_w[last]
    odd = far[last]
    count, elsewhere = np.count_nonzero(odd), np.count_nonzero(far) - np.count_nonzero(odd)
    if not surely_more(count, last.size, (elsewhere + 1) / (far.size - last.size + 2)):
        return ""
    size = float(np.abs(here[odd]).mean())
    between = np.count_nonzero((np.abs(here) > _FAR_EDGE) & ~odd)
    if count <= between or size < _LAST_NATS[1] or here[odd].std() < _LAST_NATS[2]:
        return ""
    said = f"the last token of {count:,} of {last.size:,} sequences is another one on one side: it differs by "
    return f"{said}{size:.2g} nats on average, where {elsewhere:,} of all other tokens differ by {_LAST_NATS[0]:g}"


def _odd_places(block: Block, wide: Mask) -> tuple[str, NDArray[np.intp]]:
    """Places from the rows' beginning at which most rows differ widely, in words, and the tokens that are there."""
    count, often = np.bincount(block.place), np.bincount(block.place, wide).astype(np.intp)
    likely = np.flatnonzero((count >= _PLACE_ROWS) & (2 * often > count))
    odd = [int(at) for at in likely if surely_more(often[at], count[at], _EDGE_DIFFERENCE)]
    which = ", ".join(map(str, odd[:4])) + (", ..." if len(odd) > 4 else "")
    name = "first token is another one: it differs" if odd == [0] else f"tokens at {which} are others: they differ"
    return name, np.flatnonzero(np.isin(block.place, odd))


def not_told(block: Block) -> str:
    """Say which of these checks the rows are too short, too sure or too ambiguous for; empty where none is."""
    look, total = block.drift > DRIFT, block.drift * block.lengths
    if total[look].sum() <= 0.5 * total.sum() or not look.any():
        return ""
    part = block.only(look)
    p, q = (np.maximum(side, _LOWEST).astype(np.float64) for side in (part.train, part.inference))
    starts, _ = _windows(part)
    effective = _effective(p, q, starts, np.diff(starts, append=p.size).astype(np.float64)).sum(keepdims=True)
    said = []
    if not _surely_unlike(np.zeros(1), effective)[0]:
        said.append(
            f"not checked whether both sides score the same tokens: the {part.train.size:,} tokens of sequences that "
            "differ are too few, or too sure"
        )
    if begins := _beginnings(block)[0]:
        said.append(
            f"not checked whether the prompts are the same: {begins}, which other prompts do, and weights that changed "
            "how answers begin; record the prompts and the weights' versions of both sides"
        )
    ratio = np.exp(block.exact_log_w.clip(-16.0, math.log(_RARE_BET[1])))
    if ratio.size >= _MIN_LIKELIEST_TOKENS and 1.0 - ratio.mean() > _MISSING * ratio.std() / math.sqrt(ratio.size):
        said.append(
            f"the mean of P/Q is {ratio.mean():.4f}, significantly below 1: P has mass on tokens that Q never "
            "samples, as with top-p or top-k on the inference side; or numbers of Q are another token's, and too high; "
            "or one side is a mean of both, and drift looks smaller"
        )
    return "; ".join(said)


def _unrelated(train: Floats, inference: Floats) -> bool:
    """Return True if two sides of one place are no scores of one token: weights that changed keep their order.

    Of tokens that the inference side sampled, P/Q is 1 on average, whatever the weights; of others it is not.
    """
    ratio = np.exp((train.astype(np.float64) - inference).clip(-16.0, math.log(RATIO_CUT)))
    by_chance = _UNRELATED[1] / math.sqrt(train.size - 3)
    above = float(ratio.mean() - by_chance * ratio.std())
    return above > _SURPLUS or _rank_correlation(train, inference) + by_chance < _UNRELATED[0]


def _beginnings(block: Block) -> tuple[str, bool]:
    """Say that answers differ most where they begin, if they do; whether they still do after the first few tokens.

    Weights of another step begin answers otherwise, at a few tokens; another prompt is forgotten slowly.
    """
    long = block.lengths >= _WINDOW
    if np.count_nonzero(long) < _PLACE_ROWS:
        return "", False
    far = np.minimum(np.abs(block.exact_log_w), 3.0)
    sums = [np.append(0.0, np.cumsum(values)) for values in (far, -np.maximum(block.inference, -3.0) + 0.01)]
    start, end = block.starts[long], block.last[long] + 1
    begins, then, later = (
        [total[until] - total[since] for total in sums]
        for since, until in ((start, start + RUN), (start + RUN, start + 3 * RUN), (end - _WINDOW // 2, end))
    )
    early, late = begins[0] / RUN, later[0] / (_WINDOW // 2)
    differ = (early > _EARLY_RATIOS[0]) & (early > _EARLY_RATIOS[1] * late)
    differ &= begins[0] * later[1] > _EARLY_RATIOS[2] * later[0] * begins[1]
    least = max(_PLACE_ROWS, _UNLIKE_ROW_SHARE * differ.size)
    if np.count_nonzero(differ) < least or early.mean() < _EARLY_RATIOS[2] * late.mean():
        return "", False
    said = f"the first {RUN} tokens differ by {early.mean():.2g} nats, the last {_WINDOW // 2} by {late.mean():.2g}"
    shares = [of[0][differ].sum() / of[1][differ].sum() for of in (begins, then, later)]
    return said, bool(shares[1] - shares[2] > _FORGOTTEN * (shares[0] - shares[2]))


def likeliest(block: Block, _: Seen) -> Found:
    """Find rows in which one side has the likeliest token's log-probability in place of the sampled one's.

    It is never below, and it differs as often as the likeliest token is not sampled, which is the sum of 1 - Q.
    """
    train, inference = (side.astype(np.float64) for side in (block.train, block.inference))
    differ = block.drift > DRIFT
    for low, high, name in ((train, inference, "inference"), (inference, train, "training")):
        apart = (high - low).clip(-3.0, 3.0)
        above, size, squares = (
            np.add.reduceat(part, block.starts) for part in (np.maximum(apart, 0.0), np.abs(apart), np.square(apart))
        )
        alone = (above > _ONE_SIDED * size) & (size * size > _MIN_ONE_SIDED_TOKENS * squares)
        for rows in (differ, differ & alone):
            here = block.by_token(rows)
            if not _of_the_likeliest(low[here], high[here]):
                continue
            mean = float(np.exp(block.exact_log_w[here].clip(-16.0, 3.0)).mean())
            said = f"the {name} side gives the likeliest token's log-probability, not the sampled one's; mean P/Q "
            return [RowFault(InvalidReason.NOT_SAMPLED, np.flatnonzero(rows), f"{said}{mean:.2f}")]
    return []


def _of_the_likeliest(low: NDArray[np.float64], high: NDArray[np.float64]) -> bool:
    """Return True if one side's log-probabilities are at most those of the likeliest tokens, on the other side."""
    if high.size < _MIN_LIKELIEST_TOKENS or np.count_nonzero(high < _RARE_LOGPROB) > 1e-3 * high.size:
        return False
    apart = (high - low).clip(-3.0, 3.0)
    far = apart > _FAR_NATS
    if not far.any() or far.all() or np.maximum(apart, 0.0).sum() <= _ONE_SIDED * np.abs(apart).sum():
        return False
    left, together = float(-np.expm1(high).sum()), np.exp(low[far]) + np.exp(high[far])
    return bool(
        np.median(np.abs(apart[~far])) < _SAME_NATS
        and 0.4 * left < np.count_nonzero(far) < 1.1 * left
        and np.quantile(together, 0.95) <= 1.02
    )
