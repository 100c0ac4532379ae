"""Layouts of messages: the same sender's next message has the same streams in the same order.

A message of a known layout is compared with it byte by byte, all that identifies its streams, and they are found at
once. The comparison, in `message_layouts.c`, is exact: nothing rests on a hash.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kc_otel.judge.column_message import WireColumns
from kc_otel.machine_code import ADDRESS, NUMBER, function

_MAX_BYTES: Final = 16 * 1024 * 1024
"""Bytes of all layouts together: enough to identify a hundred thousand streams of usual attributes."""
_OTHER, _SAME, _PLAIN = 0, 1, 2
_Key = tuple[bytes, bytes, int]
_OF_A_MESSAGE: Final = (ADDRESS, ADDRESS, NUMBER, ADDRESS, NUMBER)
_copy_identities: Final = function("kc_copy_identities", *_OF_A_MESSAGE, ADDRESS, ADDRESS, ADDRESS, result=NUMBER)
_is_same: Final = function("kc_is_same", *_OF_A_MESSAGE, ADDRESS, ADDRESS, ADDRESS, result=NUMBER)


@dataclass(frozen=True)
class _Layout:
    """Identities of a message's streams, and their rows.

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

    @cached_property
    def addresses(self) -> tuple[int, int, int]:
        """Addresses of the arrays other than the rows."""
        return self.identities.ctypes.data, self.metrics.ctypes.data, self.sizes.ctypes.data

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
        same = _is_same(*_addresses(wire), *layout.addresses)
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
        if made.bytes > _MAX_BYTES // 8:
            return
        before = self._known.pop(key, None)
        self._known[key] = made
        self._bytes += made.bytes - (before.bytes if before is not None else 0)
        while self._bytes > _MAX_BYTES:
            _, oldest = self._known.popitem(last=False)
            self._bytes -= oldest.bytes


def _key(wire: WireColumns) -> _Key:
    if not wire.metrics.size:
        return b"", b"", 0
    begin, _, resource, resource_end, _, _, head_end, *_ = wire.metrics.item(0)
    return wire.body[resource:resource_end], wire.body[begin:head_end], wire.points.size


def _addresses(wire: WireColumns) -> tuple[bytes, int, int, int, int]:
    return wire.body, wire.points.ctypes.data, wire.points.size, wire.metrics.ctypes.data, wire.metrics.size


def _identities(wire: WireColumns) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64]]:
    into = np.empty(len(wire.body), np.uint8)
    metrics, sizes = np.empty((wire.metrics.size, 7), np.int64), np.empty(wire.points.size, np.int64)
    size = _copy_identities(*_addresses(wire), into.ctypes.data, metrics.ctypes.data, sizes.ctypes.data)
    return into[:size].copy(), metrics, sizes
