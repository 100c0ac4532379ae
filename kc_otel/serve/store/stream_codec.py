"""Streams and evidence as bytes, for the store; histograms in them as `histogram_codec` has them."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Final

import numpy as np

from kc_otel.judge.fail_evidence import HeldEvidence
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

__all__ = ["check_stream", "decode_evidence", "decode_stream", "encode_evidence", "encode_stream", "encode_streams"]

_STREAM: Final = struct.Struct("<dqBH")
_TEST: Final = struct.Struct("<5d")
_HELD: Final = struct.Struct("<dqB?I")
_LAST: Final = struct.Struct("<qqI")
_DOUBTED: Final = struct.Struct("<BI")


def encode_stream(stream: PointStream) -> bytes:
    """A stream as bytes."""
    return _stream(stream, [encode_histogram(last.histogram) for last in stream.writers])


def encode_streams(streams: Sequence[PointStream]) -> list[bytes]:
    """Many streams as bytes, those of `encode_stream`."""
    latest = [last.histogram for stream in streams for last in stream.writers]
    many = iter(
        encode_histograms(HistogramColumns.of([one for one in latest if isinstance(one, ExponentialHistogram)]))
    )
    contents = iter([next(many) if isinstance(one, ExponentialHistogram) else encode_histogram(one) for one in latest])
    return [_stream(stream, [next(contents) for _ in stream.writers]) for stream in streams]


def _stream(stream: PointStream, contents: Sequence[bytes]) -> bytes:
    """A stream whose writers' latest values are bytes already."""
    parts = [_STREAM.pack(stream.heard, stream.forgotten, len(stream.writers), len(stream.times))]
    parts.append(np.array(stream.times, dtype="<i8").tobytes())
    for last, content in zip(stream.writers, contents, strict=True):
        parts += [_LAST.pack(last.start, last.time, len(content)), content]
    for number, last in enumerate(stream.writers):
        if last.doubted is not None:
            doubted = encode_histogram(last.doubted)
            parts += [_DOUBTED.pack(number, len(doubted)), doubted]
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
            start, time, size = _LAST.unpack_from(data, at)
            at += _LAST.size + size
            stream.writers.append(LatestValue(start, time, decode_histogram(data[at - size : at])))
        while at < len(data):
            number, size = _DOUBTED.unpack_from(data, at)
            at += _DOUBTED.size + size
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
    """What is held against a cell as bytes."""
    test, after = held.test, b"" if held.after is None else encode_histogram(held.after)
    unsaid = [math.nan if value is None else value for value in (test.above, test.top)]
    return b"".join(
        (
            _TEST.pack(test.limit, test.low, test.cap, *unsaid),
            _HELD.pack(held.peak, held.pane, held.log_sums.size, held.failing, len(after)),
            held.log_sums.astype("<f8").tobytes(),
            after,
        )
    )


def decode_evidence(data: bytes) -> HeldEvidence:
    """What is held against a cell from its bytes.

    Raises:
        CodecError: If they are not those of evidence.
    """
    try:
        limit, low, cap, above, top = _TEST.unpack_from(data)
        peak, pane, size, failing, rest = _HELD.unpack_from(data, _TEST.size)
        at = _TEST.size + _HELD.size + 8 * size
        sums = np.frombuffer(data, "<f8", size, at - 8 * size).astype(np.float64)
        after = decode_histogram(data[at : at + rest]) if rest else None
    except (struct.error, ValueError) as error:
        raise CodecError(f"not evidence: {error}") from None
    if not np.isfinite(sums).all() or math.isnan(peak) or not limit > 0.0 or len(data) != at + rest:
        raise CodecError("not evidence: a number is missing, or is none")
    said = (None if math.isnan(value) else value for value in (above, top))
    above, top = said
    return HeldEvidence(MeanTest(limit, above, low, cap, top), sums, pane, failing, peak, after)
