"""Numbers that a program changed after the kernels computed them: copied, cut, averaged, summed, or no log-probability.

Numbers in float32 are told from those on a coarse grid (`fine`): of them no two are equal by chance, so that equality,
within a row or across the sides, is a program's doing. A transformer's tokens are no exception: once a token of a row
differs between two kernels, so do, by their last bits, all that attend to it.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kc_otel.contract.input_reasons import InvalidReason
from kc_otel.record.measure.arrays import Floats
from kc_otel.record.measure.blocks import (
    CHANCE,
    DRIFT,
    FLOOR_NATS,
    NUCLEUS,
    RUN,
    UNSURE,
    Block,
    Found,
    Mask,
    RowFault,
    Seen,
    every_row,
    fault_at,
    fine,
    improbable,
    runs_of,
    surely_more,
)

_LOOK_TOKENS: Final = 1024  # tokens of a block that are looked at first for what a program does to all of them
_FEW: Final = 256
_APART_NATS: Final = 0.5
"""Largest drift of a row from which the inference side may be sound where the training side is not."""
_SMOOTH_RATIO: Final = 0.15
"""Squared steps from token to token over squared distances from the row's mean (von Neumann's ratio): 2 for numbers in
any order, 0.5 for means over 4 tokens, 0.05 for means over all tokens so far, less for sums. How improbable a sampled
token is does not follow from the one before, so that half of what varies is between neighbours in any honest row."""
_SMOOTH_FROM: Final = 8  # token from which means over all tokens so far are smooth
_SMOOTH_TOKENS: Final = 64
_SMOOTH_PART: Final = 16
"""Tokens of a part whose ratio is at most 1 in a smooth row: of numbers in any order one part in fifty has that."""
_NEIGHBOURS: Final = (1000, 0.4, 0.35, 0.15, 24.0)
"""Tokens from which means over two neighbours show, least correlation of a token with the next one, least fall of it to
the one after, largest change from there to the third, and effective number of tokens in the variance, at least. A mean
over two has 0.5 and 0; of SmolLM's sampled tokens all three are 0.06 to 0.09, of text that is sure in long stretches
0.3."""
_PROBABILITIES: Final = (4, 0.02, 0.1, 32)
"""Rows, at least, whose lowest number lies this far above -1 where they are probabilities, to what distance tokens are
compared with those, and tokens besides each row's lowest."""
_TWICE: Final = (64, -4.0, 0.3, 1.001, 0.25)
"""A softmax of probabilities: different values at least, log-probability below which all lie, least and largest range
in nats, and share of tokens in the outer tenths of the range: sure tokens at one end, improbable ones at the other. Of
a model that was never trained, whose log-probabilities lie as close, 6 % do; a quarter of 64 by chance: 1e-6."""
_NEVER: Final = (1000, -4.0, math.log(0.5), 3.5, 5.0)
"""Tokens, least and largest highest log-probability, and distance of the first percentile from the median: in that of
the last one, and in nats. Of SmolLM a third of sampled tokens are above a half; the second to fifth entries of its
lists lie within 1.4 nats above their median and 7 to 8 below; a model of open texts alone 2.4 and 4."""
_SCALE: Final = 5e-3  # median |l| from which a thousandth of it is several steps of float32's grid
_TELLING_TOKENS: Final = 64
_EDGE_TOKENS: Final = 32
_EDGE_SHARE: Final = 0.01
"""Tokens, and share of them, with |l| within a tenth of the largest from which that is where l was cut; of any tail a
handful are."""
_LAST_SHARE: Final = 0.13
"""Share of those within a tenth that lie within a fiftieth where a tail was cut: a fifth of an even tail, 0.17 to 0.2
of int8's cut at 0.3 to 1 nats; of mixtures of models that are alike less than 0.12."""
_EDGE_NATS: Final = (0.3, 3.0)
"""Largest |l| from which such an edge is no storage grid's: less than that is rounded off bfloat16 logits up to 64;
and up to which it is where somebody cuts: tokens from nowhere differ by more, up to where P ends."""
_SURE_SIDE: Final = (-1e-3, 32, 0.02, 0.5)
"""log-probability of a sure token, tokens like that, nats below which 95 % of them lie on the other side, and range of
nine tenths of them in shares of their median. Of real kernels from bfloat16 to int8 the median is below 1e-4,
and as many are above as below; of a log-softmax that lacks log 2, or of probabilities smoothed by 0.1, the range is
0.02, and 0.34 of SmolLM's loss with labels smoothed by 0.1."""
_LOWEST: Final = -8.0  # lower cut of log-probabilities in a correlation, as in `same_tokens`
_LAST_BITS: Final = 4e-6
"""Nats by which differences of two float32 log-probabilities above -16 that should be equal differ."""
_REPEATED_TOKENS: Final = 4  # odd tokens of the sample from which all are looked at
_IN_ROW: Final = 16  # times that a number on no coarse grid is there in a row from which it may be a constant
_FILLED_SHARE: Final = 0.05  # share of tokens that have such numbers
_DRIFTING_ROWS: Final = 4
"""Rows that drift, at least, where others are called copies: of equal kernels a single one may go wrong."""


def looks_altered(block: Block) -> bool:
    """Return True if numbers look changed enough for the checks here and in `fillers`, however small the drift."""
    some, log_w = slice(0, _LOOK_TOKENS), block.log_w
    for number, (side, other, _) in enumerate(block.sides):
        low = block.lowest[number]
        if np.count_nonzero(low == (lowest := low.min())) >= max(2, block.rows.size // 10):
            near = np.count_nonzero(side[some] <= lowest + FLOOR_NATS)
            if 4 * np.count_nonzero(side[some] == lowest) > 3 * near >= 3 * _REPEATED_TOKENS:
                return True
        zero = block.highest[number] == 0.0
        if zero.any() and 4 * np.count_nonzero(zero & (block.highest[1 - number] < 0.0)) > block.rows.size:
            inside = side[some][(other[some] < -NUCLEUS) & (other[some] > -10.0 * NUCLEUS)]
            if inside.size >= 2 * RUN and np.mean(inside == 0.0) > 0.8:
                return True
    if _edge(np.abs(log_w)):
        return True
    few, ends = np.sort(block.inference[some]), (log_w, -log_w)
    piles = [block.inference[end >= most - _LAST_BITS] for end in ends if (most := end.max()) > _SCALE]
    again = few[1:][few[1:] == few[:-1]]
    where = log_w if (size := float(np.abs(log_w[some]).mean())) > DRIFT else log_w[some]
    same = block.inference[np.flatnonzero(where == 0.0)[:_LOOK_TOKENS]] if size > _SCALE else few[:0]
    return any(
        log_w.size > odd.size >= least and np.count_nonzero(fine(odd[odd < -UNSURE][:_FEW])) >= least
        for odd, least in ((same, 2), *((pile, 2) for pile in piles), (again, _FEW // 10))
    )


def no_logprobs(block: Block) -> Found:
    """Sides whose numbers are sums or means over tokens, or went through a softmax twice."""
    if found := offset_by_row(block):
        return found
    for number, (side, _, name) in reversed([*enumerate(block.sides)]):
        if number == 0 and not (found or block.drift.max() > _APART_NATS):
            break
        said, some = "", side[:_LOOK_TOKENS]
        step, off = some[1:] - some[:-1], some - some.sum() / some.size
        if step @ step < 2.0 * _SMOOTH_RATIO * (off @ off) and _smooth(block, side):
            said = "change less from token to token than along the sequence: they are sums, or means, over tokens"
        elif step @ step < _NEIGHBOURS[1] * 3.5 * (off @ off) and _of_neighbours(block, side):
            said = "go together with the next token's and not with the one after: they are means over two tokens"
        elif rows := _probabilities(block, side, block.lowest[number]):
            said = f"of {rows:,} sequences lie between -1 and 0, and most of them next to -1: they are probabilities"
        elif (high := block.highest[number].max()) < _TWICE[1] and (span := high - block.lowest[number].min()) < _TWICE[
            3
        ]:
            outer = np.abs(side - (high - span / 2.0)) > 0.4 * span
            if span > _TWICE[2] and np.mean(outer) > _TWICE[4] and np.unique(side).size >= _TWICE[0]:
                said = f"lie within {span:.2g} nats around {side.mean():.3g}: a softmax of probabilities"
        if said:
            found += every_row(block, InvalidReason.NOT_LOGPROBS, f"numbers of the {name} side {said}")
    return found


def offset_by_row(block: Block) -> Found:
    """Rows, most of them, in which the sides differ by one number throughout, and by another in other rows."""
    with np.errstate(invalid="ignore"):  # -inf on both sides
        log_w = block.train[:_LOOK_TOKENS].astype(np.float64) - block.inference[:_LOOK_TOKENS]
        if 4 * np.count_nonzero(np.abs(np.diff(log_w)) <= _LAST_BITS) < 3 * log_w.size:
            return []
    # A sum that would be above 0 may have been cut there.
    cut = (block.train == 0.0) | (block.inference == 0.0)
    log_w = block.exact_log_w
    low, high = (
        end.reduceat(np.where(cut, nothing, log_w), block.starts)
        for end, nothing in ((np.minimum, np.inf), (np.maximum, -np.inf))
    )
    varies = block.highest[1] - block.lowest[1]
    long = (block.count(~cut) >= RUN) & (varies > UNSURE)
    one = long & (high - low <= _LAST_BITS) & (np.abs(low) > _LAST_BITS)
    rows = np.flatnonzero(one)
    if rows.size < _DRIFTING_ROWS or 2 * rows.size <= np.count_nonzero(long):
        return []
    sizes = np.sort(low[rows])
    if 2 * np.count_nonzero(np.diff(sizes) > _LAST_BITS) < rows.size:
        return []
    spread = f"{sizes[0]:.3g} to {sizes[-1]:.3g}"
    said = f"the sides differ by one number at all tokens of a sequence, by {spread}: a mean or "
    said += "a sum over the sequence (GSPO's ratio, a baseline) was added to each token's number"
    return [RowFault(InvalidReason.NOT_LOGPROBS, rows, said)]


def never_sure(block: Block) -> Found:
    """Numbers of which none is half of the mass, many are nearly as much as any, and others are far below.

    The k-th entry of a list of the likeliest tokens is at most 1/k, on both sides where one function reads both lists,
    and next to nothing where the model is sure of the first. Of a sampled text it would be sure of some tokens.
    """
    high = float(block.highest[1].max())
    if not _NEVER[1] < high < _NEVER[2] or block.inference.size < _NEVER[0]:
        return []
    low, middle, top = np.quantile(block.inference, (0.01, 0.5, 0.99))
    if middle - low < max(_NEVER[3] * (top - middle), _NEVER[4]):
        return []
    said = f"none of {block.inference.size:,} tokens has more than {math.exp(high):.2g} of the mass on the inference "
    said += "side: are they a later entry of lists of the likeliest tokens"
    return every_row(block, InvalidReason.NOT_SAMPLED, said)


def shifted(block: Block, _seen: Seen) -> Found:
    """Sides that give one number less to all tokens that the other is sure of: what they add up to is not 1."""
    for side, other, name in block.sides:
        sure = other > _SURE_SIDE[0]
        if np.count_nonzero(sure) < _SURE_SIDE[1]:
            continue
        low, middle, high = np.quantile(side[sure].astype(np.float64), (0.05, 0.5, 0.95))
        if high < -_SURE_SIDE[2] and high - low < -_SURE_SIDE[3] * middle:
            said = f"gives {middle:.3g} to every token that the other is sure of: its probabilities add up to "
            said += f"{np.exp(middle):.3g} (labels smoothed, or the log-sum-exp of more than the logits)"
            return every_row(block, InvalidReason.NOT_LOGPROBS, f"the {name} side {said}")
    return []


def _smooth(block: Block, side: Floats) -> bool:
    """Return True if most rows that are long enough change little from token to token."""
    long = block.lengths >= _SMOOTH_TOKENS
    ratios = []
    for start, length in zip(block.starts[long].tolist(), block.lengths[long].tolist(), strict=True):
        row = side[start + _SMOOTH_FROM : start + length].astype(np.float64)
        steps, far = _steps_and_distances(row)
        # Padding that one side scores lies apart from the answer: smooth as a whole, and not within the answer.
        parts = _steps_and_distances(row[: row.size // _SMOOTH_PART * _SMOOTH_PART].reshape(-1, _SMOOTH_PART))
        smooth = far > 1e-4 * row.size and bool((parts[0] <= parts[1]).all())
        ratios.append(float(steps / far) if smooth else 2.0)
    return 2 * int(np.count_nonzero(np.array(ratios) < _SMOOTH_RATIO)) > len(ratios)


def _of_neighbours(block: Block, side: Floats) -> bool:
    """Return True if each token's number goes together with the next one's and not with those after it."""
    if side.size < _NEIGHBOURS[0]:
        return False
    values = np.maximum(side, _LOWEST).astype(np.float64)
    off = values - block.by_token(np.add.reduceat(values, block.starts) / block.lengths)
    total, few = float(off @ off), _NEIGHBOURS[4] * float(np.square(off) @ np.square(off))
    if not total * total > few:
        return False
    near, next_one, third = (
        float((off[lag:] * off[:-lag])[block.place[lag:] >= lag].sum()) / total for lag in (1, 2, 3)
    )
    return near > _NEIGHBOURS[1] and near - next_one > _NEIGHBOURS[2] and abs(next_one - third) < _NEIGHBOURS[3]


def _probabilities(block: Block, side: Floats, lowest: Floats) -> int:
    """Return how many rows have probabilities, with a minus sign or less 1: numbers pile up at -1, and none is below.

    Each row has one that is its lowest; of log-probabilities the others are no more often next to it than above.
    """
    rows = (lowest >= -1.0) & (lowest < _PROBABILITIES[1] - 1.0)
    if np.count_nonzero(rows) < _PROBABILITIES[0]:
        return 0
    here = side[block.by_token(rows)]
    here = here[fine(here)]
    edge = np.unique(here[here < _PROBABILITIES[1] - 1.0]).size - np.count_nonzero(rows)
    above = np.count_nonzero(here < _PROBABILITIES[2] - 1.0) - np.count_nonzero(here < _PROBABILITIES[1] - 1.0)
    sure = edge >= _PROBABILITIES[3] and surely_more(edge, edge + above, 0.35)
    return int(np.count_nonzero(rows)) if sure else 0


def _steps_and_distances(rows: Floats) -> tuple[Floats, Floats]:
    """Return the sums of squared steps from token to token, and of squared distances from the mean, of each row."""
    apart = rows - rows.mean(-1, keepdims=True)
    return np.square(np.diff(rows)).sum(-1), np.square(apart).sum(-1)


def repeated_in_rows(block: Block, seen: Seen) -> Found:
    """Numbers on no coarse grid that a row has again and again, on both sides at the same tokens, amid others."""
    telling = np.flatnonzero(_telling(block) & ~seen.tokens)
    row, value = block.row_of(telling), block.inference[telling]
    order = np.lexsort((block.train[telling], value, row))
    telling, row, value = telling[order], row[order], value[order]
    keys = (row, value, block.train[telling])
    begins = np.flatnonzero(np.logical_or.reduce([np.diff(key, prepend=2.0) != 0 for key in keys]))
    often = np.diff(begins, append=telling.size)
    many = often >= _IN_ROW
    others, tokens_many = value[begins[~many]], int(often[many].sum())
    # A policy with few states repeats several numbers in a row; who fills in writes one.
    if tokens_many < _FILLED_SHARE * telling.size or np.unique(row[begins[many]]).size < np.count_nonzero(many):
        return []
    if not many.any() or others.size < _TELLING_TOKENS or np.unique(others).size < 0.5 * others.size:
        return []
    tokens = np.zeros(block.train.size, dtype=np.bool_)
    tokens[telling[np.repeat(many, often)]] = True
    said = f"{tokens.sum():,} tokens have a number of their sequence that is there up to {often.max():,} times"
    return [fault_at(block, tokens, f"{said}, on both sides", of_all=True)]


def copied_runs(block: Block, seen: Seen) -> Found:
    """Runs in which both sides are one number, after tokens of the row that drift: copied, and not computed."""
    begin, length = runs_of(block.agree, opening=False)
    differ = np.concatenate([[0], np.cumsum(~block.same)])
    before = differ[begin] - differ[block.starts[block.row_of(begin)]]
    # Kernels that agree bit for bit up to some length, or over short rows, are a fact of their own.
    odd = (before >= RUN) & ~seen.tokens[begin]
    if not odd.any() or (tokens := improbable(block, block.agree, begin[odd], length[odd], sure=True)) is None:
        return []
    said = f"{tokens.sum():,} tokens are the same number on both sides, up to {length.max():,} in a row, where others "
    return [fault_at(block, tokens, said + "differ: one side is a copy of the other there")]


def copied_tokens(block: Block, seen: Seen) -> Found:
    """Tokens of which one side is a copy of the other, after some of the row that drift and among others that do."""
    telling, after, apart = _agreement(block, seen.tokens)
    telling &= after
    others, count = telling & ~block.same, np.count_nonzero(telling)
    if np.count_nonzero(others) < _TELLING_TOKENS or (median := float(np.median(apart[others]))) < _SCALE:
        return []
    tokens = telling & block.same
    near = np.count_nonzero(apart[others] < 1e-3 * median)
    if not surely_more(np.unique(block.inference[tokens]).size, count, (near + 1) / (count + 2)):
        return []
    above = np.mean(block.train[others] > block.inference[others])
    # Kernels that agree but for single tokens are bit for bit the same at most, and those others lie anywhere.
    largest = apart[others].max()
    cut = np.count_nonzero(apart[others] > 0.9 * largest) > max(_EDGE_TOKENS, _EDGE_SHARE * np.count_nonzero(others))
    if (2 * np.count_nonzero(tokens) > count and not cut) or not 0.05 < above < 0.95:
        return []
    said = f"{tokens.sum():,} tokens among others are the same number on both sides, where those differ by {median:.2g}"
    said += f" and by {largest:.3g} at most" if cut else ""
    return [fault_at(block, tokens, f"{said}: one side is a copy of the other there", of_all=True)]


def copied_rows(block: Block, seen: Seen) -> Found:
    """Whole rows in which one side is a copy of the other, where all others drift, and do so from early on."""
    whole = block.whole(block.same)
    if not whole.any():
        return []
    telling, after, apart = _agreement(block, seen.tokens)
    tokens = block.count(telling)
    drifting = ~whole & (tokens > 0)
    of_drifting = block.by_token(drifting) & telling
    if drifting.sum() < _DRIFTING_ROWS or not np.mean(apart[of_drifting]) > DRIFT:
        return []
    # Kernels that agree up to some length do so in the other rows as well.
    share = np.count_nonzero(of_drifting & ~after) / (np.count_nonzero(of_drifting & ~after) + drifting.sum())
    copies = whole & (-tokens * np.log(max(share, 0.1)) > CHANCE)
    if not copies.any():
        return []
    said = "both sides are the same number in every token, where other sequences differ by "
    said += f"{np.mean(apart[of_drifting]):.2g}: one side is a copy of the other, or those came from another kernel"
    return [fault_at(block, block.by_token(copies), said)]


def clipped(block: Block, seen: Seen) -> Found:
    """Differences of the sides of which many have the largest size that there is, while hardly any come near it."""
    log_w = block.exact_log_w
    # A constant that was added to a row is that row's drift.
    varies = np.maximum.reduceat(log_w, block.starts) - np.minimum.reduceat(log_w, block.starts) > _LAST_BITS
    telling = _telling(block) & fine(block.train) & block.by_token(varies) & ~seen.tokens
    for sign in (1.0, -1.0):
        size = sign * log_w[telling]
        if size.size < _TELLING_TOKENS or (largest := float(size.max())) < _SCALE:
            continue
        pile = np.unique(block.inference[telling][size >= largest - _LAST_BITS]).size - 1
        near = np.count_nonzero(size >= 0.95 * largest) - np.count_nonzero(size >= largest - _LAST_BITS)
        beside = np.count_nonzero(size >= largest - 100.0 * _LAST_BITS) - np.count_nonzero(size >= largest - _LAST_BITS)
        # Mixtures of two models approach the largest ratio of their weights, and a program cuts at it.
        if 4 * beside > pile:
            continue
        if surely_more(pile, pile + near, max(1e-3, 2.0 * _LAST_BITS / (0.05 * largest))):
            tokens = telling & (sign * log_w >= largest - _LAST_BITS)
            said = f"{tokens.sum():,} tokens differ by {sign * largest:.6g}, and none by more: cut there"
            return [fault_at(block, tokens, said, InvalidReason.NOT_LOGPROBS, of_all=True)]
    return []


def left_out(block: Block, _seen: Seen) -> Found:
    """Differences of the sides of which many lie next to the largest one, where the tail of a drift has a handful.

    Two mixtures of the same two models differ by no more than the ratio of their weights either: they come to a pile
    there where the models differ much, and to hardly any where they differ little. A tail that was cut goes on evenly.
    """
    telling = _telling(block) & fine(block.train)
    sides = [(sign, np.where(telling, sign * block.exact_log_w, 0.0)) for sign in (1.0, -1.0)]
    tails = [[np.count_nonzero(size > share * size.max()) for share in (0.8, 0.9, 0.98)] for _, size in sides]
    if any(2 * tail - math.sqrt(tail) > more for more, tail, _ in tails):
        return []
    for (sign, size), (_, tail, last) in zip(sides, tails, strict=True):
        largest = float(size.max())
        tokens = size > 0.9 * largest
        even = last >= _LAST_SHARE * tail
        if even and _edge(size) and np.unique(block.inference[tokens]).size > 2 * _EDGE_TOKENS:
            spread = f"{0.9 * sign * largest:.3g} to {sign * largest:.3g}"
            said = f"{tokens.sum():,} tokens differ by {spread}, and none by more: those were left out, or masked"
            return [fault_at(block, tokens, said, InvalidReason.NOT_LOGPROBS, of_all=True)]
    return []


def _edge(size: Floats) -> bool:
    """Return True if many differences lie next to the largest one, where a tail has a handful."""
    largest = float(size.max())
    return bool(_EDGE_NATS[0] < largest < _EDGE_NATS[1] and np.count_nonzero(size > 0.9 * largest) > _EDGE_TOKENS)


def _telling(block: Block) -> Mask:
    """Tokens of which neither side is sure, with numbers that no two kernels and no two tokens share by chance."""
    telling: Mask = (block.train < -UNSURE) & (block.inference < -UNSURE) & fine(block.inference)
    return telling


def _agreement(block: Block, known: Mask) -> tuple[Mask, Mask, NDArray[np.float64]]:
    """Tokens that tell something, and that come after one that differs; and |l|."""
    differ = np.cumsum(~block.same)
    after = differ > block.by_token(differ[block.starts] - ~block.same[block.starts])
    return _telling(block) & ~known, after, np.abs(block.exact_log_w).clip(max=1e3)
