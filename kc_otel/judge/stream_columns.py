"""What is known of streams, in arrays: a message's columns are folded into them by one compiled loop.

This is the usual case of `point_streams`, and of what follows there on a point that counts: a cumulative exponential
histogram that continues the value before it, in the same buckets, in the order of time. A point of which anything else
is true, or which is so close to a rule's border that rounding might decide otherwise, is left to the code that takes
points one by one. That code decides everything that is not plain, and remains the only one that knows the rules.

    message --> columns --> rows (newest value of each stream) --> slots (what was counted, by series and panes)
                   |                                                       |
                   '--> what is not plain: point by point                  '--> panes, before anything reads them

A row mirrors one writer of a `PointStream`: the one that was heard last. Whoever takes a point of the stream by itself
has to `release` it first; `settle` brings streams and series up to date.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from kc_otel.judge.column_message import ColumnMessage, WireColumns
from kc_otel.judge.contract_state import LONG, SHORT, ContractState, Heard, SeriesKey
from kc_otel.judge.histograms import ExplicitHistogram, magnitude
from kc_otel.judge.otlp.signals import METRICS
from kc_otel.judge.otlp.wire_columns import compiled, read_columns
from kc_otel.judge.point_streams import Horizon, LatestValue
from kc_otel.judge.points import DRIFT_NAMES, INVALID, Point, walk
from kc_otel.stats import Buckets, ExponentialHistogram

__all__ = ["StreamColumns", "prepare"]

_WIDTH: Final = 320
"""Buckets of both signs that a value in a row may have: OpenTelemetry's SDKs send up to 160 of each."""
_SPAN: Final = 256
"""Buckets of each sign that a slot has room for."""
_MOST_ROWS: Final = 32_768
_MOST_KEYS: Final = 2 * _MOST_ROWS
"""Spellings of streams that are known: their attributes may be listed in any order."""
_SLOTS: Final = 4096
_CHUNK: Final = 1024
"""Points that are folded at once; they may need a slot each."""

_ROW: Final = np.dtype(
    [(name, np.int64) for name in ("start", "time", "scale", "count", "zero_count", "series", "pair", "contract")]
    + [(name, np.int64) for name in ("positive_size", "positive_offset", "negative_size", "negative_offset")]
    + [(name, np.int64) for name in ("loaded", "dirty", "blocked")]
    + [(name, np.float64) for name in ("sum", "min", "max", "zero_threshold", "least", "least_negative", "magnitude")]
    + [("heard", np.float64)]
)
_SLOT: Final = np.dtype(
    [(name, np.int64) for name in ("series", "short", "long", "scale", "count", "zero_count", "observed")]
    + [(name, np.int64) for name in ("positive_base", "negative_base", "has_positive", "has_negative")]
    + [(name, np.float64) for name in ("zero_threshold", "sum", "carry", "min", "max", "newest", "now")]
)
_LIMITS: Final = np.dtype(
    [(name, np.int64) for name in ("future", "start", "oldest", "gap")] + [("short", np.float64), ("long", np.float64)]
)
_NONE, _CLOSED = -1, -2
"""Of a series that has no slot, and of one that takes nothing from columns."""
_COUNTED: Final = 1
"""Of a point that was taken."""
_MOST: Final = 2**53
_LARGEST_SUM: Final = 2.0**565
_WIDEST_ZERO: Final = 2.0**-20
_UNSAID_ZERO: Final = 2.0**-30
"""These are what `points` and `histograms` call so."""


class StreamColumns:
    """Rows of streams, and slots of what they counted, of any number of contracts.

    Args:
        states: What is remembered, by the contract's name: where streams and series are.

    Attributes:
        taken: Points that were taken from columns so far.
    """

    def __init__(self, states: Mapping[str, ContractState]) -> None:
        self._states = list(states.values())
        self._contract = {name: number for number, name in enumerate(states)}
        self._limits = np.zeros(len(states), _LIMITS)
        for number, state in enumerate(self._states):
            self._limits[number]["short"] = state.template[SHORT].width
            self._limits[number]["long"] = state.template[LONG].width
        self._slots = np.zeros(_SLOTS, _SLOT)
        self._slot_buckets = np.zeros((_SLOTS, 2, _SPAN), np.int64)
        self._used = 0
        self._message = self._generation = self.taken = 0
        self.forget()

    def forget(self) -> None:
        """Know nothing of any stream; what was counted has to be settled before."""
        self._generation += 1
        self._keys: dict[tuple[bytes, bytes, bytes, int], dict[bytes, int]] = {}
        self._key_count = 0
        self._streams: list[tuple[bytes, SeriesKey]] = []
        self._row_of: dict[bytes, int] = {}
        self._series: dict[tuple[int, SeriesKey], int] = {}
        self._series_keys: list[tuple[int, SeriesKey]] = []
        self._pairs: dict[tuple[int, str, str], int] = {}
        self._rows = np.zeros(64, _ROW)
        self._row_buckets = np.zeros((64, _WIDTH), np.int64)
        self._slot_of = np.zeros(64, np.int64)
        self._slot_of[:] = _NONE

    def message(self, body: bytes, most: int) -> ColumnMessage | None:
        """A request as columns, of which everything was read: by protobuf what is not known here.

        Args:
            body: The serialized ExportMetricsServiceRequest.
            most: Resources, scopes, metrics and points that it may have.

        Returns:
            None where it is something else, has more in it, or has a metric that no contract can be about.
        """
        wire = read_columns(body)
        if wire is None or wire.items > most:
            return None
        if not all(wire.name(metric).startswith((b"kc.", b"gen_ai.")) for metric in range(wire.metrics.size)):
            return None
        message = ColumnMessage(wire, self._rows_of(wire), self._generation)
        left = (message.rows < 0) | (wire.points["plain"] == 0)
        try:
            if 4 * np.count_nonzero(left) > left.size or _has_other_layouts(wire):
                message.request = ExportMetricsServiceRequest.FromString(body)
                return message if sum(METRICS.items(message.request)) <= most else None
            for metric, of in enumerate(wire.metrics):
                first = int(of["first"])
                numbers = (np.flatnonzero(left[first : int(of["last"])]) + first).tolist()
                if numbers or not of["exponential"]:
                    wire.request_of(metric, numbers)
        except DecodeError:
            return None
        return message

    def fold(self, message: ColumnMessage, horizons: Mapping[str, Horizon], now: float) -> int:
        """Take what is plain, and note in the message what that was.

        Args:
            message: What arrived.
            horizons: What the clock says, by the contract's name.
            now: When it arrived, Unix seconds.

        Returns:
            How many points were taken; all of them are accepted.
        """
        if message.request is not None:
            return 0
        wire = message.wire
        self._message += 1
        if message.known != self._generation:
            message.rows, message.known = self._rows_of(wire), self._generation
        self._block_unknown(message)
        for number, horizon in enumerate(horizons.values()):
            of = self._limits[number]
            of["future"], of["start"] = horizon.future, horizon.start
            of["oldest"], of["gap"] = horizon.oldest, horizon.gap
        heard = np.zeros(len(self._pairs), np.bool_)
        gaps = np.zeros(len(self._states), np.int64)
        for first in range(0, message.taken.size, _CHUNK):
            part = slice(first, first + _CHUNK)
            if self._used + _CHUNK > _SLOTS:
                self._settle_series()
            self._used = _fold(
                wire.points[part],
                wire.buckets,
                message.rows[part],
                self._rows,
                self._row_buckets,
                self._slots,
                self._slot_buckets,
                self._used,
                self._slot_of,
                self._limits,
                now,
                self._message,
                message.taken[part],
                heard,
                gaps,
                2.0,
            )
        if heard.any():
            for number, (contract, *pair) in enumerate(self._pairs):
                if heard[number]:
                    self._states[contract].heard.setdefault((pair[0], pair[1]), Heard(now)).hear(now)
        for number in np.flatnonzero(gaps).tolist():
            self._states[number].events["gap"] += int(gaps[number])
        taken = int(np.count_nonzero(message.taken))
        self.taken += taken
        return taken

    def _rows_of(self, wire: WireColumns) -> NDArray[np.int64]:
        """The row of each of a message's points; -1 where it is not known."""
        found: list[int] = []
        body = wire.body
        begins, ends = wire.points["key_begin"].tolist(), wire.points["key_end"].tolist()
        for number, metric in enumerate(wire.metrics):
            keys = self._keys.get(wire.origin(number), _NO_KEYS)
            part = slice(int(metric["first"]), int(metric["last"]))
            found += [keys.get(body[begin:end], -1) for begin, end in zip(begins[part], ends[part], strict=True)]
        return np.array(found, np.int64)

    def _block_unknown(self, message: ColumnMessage) -> None:
        """Leave the points of streams that are known, but not in this spelling, to be taken in their order."""
        for metric, of in enumerate(message.wire.metrics):
            first = int(of["first"])
            numbers = (np.flatnonzero(message.rows[first : int(of["last"])] < 0) + first).tolist()
            if numbers:
                for point in walk(message.wire.request_of(metric, numbers), (), lambda *_: None):
                    row = self._row_of.get(point.stream)
                    if row is not None:
                        self._rows[row]["blocked"] = self._message

    def release(self, point: Point) -> None:
        """Bring a point's stream up to date, and leave it alone until it is `learn`t again.

        One of other buckets may clear what its series holds; all that was counted before is there first.
        """
        if self._used and isinstance(point.histogram, ExplicitHistogram) and point.metric != INVALID:
            self._settle_series()
        row = self._row_of.get(point.stream)
        if row is not None and self._rows[row]["loaded"]:
            self._write_back(row)
            self._rows[row]["loaded"] = 0

    def close(self, series: str) -> None:
        """Take nothing from columns for a name's series until one is `learn`t: their layout changed."""
        for number, (_, key) in enumerate(self._series_keys):
            if key.metric == series:
                self._slot_of[number] = _CLOSED

    def learn(self, message: ColumnMessage, number: int, point: Point, contract: str, key: SeriesKey) -> None:
        """Know a stream from now on, by the bytes of its point in a message, if its points may be plain.

        Args:
            message: The message.
            number: Of the point in it.
            point: The same point, which has been taken.
            contract: Name of the contract that it is about.
            key: The series that it counted for.
        """
        state = self._states[self._contract[contract]]
        stream = state.streams.get(point.stream)
        if stream is None or not stream.writers or key not in state.series:
            return
        if self._key_count >= _MOST_KEYS or len(self._streams) >= _MOST_ROWS:
            self.settle()
            self.forget()
        row = self._row_of.get(point.stream)
        if row is None:
            row = self._row_of[point.stream] = len(self._streams)
            self._streams.append((point.stream, key))
            if row == self._rows.size:
                self._rows = np.concatenate([self._rows, np.zeros_like(self._rows)])
                self._row_buckets = np.concatenate([self._row_buckets, np.zeros_like(self._row_buckets)])
        self._load(row, stream.writers[-1], self._contract[contract], key)
        self._rows[row]["heard"] = stream.heard
        where = message.wire.points[number]
        keys = self._keys.setdefault(message.wire.origin(int(where["metric"])), {})
        before = len(keys)
        keys[message.wire.body[where["key_begin"] : where["key_end"]]] = row
        self._key_count += len(keys) - before

    def forget_gone(self, contract: str) -> None:
        """Leave streams alone that are not remembered any more, or whose series is not."""
        state, number = self._states[self._contract[contract]], self._contract[contract]
        for row, (stream, key) in enumerate(self._streams):
            if self._rows[row]["contract"] == number and (stream not in state.streams or key not in state.series):
                self._rows[row]["loaded"] = 0

    def settle(self) -> None:
        """Bring all streams and series up to date."""
        self._settle_series()
        for row in np.flatnonzero(self._rows["dirty"]):
            self._write_back(int(row))

    def _load(self, row: int, value: LatestValue, contract: int, key: SeriesKey) -> None:
        into, histogram = self._rows[row], value.histogram
        into["loaded"] = into["dirty"] = 0
        if not isinstance(histogram, ExponentialHistogram) or not histogram.maximum_observed or value.doubted:
            return
        positive, negative = histogram.positive, histogram.negative
        if positive.counts.size + negative.counts.size > _WIDTH:
            return
        into["series"] = self._number_of(contract, key)
        into["pair"] = self._pairs.setdefault((contract, *key.pair), len(self._pairs))
        into["contract"] = contract
        into["start"], into["time"], into["scale"] = value.start, value.time, histogram.scale
        into["count"], into["zero_count"], into["sum"] = histogram.count, histogram.zero_count, histogram.sum
        into["min"], into["max"] = histogram.minimum, histogram.maximum
        into["zero_threshold"] = histogram.zero_threshold
        into["positive_offset"], into["positive_size"] = positive.offset, positive.counts.size
        into["negative_offset"], into["negative_size"] = negative.offset, negative.counts.size
        cells = self._row_buckets[row]
        cells[: positive.counts.size] = positive.counts
        cells[positive.counts.size : positive.counts.size + negative.counts.size] = negative.counts
        into["least"], into["least_negative"] = _least(positive, histogram.scale), _least(negative, histogram.scale)
        into["magnitude"] = magnitude(histogram)
        into["loaded"] = 1

    def _number_of(self, contract: int, key: SeriesKey) -> int:
        number = self._series.get((contract, key))
        if number is None:
            number = self._series[contract, key] = len(self._series_keys)
            self._series_keys.append((contract, key))
            if number == self._slot_of.size:
                self._slot_of = np.concatenate([self._slot_of, np.full(number, _NONE)])
        elif self._slot_of[number] == _CLOSED:
            self._slot_of[number] = _NONE
        return number

    def _write_back(self, row: int) -> None:
        of = self._rows[row]
        if not of["dirty"]:
            return
        of["dirty"] = 0
        name, _ = self._streams[row]
        state = self._states[of["contract"]]
        stream = state.streams[name]
        size, all_of = int(of["positive_size"]), self._row_buckets[row]
        latest = stream.writers[-1]
        latest.time, stream.heard = int(of["time"]), float(of["heard"])
        latest.histogram = ExponentialHistogram(
            scale=int(of["scale"]),
            count=int(of["count"]),
            sum=float(of["sum"]),
            zero_count=int(of["zero_count"]),
            positive=_trimmed(int(of["positive_offset"]), all_of[:size]),
            negative=_trimmed(int(of["negative_offset"]), all_of[size : size + int(of["negative_size"])]),
            minimum=float(of["min"]),
            maximum=float(of["max"]),
            zero_threshold=float(of["zero_threshold"]),
        )
        state.changed_streams.add(name)

    def _settle_series(self) -> None:
        slots, used = self._slots, self._used
        self._used = 0
        for number in range(used):
            slot = slots[number]
            self._slot_of[slot["series"]] = _NONE
            contract, key = self._series_keys[slot["series"]]
            positive, negative = self._slot_buckets[number]
            counted = ExponentialHistogram(
                scale=int(slot["scale"]),
                count=int(slot["count"]),
                sum=float(slot["sum"] + slot["carry"]),
                zero_count=int(slot["zero_count"]),
                positive=_trimmed(int(slot["positive_base"]), positive),
                negative=_trimmed(int(slot["negative_base"]), negative),
                minimum=float(slot["min"]),
                maximum=float(slot["max"]),
                zero_threshold=float(slot["zero_threshold"]),
                maximum_observed=bool(slot["observed"]),
            )
            self._states[contract].count(key, counted, float(slot["newest"]), float(slot["now"]))


def prepare() -> None:
    """Compile everything here, or read it from disk: seconds, or a fraction of one."""
    request = ExportMetricsServiceRequest()
    request.resource_metrics.add().scope_metrics.add().metrics.add().exponential_histogram.data_points.add()
    wire = read_columns(request.SerializeToString())
    assert wire is not None
    StreamColumns({}).fold(ColumnMessage(wire, np.full(1, -1), 1), {}, 0.0)


def _has_other_layouts(wire: WireColumns) -> bool:
    """Whether one of our quantities has explicit bounds: which layout a series has may depend on what comes first."""
    return any(
        not of["exponential"] and wire.name(metric).decode("utf-8", "replace") in DRIFT_NAMES
        for metric, of in enumerate(wire.metrics)
    )


_NO_KEYS: Final[dict[bytes, int]] = {}


def _trimmed(offset: int, counts: NDArray[np.int64]) -> Buckets:
    """Counts of their own: those of rows and slots are used again."""
    trimmed = Buckets(offset, counts).trimmed()
    return Buckets(trimmed.offset, trimmed.counts.copy())


def _least(side: Buckets, scale: int) -> float:
    """The sum of |x| if every observation lay at the lower edge of the bucket below its own, as `sum_fits` has it."""
    edges = np.exp2((np.arange(side.counts.size, dtype=np.float64) + (side.offset - 1)) * 2.0**-scale)
    return float(edges @ side.counts)


@compiled
def _difference(
    buckets: Any,
    begin: int,
    size: int,
    cells: Any,
    before: int,
    before_size: int,
    shift: int,
    edge: float,
    ratio: float,
) -> Any:
    """What one side of a value adds to the same side of the value before.

    The side's counts are `size` of `buckets` from `begin`, those of the value before `before_size` of `cells` from
    `before`; it begins `shift` buckets above. `edge` is the lower edge of the bucket below the first, `ratio` that of
    an edge to the one below.

    Returns:
        Observations, or -1 where a count went down or is none; those that were added; the first and last bucket that
        is used, and that is added to, -1 for none; the sum of |x| if each lay at the lower edge of the bucket below.
    """
    total = added = np.int64(0)
    first = last = first_added = last_added = np.int64(-1)
    least, weight = 0.0, edge
    for bucket in range(size):
        count = buckets[begin + bucket]
        cell = bucket + shift
        more = count - cells[before + cell] if 0 <= cell < before_size else count
        if count < 0 or count > _MOST or more < 0:
            return np.int64(-1), added, first, last, first_added, last_added, least
        if count:
            if first < 0:
                first = np.int64(bucket)
            last = np.int64(bucket)
            total += count
            least += count * weight
        if more:
            if first_added < 0:
                first_added = np.int64(bucket)
            last_added = np.int64(bucket)
            added += more
        weight *= ratio
    return total, added, first, last, first_added, last_added, least


@compiled
def _fits(low: float, high: float, sum: float, slack: float) -> Any:
    """Whether a sum is surely between its bounds, also if those are rounded otherwise; `sum_fits` decides the rest."""
    width = abs(low) + abs(high)
    border = slack + 1e-9 * width
    apart = 0.2 * slack + 1e-12 * width
    return low - border + apart < sum < high + border - apart


@compiled
def _add(
    into: Any,
    base: int,
    buckets: Any,
    begin: int,
    first: int,
    last: int,
    cells: Any,
    before: int,
    before_size: int,
    shift: int,
) -> None:
    """Add what a side has more than the side before it, from its bucket `first` to `last`."""
    for bucket in range(first, last + 1):
        cell = bucket + shift
        more = buckets[begin + bucket]
        if 0 <= cell < before_size:
            more -= cells[before + cell]
        into[base + bucket] += more


@compiled
def _fold(
    points: Any,
    buckets: Any,
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
    two: float,
) -> Any:
    """Take the plain ones of some points, in their order; returns how many slots are in use.

    A stream's points that follow on one that is left are left as well: what becomes of them may depend on it. `two` is
    2.0, said where the compiler cannot see it: it would compute powers in another way than Python does.
    """
    scale, ratio, wider = -1000, 0.0, 0.0
    for number in range(points.size):
        if rows_of[number] < 0:
            continue
        point, row = points[number], rows[rows_of[number]]
        cells = row_buckets[rows_of[number]]
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
            and -2 <= point.scale <= 20
            and point.zero_threshold == row.zero_threshold <= _WIDEST_ZERO
            and point.positive_size + point.negative_size <= _WIDTH
            and row.zero_count <= point.zero_count < _MOST
            and row.count > 0
            and slot_of[row.series] != _CLOSED
            and math.isfinite(point.sum)
            and abs(point.sum) < _LARGEST_SUM
        )
        if usual and point.scale != scale:
            scale = point.scale
            ratio = two ** (two**-scale)
            wider = two ** (3.0 * two**-scale)
        if usual:
            step = two**-scale
            up, up_added, up_first, up_last, up_low, up_high, least = _difference(
                buckets,
                point.positive,
                point.positive_size,
                cells,
                0,
                row.positive_size,
                point.positive_offset - row.positive_offset,
                two ** min((point.positive_offset - 1) * step, 1000.0),
                ratio,
            )
            down, down_added, down_first, down_last, down_low, down_high, least_negative = _difference(
                buckets,
                point.negative,
                point.negative_size,
                cells,
                row.positive_size,
                row.negative_size,
                point.negative_offset - row.negative_offset,
                two ** min((point.negative_offset - 1) * step, 1000.0),
                ratio,
            )
            zero_added = point.zero_count - row.zero_count
            usual = (
                up >= 0
                and down >= 0
                and up + down + point.zero_count == point.count < _MOST
                # Also buckets of the value before that are not in this one would have gone down.
                and up_added + down_added + zero_added == point.count - row.count
                and (up_first < 0 or (point.positive_offset + up_first) * step >= -1080.0)
                and (down_first < 0 or (point.negative_offset + down_first) * step >= -1080.0)
                and (point.positive_offset + up_last + 1) * step <= 512.0
                and (point.negative_offset + down_last + 1) * step <= 512.0
            )
        if usual:
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
            short, long = math.floor(time / limit.short), math.floor(time / limit.long)
            slot_number = slot_of[row.series]
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
                            and point.positive_offset + up_high < slot.positive_base + _SPAN
                        )
                    )
                    and (
                        down_low < 0
                        or not slot.has_negative
                        or (
                            point.negative_offset + down_low >= slot.negative_base
                            and point.negative_offset + down_high < slot.negative_base + _SPAN
                        )
                    )
                ):
                    slot_number = np.int64(-1)
            if slot_number < 0:
                slot_number = np.int64(used)
                used += 1
                slot_of[row.series] = slot_number
                slot = slots[slot_number]
                slot.series, slot.short, slot.long = row.series, short, long
                slot.scale, slot.zero_threshold = point.scale, point.zero_threshold
                slot.count = slot.zero_count = slot.observed = slot.has_positive = slot.has_negative = 0
                slot.positive_base = slot.negative_base = 0
                slot.sum = slot.carry = 0.0
                slot.min, slot.max = np.inf, -np.inf
                slot.newest = slot.now = -np.inf
                slot_buckets[slot_number] = 0
            slot = slots[slot_number]
            slot.count += point.count - row.count
            slot.zero_count += zero_added
            # Neumaier's sum: what is lost in adding is carried along.
            more = point.sum - row.sum
            whole = slot.sum + more
            slot.carry += (slot.sum - whole) + more if abs(slot.sum) >= abs(more) else (more - whole) + slot.sum
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
                    slot.positive_base = point.positive_offset + up_low - (_SPAN - (up_high - up_low + 1)) // 2
                _add(
                    slot_buckets[slot_number, 0],
                    point.positive_offset - slot.positive_base,
                    buckets,
                    point.positive,
                    up_low,
                    up_high,
                    cells,
                    0,
                    row.positive_size,
                    point.positive_offset - row.positive_offset,
                )
            if down_low >= 0:
                if not slot.has_negative:
                    slot.has_negative = 1
                    slot.negative_base = point.negative_offset + down_low - (_SPAN - (down_high - down_low + 1)) // 2
                _add(
                    slot_buckets[slot_number, 1],
                    point.negative_offset - slot.negative_base,
                    buckets,
                    point.negative,
                    down_low,
                    down_high,
                    cells,
                    row.positive_size,
                    row.negative_size,
                    point.negative_offset - row.negative_offset,
                )
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
            cells[bucket] = buckets[point.positive + bucket]
        for bucket in range(point.negative_size):
            cells[point.positive_size + bucket] = buckets[point.negative + bucket]
        row.least, row.least_negative, row.magnitude = least, least_negative, size
        row.heard, row.dirty = now, 1
    return used
