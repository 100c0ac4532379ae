"""Streams, rows of streams and evidence as bytes, for the store; histograms as `histogram_codec` has them."""

from __future__ import annotations

import math
import struct
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kc_otel.judge.columns.fold import ROW, SIDE
from kc_otel.judge.columns.stream_rows import BLOCK, RowContent
from kc_otel.judge.fail_evidence import HeldEvidence
from kc_otel.judge.fault_end import Fault, Recovery
from kc_otel.judge.point_streams import LatestValue, PointStream
from kc_otel.judge.statistics import MeanTest
from kc_otel.serve.store.histogram_codec import (
    WIDTHS,
    CodecError,
    can_be_observed,
    check_observed,
    decode_histogram,
    encode_histogram,
)

_STREAM: Final = struct.Struct("<dqBH")
_TEST: Final = struct.Struct("<5d")
_HELD_EVIDENCE: Final = struct.Struct("<dqB??II")
_FAULT: Final = struct.Struct("<I4d?BIII")
_LAST_POINT: Final = struct.Struct("<qqI")
_DOUBTED_INPUT: Final = struct.Struct("<BI")
_BLOCK: Final = struct.Struct("<cH")
_NUMBERS: Final = ("start", "time", "count", "zero_count", "series", "positive_offset", "negative_offset")
_SIZES: Final = ("positive_size", "negative_size")
_REALS: Final = (
    *("sum", "min", "max", "zero_threshold", "least", "least_negative", "magnitude"),
    "heard",
)
_ROW: Final = np.dtype(
    [("place", "u1"), ("name", "u1", 16), ("scale", "i1")]
    + [(name, "<u2") for name in _SIZES]
    + [(name, "<i8") for name in _NUMBERS]
    + [(name, "<f8") for name in _REALS]
)
"""Fields of a row that are saved."""


def encode_stream(stream: PointStream) -> bytes:
    """A stream as bytes."""
    parts = [_STREAM.pack(stream.heard, stream.forgotten, len(stream.writers), len(stream.times))]
    parts.append(np.array(stream.times, dtype="<i8").tobytes())
    for last in stream.writers:
        content = encode_histogram(last.histogram)
        parts += [_LAST_POINT.pack(last.start, last.time, len(content)), content]
    for number, last in enumerate(stream.writers):
        if last.doubted is not None:
            doubted = encode_histogram(last.doubted)
            parts += [_DOUBTED_INPUT.pack(number, len(doubted)), doubted]
    return b"".join(parts)


def decode_stream(data: bytes) -> PointStream:
    """A stream from its bytes.

    Raises:
        CodecError: If they are not those of a stream.
    """
    try:
        heard, forgotten, writers, times = _STREAM.unpack_from(data)
        at = _STREAM.size + 8 * times
        stream = PointStream(heard, [], np.frombuffer(data, "<i8", times, _STREAM.size).tolist(), forgotten)
        for _ in range(writers):
            start, time, size = _LAST_POINT.unpack_from(data, at)
            at += _LAST_POINT.size + size
            stream.writers.append(LatestValue(start, time, decode_histogram(data[at - size : at])))
        while at < len(data):
            number, size = _DOUBTED_INPUT.unpack_from(data, at)
            at += _DOUBTED_INPUT.size + size
            stream.writers[number].doubted = decode_histogram(data[at - size : at])
    except (struct.error, ValueError, IndexError) as error:
        raise CodecError(f"not a stream: {error}") from None
    return stream


def check_stream(stream: PointStream) -> PointStream:
    """A stream, once it is seen that it can be one.

    Raises:
        CodecError: If it holds what nobody can have observed.
    """
    for last in stream.writers:
        for histogram in (last.histogram, last.doubted):
            if histogram is not None:
                check_observed(histogram)
    return stream


def encode_rows(blocks: NDArray[np.int64], rows: NDArray[np.int64], content: RowContent) -> list[bytes]:
    """Blocks of rows as bytes, empty for those without a row.

    Args:
        blocks: Numbers of the blocks, ascending [b].
        rows: Numbers of the rows, ascending [n]; all of them are in the blocks.
        content: Of the rows of all blocks together; `series` is the id that the store gives the series.
    """
    kept = np.zeros(rows.size, _ROW)
    kept["place"] = content.places
    kept["name"] = np.frombuffer(b"".join(content.names), np.uint8).reshape(-1, 16)
    for name in ("scale", *_SIZES, *_NUMBERS, *_REALS):
        kept[name] = content.records[name]
    sizes = content.records["positive_size"] + content.records["negative_size"]
    begins = np.searchsorted(rows, np.append(blocks, blocks[-1:] + 1) * BLOCK).tolist()
    ends = np.concatenate([[0], np.cumsum(sizes)])
    found = []
    for first, last in pairwise(begins):
        counts = content.counts[ends[first] : ends[last]]
        largest = int(counts.max(initial=0))
        code = next(code for code, width in WIDTHS.items() if largest <= np.iinfo(width).max)
        parts = _BLOCK.pack(code, last - first), kept[first:last].tobytes(), counts.astype(WIDTHS[code]).tobytes()
        found.append(b"".join(parts) if first < last else b"")
    return found


def decode_rows(data: bytes) -> RowContent:
    """A block of rows from its bytes.

    Raises:
        CodecError: If they are not those of rows, or hold what nobody can have observed.
    """
    try:
        code, size = _BLOCK.unpack_from(data)
        kept = np.frombuffer(data, _ROW, size, _BLOCK.size)
        counts = np.frombuffer(data, WIDTHS[code], offset=_BLOCK.size + kept.nbytes).astype(np.int64)
    except (struct.error, ValueError, KeyError) as error:
        raise CodecError(f"not rows of streams: {error}") from None
    records, places = np.zeros(size, ROW), kept["place"].astype(np.int64)
    for name in ("scale", *_SIZES, *_NUMBERS, *_REALS):
        records[name] = kept[name]
    sizes = np.column_stack([records[name] for name in _SIZES])
    begins = np.cumsum(sizes) - sizes.reshape(-1)
    fits = size and sizes.sum() == counts.size and sizes.max() <= SIDE and places[-1] < BLOCK
    if not fits or (np.diff(places) <= 0).any() or counts.min(initial=0) < 0 or (records["zero_count"] < 0).any():
        raise CodecError("not rows of streams: their numbers do not fit together")
    totals = np.add.reduceat(np.append(counts, 0), begins).reshape(-1, 2) * (sizes > 0)
    if (totals.sum(axis=1) + records["zero_count"] != records["count"]).any():
        raise CodecError("not rows of streams: their counts do not add up")
    for side in ("positive", "negative"):
        offset, number = records[f"{side}_offset"], records[f"{side}_size"]
        if not can_be_observed(records["scale"], offset, number).all():
            raise CodecError("not rows of streams: buckets are where nothing can be observed")
    return RowContent(records, places, [name.tobytes() for name in kept["name"]], counts)


def encode_evidence(held: HeldEvidence) -> bytes:
    """Encode the evidence against a cell as bytes."""
    test, after = held.test, b"" if held.after is None else encode_histogram(held.after)
    fault = b"" if held.fault is None else _encode_fault(held.fault)
    unsaid = [math.nan if value is None else value for value in (test.above, test.top)]
    sizes = held.log_sums.size, held.failing, held.ended, len(after), len(fault)
    return b"".join(
        (
            _TEST.pack(test.limit, test.low, test.cap, *unsaid),
            _HELD_EVIDENCE.pack(held.peak, held.pane, *sizes),
            held.log_sums.astype("<f8").tobytes(),
            after,
            fault,
        )
    )


def decode_evidence(data: bytes) -> HeldEvidence:
    """Decode the evidence against a cell from its bytes.

    Raises:
        CodecError: If they are not those of evidence.
    """
    try:
        limit, low, cap, above, top = _TEST.unpack_from(data)
        peak, pane, size, failing, ended, rest, more = _HELD_EVIDENCE.unpack_from(data, _TEST.size)
        at = _TEST.size + _HELD_EVIDENCE.size + 8 * size
        sums = np.frombuffer(data, "<f8", size, at - 8 * size).astype(np.float64)
        after = decode_histogram(data[at : at + rest]) if rest else None
        fault = _decode_fault(data[at + rest :]) if more else None
    except (struct.error, ValueError) as error:
        raise CodecError(f"not evidence: {error}") from None
    if not np.isfinite(sums).all() or math.isnan(peak) or not limit > 0.0 or len(data) != at + rest + more:
        raise CodecError("not evidence: a number is missing, or is none")
    said = (None if math.isnan(value) else value for value in (above, top))
    above, top = said
    return HeldEvidence(MeanTest(limit, above, low, cap, top), sums, pane, failing, peak, after, fault, ended)


def _encode_fault(fault: Fault) -> bytes:
    held = [b"" if part is None else encode_histogram(part) for part in (fault.sample, fault.run, fault.recent)]
    wealth, level, cap = fault.recovery or (np.zeros(0), math.nan, math.nan)
    before, after = fault.improved or (math.nan, math.nan)
    numbers = fault.begun, before, after, level, cap
    sizes = fault.recovery is not None, wealth.size, *map(len, held)
    return b"".join((_FAULT.pack(*numbers, *sizes), wealth.astype("<f8").tobytes(), *held))


def _decode_fault(data: bytes) -> Fault:
    begun, before, after, level, cap, watched, bets, *sizes = _FAULT.unpack_from(data)
    at = _FAULT.size + 8 * bets
    wealth = np.frombuffer(data, "<f8", bets, _FAULT.size).astype(np.float64)
    if len(data) != at + sum(sizes) or not np.isfinite(wealth).all() or (watched and not cap > level > 0.0):
        raise ValueError("a number of a fault is missing, or is none")
    ends = np.cumsum([at, *sizes]).tolist()
    sample, run, recent = (decode_histogram(data[begin:end]) if begin < end else None for begin, end in pairwise(ends))
    recovery = Recovery(wealth, level, cap) if watched else None
    return Fault(sample, run, recent, begun, recovery, None if math.isnan(after) else (before, after))
