"""The compiled loop that takes a message's plain points: each against its row, and what it adds into a slot.

Whatever a point says that is not the usual case of `point_streams` leaves it, and what follows of its stream in the
message, to the code that takes points one by one. So does a sum so close to the border of what its buckets allow that
rounding might decide otherwise.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np

from kc_otel.judge.otlp.wire_columns import compiled, compiled_in_any_order

__all__ = ["CLOSED", "LIMITS", "NONE", "POWERS", "ROW", "SIDE", "SLOT", "SPAN", "fold", "used_ends"]

SIDE: Final = 160
"""Buckets of each sign that a value in a row may have: as many as OpenTelemetry's SDKs send."""
SPAN: Final = 256
"""Buckets of each sign that a slot has room for; more than SIDE."""
_UP, _DOWN = 0, 1

ROW: Final = np.dtype(
    [(name, np.int64) for name in ("start", "time", "scale", "count", "zero_count", "series", "pair", "contract")]
    + [(name, np.int64) for name in ("positive_size", "positive_offset", "negative_size", "negative_offset")]
    + [(name, np.int64) for name in ("loaded", "dirty", "blocked")]
    + [(name, np.float64) for name in ("sum", "min", "max", "zero_threshold", "least", "least_negative", "magnitude")]
    + [("heard", np.float64)]
)
SLOT: Final = np.dtype(
    [(name, np.int64) for name in ("series", "short", "long", "scale", "count", "zero_count", "observed")]
    + [(name, np.int64) for name in ("positive_base", "negative_base", "has_positive", "has_negative")]
    + [(name, np.float64) for name in ("zero_threshold", "sum", "carry", "min", "max", "newest", "now")]
)
LIMITS: Final = np.dtype(
    [(name, np.int64) for name in ("future", "start", "oldest", "gap")] + [("short", np.float64), ("long", np.float64)]
)
NONE, CLOSED = -1, -2
"""Of a series that has no slot, and of one that takes nothing from columns."""
_COUNTED: Final = 1
"""Of a point that was taken."""
_MOST: Final = 2**44
_LARGEST_SUM: Final = 2.0**565
_WIDEST_ZERO: Final = 2.0**-20
_UNSAID_ZERO: Final = 2.0**-30
_MOST_EXPONENT: Final = 512.0
"""These are what `points` and `histograms` call so."""
_LEAST_EXPONENT: Final = -1000.0
"""Below it doubles have fewer digits; `points` knows what to make of them."""
_LEAST_SCALE: Final = -2
_MOST_SCALE: Final = 20


def _powers() -> Any:
    ratios = np.array([2.0 ** (2.0**-scale) for scale in range(_LEAST_SCALE, _MOST_SCALE + 1)])
    with np.errstate(over="ignore"):  # so far apart are no two buckets that can be observed
        return np.concatenate([np.ones((ratios.size, 1)), np.cumprod(np.tile(ratios[:, None], SIDE), axis=1)], axis=1)


POWERS: Final = _powers()
"""Powers of the ratio of a bucket's edges, by scale from -2 on [23, SIDE + 1]."""


# Arrays are handed on whole, with where to look: a slice of one would be counted as a reference, twice for each point.
# Where a number is surely none below 0 it is said so (uint64), or every access would ask.


@compiled
def _unpack(body: Any, begin: int, counts: Any, side: int, size: int) -> None:
    """Write numbers that are packed in a body; `read_columns` has counted them."""
    at = np.uint64(begin)
    for number in range(size):
        value, shift = np.int64(body[at]), np.int64(7)
        at += np.uint64(1)
        if value > 127:
            value &= 127
            byte = np.int64(body[at])
            at += np.uint64(1)
            while byte > 127:
                value |= (byte & 127) << shift
                shift += 7
                byte = np.int64(body[at])
                at += np.uint64(1)
            value |= byte << shift
        counts[side, number] = value


@compiled
def _subtract(counts: Any, side: int, size: int, cells: Any, row: int, size_before: int, shift: int, more: Any) -> Any:
    """What one side of a value adds to the same side of its row, which it begins `shift` buckets above.

    Returns:
        Observations, or -1 where a count went down or is none, and those that were added.
    """
    for bucket in range(size):
        more[side, bucket] = counts[side, bucket]
    if shift == 0:
        for bucket in range(min(size, size_before)):
            more[side, bucket] -= cells[side, row, bucket]
    else:
        for bucket in range(size):
            cell = bucket + shift
            if 0 <= cell < size_before:
                more[side, bucket] -= cells[side, row, cell]
    total = added = wrong = np.int64(0)
    for bucket in range(size):
        total += counts[side, bucket]
        added += more[side, bucket]
        wrong |= more[side, bucket] | (_MOST - counts[side, bucket])
    return (np.int64(-1), added) if wrong < 0 else (total, added)


@compiled
def _used(counts: Any, row: int, begin: int, end: int) -> Any:
    """First and last bucket from `begin` to `end` that has observations; -1 where there is none."""
    first, last = np.int64(begin), np.int64(end - 1)
    while first <= last and counts[row, first] == 0:
        first += 1
    if first > last:
        return np.int64(-1), np.int64(-1)
    while counts[row, last] == 0:
        last -= 1
    return first, last


@compiled
def used_ends(cells: Any, rows: Any, begins: Any, ends: Any) -> Any:
    """Where what has observations begins and ends, within `begins` to `ends` of some rows of counts [n, 2]."""
    found = np.zeros((rows.size, 2), np.int64)
    for number in range(rows.size):
        first, last = _used(cells, rows[number], begins[number], ends[number])
        if first >= 0:
            found[number, 0], found[number, 1] = first, last + 1
    return found


@compiled_in_any_order
def _weighed(counts: Any, side: int, first: int, last: int, powers: Any, row: int) -> Any:
    total = 0.0
    for bucket in range(last + 1 - first):
        total += counts[side, np.uint64(first + bucket)] * powers[row, bucket]
    return total


@compiled
def _least(counts: Any, side: int, first: int, last: int, offset: int, scale: int, powers: Any, two: float) -> Any:
    """The sum of |x| if every observation lay at the lower edge of the bucket below its own."""
    if first < 0:
        return 0.0
    weighed = _weighed(counts, side, first, last, powers, scale - _LEAST_SCALE)
    return two ** ((offset + first - 1) * two**-scale) * weighed


@compiled
def _fits(low: float, high: float, sum: float, slack: float) -> Any:
    """Whether a sum is surely between its bounds, also if those are rounded otherwise; `sum_fits` decides the rest."""
    width = abs(low) + abs(high)
    border = slack + 1e-9 * width
    apart = 0.2 * slack + 1e-12 * width
    return low - border + apart < sum < high + border - apart


@compiled
def _add(into: Any, slot: Any, side: int, base: int, more: Any, first: int, last: int) -> None:
    """Add a side's buckets from `first` to `last`, where its first one has the number `base`."""
    for bucket in range(last + 1 - first):
        here = np.uint64(first + bucket)
        into[side, slot, np.uint64(base + first + bucket)] += more[side, here]


@compiled
def fold(
    body: Any,
    points: Any,
    rows_of: Any,
    rows: Any,
    row_buckets: Any,
    slots: Any,
    slot_buckets: Any,
    used: int,
    slot_of: Any,
    limits: Any,
    now: float,
    message: int,
    outcomes: Any,
    heard: Any,
    gaps: Any,
    powers: Any,
    two: float,
) -> Any:
    """Take the plain ones of some points, in their order; returns how many slots are in use.

    A stream's points that follow on one that is left are left as well: what becomes of them may depend on it. `two` is
    2.0, said where the compiler cannot see it: it would compute powers in another way than Python does.
    """
    counts, more = np.empty((2, SIDE), np.int64), np.empty((2, SIDE), np.int64)
    scale, wider = -1000, 0.0
    for number in range(points.size):
        if rows_of[number] < 0:
            continue
        at = rows_of[number]
        point, row = points[number], rows[at]
        limit = limits[row.contract]
        usual = (
            row.loaded == 1
            and row.blocked != message
            and point.plain == 1
            and point.has_sum == 1
            and point.start == row.start
            and row.time < point.time <= limit.future
            and point.time >= limit.oldest
            and row.time >= limit.start
            and point.scale == row.scale
            and _LEAST_SCALE <= point.scale <= _MOST_SCALE
            and point.zero_threshold == row.zero_threshold <= _WIDEST_ZERO
            and point.positive_size <= SIDE
            and point.negative_size <= SIDE
            and row.zero_count <= point.zero_count < _MOST
            and row.count > 0
            and slot_of[row.series, 0] != CLOSED
            and math.isfinite(point.sum)
            and abs(point.sum) < _LARGEST_SUM
        )
        if usual and point.scale != scale:
            scale = point.scale
            wider = two ** (3.0 * two**-scale)
        if usual:
            step = two**-scale
            _unpack(body, point.positive, counts, _UP, point.positive_size)
            _unpack(body, point.negative, counts, _DOWN, point.negative_size)
            shift = point.positive_offset - row.positive_offset
            up, up_added = _subtract(counts, _UP, point.positive_size, row_buckets, at, row.positive_size, shift, more)
            shift = point.negative_offset - row.negative_offset
            down, down_added = _subtract(
                counts, _DOWN, point.negative_size, row_buckets, at, row.negative_size, shift, more
            )
            up_first, up_last = _used(counts, _UP, 0, point.positive_size)
            down_first, down_last = _used(counts, _DOWN, 0, point.negative_size)
            up_low, up_high = _used(more, _UP, 0, point.positive_size)
            down_low, down_high = _used(more, _DOWN, 0, point.negative_size)
            zero_added = point.zero_count - row.zero_count
            usual = (
                up >= 0
                and down >= 0
                and up + down + point.zero_count == point.count < _MOST
                # Also buckets of the value before that are not in this one would have gone down.
                and up_added + down_added + zero_added == point.count - row.count
                and (up_first < 0 or (point.positive_offset + up_first) * step >= _LEAST_EXPONENT)
                and (down_first < 0 or (point.negative_offset + down_first) * step >= _LEAST_EXPONENT)
                and (point.positive_offset + up_last + 1) * step <= _MOST_EXPONENT
                and (point.negative_offset + down_last + 1) * step <= _MOST_EXPONENT
            )
        if usual:
            least = _least(counts, _UP, up_first, up_last, point.positive_offset, scale, powers, two)
            least_negative = _least(counts, _DOWN, down_first, down_last, point.negative_offset, scale, powers, two)
            zero = max(point.zero_threshold, _UNSAID_ZERO)
            low = least - least_negative * wider - point.zero_count * zero
            high = least * wider - least_negative + point.zero_count * zero
            size = max(abs(low), abs(high))
            low_added = (least - row.least) - (least_negative - row.least_negative) * wider - zero_added * zero
            high_added = (least - row.least) * wider - (least_negative - row.least_negative) + zero_added * zero
            usual = _fits(low, high, point.sum, 0.0) and (
                point.count == row.count
                or _fits(low_added, high_added, point.sum - row.sum, 1e-12 * (row.magnitude + size))
            )
        slot_number = np.int64(-1)
        if usual and point.count > row.count:
            # The outermost edges of what was added, in the words of `difference`.
            if down_low >= 0:
                lowest = -(two ** ((point.negative_offset + down_high + 1) * step))
            elif zero_added:
                lowest = -point.zero_threshold
            else:
                lowest = two ** ((point.positive_offset + up_low) * step)
            if up_low >= 0:
                highest = two ** ((point.positive_offset + up_high + 1) * step)
            elif zero_added:
                highest = point.zero_threshold
            else:
                highest = -(two ** ((point.negative_offset + down_low) * step))
            least_value = point.min if math.isfinite(point.min) else np.nan
            most_value = point.max if math.isfinite(point.max) else np.nan
            moved = most_value > row.max
            if least_value < row.min or lowest < least_value:
                lowest = least_value
            if moved or highest > most_value:
                highest = most_value
            time = min(point.time / 1e9, now)
            short, long = np.int64(math.floor(time / limit.short)), np.int64(math.floor(time / limit.long))
            slot_number = slot_of[row.series, short & 1]
            if slot_number >= 0:
                slot = slots[slot_number]
                if not (
                    slot.short == short
                    and slot.long == long
                    and slot.scale == point.scale
                    and slot.zero_threshold == point.zero_threshold
                    and (
                        up_low < 0
                        or not slot.has_positive
                        or (
                            point.positive_offset + up_low >= slot.positive_base
                            and point.positive_offset + up_high < slot.positive_base + SPAN
                        )
                    )
                    and (
                        down_low < 0
                        or not slot.has_negative
                        or (
                            point.negative_offset + down_low >= slot.negative_base
                            and point.negative_offset + down_high < slot.negative_base + SPAN
                        )
                    )
                ):
                    slot_number = np.int64(-1)
            if slot_number < 0:
                slot_number = np.int64(used)
                used += 1
                slot_of[row.series, short & 1] = slot_number
                slot = slots[slot_number]
                slot.series, slot.short, slot.long = row.series, short, long
                slot.scale, slot.zero_threshold = point.scale, point.zero_threshold
                slot.count = slot.zero_count = slot.observed = slot.has_positive = slot.has_negative = 0
                slot.positive_base = slot.negative_base = 0
                slot.sum = slot.carry = 0.0
                slot.min, slot.max = np.inf, -np.inf
                slot.newest = slot.now = -np.inf
            slot = slots[slot_number]
            slot.count += point.count - row.count
            slot.zero_count += zero_added
            # Neumaier's sum: what is lost in adding is carried along.
            gain = point.sum - row.sum
            whole = slot.sum + gain
            slot.carry += (slot.sum - whole) + gain if abs(slot.sum) >= abs(gain) else (gain - whole) + slot.sum
            slot.sum = whole
            slot.min = min(slot.min, lowest)
            if highest > slot.max:
                slot.max, slot.observed = highest, moved
            elif highest == slot.max and moved:
                slot.observed = 1
            slot.newest, slot.now = max(slot.newest, time), max(slot.now, now)
            if up_low >= 0:
                if not slot.has_positive:
                    slot.has_positive = 1
                    for bucket in range(SPAN):
                        slot_buckets[_UP, slot_number, bucket] = 0
                    slot.positive_base = point.positive_offset + up_low - (SPAN - (up_high - up_low + 1)) // 2
                base = point.positive_offset - slot.positive_base
                _add(slot_buckets, slot_number, _UP, base, more, up_low, up_high)
            if down_low >= 0:
                if not slot.has_negative:
                    slot.has_negative = 1
                    for bucket in range(SPAN):
                        slot_buckets[_DOWN, slot_number, bucket] = 0
                    slot.negative_base = point.negative_offset + down_low - (SPAN - (down_high - down_low + 1)) // 2
                base = point.negative_offset - slot.negative_base
                _add(slot_buckets, slot_number, _DOWN, base, more, down_low, down_high)
        if not usual:
            row.blocked = message
            continue
        outcomes[number] = _COUNTED
        if point.time - row.time > limit.gap:
            gaps[row.contract] += 1
        heard[row.pair] = True
        row.time, row.count, row.zero_count, row.sum = point.time, point.count, point.zero_count, point.sum
        row.min = point.min if math.isfinite(point.min) else np.nan
        row.max = point.max if math.isfinite(point.max) else np.nan
        row.positive_offset, row.positive_size = point.positive_offset, point.positive_size
        row.negative_offset, row.negative_size = point.negative_offset, point.negative_size
        for bucket in range(point.positive_size):
            row_buckets[_UP, at, bucket] = counts[_UP, bucket]
        for bucket in range(point.negative_size):
            row_buckets[_DOWN, at, bucket] = counts[_DOWN, bucket]
        row.least, row.least_negative, row.magnitude = least, least_negative, size
        row.heard, row.dirty = now, 1
    return used
