"""State of streams in arrays: one loop folds a message's columns into them.

This is the usual case of `point_streams`, and of what follows there on a point that counts: a cumulative exponential
histogram that continues the value before it, in the same buckets, in the order of time. A point of which anything else
is true, or which is so close to a rule's border that rounding might decide otherwise, is left to the code that takes
points one by one. That code decides all other cases, and remains the only one that knows the rules.

    message --> columns --> rows (newest value of each stream) --> slots (what was counted, by series and panes)
                   |                                                       |
                   '--> what is not plain: point by point                  '--> panes, before anything reads them

Of a stream that is in a row there is no `PointStream`. Code that takes a point of it by itself has to `release` it
first; `settle` brings series up to date.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from typing import Final, NamedTuple

import numpy as np
from google.protobuf.message import DecodeError

from kc_otel.judge.columns.stream_rows import (
    CLOSED,
    LIMITS,
    NONE,
    SLOT,
    SPAN,
    ContractRows,
    Known,
    RowContent,
    RowMemory,
    stream_of,
    used_parts,
)
from kc_otel.judge.contract_state import ContractState
from kc_otel.judge.otlp.wire_columns import ColumnMessage, read_columns
from kc_otel.judge.point_streams import Horizon
from kc_otel.judge.points import DRIFT_NAMES, MAX_COUNT, OTHER_NAMES, Point, digest_of, origin_of
from kc_otel.judge.series import LONG, SHORT, Pair, SeriesKey
from kc_otel.stats.histogram_columns import HistogramColumns
from kc_otel.stats.interval import Numbers

_MAX_SPELLINGS: Final = 65_536
"""Spellings of attributes that are known; processes that record the same share them."""
_MAX_LAYOUT_BYTES: Final = 2**27
"""Memory for what senders' messages are of, at most; 1,024 of 170 points take a quarter of it."""
_BYTES_OF_A_POINT: Final = 100
"""Memory for a point there, besides its attributes."""
_POINTS_PER_CHUNK: Final = 1024
"""Points that are folded at once; they may need a slot each."""
_SLOT_COUNT: Final = 4096
_DRIFT_NAMES: Final = frozenset(name.encode() for name in DRIFT_NAMES)
_EXPONENTIAL: Final = attrgetter("exponential")
_SCOPE: Final = attrgetter("scope_begin")


class StreamColumns:
    """Rows of streams, and slots of what they counted, of all contracts; `taken` counts points so far."""

    def __init__(self, states: Mapping[str, ContractState]) -> None:
        self._states = list(states.values())
        self._contract = {name: number for number, name in enumerate(states)}
        self._limits = np.zeros(len(states), LIMITS)
        for number, state in enumerate(self._states):
            self._limits[number]["short"] = state.grids[SHORT].width
            self._limits[number]["long"] = state.grids[LONG].width
        self._slots = SeriesSlots(self._states)
        self._held: Known | None = None
        self._message = self.taken = 0
        self.forget()

    def forget(self) -> None:
        """Forget the numbers of series and pairs; rows have none then, and counts must be settled before."""
        self._spellings: dict[tuple[bytes, bytes, int], dict[bytes, _Spelling]] = {}
        self._forget_layouts()
        self._pairs: dict[tuple[int, Pair], int] = {}  # the number of the first series of each pair of a contract
        self._memory = RowMemory()
        self._rows = [ContractRows(self._memory, number, state) for number, state in enumerate(self._states)]
        for state, rows in zip(self._states, self._rows, strict=True):
            state.rows = rows
        self._slots.forget()

    def message(self, body: bytes, most: int) -> ColumnMessage | None:
        """A request as columns.

        None where it is something else, has more than `most` resources, scopes, metrics and points in it, or has a
        metric that no contract can be about.
        """
        message = read_columns(body, most)
        if message is None or message.items > most:
            return None
        if not all(name.startswith((b"kc.", b"gen_ai.")) for name in message.names):
            return None
        try:
            message.rows, new = self._rows_of(message)
            left = message.rows < 0
            left[[first.point for first in new]] = False
            message.new = int(np.count_nonzero((message.rows < 0) & ~left))
            message.known = None if new else self._memory.token
            left |= message.points["plain"] == 0
            # Explicit bounds of one of our quantities: a series' layout may then depend on the first point.
            named = zip(message.names, message.spans, strict=True)
            others = any(name in _DRIFT_NAMES and not of.exponential for name, of in named)
            message.whole, items = others or bool(4 * np.count_nonzero(left) > left.size), message.items
            for of, metric in message.metrics((~left & (not message.whole)).tobytes()):
                origin_of(*message.origin(of))  # protobuf may refuse it, and the message with it
                items += 0 if of.exponential else len(getattr(metric, metric.WhichOneof("data")).data_points)
        except DecodeError:
            return None
        return None if items > most else message

    def fold(self, message: ColumnMessage, horizons: Mapping[str, Horizon], now: float) -> tuple[int, int]:
        """Take the plain points that arrived at `now`, Unix seconds, and note in the message which ones.

        Returns how many points were taken, and how many of these were older than they may be when they came.
        """
        if message.whole:
            return 0, 0
        self._message += 1
        begun: Sequence[tuple[int, int]] = ()
        if message.known is None or message.known is not self._memory.token:
            message.rows, new = self._rows_of(message)
            begun = self._begin(message, new, now)
        if (message.rows < 0).any():
            self._block_unknown(message)
        for number, horizon in enumerate(horizons.values()):
            of = self._limits[number]
            of["future"], of["start"] = horizon.future, horizon.start
            of["oldest"], of["gap"] = horizon.oldest, horizon.gap
        before = self._memory.rows["count"][message.rows]
        heard = np.zeros(len(self._slots), np.bool_)
        gaps = np.zeros(len(self._states), np.int64)
        for first in range(0, message.taken.size, _POINTS_PER_CHUNK):
            self._slots.make_room(_POINTS_PER_CHUNK)
            last = min(first + _POINTS_PER_CHUNK, message.taken.size)
            self._slots.used = self._known().fold(
                message, (first, last), self._slots.used, now, self._message, heard, gaps
            )
        for contract, row in begun:
            self._rows[contract].end_begin(row)
        for number in np.flatnonzero(heard).tolist():
            contract, key = self._slots.owners[number]
            self._states[contract].hear(key.pair, now)
        for number in np.flatnonzero(gaps).tolist():
            self._states[number].events["gap"] += int(gaps[number])
        message.series = self._memory.rows["series"][message.rows]
        message.grown = (message.taken != 0) & (self._memory.rows["count"][message.rows] > before)
        taken = int(np.count_nonzero(message.taken))
        self.taken += taken
        return taken, self._behind(message, now)

    def _behind(self, message: ColumnMessage, now: float) -> int:
        """Count the points that were taken and were too old when they arrived."""
        ages = now - message.points["time"] / 1e9
        if not ages.size or ages.max() <= min(state.timely for state in self._states):
            return 0
        taken = np.flatnonzero(message.taken)
        contracts, found = self._memory.rows["contract"][message.rows[taken]], 0
        for number in np.unique(contracts).tolist():
            state, old = self._states[number], taken[contracts == number]
            old = old[ages[old] > state.timely]
            for place in {self._memory.rows["pair"][message.rows[number]]: number for number in old}.values():
                sender = origin_of(*message.origin(message.spans[message.points["metric"][place]])).sender
                _, key = self._slots.owners[self._memory.rows["series"][message.rows[place]]]
                state.refused.add("behind", key.pair, sender, float(ages[place]), now)
            found += old.size
        return found

    def _known(self) -> Known:
        """Rows and slots as they are now."""
        rows, slots = self._memory, self._slots
        arrays = (rows.rows, rows.counts, slots.slots, slots.buckets, slots.of, self._limits)
        if self._held is None or any(a is not b for a, b in zip(arrays, self._held.arrays, strict=True)):
            self._held = Known(*arrays)
        return self._held

    def _begin(self, message: ColumnMessage, new: Sequence[_FirstPoint], now: float) -> list[tuple[int, int]]:
        """Give rows to new streams. Returns the numbers of their contracts, and the rows."""
        points, begun = message.points, []
        for contract in {first.spelling.contract for first in new}:
            of = [first for first in new if first.spelling.contract == contract]
            counts = points["count"][[first.point for first in of]].clip(0, MAX_COUNT)
            if not self._states[contract].has_room_for(len(of), int(counts.sum()), now):
                continue
            for point, spelling, name in of:
                size = int(points["positive_size"][point] + points["negative_size"][point])
                row = self._rows[contract].begin(name, spelling.series, spelling.pair, size)
                message.rows[point] = row
                if row >= 0:
                    begun.append((contract, row))
        return begun

    def _rows_of(self, message: ColumnMessage) -> tuple[Numbers, list[_FirstPoint]]:
        """The row of each of a message's points, -1 for none [points], and those of streams that are new."""
        found: list[Numbers] = []
        new: list[_FirstPoint] = []
        body, points = message.body, message.points
        keys = [body[at:end] for at, end in zip(points["key_begin"].tolist(), points["key_end"].tolist(), strict=True)]
        for _, group in groupby(filter(_EXPONENTIAL, message.spans), _SCOPE):
            spans = [*group]
            origin, first, last = message.origin(spans[0]), spans[0].first, spans[-1].last
            heads = [(body[of.begin : of.head_end], of.temporality, of.last - of.first) for of in spans]
            layout = self._layouts.get(origin)
            if layout is None or layout.heads != heads or layout.keys != keys[first:last]:
                layout = self._layout(origin, heads, keys[first:last])
            if layout.known is not self._memory.token:
                rows = [
                    -1 if known is None else self._rows[known.contract].row_of.get(name, -1)
                    for known, name in zip(layout.spellings, layout.names, strict=True)
                ]
                layout.rows = np.array(rows, np.int64)
                layout.known = self._memory.token if -1 not in rows else None
                for point, (row, known, name) in enumerate(zip(rows, layout.spellings, layout.names, strict=True)):
                    if row < 0 and known is not None and name not in self._states[known.contract].streams:
                        new.append(_FirstPoint(first + point, known, name))
            found.append(layout.rows)
        return np.concatenate(found) if found else np.zeros(0, np.int64), new

    def _layout(self, origin: tuple[bytes, bytes], heads: list[_Head], keys: list[bytes]) -> _Layout:
        """Find what is known of a sender's attributes, and remember it for its next message."""
        digest = origin_of(*origin).digest
        families = [self._spellings.get((origin[1], *head[:2]), {}) for head in heads]
        of = (family for family, head in zip(families, heads, strict=True) for _ in range(head[2]))
        spellings = [family.get(key) for family, key in zip(of, keys, strict=True)]
        same = [key if known is None else known.key for known, key in zip(spellings, keys, strict=True)]
        names = [b"" if known is None else digest_of(digest, known.tail) for known in spellings]
        self._layout_bytes += sum(map(len, keys)) + _BYTES_OF_A_POINT * len(keys)
        if self._layout_bytes > _MAX_LAYOUT_BYTES:
            self._forget_layouts()
        layout = self._layouts[origin] = _Layout(heads, same, spellings, names)
        return layout

    def _forget_layouts(self) -> None:
        self._layouts: dict[tuple[bytes, bytes], _Layout] = {}
        self._layout_bytes = 0

    def _block_unknown(self, message: ColumnMessage) -> None:
        """Leave the points of streams that are known, but not in this spelling, to be taken in their order."""
        for point in message.left((), Counter(), (message.rows >= 0).tobytes()):
            if (
                isinstance(point, Point)
                and (rows := self._of(point)) is not None
                and (row := rows.row_of.get(point.stream)) is not None
            ):
                self._memory.rows[row]["blocked"] = self._message

    def _of(self, point: Point) -> ContractRows | None:
        """The rows of the contract that a point names."""
        number = self._contract.get(str(point.attributes.get("kc.contract")))
        return None if number is None else self._rows[number]

    def release(self, point: Point) -> None:
        """Have a point's stream take points by itself until it is `learn`t again."""
        if point.metric not in OTHER_NAMES and point.histogram.layout is not None:
            self._slots.settle()  # other buckets may clear what their series holds
        rows = self._of(point)
        if rows is not None:
            rows.release(point.stream)

    def close(self, series: str) -> None:
        """Take nothing from columns for a name's series until one is `learn`t: their layout changed."""
        self._slots.close(series)

    def learn(self, message: ColumnMessage, point: Point, contract: str, key: SeriesKey) -> None:
        """Know a stream from now on, if its points may be plain: one in a message, that was counted for the series."""
        of = self._contract[contract]
        stream = self._states[of].streams.get(point.stream)
        if stream is None or not stream.writers or key not in self._states[of].series:
            return
        if len(self._slots) >= _MAX_SPELLINGS:
            self._release_all()
        series, pair = self._numbers(of, key)
        self._rows[of].load(point.stream, series, pair)
        if sum(map(len, self._spellings.values())) >= _MAX_SPELLINGS:
            self._spellings.clear()
        where = message.points[point.number]
        metric, body = message.spans[where["metric"]], message.body
        family = message.origin(metric)[1], body[metric.begin : metric.head_end], metric.temporality
        spelling = _Spelling(body[where["key_begin"] : where["key_end"]], point.tail, of, series, pair)
        spellings = self._spellings.setdefault(family, {})
        if spellings.get(spelling.key) != spelling:
            spellings[spelling.key] = spelling
            self._forget_layouts()

    def _numbers(self, contract: int, key: SeriesKey) -> tuple[int, int]:
        """The number of a series, and that of its pair."""
        series = self._slots.number_of(contract, key)
        return series, self._pairs.setdefault((contract, key.pair), series)

    def _release_all(self) -> None:
        """Have all streams take points by themselves, and begin anew."""
        self.settle()
        for rows in self._rows:
            for name in list(rows.row_of):
                rows.release(name)
        self.forget()

    def series_of(self, numbers: Sequence[int]) -> list[SeriesKey]:
        """The series that rows have these numbers of."""
        return [self._slots.owners[number][1] for number in numbers]

    def observed(self, message: ColumnMessage) -> Iterator[tuple[str, str, list[SeriesKey]]]:
        """Yield what was observed of series in a message: the sender, name of the contract, the series."""
        contracts = self._memory.rows["contract"][message.rows]
        for _, group in groupby(filter(_EXPONENTIAL, message.spans), _SCOPE):
            spans = [*group]
            here = np.arange(spans[0].first, spans[-1].last)[message.grown[spans[0].first : spans[-1].last]]
            for contract in {*contracts[here].tolist()}:
                numbers = message.series[here[contracts[here] == contract]].tolist()
                keys = [self._slots.owners[number][1] for number in numbers]
                yield origin_of(*message.origin(spans[0])).sender, self._states[contract].contract.name, keys

    def restore(self, contract: str, content: RowContent, keys: Sequence[SeriesKey | None]) -> None:
        """Streams that were saved in rows; those without room, or a series, take points by themselves."""
        of = self._contract[contract]
        state, rows = self._states[of], self._rows[of]
        for (name, record, counts), key in zip(content.rows(), keys, strict=True):
            if key is not None:
                record["series"], record["pair"] = self._numbers(of, key)
            if key is None or rows.put(name, record, counts) < 0:
                state.streams[name] = stream_of(record, counts)
                state.changed_streams.add(name)

    def forget_gone(self, contract: str) -> None:
        """Leave streams alone that are not remembered any more, or whose series is not."""
        number = self._contract[contract]
        if gone := self._slots.gone(number):
            self._rows[number].release_series(gone)
            self._spellings.clear()
            self._forget_layouts()

    def settle(self) -> None:
        """Bring all series up to date."""
        self._slots.settle()


class _Spelling(NamedTuple):
    """Attributes as a sender lists them: what `points.digest_of` needs, numbers of contract, series and pair."""

    key: bytes
    tail: bytes
    contract: int
    series: int
    pair: int


_Head = tuple[bytes, int, int]
"""Name, description and unit of a metric, its temporality, and how many points it has."""


@dataclass(slots=True)
class _Layout:
    """Streams of the points of a resource and scope, in their order: mostly the same in the next message."""

    heads: list[_Head]
    """The metrics."""
    keys: list[bytes]
    """Attributes [points]."""
    spellings: list[_Spelling | None]
    """The same as far as they are known [points]."""
    names: list[bytes]
    """Digests of the streams [points]."""
    rows: Numbers = field(default_factory=lambda: np.zeros(0, np.int64))
    known: object = None
    """`RowMemory.token` that `rows` are of; None where some point has none."""


class _FirstPoint(NamedTuple):
    """A point of a stream that is not known, with attributes that are, by its number in the message."""

    point: int
    spelling: _Spelling
    name: bytes


class SeriesSlots:
    """The slots that are in use, their buckets, positive and then negative ones, and whose they are.

    `of` are the slots that each series counts into [series, 2], one for even and one for odd short panes: where a pane
    ends, some senders are still in the one before. NONE for no slot, CLOSED for a series that takes nothing.
    """

    def __init__(self, states: Sequence[ContractState]) -> None:
        self._states = states
        self.slots = np.zeros(_SLOT_COUNT, SLOT)
        self.buckets = np.zeros((2, _SLOT_COUNT, SPAN), np.int64)
        self.used = 0
        self.forget()

    def forget(self) -> None:
        """Forget every series; counts must be settled before."""
        self._numbers: dict[tuple[int, SeriesKey], int] = {}
        self.owners: list[tuple[int, SeriesKey]] = []
        self.of = np.full((64, 2), NONE)

    def __len__(self) -> int:
        return len(self.owners)

    def gone(self, contract: int) -> list[int]:
        """The numbers of a contract's series that are no more."""
        series = self._states[contract].series
        return [number for number, (of, key) in enumerate(self.owners) if of == contract and key not in series]

    def number_of(self, contract: int, key: SeriesKey) -> int:
        """The number of a series, which is open from now on."""
        number = self._numbers.get((contract, key))
        if number is None:
            number = self._numbers[contract, key] = len(self.owners)
            self.owners.append((contract, key))
            if number == len(self.of):
                self.of = np.concatenate([self.of, np.full((number, 2), NONE)])
        elif self.of[number, 0] == CLOSED:
            self.of[number] = NONE
        return number

    def close(self, metric: str) -> None:
        """Count nothing for a metric's series until they are opened."""
        for number, (_, key) in enumerate(self.owners):
            if key.metric == metric:
                self.of[number] = CLOSED

    def make_room(self, most: int) -> None:
        """See to it that as many more slots may be taken."""
        if self.used + most > self.slots.size:
            self.settle()

    def settle(self) -> None:
        """Put what was counted into panes."""
        used, self.used = self.used, 0
        if not used:
            return
        every = self.slots[:used]
        series = every["series"]
        self.of[series] = NONE
        found = [self.owners[number] for number in series.tolist()]
        contracts = np.array([contract for contract, _ in found])
        for number in np.unique(contracts).tolist():
            which = np.flatnonzero(contracts == number)
            of = every if which.size == used else every[which]
            sides = (used_parts(self.slots, buckets, which, side) for side, buckets in enumerate(self.buckets))
            columns = HistogramColumns(
                of["scale"].copy(),
                of["zero_threshold"].copy(),
                of["count"].copy(),
                of["zero_count"].copy(),
                of["sum"] + of["carry"],
                of["min"].copy(),
                of["max"].copy(),
                of["observed"] != 0,
                np.full(which.size, None),
                *sides,
            )
            keys = [found[slot][1] for slot in which.tolist()]
            self._states[number].count_all(keys, columns, of["newest"].tolist(), of["now"].tolist())
