"""A message's points matched with the streams that they continue, so that one loop folds them.

This is the usual case of `point_streams`, and of what follows there on a point that counts: a cumulative exponential
histogram that continues the value before it, in the same buckets, in the order of time. A point of which anything else
is true, or which is so close to a rule's border that rounding might decide otherwise, is left to the code that takes
points one by one. That code decides all other cases, and remains the only one that knows the rules.

    message --> columns --> rows (newest value of each stream) --> slots (what was counted, by series and panes)
                   |                                                       |
                   '--> what is not plain: point by point                  '--> panes, before anything reads them
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

from kc_otel.judge.contract_state import ContractState
from kc_otel.judge.otlp.wire_columns import ColumnMessage, read_columns
from kc_otel.judge.point_streams import Horizon
from kc_otel.judge.points import DRIFT_NAMES, MAX_COUNT, Point, digest_of, origin_of
from kc_otel.judge.series import SeriesKey
from kc_otel.stats.interval import Numbers

_MAX_SPELLINGS: Final = 65_536
"""Spellings of attributes that are known; processes that record the same share them."""
_MAX_LAYOUT_BYTES: Final = 2**27
"""Memory for what senders' messages are of, at most; 1,024 of 170 points take a quarter of it."""
_BYTES_OF_A_POINT: Final = 100
"""Memory for a point there, besides its attributes."""
_DRIFT_NAMES: Final = frozenset(name.encode() for name in DRIFT_NAMES)
_EXPONENTIAL: Final = attrgetter("exponential")
_SCOPE: Final = attrgetter("scope_begin")


class MessageStreams:
    """Known messages of senders and their rows; `taken` counts the points that were folded so far."""

    def __init__(self, states: Mapping[str, ContractState]) -> None:
        self._states = list(states.values())
        self._contract = {name: number for number, name in enumerate(states)}
        self._spellings: dict[tuple[bytes, bytes, int], dict[bytes, _Spelling]] = {}
        self._message = self.taken = 0
        self._forget_layouts()

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
            new = self._match(message)
            left = message.rows < 0
            left[[first.point for first in new]] = False
            message.new = int(np.count_nonzero((message.rows < 0) & ~left))
            message.known = -1 if new else self._freed()
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
        begun: Sequence[tuple[ContractState, int]] = ()
        if message.known != self._freed():
            begun = self._begin(message, self._match(message), now)
        if (message.rows < 0).any():
            self._block_unknown(message)
        behind = 0
        for number in {*message.contracts[message.rows >= 0].tolist()}:
            state, rows = self._states[number], np.where(message.contracts == number, message.rows, -1)
            behind += state.fold(message, rows, horizons[state.contract.name], now, self._message)
        for state, row in begun:
            state.streams.end_begin(row)
        taken = int(np.count_nonzero(message.taken))
        self.taken += taken
        return taken, behind

    def _begin(self, message: ColumnMessage, new: Sequence[_FirstPoint], now: float) -> list[tuple[ContractState, int]]:
        """Give rows to new streams. Returns the states of their contracts, and the rows."""
        points, begun = message.points, []
        for contract in {first.spelling.contract for first in new}:
            of, state = [first for first in new if first.spelling.contract == contract], self._states[contract]
            counts = points["count"][[first.point for first in of]].clip(0, MAX_COUNT)
            if not state.has_room_for(len(of), int(counts.sum()), now):
                continue
            for point, spelling, name in of:
                size = int(points["positive_size"][point] + points["negative_size"][point])
                series = state.series.get(spelling.series)
                row = -1 if series is None else state.streams.begin(name, series.number, size)
                message.rows[point] = row
                if row >= 0:
                    begun.append((state, row))
        return begun

    def _match(self, message: ColumnMessage) -> list[_FirstPoint]:
        """Find contract and row of each of a message's points, -1 for none. Returns those of streams that are new."""
        found: list[_Layout] = []
        new: list[_FirstPoint] = []
        body, points, freed = message.body, message.points, self._freed()
        keys = [body[at:end] for at, end in zip(points["key_begin"].tolist(), points["key_end"].tolist(), strict=True)]
        for _, group in groupby(filter(_EXPONENTIAL, message.spans), _SCOPE):
            spans = [*group]
            origin, first, last = message.origin(spans[0]), spans[0].first, spans[-1].last
            heads = [(body[of.begin : of.head_end], of.temporality, of.last - of.first) for of in spans]
            layout = self._layouts.get(origin)
            if layout is None or layout.heads != heads or layout.keys != keys[first:last]:
                layout = self._layout(origin, heads, keys[first:last])
            if layout.known != freed:
                rows = [
                    -1 if known is None else self._states[known.contract].streams.row_of.get(name, -1)
                    for known, name in zip(layout.spellings, layout.names, strict=True)
                ]
                layout.rows = np.array(rows, np.int64)
                layout.known = freed if -1 not in rows else -1
                for point, (row, known, name) in enumerate(zip(rows, layout.spellings, layout.names, strict=True)):
                    if row < 0 and known is not None and name not in self._states[known.contract].streams.alone:
                        new.append(_FirstPoint(first + point, known, name))
            found.append(layout)
        if found:
            message.rows = np.concatenate([layout.rows for layout in found])
            message.contracts = np.concatenate([layout.contracts for layout in found])
        return new

    def _layout(self, origin: tuple[bytes, bytes], heads: list[_Head], keys: list[bytes]) -> _Layout:
        """Find what is known of a sender's attributes, and remember it for its next message."""
        digest = origin_of(*origin).digest
        families = [self._spellings.get((origin[1], *head[:2]), {}) for head in heads]
        of = (family for family, head in zip(families, heads, strict=True) for _ in range(head[2]))
        spellings = [family.get(key) for family, key in zip(of, keys, strict=True)]
        same = [key if known is None else known.key for known, key in zip(spellings, keys, strict=True)]
        names = [b"" if known is None else digest_of(digest, known.tail) for known in spellings]
        contracts = np.array([-1 if known is None else known.contract for known in spellings], np.int64)
        self._layout_bytes += sum(map(len, keys)) + _BYTES_OF_A_POINT * len(keys)
        if self._layout_bytes > _MAX_LAYOUT_BYTES:
            self._forget_layouts()
        layout = self._layouts[origin] = _Layout(heads, same, spellings, names, contracts)
        return layout

    def _forget_layouts(self) -> None:
        self._layouts: dict[tuple[bytes, bytes], _Layout] = {}
        self._layout_bytes = 0

    def _freed(self) -> int:
        """Number of rows that were taken back so far, of all contracts."""
        return sum(state.streams.freed for state in self._states)

    def _block_unknown(self, message: ColumnMessage) -> None:
        """Leave the points of streams that are known, but not in this spelling, to be taken in their order."""
        for point in message.left((), Counter(), (message.rows >= 0).tobytes()):
            if isinstance(point, Point):
                contract = self._contract.get(str(point.attributes.get("kc.contract")))
                if contract is not None:
                    self._states[contract].streams.block(point.stream, self._message)

    def learn(self, message: ColumnMessage, point: Point, state: ContractState, key: SeriesKey) -> None:
        """Know a stream from now on, if its points may be plain: one in a message, that was counted for the series."""
        stream, series = state.streams.alone.get(point.stream), state.series.get(key)
        if stream is None or not stream.writers or series is None:
            return
        state.streams.load(point.stream, series.number)
        if sum(map(len, self._spellings.values())) >= _MAX_SPELLINGS:
            self._spellings.clear()
        where = message.points[point.number]
        metric, body = message.spans[where["metric"]], message.body
        family = message.origin(metric)[1], body[metric.begin : metric.head_end], metric.temporality
        spelling = _Spelling(body[where["key_begin"] : where["key_end"]], point.tail, self._states.index(state), key)
        spellings = self._spellings.setdefault(family, {})
        if spellings.get(spelling.key) != spelling:
            spellings[spelling.key] = spelling
            self._forget_layouts()

    def observed(self, message: ColumnMessage) -> Iterator[tuple[str, ContractState, list[SeriesKey]]]:
        """Yield what was observed of series in a message: the sender, the state of the contract, the series."""
        for _, group in groupby(filter(_EXPONENTIAL, message.spans), _SCOPE):
            spans = [*group]
            part = slice(spans[0].first, spans[-1].last)
            contracts, grown = message.contracts[part].tolist(), message.grown[part]
            for contract in {*contracts}:
                named = zip(grown, contracts, strict=True)
                if keys := [key for key, of in named if key is not None and of == contract]:
                    yield origin_of(*message.origin(spans[0])).sender, self._states[contract], keys


class _Spelling(NamedTuple):
    """Attributes as a sender lists them: what `points.digest_of` needs, number of the contract, series."""

    key: bytes
    tail: bytes
    contract: int
    series: SeriesKey


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
    contracts: Numbers
    """Numbers of the contracts [points]; -1 where it is not known."""
    rows: Numbers = field(default_factory=lambda: np.zeros(0, np.int64))
    known: int = -1
    """Rows that had been taken back when `rows` were found; -1 where some point has none."""


class _FirstPoint(NamedTuple):
    """A point of a stream that is not known, with attributes that are, by its number in the message."""

    point: int
    spelling: _Spelling
    name: bytes
