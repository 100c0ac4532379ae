"""Limits on size, before and after decompression."""

from __future__ import annotations

import gzip
import tracemalloc
import zlib

import pytest

from kc_otel.judge.otlp.request_errors import TooLargeError
from kc_otel.judge.otlp.request_limits import Limits, inflate

LIMITS = Limits(max_bytes=100_000)


@pytest.mark.parametrize(
    ("encoding", "compress"),
    [("", bytes), ("identity", bytes), ("gzip", gzip.compress), (" GZip ", gzip.compress), ("deflate", zlib.compress)],
)
def test_bodies_up_to_the_limit_are_inflated(encoding: str, compress: object) -> None:
    """Exactly the limit is accepted, one byte more is not."""
    assert callable(compress)
    assert inflate(compress(b"x" * 100_000), encoding, LIMITS) == b"x" * 100_000
    with pytest.raises(TooLargeError, match="100000 bytes; send smaller batches"):
        inflate(compress(b"x" * 100_001), encoding, LIMITS)


@pytest.mark.slow
def test_bombs_are_refused_while_inflating() -> None:
    """A body that would inflate to a gigabyte costs about the limit, not a gigabyte."""
    layer = zlib.compressobj(9, zlib.DEFLATED, 16 + zlib.MAX_WBITS)
    bomb = b"".join(layer.compress(bytes(1 << 20)) for _ in range(256)) + layer.flush()
    tracemalloc.start()
    with pytest.raises(TooLargeError):
        inflate(bomb, "gzip", LIMITS)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2_000_000


def test_members_of_a_gzip_body_share_the_limit() -> None:
    """Several gzip members are one body, and one limit."""
    part = gzip.compress(b"x" * 30_000, mtime=0)
    assert inflate(part * 3, "gzip", LIMITS) == b"x" * 90_000
    with pytest.raises(TooLargeError):
        inflate(part * 4, "gzip", LIMITS)


@pytest.mark.parametrize("field", ["max_bytes", "max_items", "retry_after", "read_timeout"])
def test_limits_are_positive(field: str) -> None:
    """A limit of nothing is a mistake."""
    with pytest.raises(ValueError, match=f"{field}: 0 must be more than 0"):
        Limits(**{field: 0})
