"""Streams of a contract: in rows of arrays, where the next point may be plain, and as objects, where it may not.

Of a stream in a row that is all there is, its newest value, in arrays of fixed size: some 600 bytes instead of several
Python objects. Code that takes a point of it by itself takes it out first, which makes a `PointStream` of it; `load`
moves that back. Rows are saved in blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from ctypes import c_void_p
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kc_otel import machine_code
from kc_otel.judge.point_streams import LatestValue, PointStream
from kc_otel.machine_code import ADDRESS, NUMBER, function
from kc_otel.stats import Buckets, Histogram
from kc_otel.stats.histogram import magnitude
from kc_otel.stats.interval import Numbers

SIDE: Final = 160
"""Buckets of each sign that a value in a row may have: as many as OpenTelemetry's SDKs send."""
ROW: Final = np.dtype(
    [(name, np.int64) for name in ("start", "time", "scale", "count", "zero_count", "series", "pair", "contract")]
    + [(name, np.int64) for name in ("positive_size", "positive_offset", "negative_size", "negative_offset")]
    + [(name, np.int64) for name in ("loaded", "dirty", "blocked", "at", "room", "wide")]
    + [(name, np.float64) for name in ("sum", "min", "max", "zero_threshold", "least", "least_negative", "magnitude")]
    + [("heard", np.float64)]
)
"""`pair` is where the fold notes that the stream was heard of: its series, too. There is one `contract`, 0."""
NOT_LOADED, LOADED, NEW = 0, 1, 2
"""Of a row whose stream takes points by itself, of one that takes them, and of one that waits for its first point."""
MAX_ROWS: Final = 262_144
"""Streams of a contract that may have a row; memory that nobody has written to costs nothing."""
_WORDS_PER_ROW: Final = 2 * SIDE + 32
"""Words for the counts of a row's buckets, in the mean of all rows: more take only counts that need two each."""
BLOCK: Final = 32
"""Rows that are saved together."""
_SPARE_WORDS: Final = 24
"""Words that a row has room for beyond what its buckets need now."""
_WORDS: Final = 16
"""Words that room is given in."""
_NARROW: Final = 2**32
"""Counts from which on a bucket needs two words."""
_counts_of: Final = function("kc_counts_of", ADDRESS, ADDRESS, NUMBER, ADDRESS)


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


class StreamRows:
    """Streams of a contract by their digests: `row_of` says which have a row, `alone` has the others.

    `rows` are ROW [n], `counts` the words of their buckets, uint32 [w], `names` the digest of the stream in each; empty
    for none. `others` is what else is known of a stream in a row: all writers but the one heard last, times, and so on.
    `changed` are streams to be saved by themselves, or no more; `freed` counts rows that were taken back: who remembers
    any has to look for them again then.
    """

    def __init__(self, most: int) -> None:
        size = -(-min(most, MAX_ROWS) // BLOCK) * BLOCK
        self.rows, self.counts = np.zeros(size, ROW), np.zeros(_WORDS_PER_ROW * size, np.uint32)
        self.names: list[bytes] = []
        self.row_of: dict[bytes, int] = {}
        self.alone: dict[bytes, PointStream] = {}
        self.others: dict[bytes, PointStream] = {}
        self.changed: set[bytes] = set()
        self.freed = 0
        self._free: list[int] = []
        self._free_words: dict[int, list[int]] = {}
        self._used_words = 0

    def __len__(self) -> int:
        return len(self.row_of) + len(self.alone)

    def take_out(self, name: bytes) -> PointStream | None:
        """A stream, which takes points by itself until it is loaded again; None for one that is not known."""
        row = self.row_of.get(name)
        if row is not None:
            if self.rows["loaded"][row] == LOADED:
                self.alone[name] = self.stream(name)
            self._release(row)
        return self.alone.get(name)

    def load(self, name: bytes, series: int) -> None:
        """Move a stream into a row, with the number of its series, if its points are plain."""
        stream = self.alone.get(name)
        if stream is None or not stream.writers:
            return
        found, before = record_of(stream.writers[-1]), stream.writers[:-1]
        if found is None or any(other.start == stream.writers[-1].start for other in before):
            return
        record, counts = found
        record["heard"] = stream.heard
        if self._put(name, record, counts, series) < 0:
            return
        if before or stream.times or stream.forgotten >= 0:
            self.others[name] = PointStream(0.0, before, stream.times, stream.forgotten)
        del self.alone[name]
        self.changed.add(name)

    def restore(self, content: RowContent, series: Sequence[int]) -> None:
        """Streams that were saved in rows, and the numbers of their series, -1 for one that is gone.

        Those without a series, room or machine code take points by themselves.
        """
        for (name, record, counts), number in zip(content.rows(), series, strict=True):
            fits = number >= 0 and machine_code.is_available()
            if not fits or self._put(name, record, counts, number) < 0:
                self.alone[name] = stream_of(record, counts)
                self.changed.add(name)

    def begin(self, name: bytes, series: int, size: int) -> int:
        """A row for the first point of a stream, with so many buckets; -1 where there is no room."""
        if name in self.row_of:
            return self.row_of[name]
        return self._put(name, _NEW_ROW.copy(), np.zeros(min(size, 2 * SIDE), np.int64), series, NEW)

    def end_begin(self, row: int) -> None:
        """Forget a new stream if its first point was not plain."""
        if self.rows["loaded"][row] == NEW:
            self._release(row)

    def _put(self, name: bytes, record: Any, counts: Numbers, series: int, loaded: int = LOADED) -> int:
        """Give a stream a row with this record and these counts; -1 where there is no room."""
        row = self._free.pop() if self._free else len(self.names)
        if row >= self.rows.size:
            return -1
        if row == len(self.names):
            self.names.append(b"")
        self.names[row], self.row_of[name] = name, row
        of = self.rows[row]
        self.rows[row] = record
        of["series"], of["pair"], of["contract"] = series, series, 0
        of["loaded"], of["dirty"], of["room"] = loaded, 1, 0
        wide = bool(counts.size and counts.max() >= _NARROW)
        words = counts.view(np.uint32) if wide else counts
        room = -(-(words.size + _SPARE_WORDS) // _WORDS) * _WORDS
        if free := self._free_words.get(room):
            of["at"] = free.pop()
        elif self._used_words + room <= self.counts.size:
            of["at"] = self._used_words
            self._used_words += room
        else:
            self._release(row)
            return -1
        of["room"], of["wide"] = room, wide
        self.counts[of["at"] : of["at"] + words.size] = words
        return row

    def _release(self, row: int) -> None:
        """Have a row without a stream, which may be another's from now on."""
        name, of = self.names[row], self.rows[row]
        self.row_of.pop(name, None)
        self.others.pop(name, None)
        self.names[row] = b""
        if of["room"]:
            self._free_words.setdefault(int(of["room"]), []).append(int(of["at"]))
        of["room"], of["loaded"], of["dirty"] = 0, NOT_LOADED, 1
        self.freed += 1
        self.changed.add(name)
        self._free.append(row)

    def block(self, name: bytes, message: int) -> None:
        """Have the points of a stream left that are in the message of a number."""
        if (row := self.row_of.get(name)) is not None:
            self.rows["blocked"][row] = message

    def take_out_of(self, series: Sequence[int]) -> None:
        """Have the streams of some series take points by themselves: their numbers may be other series' from now on."""
        rows = self._loaded()
        for row in rows[np.isin(self.rows["series"][rows], series)].tolist():
            self.take_out(self.names[row])

    def forget_silent(self, since: float) -> int:
        """Forget the streams that were heard of last before a Unix time in seconds. Returns how many."""
        rows = self._loaded()
        silent = rows[self.rows["heard"][rows] < since].tolist()
        alone = [name for name, stream in self.alone.items() if stream.heard < since]
        for row in silent:
            self._release(row)
        for name in alone:
            del self.alone[name]
        self.changed.update(alone)
        return len(silent) + len(alone)

    def turn_back(self, now: float) -> None:
        """The clock went back: none was heard of later than now."""
        rows = self._loaded()
        self.rows["heard"][rows] = np.minimum(self.rows["heard"][rows], now)
        self.rows["dirty"][rows] = 1
        for stream in self.alone.values():
            stream.heard = min(stream.heard, now)

    @property
    def blocks(self) -> range:
        """Numbers of the blocks that have rows."""
        return range(-(-len(self.names) // BLOCK))

    def unsaved(self) -> tuple[Numbers, Numbers]:
        """The blocks that differ from what was saved, and the rows in them that streams are in, both ascending."""
        end = len(self.blocks) * BLOCK
        dirty = (self.rows["dirty"][:end] != 0).reshape(-1, BLOCK).any(axis=1)
        return np.flatnonzero(dirty), np.flatnonzero(dirty.repeat(BLOCK) & (self.rows["loaded"][:end] == LOADED))

    def saved(self) -> Callable[[], None]:
        """Mark everything as saved; returns the function that takes this back."""
        changed, self.changed = self.changed, set()
        rows = np.flatnonzero(self.rows["dirty"][: len(self.names)])
        self.rows["dirty"][rows] = 0

        def unsaved() -> None:
            self.changed |= changed
            self.rows["dirty"][rows] = 1

        return unsaved

    def content(self, rows: Numbers) -> RowContent:
        """Return what is in some rows."""
        records = self.rows[rows]
        counts = np.empty(int(records["positive_size"].sum() + records["negative_size"].sum()), np.int64)
        known = (c_void_p * 2)(self.rows.ctypes.data, self.counts.ctypes.data)  # what `fold.c` calls Known begins so
        _counts_of(known, rows.ctypes.data, rows.size, counts.ctypes.data)
        return RowContent(records, [self.names[row] for row in rows.tolist()], counts)

    def stream(self, name: bytes) -> PointStream:
        """A copy of a stream that is in a row."""
        others = self.others.get(name, PointStream())
        [(_, stream)] = self.content(np.array([self.row_of[name]])).streams()
        return PointStream(stream.heard, [*others.writers, *stream.writers], list(others.times), others.forgotten)

    def _loaded(self) -> Numbers:
        return np.fromiter(self.row_of.values(), np.int64, len(self.row_of))


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
