"""Streams and evidence as bytes, for the store; histograms in them as `histogram_codec` has them."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import numpy as np

from kc_otel.judge.fail_evidence import HeldEvidence
from kc_otel.judge.fault_end import Fault, Recovery
from kc_otel.judge.mean_test import MeanTest
from kc_otel.judge.point_streams import LatestValue, PointStream
from kc_otel.serve.store.histogram_codec import (
    CodecError,
    check_observed,
    decode_histogram,
    encode_histogram,
    encode_histograms,
)
from kc_otel.stats import ExponentialHistogram
from kc_otel.stats.histogram_columns import HistogramColumns

_STREAM: Final = struct.Struct("<dqBH")
_TEST: Final = struct.Struct("<5d")
_HELD_EVIDENCE: Final = struct.Struct("<dqB??II")
_FAULT: Final = struct.Struct("<I4d?BIII")
_LAST_POINT: Final = struct.Struct("<qqI")
_DOUBTED_INPUT: Final = struct.Struct("<BI")


def encode_stream(stream: PointStream) -> bytes:
    """A stream as bytes."""
    return _stream(stream, [encode_histogram(last.histogram) for last in stream.writers])


def encode_streams(streams: Sequence[PointStream]) -> list[bytes]:
    """Many streams as bytes, those of `encode_stream`."""
    latest = [last.histogram for stream in streams for last in stream.writers]
    many = iter(
        encode_histograms(HistogramColumns.of([last for last in latest if isinstance(last, ExponentialHistogram)]))
    )
    contents = iter(
        [next(many) if isinstance(last, ExponentialHistogram) else encode_histogram(last) for last in latest]
    )
    return [_stream(stream, [next(contents) for _ in stream.writers]) for stream in streams]


def _stream(stream: PointStream, contents: Sequence[bytes]) -> bytes:
    """A stream whose writers' latest values are bytes already."""
    parts = [_STREAM.pack(stream.heard, stream.forgotten, len(stream.writers), len(stream.times))]
    parts.append(np.array(stream.times, dtype="<i8").tobytes())
    for last, content in zip(stream.writers, contents, strict=True):
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
