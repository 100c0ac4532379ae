"""Layouts of messages: the same sender's next message has the same streams in the same order.

A message of a known layout is compared with it byte by byte, all that identifies its streams, and they are found at
once. The compiled comparison is exact: nothing rests on a hash.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kc_otel.judge.column_message import WireColumns
from kc_otel.judge.otlp.wire_columns import compiled

__all__ = ["MessageLayouts"]

_MOST_BYTES: Final = 16 * 1024 * 1024
"""Of all layouts together: what identifies a hundred thousand streams of usual attributes."""
_OTHER, _SAME, _PLAIN = 0, 1, 2
_Key = tuple[bytes, bytes, int]


@dataclass(frozen=True, slots=True)
class _Layout:
    """What a message's streams are identified by, and their rows.

    Attributes:
        identities: Resource, scope, name and unit of each metric, then the attributes of each point; uint8.
        metrics: How many bytes of the first three each metric has, -1 for those of the metric before; its temporality,
            whether it is exponential, and its points [metrics, 7].
        sizes: How many bytes the attributes of each point have [points].
        rows: Of each point [points].
    """

    identities: NDArray[np.uint8]
    metrics: NDArray[np.int64]
    sizes: NDArray[np.int64]
    rows: NDArray[np.int64]

    @property
    def bytes(self) -> int:
        return self.identities.nbytes + self.metrics.nbytes + self.sizes.nbytes + self.rows.nbytes


class MessageLayouts:
    """Layouts that were seen last, of whose messages every stream is known."""

    def __init__(self) -> None:
        self._known: OrderedDict[_Key, _Layout] = OrderedDict()
        self._bytes = 0

    def rows_of(self, wire: WireColumns) -> tuple[NDArray[np.int64], bool] | None:
        """Row of each of a message's points, not to be written, and whether all of it is plain exponential points.

        None where its layout is not known.
        """
        key = _key(wire)
        layout = self._known.get(key)
        if layout is None or layout.metrics.shape[0] != wire.metrics.size:
            return None
        same = _is_same(wire.content, wire.points, wire.metrics, layout.identities, layout.metrics, layout.sizes)
        if same == _OTHER:
            return None
        self._known.move_to_end(key)
        return layout.rows, same == _PLAIN

    def learn(self, wire: WireColumns, rows: NDArray[np.int64]) -> None:
        """Know a message's layout from now on, instead of the one that began like it."""
        key = _key(wire)
        rows = rows.copy()
        rows.flags.writeable = False
        made = _Layout(*_identities(wire), rows)
        if made.bytes > _MOST_BYTES // 8:
            return
        before = self._known.pop(key, None)
        self._known[key] = made
        self._bytes += made.bytes - (before.bytes if before is not None else 0)
        while self._bytes > _MOST_BYTES:
            _, oldest = self._known.popitem(last=False)
            self._bytes -= oldest.bytes


def _key(wire: WireColumns) -> _Key:
    if not wire.metrics.size:
        return b"", b"", 0
    begin, _, resource, resource_end, _, _, head_end, *_ = wire.metrics.item(0)
    return wire.body[resource:resource_end], wire.body[begin:head_end], wire.points.size


def _identities(wire: WireColumns) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64]]:
    into = np.empty(wire.content.size, np.uint8)
    metrics, sizes = np.empty((wire.metrics.size, 7), np.int64), np.empty(wire.points.size, np.int64)
    size = _copy_identities(wire.content, wire.points, wire.metrics, into, metrics, sizes)
    return into[:size].copy(), metrics, sizes


@compiled
def _describe(of: Any, before_resource: int, before_scope: int, into: Any) -> None:
    """What a metric says besides its bytes; the bytes of a resource or scope are not compared once more."""
    into[0] = of.resource_end - of.resource_begin if of.resource_begin != before_resource else -1
    into[1] = of.scope_end - of.scope_begin if of.scope_begin != before_scope else -1
    into[2], into[3], into[4] = of.head_end - of.begin, of.temporality, of.exponential
    into[5], into[6] = of.first, of.last


@compiled
def _copy_identities(content: Any, points: Any, metrics: Any, into: Any, said: Any, sizes: Any) -> Any:
    at, resource, scope = 0, -1, -1
    for number in range(metrics.size):
        of = metrics[number]
        _describe(of, resource, scope, said[number])
        resource, scope = of.resource_begin, of.scope_begin
        for size, begin in ((said[number, 0], resource), (said[number, 1], scope), (said[number, 2], of.begin)):
            if size > 0:
                into[at : at + size] = content[begin : begin + size]
                at += size
    for number in range(points.size):
        begin, end = points[number].key_begin, points[number].key_end
        sizes[number] = end - begin
        into[at : at + end - begin] = content[begin:end]
        at += end - begin
    return at


@compiled
def _differ(some: Any, others: Any) -> Any:
    wrong = np.uint8(0)
    for byte in range(some.size):
        wrong |= some[byte] ^ others[byte]
    return wrong != 0


@compiled
def _is_same(content: Any, points: Any, metrics: Any, identities: Any, said: Any, sizes: Any) -> Any:
    at, resource, scope = 0, -1, -1
    here, plain = np.empty(7, np.int64), True
    for number in range(metrics.size):
        of = metrics[number]
        _describe(of, resource, scope, here)
        for field in range(7):
            if here[field] != said[number, field]:
                return _OTHER
        resource, scope, plain = of.resource_begin, of.scope_begin, plain and of.exponential == 1
        for size, begin in ((here[0], resource), (here[1], scope), (here[2], of.begin)):
            if size > 0:
                if _differ(content[begin : begin + size], identities[at : at + size]):
                    return _OTHER
                at += size
    for number in range(points.size):
        begin, size = points[number].key_begin, sizes[number]
        if points[number].key_end - begin != size:
            return _OTHER
        if _differ(content[begin : begin + size], identities[at : at + size]):
            return _OTHER
        at += size
        plain = plain and points[number].plain == 1
    return _PLAIN if plain else _SAME
