"""Histograms, streams and evidence as bytes, for the store: little-endian, counts in integers that just hold them."""

from __future__ import annotations

import math
import struct
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kc_otel.judge.fail_evidence import HeldEvidence
from kc_otel.judge.histograms import ExplicitHistogram, Histogram
from kc_otel.judge.mean_test import MeanTest
from kc_otel.judge.point_streams import LatestValue, PointStream
from kc_otel.stats import Buckets, ExponentialHistogram

__all__ = [
    "CodecError",
    "decode_evidence",
    "decode_histogram",
    "decode_stream",
    "encode_evidence",
    "encode_histogram",
    "encode_stream",
]

_EXPONENTIAL: Final = struct.Struct("<BbB4dq q")
_EXPLICIT: Final = struct.Struct("<BB3dI")
_RUN: Final = struct.Struct("<cqI")
_STREAM: Final = struct.Struct("<dqBH")
_TEST: Final = struct.Struct("<5d")
_HELD: Final = struct.Struct("<dqB?I")
_LAST: Final = struct.Struct("<qqI")
_DOUBTED: Final = struct.Struct("<BI")
_WIDTHS: Final[dict[bytes, np.dtype[Any]]] = {
    b"1": np.dtype("<u1"),
    b"2": np.dtype("<u2"),
    b"4": np.dtype("<u4"),
    b"8": np.dtype("<i8"),
}


class CodecError(ValueError):
    """Bytes that no encoder here has written."""


def encode_histogram(histogram: Histogram) -> bytes:
    """A histogram as bytes."""
    if isinstance(histogram, ExplicitHistogram):
        head = _EXPLICIT.pack(
            1, histogram.maximum_observed, histogram.sum, histogram.minimum, histogram.maximum, len(histogram.edges)
        )
        return head + np.array(histogram.edges, dtype="<f8").tobytes() + _encode_run(0, histogram.counts)
    head = _EXPONENTIAL.pack(
        0,
        histogram.scale,
        histogram.maximum_observed,
        histogram.sum,
        histogram.minimum,
        histogram.maximum,
        histogram.zero_threshold,
        histogram.count,
        histogram.zero_count,
    )
    sides = (_encode_run(side.offset, side.counts) for side in (histogram.positive, histogram.negative))
    return head + b"".join(sides)


def decode_histogram(data: bytes) -> Histogram:
    """A histogram from its bytes.

    Raises:
        CodecError: If they are not those of a histogram.
    """
    try:
        return _explicit(data) if data[0] else _exponential(data)
    except (struct.error, IndexError, KeyError, ValueError) as error:
        raise CodecError(f"not a histogram: {error}") from None


def encode_stream(stream: PointStream) -> bytes:
    """A stream as bytes."""
    parts = [_STREAM.pack(stream.heard, stream.forgotten, len(stream.writers), len(stream.times))]
    parts.append(np.array(stream.times, dtype="<i8").tobytes())
    for last in stream.writers:
        content = encode_histogram(last.histogram)
        parts += [_LAST.pack(last.start, last.time, len(content)), content]
    for number, last in enumerate(stream.writers):
        if last.doubted is not None:
            content = encode_histogram(last.doubted)
            parts += [_DOUBTED.pack(number, len(content)), content]
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


def _exponential(data: bytes) -> ExponentialHistogram:
    _, scale, observed, total, minimum, maximum, threshold, count, zero = _EXPONENTIAL.unpack_from(data)
    positive, at = _decode_run(data, _EXPONENTIAL.size)
    negative, _ = _decode_run(data, at)
    return ExponentialHistogram(
        scale=scale,
        count=count,
        sum=total,
        zero_count=zero,
        positive=positive,
        negative=negative,
        minimum=minimum,
        maximum=maximum,
        zero_threshold=threshold,
        maximum_observed=bool(observed),
    )


def _explicit(data: bytes) -> ExplicitHistogram:
    _, observed, total, minimum, maximum, size = _EXPLICIT.unpack_from(data)
    edges = tuple(np.frombuffer(data, "<f8", size, _EXPLICIT.size).tolist())
    run, _ = _decode_run(data, _EXPLICIT.size + 8 * size)
    return ExplicitHistogram(edges, run.counts, total, minimum, maximum, bool(observed))


def _encode_run(offset: int, counts: NDArray[np.int64]) -> bytes:
    largest = int(counts.max()) if counts.size else 0
    width = b"1" if largest < 2**8 else b"2" if largest < 2**16 else b"4" if largest < 2**32 else b"8"
    return _RUN.pack(width, offset, counts.size) + counts.astype(_WIDTHS[width]).tobytes()


def _decode_run(data: bytes, at: int) -> tuple[Buckets, int]:
    width, offset, size = _RUN.unpack_from(data, at)
    dtype = _WIDTHS[width]
    start = at + _RUN.size
    counts = np.frombuffer(data, dtype, size, start).astype(np.int64)
    return Buckets(offset, counts), start + size * dtype.itemsize
