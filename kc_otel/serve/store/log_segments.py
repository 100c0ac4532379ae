"""What a segment of the write-ahead log holds: whole messages, also those that follow on damage.

Where a message begins is known from where the one before it ends. After damage it is not, and what lies there may have
been sent by anybody: a beginning is any length that leads to the mark of an end, and is believed if the checksum fits.
All of them are looked for at once; checksums are computed over no more than `_CHECKED` bytes a segment.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kc_otel.offline.replay.traffic_entries import SEAL_BYTES, is_sealed, sealed_frame

__all__ = ["LogRecord", "Segment"]

_LENGTH: Final = struct.Struct(">I")
_SEAL: Final = re.compile(re.escape(sealed_frame(b"", 0.0)[_LENGTH.size :][:12]))
"""How every mark begins."""
_CHECKED: Final = 2 * 1024**3
"""Bytes whose checksums are computed after damage: seconds."""
_EACH: Final = 4 * 1024
"""Bytes that take as long as the checksum of nothing."""
_CHUNK: Final = 1024**2


@dataclass(frozen=True, slots=True)
class LogRecord:
    """A message of the log.

    Attributes:
        start: Position of its first byte.
        end: Position after it.
        message: The ExportMetricsServiceRequest as it arrived, serialized, with its mark.
    """

    start: int
    end: int
    message: bytes


class Segment:
    """A segment's content.

    Args:
        content: All of it.
        start: Position of its first byte.
        checked: Bytes whose checksums are computed at most in search of messages after damage.

    Attributes:
        given_up: Whether the search came to that end: there may be whole messages after the last that was found.
    """

    def __init__(self, content: bytes, start: int, checked: int = _CHECKED) -> None:
        self._content, self._start, self._left = content, start, checked
        self._ends: NDArray[np.bool_] | None = None
        self.given_up = False

    def records(self) -> Iterator[LogRecord]:
        """The messages that are whole, in their order."""
        at: int | None = 0
        while at is not None and at < len(self._content):
            if end := self._end_of(at):
                yield LogRecord(self._start + at, self._start + end, self._content[at + _LENGTH.size : end])
                at = end
            else:
                at = self._next(at)

    def _end_of(self, at: int) -> int:
        """Where the message that begins here ends; 0 where none does."""
        if at + _LENGTH.size > len(self._content):
            return 0
        end: int = at + _LENGTH.size + _LENGTH.unpack_from(self._content, at)[0]
        return end if end <= len(self._content) and is_sealed(self._content[at + _LENGTH.size : end]) else 0

    def _next(self, at: int) -> int | None:
        """Where the next whole message begins, after damage."""
        for first in range(at + 1, len(self._content) - SEAL_BYTES, _CHUNK):
            begins, lengths = self._candidates(first)
            for begin, length in zip(begins.tolist(), lengths.tolist(), strict=True):
                self._left -= length + _EACH
                if self._left < 0:
                    self.given_up = True
                    return None
                if self._end_of(begin):
                    return int(begin)
        return None

    def _candidates(self, first: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Of a chunk's positions those whose length leads to the end of a mark, and the lengths."""
        content = np.frombuffer(self._content, np.uint8)
        last = min(first + _CHUNK, content.size - _LENGTH.size + 1)
        lengths = np.zeros(last - first, np.int64)
        for byte in range(_LENGTH.size):
            lengths = (lengths << 8) | content[first + byte : last + byte]
        ends = np.arange(first, last) + _LENGTH.size + lengths
        found = np.flatnonzero((lengths >= SEAL_BYTES) & (ends <= content.size))
        found = found[self._ends_of_marks()[ends[found]]]
        return first + found, lengths[found]

    def _ends_of_marks(self) -> NDArray[np.bool_]:
        """Of every position whether a mark ends there [size + 1]."""
        if self._ends is None:
            size = len(self._content)
            ends = np.fromiter((mark.start() for mark in _SEAL.finditer(self._content)), np.int64) + SEAL_BYTES
            self._ends = np.zeros(size + 1, np.bool_)
            self._ends[ends[ends <= size]] = True
        return self._ends
