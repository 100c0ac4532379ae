"""Rows of streams, and the fold in C (`fold.c`) that takes a message's plain points: each against its row.

Of a stream whose next point may be plain a row is all there is, its newest value, in arrays of fixed size: some 600
bytes instead of several Python objects. Code that takes a point of it by itself `release`s it first, which makes a
`PointStream` of it; `load` moves that back. Rows are given to contracts in blocks, which are what the store writes.

The fold adds what a point counts into a slot. Whatever a point says that is not the usual case of `point_streams`
leaves it, and what follows of its stream in the message, to the code that takes points one by one. So does a sum so
close to the border of what its buckets allow that rounding might decide otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from ctypes import Structure, addressof
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kc_otel.judge.otlp.wire_columns import ColumnMessage
from kc_otel.judge.point_streams import LatestValue, PointStream
from kc_otel.machine_code import ADDRESS, DOUBLE, NUMBER, function
from kc_otel.stats import Buckets, Histogram
from kc_otel.stats.histogram import magnitude
from kc_otel.stats.histogram_columns import SideColumns
from kc_otel.stats.interval import Numbers

if TYPE_CHECKING:
    from kc_otel.judge.contract_state import ContractState

Array = NDArray[Any]

SIDE: Final = 160
"""Buckets of each sign that a value in a row may have: as many as OpenTelemetry's SDKs send."""
SPAN: Final = 256
"""Buckets of each sign that a slot has room for; more than SIDE."""

ROW: Final = np.dtype(
    [(name, np.int64) for name in ("start", "time", "scale", "count", "zero_count", "series", "pair", "contract")]
    + [(name, np.int64) for name in ("positive_size", "positive_offset", "negative_size", "negative_offset")]
    + [(name, np.int64) for name in ("loaded", "dirty", "blocked", "at", "room", "wide")]
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
NOT_LOADED, LOADED, NEW = 0, 1, 2
"""Of a row whose stream takes points by itself, of one that takes them, and of one that waits for its first point."""
NONE, CLOSED = -1, -2
"""Of a series that has no slot, and of one that takes nothing from columns."""
_LEAST_SCALE: Final = -2
_MOST_SCALE: Final = 20


def _powers() -> Any:
    ratios = np.array([2.0 ** (2.0**-scale) for scale in range(_LEAST_SCALE, _MOST_SCALE + 1)])
    with np.errstate(over="ignore"):  # so far apart are no two buckets that can be observed
        return np.concatenate([np.ones((ratios.size, 1)), np.cumprod(np.tile(ratios[:, None], SIDE), axis=1)], axis=1)


_POWERS: Final = _powers()
"""Powers of the ratio of a bucket's edges, by scale from -2 on [23, SIDE + 1]."""
MAX_ROWS: Final = 262_144
"""Streams that may have a row; memory that nobody has written to costs nothing."""
_MAX_WORDS: Final = 192 * MAX_ROWS
BLOCK: Final = 32
"""Rows that a contract is given at a time."""
_SPARE_WORDS: Final = 24
"""Words that a row has room for beyond what its buckets need now."""
_WORDS: Final = 16
"""Words that room is given in."""
_NARROW: Final = 2**32
"""Counts from which on a bucket needs two words."""


_fold: Final = function(
    "kc_fold",
    *(ADDRESS, ADDRESS, ADDRESS, ADDRESS, NUMBER, NUMBER, NUMBER, DOUBLE, NUMBER, ADDRESS, ADDRESS, ADDRESS),
    result=NUMBER,
)
_used_parts: Final = function(
    "kc_used_parts", *(ADDRESS, ADDRESS, ADDRESS, NUMBER, NUMBER, ADDRESS, ADDRESS, ADDRESS, ADDRESS), result=NUMBER
)
_counts_of: Final = function("kc_counts_of", ADDRESS, ADDRESS, NUMBER, ADDRESS)


class _Known(Structure):
    """State of the fold, in the layout of `fold.c`."""

    _fields_ = (
        *(("rows", ADDRESS), ("counts", ADDRESS)),
        *(("slots", ADDRESS), ("slot_buckets", ADDRESS), ("most_slots", NUMBER)),
        *(("slot_of", ADDRESS), ("limits", ADDRESS), ("powers", ADDRESS)),
    )


class Known:
    """Arrays that points are folded into; they are handed over once, not with every message.

    ROW [r]; the words of their buckets, uint32 [w]; SLOT [s]; their buckets, int64 [2, s, SPAN]; the slots of each
    series, int64 [series, 2]; LIMITS [contracts].
    """

    def __init__(
        self, rows: Array, counts: Array, slots: Array, slot_buckets: Array, slot_of: Array, limits: Array
    ) -> None:
        self.arrays = (rows, counts, slots, slot_buckets, slot_of, limits)
        row, words, slot, buckets, of, limit = (array.ctypes.data for array in self.arrays)
        self._known = _Known(row, words, slot, buckets, slots.size, of, limit, _POWERS.ctypes.data)
        self._address = addressof(self._known)

    def fold(
        self,
        message: ColumnMessage,
        part: tuple[int, int],
        used: int,
        now: float,
        number: int,
        heard: NDArray[np.bool_],
        gaps: Numbers,
    ) -> int:
        """Take the plain ones of the points in `part`, from its first to before its last, which arrived at `now`.

        Each needs room for a slot. A stream's points after one that is left are left as well, because their outcome may
        depend on it, and so are those of rows that are `blocked` by the number of this message. `heard` gets 1 for
        pairs of kernels that were heard of, and `gaps` one more for the contract of each point that came late. Returns
        how many slots are in use.
        """
        points, rows, *into = (
            array.ctypes.data for array in (message.points, message.rows, message.taken, heard, gaps)
        )
        slots: int = _fold(self._address, message.body, points, rows, *part, used, now, number, *into)
        return slots


def used_parts(slots: Array, buckets: Array, which: Numbers, side: int) -> SideColumns:
    """Return the used buckets of some slots, of one sign (0 positive, 1 negative), from all slots' buckets of it."""
    size = which.size
    counts, found = np.empty(size * SPAN, np.int64), np.empty(2 * size + 1, np.int64)
    begin, of = found.ctypes.data, found.itemsize
    into = begin, begin + size * of, counts.ctypes.data, begin + 2 * size * of
    total = _used_parts(slots.ctypes.data, buckets.ctypes.data, which.ctypes.data, size, side, *into)
    return SideColumns.packed(found[:size], found[size:-1], counts[:total], int(found[-1]))


def counts_of(rows: Array, counts: Array, which: Numbers) -> Numbers:
    """Return the counts of some rows' buckets: positive and then negative ones, one row after the other."""
    known = _Known(rows.ctypes.data, counts.ctypes.data)
    found = np.empty(int(rows["positive_size"][which].sum() + rows["negative_size"][which].sum()), np.int64)
    _counts_of(addressof(known), which.ctypes.data, which.size, found.ctypes.data)
    return found


class RowContent(NamedTuple):
    """Content of some rows: ROW [n], digests of the streams, and counts of their buckets, one row after the other."""

    records: NDArray[Any]
    names: Sequence[bytes]
    counts: Numbers

    def rows(self) -> Iterator[tuple[bytes, Any, Numbers]]:
        """Yield the digest, the record and the counts of each: of positive and then of negative buckets."""
        ends = np.cumsum(self.records["positive_size"] + self.records["negative_size"])[:-1]
        yield from zip(self.names, self.records, np.split(self.counts, ends), strict=True)

    def streams(self) -> Iterator[tuple[bytes, PointStream]]:
        """Yield the digest of each stream, and the stream."""
        return ((name, stream_of(record, counts)) for name, record, counts in self.rows())


_NEW_ROW: Final = np.zeros((), ROW)
for _field, _value in {"loaded": NEW, "time": -1, "min": np.inf, "max": -np.inf}.items():
    _NEW_ROW[_field] = _value


class RowMemory:
    """Rows of all contracts, ROW [n], words of their buckets, uint32 [w], and the stream of each; empty for none.

    `token` is another object once a row was freed: messages that name rows have to look for them again then.
    """

    def __init__(self) -> None:
        self.rows = np.zeros(MAX_ROWS, ROW)
        self.counts = np.zeros(_MAX_WORDS, np.uint32)
        self.names: list[bytes] = []
        self.token = object()
        self._free_words: dict[int, list[int]] = {}
        self._used_words = 0

    def block(self) -> int | None:
        """Return a block that nobody has; None for none."""
        block = len(self.names) // BLOCK
        if (block + 1) * BLOCK > MAX_ROWS:
            return None
        self.names += [b""] * BLOCK
        return block

    def make_room(self, row: int, words: int) -> bool:
        """See to it that a row has room for so many words; what is in it may be lost. False where there is none."""
        of = self.rows[row]
        if words <= of["room"]:
            return True
        self.give_back(row)
        room = _room_for(words)
        free = self._free_words.get(room)
        if free:
            of["at"] = free.pop()
        elif self._used_words + room > _MAX_WORDS:
            return False
        else:
            of["at"] = self._used_words
            self._used_words += room
        of["room"] = room
        return True

    def give_back(self, row: int) -> None:
        """Take a row's room away."""
        of = self.rows[row]
        if of["room"]:
            self._free_words.setdefault(int(of["room"]), []).append(int(of["at"]))
        of["room"] = 0

    def put(self, row: int, counts: Numbers) -> bool:
        """Keep the counts of a row's buckets, positive and then negative ones; False where there is no room."""
        wide = bool(counts.size and counts.max() >= _NARROW)
        words = counts.view(np.uint32) if wide else counts
        if not self.make_room(row, words.size):
            return False
        of = self.rows[row]
        of["wide"] = wide
        self.counts[of["at"] : of["at"] + words.size] = words
        return True


class ContractRows:
    """Rows of a contract's streams, in blocks of the memory; `state` has the streams without one.

    `row_of` is by a stream's digest; `others` is what else is known of a stream in a row: all writers but the one heard
    last, times, and so on.
    """

    def __init__(self, memory: RowMemory, contract: int, state: ContractState) -> None:
        self._memory, self._contract, self._state = memory, contract, state
        self.row_of: dict[bytes, int] = {}
        self.others: dict[int, PointStream] = {}
        self.blocks: set[int] = set()
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self.row_of)

    def load(self, name: bytes, series: int, pair: int) -> None:
        """Move a stream into a row, with the numbers of its series and pair, if its points are plain."""
        stream = self._state.streams[name]
        found, before = record_of(stream.writers[-1]), stream.writers[:-1]
        if found is None or any(other.start == stream.writers[-1].start for other in before):
            return
        record, counts = found
        record["heard"], record["series"], record["pair"] = stream.heard, series, pair
        if (row := self.put(name, record, counts)) < 0:
            return
        if before or stream.times or stream.forgotten >= 0:
            self.others[row] = PointStream(0.0, before, stream.times, stream.forgotten)
        del self._state.streams[name]
        self._state.changed_streams.add(name)

    def begin(self, name: bytes, series: int, pair: int, size: int) -> int:
        """A row for the first point of a stream, with so many buckets; -1 where there is no room."""
        if name in self.row_of:
            return self.row_of[name]
        record = _NEW_ROW.copy()
        record["series"], record["pair"] = series, pair
        return self.put(name, record, np.zeros(min(size, 2 * SIDE), np.int64), NEW)

    def put(self, name: bytes, record: Any, counts: Numbers, loaded: int = LOADED) -> int:
        """Give a stream a row with this record and these counts; -1 where there is no room."""
        if not self._free:
            block = self._memory.block()
            if block is None:
                return -1
            self.blocks.add(block)
            self._free += range((block + 1) * BLOCK - 1, block * BLOCK - 1, -1)
        row = self._free.pop()
        self._memory.names[row], self.row_of[name] = name, row
        into = self._memory.rows[row]
        self._memory.rows[row] = record
        into["contract"], into["loaded"], into["dirty"], into["room"] = self._contract, loaded, 1, 0
        if not self._memory.put(row, counts):
            self.free(row)
            return -1
        return row

    def end_begin(self, row: int) -> None:
        """Forget a new stream if its first point was not plain."""
        if self._memory.rows["loaded"][row] == NEW:
            self.free(row)

    def release(self, name: bytes) -> None:
        """Make a stream that takes points by itself of one that is in a row."""
        row = self.row_of.get(name)
        if row is not None:
            self._state.streams[name] = self.stream(row)
            self.free(row)

    def release_series(self, series: Sequence[int]) -> None:
        """`release` the streams of some series, by their numbers."""
        rows = self._loaded()
        for row in rows[np.isin(self._memory.rows["series"][rows], series)].tolist():
            self.release(self._memory.names[row])

    def free(self, row: int) -> None:
        """Forget the stream of a row, which may be another's from now on."""
        name = self._memory.names[row]
        self.row_of.pop(name, None)
        self.others.pop(row, None)
        self._memory.give_back(row)
        self._memory.names[row] = b""
        self._memory.token = object()
        into = self._memory.rows[row]
        into["loaded"], into["dirty"] = NOT_LOADED, 1
        self._state.changed_streams.add(name)
        self._free.append(row)

    def forget_silent(self, since: float) -> int:
        """Forget the streams that were heard of last before a Unix time in seconds. Returns how many."""
        rows = self._loaded()
        silent = rows[self._memory.rows["heard"][rows] < since].tolist()
        for row in silent:
            self.free(row)
        return len(silent)

    def turn_back(self, now: float) -> None:
        """The clock went back: none was heard of later than now."""
        rows = self._loaded()
        self._memory.rows["heard"][rows] = np.minimum(self._memory.rows["heard"][rows], now)
        self._memory.rows["dirty"][rows] = 1

    def unsaved(self) -> tuple[Numbers, Numbers]:
        """The blocks that differ from what was saved, and the rows in them that streams are in, both ascending."""
        blocks = np.array(sorted(self.blocks), np.int64)
        of_blocks = blocks[:, None] * BLOCK + np.arange(BLOCK)
        dirty = (self._memory.rows["dirty"][of_blocks] != 0).any(axis=1)
        rows = of_blocks[dirty].reshape(-1)
        return blocks[dirty], rows[self._memory.rows["loaded"][rows] == LOADED]

    def content(self, rows: Numbers) -> RowContent:
        """Return what is in some rows."""
        names = [self._memory.names[row] for row in rows.tolist()]
        counts = counts_of(self._memory.rows, self._memory.counts, rows)
        return RowContent(self._memory.rows[rows], names, counts)

    def saved(self) -> Callable[[], None]:
        """Mark everything as saved; returns the function that takes this back."""
        rows = (np.array(sorted(self.blocks), np.int64)[:, None] * BLOCK + np.arange(BLOCK)).reshape(-1)
        rows = rows[self._memory.rows["dirty"][rows] != 0]
        self._memory.rows["dirty"][rows] = 0

        def unsaved() -> None:
            self._memory.rows["dirty"][rows] = 1

        return unsaved

    def _loaded(self) -> Numbers:
        return np.fromiter(self.row_of.values(), np.int64, len(self.row_of))

    def stream(self, row: int) -> PointStream:
        """A copy of the stream that is in a row."""
        others = self.others.get(row, PointStream())
        [(_, stream)] = self.content(np.array([row])).streams()
        return PointStream(stream.heard, [*others.writers, *stream.writers], list(others.times), others.forgotten)


def record_of(value: LatestValue) -> tuple[Any, Numbers] | None:
    """The record of a row with a stream's newest value, and the counts of its buckets; None where it fits into none."""
    histogram = value.histogram
    if value.doubted is not None or histogram.layout is not None or not histogram.maximum_observed:
        return None
    positive, negative, scale = histogram.positive, histogram.negative, histogram.scale
    if max(positive.counts.size, negative.counts.size) > SIDE:
        return None
    into = np.zeros((), ROW)
    into["start"], into["time"], into["scale"] = value.start, value.time, scale
    into["count"], into["zero_count"], into["sum"] = histogram.count, histogram.zero_count, histogram.sum
    into["min"], into["max"], into["zero_threshold"] = histogram.minimum, histogram.maximum, histogram.zero_threshold
    into["positive_offset"], into["positive_size"] = positive.offset, positive.counts.size
    into["negative_offset"], into["negative_size"] = negative.offset, negative.counts.size
    into["least"], into["least_negative"] = positive.least(scale), negative.least(scale)
    into["magnitude"] = magnitude(histogram)
    return into, np.concatenate([positive.counts, negative.counts])


def stream_of(record: Any, counts: Numbers) -> PointStream:
    """The stream that a row is of, from its record and the counts of its buckets."""
    of, size = {name: record[name].item() for name in ROW.names or ()}, int(record["positive_size"])
    histogram = Histogram(
        scale=of["scale"],
        count=of["count"],
        sum=of["sum"],
        zero_count=of["zero_count"],
        positive=Buckets(of["positive_offset"], counts[:size].copy()).trimmed(),
        negative=Buckets(of["negative_offset"], counts[size:].copy()).trimmed(),
        minimum=of["min"],
        maximum=of["max"],
        zero_threshold=of["zero_threshold"],
    )
    return PointStream(of["heard"], [LatestValue(of["start"], of["time"], histogram)])


def _room_for(words: int) -> int:
    """Words that a row is given where it needs so many."""
    return -(-(words + _SPARE_WORDS) // _WORDS) * _WORDS
