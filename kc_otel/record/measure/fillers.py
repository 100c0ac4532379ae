"""Constants that stand for "no number": sentinels, runs of one value, fillers at an edge, zeros, floors.

How often a run of such tokens comes by itself is estimated from the rest of the block and from the run's neighbours,
because a model that copies a text is entirely sure of many tokens in a row.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

import numpy as np

from kc_otel.contract.input_reasons import InvalidReason
from kc_otel.record.measure.altered import shifted
from kc_otel.record.measure.blocks import (
    FLOOR_NATS,
    NUCLEUS,
    RUN,
    UNSURE,
    Block,
    Faults,
    Mask,
    Seen,
    eroded,
    fault_at,
    fine,
    improbable,
    runs_of,
    spread,
    surely_more,
    trailing,
)

_SURE_NATS: Final = 0.02  # nats up to which a side is sure of a token, exactly 0 or not
_SURELY_UNSURE: Final = 1.0
_UNWRITTEN_NATS: Final = 3.0
"""Nats that the other side's tokens cost together where a side is exactly 0 throughout a short sequence."""
_SENTINEL: Final = -1000.0
"""No log-softmax of a trained model goes below; lower values (-9999, the lowest float) are fillers."""
_ROUNDED: Final = 0.5  # the same where a row's numbers are on a coarse grid
_NUCLEUS_TOKENS: Final = 32
_NUCLEUS_SHARE: Final = 0.9
_TOP_P_NATS: Final = 0.75  # the same at most: half of the mass is kept
_FINE_SHARE: Final = 0.8  # share of a side's numbers on no coarse grid from which they are float32's
_FLOOR_VALUES: Final = 32
_ONE_NUMBER: Final = (32, 3, 0.5)
"""Tokens of one number on a side from which it is a filler, times that they exceed those of any other number, and nats
that half of them lie apart on the other side."""
_UNIFORM: Final = (400_000, 1e-6)
"""Largest vocabulary, and error in float32 of 1/n in shares of it: a broken kernel has all logits equal."""
_BLURRED_FLOOR: Final = (1.0, 32, 0.5, 0.9, 0.2)
"""Nats below one side's lowest number from which tokens of the other side lie far below it, such tokens at least, nats
above the lowest within which that side has them where it is a floor, share of them, and its slope on the other side
there. Tokens that a broken kernel alone found likely have any number on its side; another base has a slope."""
_EDGE_ROWS: Final = 0.9  # share of rows that begin, or end, with the same filler where a mask is missing
_MIN_EDGE: Final = 3
"""Tokens from which such an edge is looked at: of a template's first token or two both kernels are entirely sure."""
_EDGE_TOKENS: Final = 1000
_NEARLY_ZERO: Final = 30
"""Tokens nearly 0, and not 0, on both sides from which a last token that is 0 in nine of ten rows, and no other in the
block, is no sure end of turn: float32 has room for 1 - 6e-8, and somewhere else a token would be as sure."""
_EDGE_ELSEWHERE: Final = 1e-3
"""Share of other tokens that are exactly 0 on both sides, up to which so many at an edge are none of a sure model."""
_ALL_ZERO: Final = (256, 1e-3)
"""Tokens from which a block of exact zeros on both sides is no text of a sure model, and share of others beside them:
kernels that are entirely sure of 19 tokens in 20 are so of 256 once in 500,000 blocks."""
_VALUES: Final = 8  # different constants of a block that are looked at; of more, those with the most tokens


def agree_in_runs(block: Block) -> bool:
    """Return True if some row has a run of one value on a side, or of tokens in which both sides agree."""
    if block.train.size < RUN:
        return False
    if any(eroded(same, RUN - 1).any() for same in (*block.repeats, block.agree)):
        return True
    zeros = [(block.train[edge] == 0.0) & (block.inference[edge] == 0.0) for edge in (block.starts, block.last)]
    return any(np.count_nonzero(zero) >= _EDGE_ROWS * zero.size for zero in zeros)


def sentinels(block: Block, _seen: Seen) -> Faults:
    """Numbers that no log-softmax of a trained model goes down to."""
    tokens = (block.train < _SENTINEL) & np.isfinite(block.train)
    if tokens.any():
        yield fault_at(block, tokens, f"{tokens.sum():,} tokens are {block.train[tokens][0]:.4g}")


def whole_rows(block: Block, _seen: Seen) -> Faults:
    """Rows of which one side is a single value and the other is not."""
    flat = [low == high for low, high in zip(block.lowest, block.highest, strict=True)]
    for (side, _, name), here, there in zip(block.sides, flat, flat[::-1], strict=True):
        zero = here & (side[block.starts] == 0.0)
        unwritten = zero & (block.lengths >= 2) & (block.drift * block.lengths > _UNWRITTEN_NATS)
        rows = here & ~there & (block.lengths >= 3) & (block.drift > UNSURE)
        several = 2 * np.count_nonzero(rows) > np.count_nonzero(block.lengths >= 3)
        if not (several and np.count_nonzero(rows) >= 4):
            rows &= block.lengths >= RUN
        _, often = np.unique(side[block.starts[rows & ~zero]], return_counts=True)
        told = "one value per sequence, the same at each token"
        if often.size and often.max() > 1:
            told = f"one value at each token of {often.max():,} sequences, which is padding or a filler,"
        for which, reason, words in (
            ((rows & zero) | unwritten, InvalidReason.PLACEHOLDER, "every token is exactly 0"),
            (rows & ~zero, InvalidReason.ONE_VALUE, told),
        ):
            if which.any():
                tokens = block.by_token(which)
                yield fault_at(block, tokens, f"{words} on the {name} side; e.g. {side[tokens][0]:.4g}", reason)


def nothing_but_zeros(block: Block, _seen: Seen) -> Faults:
    """Exact zeros on both sides that are nearly all that counts, as of a mask that counts padding and nothing else."""
    zero = (block.train == 0.0) & (block.inference == 0.0)
    count, (fewest, others) = np.count_nonzero(zero), _ALL_ZERO
    if count >= fewest and zero.size - count <= others * count:
        yield fault_at(block, zero, f"{count:,} of all {zero.size:,} tokens that count are exactly 0 on both sides")


def runs_of_one(block: Block, seen: Seen) -> Faults:
    """Runs of one value that the rest of the block, and the run's neighbours, do not explain."""
    both = block.repeats[0] & block.repeats[1]
    taken = seen.tokens.copy()
    for where, same, side in (
        ("both sides", both, block.inference),
        ("the training side", block.repeats[0], block.train),
        ("the inference side", block.repeats[1], block.inference),
    ):
        begin, length = runs_of(same)
        begin, length = begin[~taken[begin]], length[~taken[begin]]
        if same is not both and begin.size:
            apart = np.abs(block.exact_log_w).clip(max=16.0)
            ends = np.column_stack([begin, begin + length]).ravel()
            alike, level = (np.add.reduceat(np.append(of, 0), ends)[::2] for of in (both.astype(np.intp), apart))
            one_side = (2 * alike < length) & (level > UNSURE * length)
            begin, length = begin[one_side], length[one_side]
        if not begin.size:
            continue
        values, total = np.unique(side[begin], return_counts=True)
        for value in values[np.argsort(-total)][:_VALUES]:
            runs, equal = side[begin] == value, side == value
            if same is both:
                equal &= np.isin(block.train, block.train[begin[runs]])
            sure = same is both and abs(float(value)) < UNSURE
            tokens = improbable(block, equal, begin[runs], length[runs], sure=sure)
            if tokens is None:
                continue
            tokens |= _ending_alike(block, equal, tokens)
            taken |= tokens
            amount = "exactly 0" if value == 0.0 else f"{value:.6g}"
            said = f"{tokens.sum():,} tokens are {amount} on {where}, up to {int(length[runs].max()):,} in a row"
            yield fault_at(block, tokens, said)


def _ending_alike(block: Block, equal: Mask, tokens: Mask) -> Mask:
    """The ends of other rows, however short, where several rows end in this filler: a mask is missing for all rows."""
    rare = np.count_nonzero(equal & ~tokens) < 0.02 * np.count_nonzero(~tokens) + block.rows.size
    if np.count_nonzero(tokens[block.last]) < 2 or not rare:
        return np.zeros_like(tokens)
    rows = equal[block.last] & ~tokens[block.last] & ~block.whole(equal)
    ending: Mask = block.by_token(rows) & trailing(block, equal)
    return ending


def edges(block: Block, seen: Seen) -> Faults:
    """Exact zeros on both sides with which nearly every row begins, or ends, and which hardly come elsewhere."""
    zero = (block.train == 0.0) & (block.inference == 0.0) & ~seen.tokens
    if not zero.any():
        return
    low, high = np.minimum(block.train, block.inference), np.maximum(block.train, block.inference)
    nearly_zero = np.count_nonzero((high < 0.0) & (low > -1e-3))
    ends, place = block.last + 1, np.arange(zero.size)
    first = np.minimum.reduceat(np.where(zero, zero.size, place), block.starts)
    last = np.maximum.reduceat(np.where(zero, -1, place), block.starts)
    leading, trailing = np.minimum(first, ends) - block.starts, block.last - np.maximum(last, block.starts - 1)
    for where, size, begin in (("begin", leading, block.starts), ("end", trailing, ends - trailing)):
        some = (size > 0) & (size < block.lengths)
        usual = int(np.quantile(np.where(some, size, 0), 1.0 - _EDGE_ROWS, method="lower"))
        tokens = spread(begin[some], size[some], zero.size)
        others, elsewhere = np.count_nonzero(~tokens), np.count_nonzero(zero & ~tokens)
        if usual < _MIN_EDGE and (elsewhere or where == "begin" or usual == 0 or nearly_zero < _NEARLY_ZERO):
            continue
        if others >= _EDGE_TOKENS and elsewhere <= _EDGE_ELSEWHERE * others:
            said = f"{tokens.sum():,} tokens with which the sequences {where} are exactly 0 on both sides"
            yield fault_at(block, tokens, f"{said}, {usual} in most")


def nucleus(block: Block, seen: Seen) -> Faults:
    """Exact zeros of one side wherever the other is surer than some top-p, and nowhere else: one token was left.

    In float32 an exact 0 is a probability above 1 - 6e-8, from which no drift makes 0.99. Only rows with one count.
    """
    for side, other, name in block.sides:
        zero = (side == 0.0) & (other < -NUCLEUS) & ~seen.tokens
        if np.count_nonzero(zero) < _NUCLEUS_TOKENS or not np.mean(fine(side[side < -UNSURE])) > _FINE_SHARE:
            continue
        edge, middle = np.quantile(other[zero], (0.02, 0.5))
        rows = block.count(zero) > 0
        inside = block.by_token(rows) & (other < -NUCLEUS) & (other > middle)
        if edge > -_TOP_P_NATS and np.mean(zero[inside]) > _NUCLEUS_SHARE:
            said = (
                f"tokens to which the other side gives {math.exp(edge):.3g} to 0.999 are exactly 0 on the {name} side"
            )
            most = bool(2 * np.count_nonzero(rows) > rows.size)
            yield fault_at(block, zero, said, InvalidReason.TRUNCATED_SAMPLING, of_all=most)


def of_the_token_before(block: Block, seen: Seen) -> Faults:
    """Tokens with the number of the one before them on one side, where the other side has another: no two are equal.

    The same of both sides where it is the last token of many sequences, each time with another number, and no other.
    """
    both = block.repeats[0] & block.repeats[1] & (block.inference < -UNSURE) & ~seen.tokens
    both[both] = fine(block.inference[both])
    last = np.zeros_like(both)
    last[block.last[block.lengths > RUN]] = True
    count, elsewhere = np.count_nonzero(both & last), np.count_nonzero(both & ~last)
    different = np.unique(block.inference[both & last]).size
    if 2 * different > count and surely_more(different, np.count_nonzero(last), (elsewhere + 1) / (both.size + 2)):
        said = f"the last token of {count:,} sequences has the number of the one before it, on both sides"
        yield fault_at(block, both & last, said)
    for (side, other, name), same in zip(block.sides, block.repeats, strict=True):
        apart = np.abs(np.diff(np.maximum(other, _SENTINEL), prepend=0.0)) > UNSURE
        tokens = same & apart & ~seen.tokens & (side < -UNSURE)
        tokens[tokens] = fine(side[tokens])
        if np.unique(side[tokens]).size >= RUN:
            said = f"{np.count_nonzero(tokens):,} tokens have the number of the token before them on the {name} side"
            yield fault_at(block, tokens, said)


def cleared(block: Block, seen: Seen) -> Faults:
    """Exact zeros on both sides in the place of all likely tokens: of any text some are likely and not certain."""
    low = np.minimum(block.train, block.inference)
    zero = (low == 0.0) & ~seen.tokens
    others = block.inference[low < 0.0]
    if np.count_nonzero(zero) < _NUCLEUS_TOKENS or others.size < _EDGE_TOKENS:
        return
    if (top := low[low < 0.0].max()) <= -FLOOR_NATS and np.mean(fine(others)) >= _FINE_SHARE:
        yield fault_at(block, zero, f"{zero.sum():,} tokens are exactly 0 on both sides, and no others above {top:.3g}")


def single_zeros(block: Block, seen: Seen) -> Faults:
    """Exact zeros of one side where the other is unsure, against how often a sure token of that side is exactly 0."""
    for side, other, name in block.sides:
        zero, sure = side == 0.0, side > -_SURE_NATS
        unsure = sure & (other < -UNSURE) & ~seen.tokens
        if not (zero & unsure).any():
            continue
        # Rows that were rounded to a decimal or two have zeros that others have not.
        asked = side < -UNSURE
        coarse = 2 * block.count(asked & fine(side)) < block.count(asked)
        unsure &= ~(block.by_token(coarse) & (other > -_ROUNDED))
        agreed = sure & ~unsure & ~seen.tokens
        share = (np.count_nonzero(zero & agreed) + 1) / (np.count_nonzero(agreed) + 2)
        tokens = zero & unsure
        if not surely_more(np.count_nonzero(tokens), np.count_nonzero(unsure), share):
            tokens &= other < -_SURELY_UNSURE
            if np.count_nonzero(tokens) < max(RUN, 0.01 * side.size):
                continue
        amount = np.count_nonzero(tokens)
        where = ", each the last of its sequence" if np.count_nonzero(tokens[block.last]) == amount else ""
        said = f"{amount:,} tokens ({amount / side.size:.1%}) are exactly 0 on the {name} side where the other gives "
        yield fault_at(block, tokens, f"{said}{np.median(other[tokens]):.3g}{where}")


def floors(block: Block, seen: Seen) -> Faults:
    """A lowest value that many tokens share, more than any other, while hardly any come near it.

    Of numbers that no program cut, those a little above the lowest are no rarer than it.
    """
    for side, other, name in block.sides:
        usable = np.where(seen.tokens, 0.0, side)
        lowest = usable.min()
        tokens = usable == lowest
        count = np.count_nonzero(tokens)
        if not RUN <= count <= 0.95 * side.size or lowest > -0.5 or _uniform(float(lowest)):
            continue
        if 2 * count < np.count_nonzero(usable <= lowest + FLOOR_NATS):
            continue
        values, often = np.unique(usable[~tokens & ~seen.tokens & (usable < 0.0)], return_counts=True)
        # A model of few contexts has few numbers, and one of them is its lowest.
        if values.size < _FLOOR_VALUES or count <= 3 * often.max():
            continue
        near = int(often[values <= max(lowest + FLOOR_NATS, values[0])].sum())
        both = 2 * np.count_nonzero(tokens & (other == other[tokens].min())) > count
        if not surely_more(count, count + near, 0.5) and (both or count <= 3 * near or np.ptp(other[tokens]) < UNSURE):
            continue
        where = "both sides, below which they have" if both else f"the {name} side, below which it has"
        yield fault_at(block, tokens, f"{count:,} tokens are {lowest:.4g} on {where} none: a floor", of_all=True)
        if both:
            break


def blurred_floors(block: Block, seen: Seen) -> Faults:
    """Tokens that one side has at its lowest number wherever the other is far below: log(q + epsilon), or noise."""
    for side, other, name in block.sides:
        usable = np.where(seen.tokens, 0.0, side)
        lowest = float(usable.min())
        far = (other < lowest - _BLURRED_FLOOR[0]) & ~seen.tokens
        low = usable < lowest + _BLURRED_FLOOR[2]
        count = np.count_nonzero(far)
        if count < _BLURRED_FLOOR[1] or lowest > -0.5 or 2 * np.count_nonzero(low) > side.size:
            continue
        values, often = np.unique(side[far], return_counts=True)
        off = np.maximum(other[far], _SENTINEL).astype(np.float64)
        off -= off.mean()
        if (
            np.count_nonzero(far & low) < _BLURRED_FLOOR[3] * count
            or abs(float(off @ side[far])) >= _BLURRED_FLOOR[4] * float(off @ off)
            or (2 * often.max() > count and _uniform(float(values[np.argmax(often)])))
            or shifted(block, seen)  # smoothed labels leave such a floor as well, and show where a side is sure
        ):
            continue
        said = f"{count:,} tokens to which the other side gives less than {lowest - _BLURRED_FLOOR[0]:.4g} are "
        said += f"{lowest:.4g} or little more on the {name} side: a floor, noise on one, or log(p + epsilon)"
        yield replace(fault_at(block, far, said, of_all=True), tokens=far & low)


def one_number(block: Block, seen: Seen) -> Faults:
    """Tokens that have one number on a side, far more than any other number has, where the other side's lie apart."""
    for side, other, name in block.sides:
        values, often = np.unique(side[~seen.tokens & (side < -UNSURE)], return_counts=True)
        if values.size < _FLOOR_VALUES or (count := int(often.max())) < _ONE_NUMBER[0]:
            continue
        value = float(values[np.argmax(often)])
        if count <= _ONE_NUMBER[1] * np.sort(often)[-2] or _uniform(value):
            continue
        tokens = (side == value) & ~seen.tokens
        low, high = np.quantile(other[tokens], (0.25, 0.75))
        if high - low > _ONE_NUMBER[2]:
            said = f"{count:,} tokens are {value:.6g} on the {name} side, where the other lies between {low:.3g} and "
            yield fault_at(block, tokens, f"{said}{high:.3g} for half of them: a floor or a filler", of_all=True)


def _uniform(value: float) -> bool:
    """Return True if a number is the log of 1/n, and n no power of ten, which people write as a floor."""
    choices = math.exp(min(-value, 50.0))
    whole = round(choices)
    if whole > _UNIFORM[0] or abs(choices - whole) > _UNIFORM[1] * choices:
        return False
    return str(whole).rstrip("0") != "1"
