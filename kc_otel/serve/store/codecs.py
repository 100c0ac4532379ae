"""Histograms of panes and rows of streams as bytes, for the store: little-endian, thousands of them in an evaluation.

Counts are in integers that just hold them. Decoding raises a ValueError for bytes that no encoder here has written.
"""

from __future__ import annotations

import struct
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kc_otel.judge.columns.stream_rows import BLOCK, ROW, SIDE, RowContent
from kc_otel.judge.stored_numbers import can_be_observed, observed
from kc_otel.stats.histogram import EXPLICIT, Buckets, Histogram
from kc_otel.stats.histogram_columns import HistogramColumns, SideColumns, packed

_HISTOGRAM: Final = np.dtype(
    [("scale", "i1"), ("observed", "u1")]
    + [(name, "<f8") for name in ("sum", "minimum", "maximum", "zero_threshold")]
    + [(name, "<i8") for name in ("count", "zero_count")]
)
_RUN: Final = np.dtype([("width", "S1"), ("offset", "<i8"), ("size", "<u4")])
_WIDTHS: Final[dict[bytes, np.dtype[Any]]] = {
    b"1": np.dtype("<u1"),
    b"2": np.dtype("<u2"),
    b"4": np.dtype("<u4"),
    b"8": np.dtype("<i8"),
}
_BLOCK: Final = struct.Struct("<cH")
_NUMBERS: Final = ("start", "time", "count", "zero_count", "series", "positive_offset", "negative_offset")
_SIZES: Final = ("positive_size", "negative_size")
_REALS: Final = (*("sum", "min", "max", "zero_threshold", "least", "least_negative", "magnitude"), "heard")
_ROW: Final = np.dtype(
    [("name", "u1", 16), ("scale", "i1")]
    + [(name, "<u2") for name in _SIZES]
    + [(name, "<i8") for name in _NUMBERS]
    + [(name, "<f8") for name in _REALS]
)
"""Fields of a row that are saved."""


def encode_histograms(columns: HistogramColumns) -> list[bytes]:
    """Histograms as bytes, each for `decode_histogram`."""
    heads = np.zeros(len(columns), _HISTOGRAM)
    for name in ("scale", "observed", "sum", "minimum", "maximum", "zero_threshold", "count", "zero_count"):
        heads[name] = getattr(columns, name)
    edges = [b"" if layout is None else np.array(layout, "<f8").tobytes() for layout in columns.layout]
    parts = _records(heads), _encode_runs(columns.positive), _encode_runs(columns.negative), edges
    return [b"".join(of) for of in zip(*parts, strict=True)]


def decode_histogram(data: bytes) -> Histogram:
    """A histogram from its bytes; a ValueError also if nobody can have observed it."""
    try:
        [head] = np.frombuffer(data, _HISTOGRAM, 1).tolist()
        scale, seen, total, minimum, maximum, threshold, count, zero_count = head
        positive, at = _decode_run(data, _HISTOGRAM.itemsize)
        negative, at = _decode_run(data, at)
        layout = tuple(np.frombuffer(data[at:], "<f8").tolist()) if scale == EXPLICIT else None
    except (KeyError, ValueError) as error:
        raise ValueError(f"not a histogram: {error}") from None
    extremes = minimum, maximum, threshold
    return observed(Histogram(scale, count, total, zero_count, positive, negative, *extremes, bool(seen), layout))


def _encode_runs(side: SideColumns) -> list[bytes]:
    """Buckets of many, whose counts are all as wide as the largest needs."""
    heads, counts = np.zeros(side.size.size, _RUN), packed(side.counts)
    heads["width"], heads["size"], heads["offset"] = _width_of(counts), side.size, side.offset * (side.size > 0)
    whole, width = counts.tobytes(), counts.itemsize
    begins, ends = (side.begins * width).tolist(), ((side.begins + side.size) * width).tolist()
    return [head + whole[begin:end] for head, begin, end in zip(_records(heads), begins, ends, strict=True)]


def _width_of(counts: NDArray[np.integer]) -> bytes:
    return str(counts.itemsize).encode()


def _records(records: NDArray[Any]) -> list[bytes]:
    data, size = records.tobytes(), records.dtype.itemsize
    return [data[at : at + size] for at in range(0, len(data), size)]


def _decode_run(data: bytes, at: int) -> tuple[Buckets, int]:
    [(width, offset, size)] = np.frombuffer(data, _RUN, 1, at).tolist()
    start = at + _RUN.itemsize
    counts = np.frombuffer(data, _WIDTHS[width], size, start).astype(np.int64)
    return Buckets(offset, counts), start + size * _WIDTHS[width].itemsize


def encode_rows(blocks: NDArray[np.int64], rows: NDArray[np.int64], content: RowContent) -> list[bytes]:
    """Blocks of rows as bytes, empty for those without a row.

    Args:
        blocks: Numbers of the blocks, ascending [b].
        rows: Numbers of the rows, ascending [n]; all of them are in the blocks.
        content: Of the rows of all blocks together; `series` is the id that the store gives the series.
    """
    kept = np.zeros(rows.size, _ROW)
    kept["name"] = np.frombuffer(b"".join(content.names), np.uint8).reshape(-1, 16)
    for name in ("scale", *_SIZES, *_NUMBERS, *_REALS):
        kept[name] = content.records[name]
    sizes = content.records["positive_size"] + content.records["negative_size"]
    begins = np.searchsorted(rows, np.append(blocks, blocks[-1:] + 1) * BLOCK).tolist()
    ends = np.concatenate([[0], np.cumsum(sizes)])
    found = []
    for first, last in pairwise(begins):
        counts = packed(content.counts[ends[first] : ends[last]])
        parts = _BLOCK.pack(_width_of(counts), last - first), kept[first:last].tobytes(), counts.tobytes()
        found.append(b"".join(parts) if first < last else b"")
    return found


def decode_rows(data: bytes) -> RowContent:
    """A block of rows from its bytes; a ValueError also if they hold what nobody can have observed."""
    try:
        code, size = _BLOCK.unpack_from(data)
        kept = np.frombuffer(data, _ROW, size, _BLOCK.size)
        counts = np.frombuffer(data, _WIDTHS[code], offset=_BLOCK.size + kept.nbytes).astype(np.int64)
    except (struct.error, ValueError, KeyError) as error:
        raise ValueError(f"not rows of streams: {error}") from None
    records = np.zeros(size, ROW)
    for name in ("scale", *_SIZES, *_NUMBERS, *_REALS):
        records[name] = kept[name]
    sizes = np.column_stack([records[name] for name in _SIZES])
    begins = np.cumsum(sizes) - sizes.reshape(-1)
    fits = size and sizes.sum() == counts.size and sizes.max() <= SIDE
    if not fits or counts.min(initial=0) < 0 or (records["zero_count"] < 0).any():
        raise ValueError("not rows of streams: their numbers do not fit together")
    totals = np.add.reduceat(np.append(counts, 0), begins).reshape(-1, 2) * (sizes > 0)
    if (totals.sum(axis=1) + records["zero_count"] != records["count"]).any():
        raise ValueError("not rows of streams: their counts do not add up")
    for side in ("positive", "negative"):
        offset, number = records[f"{side}_offset"], records[f"{side}_size"]
        if not can_be_observed(records["scale"], offset, number).all():
            raise ValueError("not rows of streams: buckets are where nothing can be observed")
    return RowContent(records, [name.tobytes() for name in kept["name"]], counts)
