"""Layouts of messages: the same sender's next message has the same streams in the same order.

A message of a known layout is compared with it byte by byte, all that identifies its streams, and they are found at
once. The comparison, in `message_layouts.c`, is exact: nothing rests on a hash. Senders that differ in nothing but
their resource share a layout, and have rows of their own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kc_otel.judge.otlp.wire_columns import WireColumns
from kc_otel.machine_code import ADDRESS, NUMBER, function

_MAX_BYTES: Final = 16 * 1024 * 1024
"""Bytes of all layouts together: enough to identify some hundred thousand streams, of a thousand senders."""
_Key = tuple[tuple[bytes, ...], bytes, bytes, int]
_OF_A_MESSAGE: Final = (ADDRESS, ADDRESS, NUMBER, ADDRESS, NUMBER)
_copy_identities: Final = function("kc_copy_identities", *_OF_A_MESSAGE, ADDRESS, ADDRESS, ADDRESS, result=NUMBER)
_is_same: Final = function("kc_is_same", *_OF_A_MESSAGE, ADDRESS, ADDRESS, ADDRESS, result=NUMBER)


@dataclass(eq=False, slots=True)
class _Layout:
    """Identities of a message's streams, without their resources.

    Attributes:
        identities: Scope, name and unit of each metric, then the attributes of each point; uint8.
        metrics: Whether each metric has another resource than the one before; how many bytes of scope and head it has,
            -1 for the scope of the one before; its temporality, whether it is exponential, and its points [metrics, 7].
        sizes: How many bytes the attributes of each point have [points].
        senders: How many share it.
    """

    identities: NDArray[np.uint8]
    metrics: NDArray[np.int64]
    sizes: NDArray[np.int64]
    senders: int = 0
    addresses: tuple[int, int, int] = field(init=False)

    def __post_init__(self) -> None:
        self.addresses = self.identities.ctypes.data, self.metrics.ctypes.data, self.sizes.ctypes.data

    @property
    def key(self) -> tuple[bytes, bytes, bytes]:
        """All of it."""
        return self.identities.tobytes(), self.metrics.tobytes(), self.sizes.tobytes()

    @property
    def bytes(self) -> int:
        """Bytes of it, and of its key."""
        return 2 * (self.identities.nbytes + self.metrics.nbytes + self.sizes.nbytes)


class _Sender(NamedTuple):
    """A sender's layout, and the rows of its points [points]."""

    layout: _Layout
    rows: NDArray[np.int64]
    bytes: int


class MessageLayouts:
    """Layouts that were seen last, of whose messages every stream is known."""

    def __init__(self) -> None:
        self._senders: OrderedDict[_Key, _Sender] = OrderedDict()
        self._layouts: dict[tuple[bytes, bytes, bytes], _Layout] = {}
        self._bytes = 0

    def rows_of(self, wire: WireColumns) -> NDArray[np.int64] | None:
        """Row of each of a message's points, not to be written; None where its layout is not known."""
        key = _key(wire)
        known = self._senders.get(key)
        if known is None or known.layout.metrics.shape[0] != wire.metrics.size:
            return None
        if not _is_same(*_addresses(wire), *known.layout.addresses):
            return None
        self._senders.move_to_end(key)
        return known.rows

    def learn(self, wire: WireColumns, rows: NDArray[np.int64]) -> None:
        """Know a message's layout from now on, instead of the one that began like it."""
        key, made = _key(wire), _Layout(*_identities(wire))
        rows = rows.copy()
        rows.flags.writeable = False
        size = rows.nbytes + sum(map(len, key[0]))
        if made.bytes + size > _MAX_BYTES // 8:
            return
        self._forget(key)
        layout = self._layouts.setdefault(made.key, made)
        self._bytes += size + (0 if layout.senders else layout.bytes)
        layout.senders += 1
        self._senders[key] = _Sender(layout, rows, size)
        while self._bytes > _MAX_BYTES:
            self._forget(next(iter(self._senders)))

    def forget(self, rows: Collection[int]) -> None:
        """Forget the layouts of messages with a point in one of these rows."""
        gone = set(rows)
        for key in [key for key, known in self._senders.items() if not gone.isdisjoint(known.rows.tolist())]:
            self._forget(key)

    def _forget(self, key: _Key) -> None:
        known = self._senders.pop(key, None)
        if known is None:
            return
        self._bytes -= known.bytes
        known.layout.senders -= 1
        if not known.layout.senders:
            self._bytes -= known.layout.bytes
            del self._layouts[known.layout.key]


def _key(wire: WireColumns) -> _Key:
    """The beginning of a message, and all of its resources."""
    if not wire.points.size:
        return (), b"", b"", 0
    body = wire.body
    begin, _, resource, resource_end, _, _, head_end, *_ = wire.metrics.item(0)
    resources: tuple[bytes, ...] = (body[resource:resource_end],)
    if wire.metrics.item(-1)[2] != resource:
        begins, at = np.unique(wire.metrics["resource_begin"], return_index=True)
        ends = wire.metrics["resource_end"][at]
        resources = tuple(body[low:high] for low, high in zip(begins.tolist(), ends.tolist(), strict=True))
    point = wire.points[0]
    return resources, body[begin:head_end], body[point["key_begin"] : point["key_end"]], wire.points.size


def _addresses(wire: WireColumns) -> tuple[bytes, int, int, int, int]:
    return wire.body, wire.points.ctypes.data, wire.points.size, wire.metrics.ctypes.data, wire.metrics.size


def _identities(wire: WireColumns) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64]]:
    into = np.empty(len(wire.body), np.uint8)
    metrics, sizes = np.empty((wire.metrics.size, 7), np.int64), np.empty(wire.points.size, np.int64)
    size = _copy_identities(*_addresses(wire), into.ctypes.data, metrics.ctypes.data, sizes.ctypes.data)
    return into[:size].copy(), metrics, sizes
