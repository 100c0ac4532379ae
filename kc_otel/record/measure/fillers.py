"""Constants that stand for "no number": sentinels, runs of one value, fillers at an edge, zeros, floors.

How often a run of such tokens comes by itself is estimated from the rest of the block and from the run's neighbours,
because a model that copies a text is entirely sure of many tokens in a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kc_otel.contract.input_reasons import InvalidReason
from kc_otel.record.measure.altered import (
    clipped,
    copied_rows,
    copied_runs,
    copied_tokens,
    repeated_in_rows,
    shifted,
)
from kc_otel.record.measure.arrays import Block
from kc_otel.record.measure.rounding import rounded_rows
from kc_otel.record.measure.row_faults import (
    FLOOR_NATS,
    NUCLEUS,
    RUN,
    UNSURE,
    Found,
    Mask,
    equal_numbers,
    eroded,
    fault_at,
    fine,
    improbable,
    repeated_numbers,
    row_of,
    runs_of,
    spread,
    surely_more,
    trailing,
)

_SURE_NATS: Final = 0.02
"""Nats up to which a side is sure of a token, exactly 0 or not."""
_SURELY_UNSURE: Final = 1.0
_UNWRITTEN_NATS: Final = 3.0
"""Nats that the other side's tokens cost together where a side is exactly 0 throughout a short sequence."""
SENTINEL: Final = -1000.0
"""No log-softmax of a trained model goes below; lower values (-9999, the lowest float) are fillers."""
_ROUNDED: Final = 0.5
"""The same where a row's numbers are on a coarse grid."""
_NUCLEUS_TOKENS: Final = 32
_NUCLEUS_SHARE: Final = 0.9
_TOP_P_NATS: Final = 0.75
"""The same at most: half of the mass is kept."""
_FINE_SHARE: Final = 0.8
"""Share of a side's numbers on no coarse grid from which they are float32's."""
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
EDGE_ROWS: Final = 0.9
"""Share of rows that begin, or end, with the same filler where a mask is missing."""
_MIN_EDGE: Final = 3
"""Tokens from which such an edge is looked at: of a template's first token or two both kernels are entirely sure."""
_EDGE_TOKENS: Final = 1000
_NEARLY_ZERO: Final = 30
"""Tokens nearly 0, and not 0, on both sides from which a last token that is 0 in nine of ten rows, and no other in the
block, is no sure end of turn: float32 has room for 1 - 6e-8, and somewhere else a token would be as sure."""
_EDGE_ELSEWHERE: Final = 1e-3
"""Share of other tokens that are exactly 0 on both sides, up to which so many at an edge are none of a sure model."""
_VALUES: Final = 8
"""Different constants of a block that are looked at; of more, those with the most tokens."""


def agree_in_runs(block: Block) -> Mask:
    """Rows with a run of one value on a side, or of tokens in which both sides are the same number, [rows]."""
    found = np.zeros(block.rows.size, dtype=np.bool_)
    if block.train.size < RUN:
        return found
    for same in (*repeated_numbers(block), equal_numbers(block)):
        long = eroded(same, RUN - 1)
        if long.size and long.any():
            found[np.unique(row_of(block, np.flatnonzero(long)))] = True
    for edge in (block.starts, block.starts + block.lengths - 1):
        zero = (block.train[edge] == 0.0) & (block.inference[edge] == 0.0)
        if np.count_nonzero(zero) >= EDGE_ROWS * zero.size:
            found |= zero
    return found


def constants(block: Block, drift: NDArray[np.float64], *, altered: bool) -> tuple[Found, Mask]:
    """Findings, and which tokens are not numbers; a token is told of once. For `altered` see `looks_altered`."""
    found: Found = []
    known = np.zeros(block.train.size, dtype=np.bool_)
    looks: tuple[Callable[[Block, Mask], Found], ...] = (
        _sentinels,
        partial(_whole_rows, drift),
        _runs_of_one,
        _edges,
        _floors,
        _blurred_floors,
        _one_number,
        *((repeated_in_rows, copied_rows, rounded_rows) if altered else ()),
        copied_runs,
        *((copied_tokens, clipped) if altered else ()),
        _nucleus,
        _of_the_token_before,
        _cleared,
        _single_zeros,
    )
    for look in looks:
        for fault in look(block, known):
            found.append(fault)
            known = known if fault.tokens is None else known | fault.tokens
    return found, known


def _sentinels(block: Block, _known: Mask) -> Found:
    tokens = (block.train < SENTINEL) & np.isfinite(block.train)
    if not tokens.any():
        return []
    return [fault_at(block, tokens, f"{tokens.sum():,} tokens are {block.train[tokens][0]:.4g}")]


def _whole_rows(drift: NDArray[np.float64], block: Block, _known: Mask) -> Found:
    """Rows of which one side is a single value and the other is not."""
    found = []
    flat = [
        np.minimum.reduceat(side, block.starts) == np.maximum.reduceat(side, block.starts)
        for side in (block.train, block.inference)
    ]
    for (side, _, name), here, there in zip(block.sides, flat, flat[::-1], strict=True):
        zero = here & (side[block.starts] == 0.0)
        unwritten = zero & (block.lengths >= 2) & (drift * block.lengths > _UNWRITTEN_NATS)
        rows = here & ~there & (block.lengths >= 3) & (drift > UNSURE)
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
                tokens = np.repeat(which, block.lengths)
                said = f"{words} on the {name} side; e.g. {side[tokens][0]:.4g}"
                found.append(fault_at(block, tokens, said, reason))
    return found


def _runs_of_one(block: Block, known: Mask) -> Found:
    """Runs of one value that the rest of the block, and the run's neighbours, do not explain."""
    found = []
    repeats = repeated_numbers(block)
    both = repeats[0] & repeats[1]
    taken = known.copy()
    for name, same, side in (
        ("both", both, block.inference),
        ("training", repeats[0], block.train),
        ("inference", repeats[1], block.inference),
    ):
        begin, length = runs_of(same)
        fresh = ~taken[begin] if begin.size else np.zeros(0, dtype=np.bool_)
        begin, length = begin[fresh], length[fresh]
        if name != "both" and begin.size:
            alone = np.add.reduceat(np.append(both, False), np.column_stack([begin, begin + length]).ravel(), dtype=int)
            one_side = 2 * alone[::2] < length
            begin, length = begin[one_side], length[one_side]
        if name != "both" and begin.size:
            apart = np.abs(block.train.astype(np.float64) - block.inference).clip(max=16.0)
            level = np.add.reduceat(np.append(apart, 0.0), np.column_stack([begin, begin + length]).ravel())[::2]
            begin, length = begin[level > UNSURE * length], length[level > UNSURE * length]
        if not begin.size:
            continue
        values, total = np.unique(side[begin], return_counts=True)
        for value in values[np.argsort(-total)][:_VALUES]:
            equal = side == value
            if name == "both":
                equal &= np.isin(block.train, block.train[begin[side[begin] == value]])
            runs = side[begin] == value
            sure = name == "both" and abs(float(value)) < UNSURE
            tokens = improbable(block, equal, begin[runs], length[runs], sure=sure)
            if tokens is None:
                continue
            tokens |= _ending_alike(block, equal, tokens)
            taken |= tokens
            longest = int(length[runs].max())
            amount = "exactly 0" if value == 0.0 else f"{value:.6g}"
            where = "on both sides" if name == "both" else f"on the {name} side"
            said = f"{tokens.sum():,} tokens are {amount} {where}, up to {longest:,} in a row"
            found.append(fault_at(block, tokens, said))
    return found


def _ending_alike(block: Block, equal: Mask, tokens: Mask) -> Mask:
    """The ends of other rows, however short, where several rows end in this filler: a mask is missing for all rows."""
    ends = block.starts + block.lengths - 1
    rare = np.count_nonzero(equal & ~tokens) < 0.02 * np.count_nonzero(~tokens) + block.rows.size
    if np.count_nonzero(tokens[ends]) < 2 or not rare:
        return np.zeros_like(tokens)
    whole = np.logical_and.reduceat(equal, block.starts)
    ending: Mask = np.repeat(equal[ends] & ~tokens[ends] & ~whole, block.lengths) & trailing(block, equal)
    return ending


def _edges(block: Block, known: Mask) -> Found:
    """Exact zeros on both sides with which nearly every row begins, or ends, and which hardly come elsewhere."""
    zero = (block.train == 0.0) & (block.inference == 0.0) & ~known
    found: Found = []
    if not zero.any():
        return found
    low, high = np.minimum(block.train, block.inference), np.maximum(block.train, block.inference)
    nearly_zero = np.count_nonzero((high < 0.0) & (low > -1e-3))
    ends, place = block.starts + block.lengths, np.arange(zero.size)
    first = np.minimum.reduceat(np.where(zero, zero.size, place), block.starts)
    last = np.maximum.reduceat(np.where(zero, -1, place), block.starts)
    leading, trailing = np.minimum(first, ends) - block.starts, ends - 1 - np.maximum(last, block.starts - 1)
    for where, size, begin in (("begin", leading, block.starts), ("end", trailing, ends - trailing)):
        some = (size > 0) & (size < block.lengths)
        usual = int(np.quantile(np.where(some, size, 0), 1.0 - EDGE_ROWS, method="lower"))
        tokens = spread(begin[some], size[some], zero.size)
        others, elsewhere = np.count_nonzero(~tokens), np.count_nonzero(zero & ~tokens)
        if usual < _MIN_EDGE and (elsewhere or where == "begin" or usual == 0 or nearly_zero < _NEARLY_ZERO):
            continue
        if others >= _EDGE_TOKENS and elsewhere <= _EDGE_ELSEWHERE * others:
            said = f"{tokens.sum():,} tokens with which the sequences {where} are exactly 0 on both sides"
            found.append(fault_at(block, tokens, f"{said}, {usual} in most"))
    return found


def _nucleus(block: Block, known: Mask) -> Found:
    """Exact zeros of one side wherever the other is surer than some top-p, and nowhere else: one token was left.

    In float32 an exact 0 is a probability above 1 - 6e-8, from which no drift makes 0.99. Only rows with one count.
    """
    found = []
    for side, other, name in block.sides:
        zero = (side == 0.0) & (other < -NUCLEUS) & ~known
        if np.count_nonzero(zero) < _NUCLEUS_TOKENS or not np.mean(fine(side[side < -UNSURE])) > _FINE_SHARE:
            continue
        edge, middle = np.quantile(other[zero], (0.02, 0.5))
        of_rows = np.repeat(np.logical_or.reduceat(zero, block.starts), block.lengths)
        inside = of_rows & (other < -NUCLEUS) & (other > middle)
        if edge > -_TOP_P_NATS and np.mean(zero[inside]) > _NUCLEUS_SHARE:
            kept = f"{math.exp(edge):.3g} to 0.999"
            said = f"tokens to which the other side gives {kept} are exactly 0 on the {name} side"
            most = bool(2 * np.count_nonzero(np.logical_or.reduceat(zero, block.starts)) > block.rows.size)
            found.append(fault_at(block, zero, said, InvalidReason.TRUNCATED_SAMPLING, of_all=most))
    return found


def _of_the_token_before(block: Block, known: Mask) -> Found:
    """Tokens with the number of the one before them on one side, where the other side has another: no two are equal.

    The same of both sides where it is the last token of many sequences, each time with another number, and no other.
    """
    found = []
    repeats = repeated_numbers(block)
    both = repeats[0] & repeats[1] & (block.inference < -UNSURE) & ~known
    both[both] = fine(block.inference[both])
    last = np.zeros_like(both)
    last[(block.starts + block.lengths - 1)[block.lengths > RUN]] = True
    count, elsewhere = np.count_nonzero(both & last), np.count_nonzero(both & ~last)
    different = np.unique(block.inference[both & last]).size
    if 2 * different > count and surely_more(different, np.count_nonzero(last), (elsewhere + 1) / (both.size + 2)):
        said = f"the last token of {count:,} sequences has the number of the one before it, on both sides"
        found.append(fault_at(block, both & last, said))
    for (side, other, name), same in zip(block.sides, repeats, strict=True):
        apart = np.abs(np.diff(np.maximum(other, SENTINEL), prepend=0.0)) > UNSURE
        tokens = same & apart & ~known & (side < -UNSURE)
        tokens[tokens] = fine(side[tokens])
        if np.unique(side[tokens]).size >= RUN:
            said = f"{np.count_nonzero(tokens):,} tokens have the number of the token before them on the {name} side"
            found.append(fault_at(block, tokens, said))
    return found


def _cleared(block: Block, known: Mask) -> Found:
    """Exact zeros on both sides in the place of all likely tokens: of any text some are likely and not certain."""
    low = np.minimum(block.train, block.inference)
    zero = (low == 0.0) & ~known
    others = block.inference[low < 0.0]
    if np.count_nonzero(zero) < _NUCLEUS_TOKENS or others.size < _EDGE_TOKENS:
        return []
    if (top := low[low < 0.0].max()) > -FLOOR_NATS or np.mean(fine(others)) < _FINE_SHARE:
        return []
    said = f"{zero.sum():,} tokens are exactly 0 on both sides, and no others above {top:.3g}"
    return [fault_at(block, zero, said)]


def _single_zeros(block: Block, known: Mask) -> Found:
    """Exact zeros of one side where the other is unsure, against how often a sure token of that side is exactly 0."""
    found = []
    for side, other, name in block.sides:
        zero = side == 0.0
        if not zero.any():
            continue
        sure = side > -_SURE_NATS
        unsure = sure & (other < -UNSURE) & ~known
        if not (zero & unsure).any():
            continue
        # Rows that were rounded to a decimal or two have zeros that others have not.
        asked = side < -UNSURE
        ratio = [np.add.reduceat(which, block.starts, dtype=np.intp) for which in (asked & fine(side), asked)]
        coarse = 2 * ratio[0] < ratio[1]
        unsure &= ~(np.repeat(coarse, block.lengths) & (other > -_ROUNDED))
        agreed = sure & ~unsure & ~known
        count, of = np.count_nonzero(zero & unsure), np.count_nonzero(unsure)
        share = (np.count_nonzero(zero & agreed) + 1) / (np.count_nonzero(agreed) + 2)
        tokens = zero & unsure
        if not surely_more(count, of, share):
            tokens &= other < -_SURELY_UNSURE
            if np.count_nonzero(tokens) < max(RUN, 0.01 * side.size):
                continue
        amount = np.count_nonzero(tokens)
        last = block.starts + block.lengths - 1
        where = ", each the last of its sequence" if np.count_nonzero(tokens[last]) == amount else ""
        said = f"{amount:,} tokens ({amount / side.size:.1%}) are exactly 0 on the {name} side where the other gives "
        said += f"{np.median(other[tokens]):.3g}{where}"
        found.append(fault_at(block, tokens, said))
    return found


def _floors(block: Block, known: Mask) -> Found:
    """A lowest value that many tokens share, more than any other, while hardly any come near it.

    Of numbers that no program cut, those a little above the lowest are no rarer than it.
    """
    found = []
    for side, other, name in block.sides:
        usable = np.where(known, 0.0, side)
        lowest = usable.min()
        tokens = usable == lowest
        count = np.count_nonzero(tokens)
        if not RUN <= count <= 0.95 * side.size or lowest > -0.5 or _uniform(float(lowest)):
            continue
        if 2 * count < np.count_nonzero(usable <= lowest + FLOOR_NATS):
            continue
        values, often = np.unique(usable[~tokens & ~known & (usable < 0.0)], return_counts=True)
        # A model of few contexts has few numbers, and one of them is its lowest.
        if values.size < _FLOOR_VALUES or count <= 3 * often.max():
            continue
        near = int(often[values <= max(lowest + FLOOR_NATS, values[0])].sum())
        both = 2 * np.count_nonzero(tokens & (other == other[tokens].min())) > count
        if not surely_more(count, count + near, 0.5) and (both or count <= 3 * near or np.ptp(other[tokens]) < UNSURE):
            continue
        where = "both sides, below which they have" if both else f"the {name} side, below which it has"
        said = f"{count:,} tokens are {lowest:.4g} on {where} none: a floor"
        found.append(fault_at(block, tokens, said, of_all=True))
        if both:
            break
    return found


def _blurred_floors(block: Block, known: Mask) -> Found:
    """Tokens that one side has at its lowest number wherever the other is far below: log(q + epsilon), or noise."""
    found: Found = []
    for side, other, name in block.sides:
        usable = np.where(known, 0.0, side)
        lowest = float(usable.min())
        far = (other < lowest - _BLURRED_FLOOR[0]) & ~known
        low = usable < lowest + _BLURRED_FLOOR[2]
        count = np.count_nonzero(far)
        if count < _BLURRED_FLOOR[1] or lowest > -0.5 or 2 * np.count_nonzero(low) > side.size:
            continue
        values, often = np.unique(side[far], return_counts=True)
        off = np.maximum(other[far], SENTINEL).astype(np.float64)
        off -= off.mean()
        if (
            np.count_nonzero(far & low) < _BLURRED_FLOOR[3] * count
            or abs(float(off @ side[far])) >= _BLURRED_FLOOR[4] * float(off @ off)
            or (2 * often.max() > count and _uniform(float(values[np.argmax(often)])))
            or shifted(block)  # smoothed labels leave such a floor as well, and show where a side is sure
        ):
            continue
        said = f"{count:,} tokens to which the other side gives less than {lowest - _BLURRED_FLOOR[0]:.4g} are "
        said += f"{lowest:.4g} or little more on the {name} side: a floor, noise on one, or log(p + epsilon)"
        found.append(replace(fault_at(block, far, said, of_all=True), tokens=far & low))
    return found


def _one_number(block: Block, known: Mask) -> Found:
    """Tokens that have one number on a side, far more than any other number has, where the other side's lie apart."""
    found = []
    for side, other, name in block.sides:
        values, often = np.unique(side[~known & (side < -UNSURE)], return_counts=True)
        if values.size < _FLOOR_VALUES or (count := int(often.max())) < _ONE_NUMBER[0]:
            continue
        value = float(values[np.argmax(often)])
        if count <= _ONE_NUMBER[1] * np.sort(often)[-2] or _uniform(value):
            continue
        tokens = (side == value) & ~known
        low, high = np.quantile(other[tokens], (0.25, 0.75))
        if high - low > _ONE_NUMBER[2]:
            said = f"{count:,} tokens are {value:.6g} on the {name} side, where the other lies between {low:.3g} and "
            said += f"{high:.3g} for half of them: a floor or a filler"
            found.append(fault_at(block, tokens, said, of_all=True))
    return found


def _uniform(value: float) -> bool:
    """Return True if a number is the log of 1/n, and n no power of ten, which people write as a floor."""
    choices = math.exp(min(-value, 50.0))
    whole = round(choices)
    if whole > _UNIFORM[0] or abs(choices - whole) > _UNIFORM[1] * choices:
        return False
    return str(whole).rstrip("0") != "1"
