"""Histograms, streams, rows of streams and evidence as bytes, for the store: little-endian.

Counts are in integers that just hold them. Decoding raises a `CodecError` for bytes that no encoder here has written.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kc_otel.judge.columns.stream_rows import BLOCK, ROW, SIDE, RowContent
from kc_otel.judge.fail_evidence import HeldEvidence, row_of
from kc_otel.judge.fault_end import Fault, Recovery
from kc_otel.judge.point_streams import LatestValue, PointStream
from kc_otel.judge.statistics import MeanTest
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
_SCALES: Final = range(-16, 21)
_LEAST_EXPONENT, _MOST_EXPONENT = -1080.0, 512.0
"""Binary exponents of what `points` lets be observed; coarser buckets reach beyond by less than one of them."""
_STREAM: Final = struct.Struct("<dq")
_WRITER: Final = struct.Struct("<qq")
_EVIDENCE: Final = struct.Struct("<6dqB?")
_FAULT: Final = struct.Struct("<5d?")
_COUNT: Final = struct.Struct("<I")
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


class CodecError(ValueError):
    """Bytes that no encoder here has written."""


def _joined(head: bytes, *parts: bytes) -> bytes:
    """A head of a known size, and parts of any."""
    return b"".join((head, _COUNT.pack(len(parts)), *(_COUNT.pack(len(part)) for part in parts), *parts))


def _taken_apart(head: struct.Struct, data: bytes) -> tuple[tuple[Any, ...], list[bytes]]:
    """Numbers of the head, and the parts, of what `_joined` returned; a ValueError where bytes are missing or more."""
    (count,) = _COUNT.unpack_from(data, head.size)
    begin = head.size + _COUNT.size * (count + 1)
    sizes = struct.unpack_from(f"<{count}I", data, head.size + _COUNT.size)
    ends = list(accumulate(sizes, initial=begin))
    if ends[-1] != len(data):
        raise ValueError("its length is not that of its parts")
    return head.unpack_from(data), [data[first:last] for first, last in pairwise(ends)]


def encode_histogram(histogram: Histogram | None) -> bytes:
    """A histogram as bytes; none for None."""
    return b"" if histogram is None else encode_histograms(HistogramColumns.of([histogram]))[0]


def encode_histograms(columns: HistogramColumns) -> list[bytes]:
    """Histograms as bytes, each for `decode_histogram`."""
    heads = np.zeros(len(columns), _HISTOGRAM)
    for name in ("scale", "observed", "sum", "minimum", "maximum", "zero_threshold", "count", "zero_count"):
        heads[name] = getattr(columns, name)
    edges = [b"" if layout is None else np.array(layout, "<f8").tobytes() for layout in columns.layout]
    parts = _records(heads), _encode_runs(columns.positive), _encode_runs(columns.negative), edges
    return [b"".join(of) for of in zip(*parts, strict=True)]


def decode_histogram(data: bytes) -> Histogram:
    """A histogram from its bytes.

    A CodecError also if there are buckets where nothing can have been observed: added up with others, they would be an
    array of every bucket between.
    """
    try:
        [head] = np.frombuffer(data, _HISTOGRAM, 1).tolist()
        scale, observed, total, minimum, maximum, threshold, count, zero_count = head
        positive, at = _decode_run(data, _HISTOGRAM.itemsize)
        negative, at = _decode_run(data, at)
        layout = tuple(np.frombuffer(data[at:], "<f8").tolist()) if scale == EXPLICIT else None
    except (KeyError, ValueError) as error:
        raise CodecError(f"not a histogram: {error}") from None
    for side in (positive, negative):
        if layout is None and not can_be_observed(*map(np.array, (scale, side.offset, side.counts.size))):
            raise CodecError(f"not a histogram: bucket {side.offset} at scale {scale}")
    extremes = minimum, maximum, threshold
    return Histogram(scale, count, total, zero_count, positive, negative, *extremes, bool(observed), layout)


def can_be_observed(scale: NDArray[np.int64], offset: NDArray[np.int64], size: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return whether something can be in so many buckets from an offset on, of each."""
    base = 2.0**-scale
    within = (_LEAST_EXPONENT - base <= offset * base) & ((offset + size) * base <= _MOST_EXPONENT + base)
    found: NDArray[np.bool_] = (_SCALES.start <= scale) & (scale < _SCALES.stop) & ((size == 0) | within)
    return found


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


def encode_streams(streams: Sequence[PointStream]) -> list[bytes]:
    """Streams as bytes, each for `decode_stream`."""
    latest = [last for stream in streams for last in stream.writers]
    values = [value for last in latest for value in (last.histogram, last.doubted) if value is not None]
    encoded = iter(encode_histograms(HistogramColumns.of(values)))

    def encode_writer(last: LatestValue) -> bytes:
        value, doubted = next(encoded), b"" if last.doubted is None else next(encoded)
        return _joined(_WRITER.pack(last.start, last.time), value, doubted)

    return [
        _joined(
            _STREAM.pack(stream.heard, stream.forgotten),
            np.array(stream.times, dtype="<i8").tobytes(),
            *map(encode_writer, stream.writers),
        )
        for stream in streams
    ]


def decode_stream(data: bytes) -> PointStream:
    """A stream from its bytes."""
    try:
        (heard, forgotten), (times, *writers) = _taken_apart(_STREAM, data)
        stream = PointStream(heard, [], np.frombuffer(times, "<i8").tolist(), forgotten)
        for writer in writers:
            (start, time), (histogram, doubted) = _taken_apart(_WRITER, writer)
            stream.writers.append(LatestValue(start, time, decode_histogram(histogram), _decode_optional(doubted)))
    except (struct.error, ValueError) as error:
        raise CodecError(f"not a stream: {error}") from None
    return stream


def _decode_optional(data: bytes) -> Histogram | None:
    return decode_histogram(data) if data else None


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
    """A block of rows from its bytes; a CodecError also if they hold what nobody can have observed."""
    try:
        code, size = _BLOCK.unpack_from(data)
        kept = np.frombuffer(data, _ROW, size, _BLOCK.size)
        counts = np.frombuffer(data, _WIDTHS[code], offset=_BLOCK.size + kept.nbytes).astype(np.int64)
    except (struct.error, ValueError, KeyError) as error:
        raise CodecError(f"not rows of streams: {error}") from None
    records = np.zeros(size, ROW)
    for name in ("scale", *_SIZES, *_NUMBERS, *_REALS):
        records[name] = kept[name]
    sizes = np.column_stack([records[name] for name in _SIZES])
    begins = np.cumsum(sizes) - sizes.reshape(-1)
    fits = size and sizes.sum() == counts.size and sizes.max() <= SIDE
    if not fits or counts.min(initial=0) < 0 or (records["zero_count"] < 0).any():
        raise CodecError("not rows of streams: their numbers do not fit together")
    totals = np.add.reduceat(np.append(counts, 0), begins).reshape(-1, 2) * (sizes > 0)
    if (totals.sum(axis=1) + records["zero_count"] != records["count"]).any():
        raise CodecError("not rows of streams: their counts do not add up")
    for side in ("positive", "negative"):
        offset, number = records[f"{side}_offset"], records[f"{side}_size"]
        if not can_be_observed(records["scale"], offset, number).all():
            raise CodecError("not rows of streams: buckets are where nothing can be observed")
    return RowContent(records, [name.tobytes() for name in kept["name"]], counts)


def encode_evidence(held: HeldEvidence) -> bytes:
    """Encode the evidence against a cell as bytes."""
    test, fault = held.test, b"" if held.fault is None else _encode_fault(held.fault)
    unsaid = [math.nan if value is None else value for value in (test.above, test.top)]
    head = _EVIDENCE.pack(test.limit, test.low, test.cap, *unsaid, held.peak, held.pane, held.failing, held.ended)
    return _joined(head, held.log_sums.astype("<f8").tobytes(), encode_histogram(held.after), fault)


def decode_evidence(data: bytes) -> HeldEvidence:
    """Decode the evidence against a cell from its bytes."""
    try:
        (limit, low, cap, *unsaid, peak, pane, failing, ended), parts = _taken_apart(_EVIDENCE, data)
        sums, after, fault = parts
        log_sums = np.frombuffer(sums, "<f8").astype(np.float64)
        held_after, held_fault = _decode_optional(after), _decode_fault(fault) if fault else None
    except (struct.error, ValueError) as error:
        raise CodecError(f"not evidence: {error}") from None
    if not np.isfinite(log_sums).all() or math.isnan(peak) or not limit > 0.0:
        raise CodecError("not evidence: a number is missing, or is none")
    above, top = (None if math.isnan(value) else value for value in unsaid)
    test, row = MeanTest(limit, above, low, cap, top), row_of(log_sums, pane)
    return HeldEvidence(test, row, failing, peak, held_after, held_fault, ended)


def _encode_fault(fault: Fault) -> bytes:
    wealth, level, cap = fault.recovery or (np.zeros(0), math.nan, math.nan)
    before, after = fault.improved or (math.nan, math.nan)
    head = _FAULT.pack(fault.begun, before, after, level, cap, fault.recovery is not None)
    return _joined(
        head, wealth.astype("<f8").tobytes(), *map(encode_histogram, (fault.sample, fault.run, fault.recent))
    )


def _decode_fault(data: bytes) -> Fault:
    (begun, before, after, level, cap, watched), (bets, *histograms) = _taken_apart(_FAULT, data)
    sample, run, recent = map(_decode_optional, histograms)
    wealth = np.frombuffer(bets, "<f8").astype(np.float64)
    if not np.isfinite(wealth).all() or (watched and not cap > level > 0.0):
        raise ValueError("a number of a fault is missing, or is none")
    recovery = Recovery(wealth, level, cap) if watched else None
    improved = None if math.isnan(after) else (before, after)
    return Fault(sample, run, recent, begun, recovery, improved)
