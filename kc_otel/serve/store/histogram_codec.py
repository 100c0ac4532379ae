"""Histograms as bytes, for the store: little-endian, counts in integers that just hold them."""

from __future__ import annotations

import struct
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kc_otel.judge.histograms import ExplicitHistogram, Histogram
from kc_otel.stats import Buckets, ExponentialHistogram
from kc_otel.stats.histogram_columns import HistogramColumns, SideColumns

_EXPONENTIAL: Final = struct.Struct("<BbB4dqq")
_EXPONENTIAL_DTYPE: Final = np.dtype(
    [
        ("kind", "u1"),
        ("scale", "i1"),
        ("observed", "u1"),
        ("sum", "<f8"),
        ("minimum", "<f8"),
        ("maximum", "<f8"),
        ("zero_threshold", "<f8"),
        ("count", "<i8"),
        ("zero_count", "<i8"),
    ]
)
"""`_EXPONENTIAL`, of many."""
_SCALES: Final = range(-16, 21)
_LEAST_EXPONENT, _MOST_EXPONENT = -1080.0, 512.0
"""Binary exponents of what `points` lets be observed; coarser buckets reach beyond by less than one of them."""
_EXPLICIT: Final = struct.Struct("<BB3dI")
_RUN: Final = struct.Struct("<cqI")
_RUN_DTYPE: Final = np.dtype([("width", "S1"), ("offset", "<i8"), ("size", "<u4")])
"""`_RUN`, of many."""
WIDTHS: Final[dict[bytes, np.dtype[Any]]] = {
    b"1": np.dtype("<u1"),
    b"2": np.dtype("<u2"),
    b"4": np.dtype("<u4"),
    b"8": np.dtype("<i8"),
}
_WIDTH_CODES: Final = np.array([*WIDTHS])
_WIDTH_DTYPES: Final = [*WIDTHS.values()]
_WIDTH_LIMITS: Final = np.array([2**8, 2**16, 2**32])
"""Counts from which on the next width is needed."""


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


def encode_histograms(columns: HistogramColumns) -> list[bytes]:
    """Exponential histograms as bytes, those of `encode_histogram` of each."""
    heads = np.zeros(len(columns), _EXPONENTIAL_DTYPE)
    for name, values in (
        ("scale", columns.scale),
        ("observed", columns.observed),
        ("sum", columns.sum),
        ("minimum", columns.minimum),
        ("maximum", columns.maximum),
        ("zero_threshold", columns.zero_threshold),
        ("count", columns.count),
        ("zero_count", columns.zero_count),
    ):
        heads[name] = values
    sides = zip(_rows(heads), _encode_runs(columns.positive), _encode_runs(columns.negative), strict=True)
    return [b"".join(parts) for parts in sides]


def decode_histogram(data: bytes) -> Histogram:
    """A histogram from its bytes.

    Raises:
        CodecError: If they are not those of a histogram.
    """
    try:
        return _explicit(data) if data[0] else _exponential(data)
    except (struct.error, IndexError, KeyError, ValueError) as error:
        raise CodecError(f"not a histogram: {error}") from None


def check_observed(histogram: Histogram) -> None:
    """See that nothing is in buckets where nothing can have been observed.

    Added up with others, they would be an array of every bucket between.

    Raises:
        CodecError: If something is.
    """
    if not isinstance(histogram, ExponentialHistogram):
        return
    for side in (histogram.positive, histogram.negative):
        if not can_be_observed(*(np.array(number) for number in (histogram.scale, side.offset, side.counts.size))):
            raise CodecError(f"not a histogram: bucket {side.offset} at scale {histogram.scale}")


def can_be_observed(scale: NDArray[np.int64], offset: NDArray[np.int64], size: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return whether something can be in so many buckets from an offset on, of each."""
    base = 2.0**-scale
    within = (_LEAST_EXPONENT - base <= offset * base) & ((offset + size) * base <= _MOST_EXPONENT + base)
    found: NDArray[np.bool_] = (_SCALES.start <= scale) & (scale < _SCALES.stop) & ((size == 0) | within)
    return found


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
    return _RUN.pack(width, offset, counts.size) + counts.astype(WIDTHS[width]).tobytes()


def _encode_runs(side: SideColumns) -> list[bytes]:
    """`_encode_run` of each."""
    largest, used = np.zeros(side.size.size, np.int64), np.flatnonzero(side.size)
    if used.size:
        largest[used] = np.maximum.reduceat(side.counts, side.begins[used])
    kind = np.searchsorted(_WIDTH_LIMITS, largest, side="right")
    heads = np.zeros(kind.size, _RUN_DTYPE)
    heads["width"], heads["size"] = _WIDTH_CODES[kind], side.size
    heads["offset"] = np.where(side.size > 0, side.offset, 0)
    whole = {number: side.counts.astype(_WIDTH_DTYPES[number]).tobytes() for number in np.unique(kind).tolist()}
    width = np.array([dtype.itemsize for dtype in _WIDTH_DTYPES])[kind]
    begins = side.begins * width
    places = zip(_rows(heads), kind.tolist(), begins.tolist(), (begins + side.size * width).tolist(), strict=True)
    return [head + whole[number][begin:end] for head, number, begin, end in places]


def _rows(records: NDArray[Any]) -> list[bytes]:
    """The bytes of each record."""
    data, size = records.tobytes(), records.dtype.itemsize
    return [data[at : at + size] for at in range(0, len(data), size)]


def _decode_run(data: bytes, at: int) -> tuple[Buckets, int]:
    width, offset, size = _RUN.unpack_from(data, at)
    dtype = WIDTHS[width]
    start = at + _RUN.size
    counts = np.frombuffer(data, dtype, size, start).astype(np.int64)
    return Buckets(offset, counts), start + size * dtype.itemsize
