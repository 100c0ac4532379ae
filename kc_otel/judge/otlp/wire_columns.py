"""Walk along the wire format of an ExportMetricsServiceRequest that leaves columns of its exponential points.

The walk is in C, `wire_columns.c`. It gives up on whatever is not exactly what senders write, which is then read by
protobuf. It decodes numbers only: names and attributes stay bytes, so a caller may use them only where protobuf has
read the same bytes before.
"""

from __future__ import annotations

import threading
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kc_otel.judge.column_message import WireColumns
from kc_otel.machine_code import ADDRESS, NUMBER, function

POINT: Final = np.dtype(
    [(name, np.int64) for name in ("begin", "end", "key_begin", "key_end", "metric", "plain")]
    + [(name, np.int64) for name in ("start", "time", "count", "zero_count", "scale", "has_sum")]
    + [(name, np.int64) for name in ("positive", "positive_end", "positive_size", "positive_offset")]
    + [(name, np.int64) for name in ("negative", "negative_end", "negative_size", "negative_offset")]
    + [(name, np.float64) for name in ("sum", "min", "max", "zero_threshold")]
)
METRIC: Final = np.dtype(
    [(name, np.int64) for name in ("begin", "end", "resource_begin", "resource_end", "scope_begin", "scope_end")]
    + [(name, np.int64) for name in ("head_end", "exponential", "temporality", "first", "last")]
)
_MAX_ITEMS: Final = 60_000
"""Points or metrics of a message; the arrays for them take 17 MB."""
_LEAST_POINT: Final = 32
"""Bytes that a point has at least which is one of ours: it names a contract, a slice and two kernels."""


_scan: Final = function("kc_scan", ADDRESS, NUMBER, ADDRESS, NUMBER, ADDRESS, NUMBER, ADDRESS, result=NUMBER)


def read_columns(body: bytes, most: int = _MAX_ITEMS) -> WireColumns | None:
    """A message as columns; None where only protobuf can say what it is, or where it has more points or metrics."""
    room = min(len(body) // _LEAST_POINT + 8, most)
    if room > _SCRATCH.points.size:
        _SCRATCH.grow(room)
    points, metrics, found = _SCRATCH.addresses
    items = _scan(body, len(body), points, room, metrics, room, found)
    if items < 0:
        return None
    size, kinds = _SCRATCH.found.tolist()
    return WireColumns(body, items, _copy(_SCRATCH.points[:size]), _copy(_SCRATCH.metrics[:kinds]))


def _copy(records: NDArray[Any]) -> NDArray[Any]:
    """Records that are copied as what they are, eight bytes for each field; NumPy copies them field by field."""
    return records.view(np.int64).copy().view(records.dtype)


class _Scratch(threading.local):
    """Per-thread buffers in which a message is taken apart before the needed parts are copied."""

    def __init__(self) -> None:
        self.found = np.zeros(2, np.int64)
        self.grow(4096)

    def grow(self, points: int) -> None:
        self.points = np.empty(points, POINT)
        self.metrics = np.empty(points, METRIC)
        self.addresses = self.points.ctypes.data, self.metrics.ctypes.data, self.found.ctypes.data


_SCRATCH: Final = _Scratch()
