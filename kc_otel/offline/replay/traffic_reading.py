"""Recordings from files: the Collector's file exporter in both its formats, and the log that `kc-otel serve` keeps.

| content                                   | how it is told from the others        |
| ----------------------------------------- | ------------------------------------- |
| length and message, in protobuf or JSON   | begins with a length up to MOST_BYTES |
| OTLP/JSON, one request per line           | begins with anything else             |
| either of them, the file gzip or zstd     | their magic numbers                   |
| messages that are zstd one by one         | the same, behind the length           |

What is damaged is skipped and named; the rest is used. A line is damaged by itself. Where a length is wrong nothing
says where the next message begins, so the rest of that file is lost. A file in which nothing can be read is refused.
A folder is a log: one recording, in as many files as there are segments.
"""

from __future__ import annotations

import gzip
import heapq
import io
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import IO, Any, Final

from kc_otel._extras import MissingExtraError, extra
from kc_otel.judge.otlp.decode import from_json, from_protobuf
from kc_otel.judge.otlp.request_errors import BadRequestError
from kc_otel.judge.otlp.signals import METRICS
from kc_otel.offline.replay.traffic_entries import (
    EVALUATED,
    MOST_BYTES,
    OWN_FILES,
    TrafficEntry,
    entry_of,
    unsealed,
)

__all__ = ["TrafficFileError", "evaluations_recorded", "read_recordings", "recorded_files"]

_GZIP: Final = b"\x1f\x8b"
_ZSTD: Final = b"\x28\xb5\x2f\xfd"
_LENGTH: Final = struct.Struct(">I")
_BUFFER: Final = 256 * 1024
"""Bytes that are read at once: a message has some ten thousand."""
_BROKEN: Final = (OSError, EOFError, ValueError, zlib.error)
"""What reading a damaged file raises; ValueError is pyarrow's."""
_SAID: Final = 300
"""Characters of what a parser says."""
_LOOKED_AT: Final = 100
"""Entries of a file that are looked at to see whether it says when the evaluator judged."""

_Message = tuple[str, bytes, bool]
"""File and line or message, its bytes, and whether it is JSON."""


class TrafficFileError(Exception):
    """A recording that cannot be used; the message says what to do."""


def read_recordings(paths: Sequence[Path], damage: list[str]) -> Iterator[TrafficEntry]:
    """The entries of all files in the order of their times; of one file in the file's own order.

    Args:
        paths: Recordings, in any order: folders of the evaluator's log, and files.
        damage: Takes a sentence for everything that had to be left out, with file and line or message.

    Raises:
        TrafficFileError: If a file cannot be read or is no recording.
    """
    return heapq.merge(*(_entries(path, damage) for path in paths), key=lambda entry: entry.at)


def evaluations_recorded(paths: Iterable[Path]) -> bool:
    """Whether every recording says when the evaluator judged.

    Raises:
        TrafficFileError: If a file cannot be read or is no recording.
    """
    return all(any(entry.is_evaluation for entry in islice(_entries(path, []), _LOOKED_AT)) for path in paths)


def recorded_files(path: Path) -> list[Path]:
    """The file, or the segments of a log's folder, oldest first.

    Raises:
        TrafficFileError: If a folder cannot be read, or has none.
    """
    if not path.is_dir():
        return [path]
    try:
        segments = sorted(file for file in path.iterdir() if file.suffix == ".otlp")
    except OSError as error:
        raise TrafficFileError(f"{path}: cannot be read ({error.strerror or error})") from None
    if not segments:
        raise TrafficFileError(f"{path}: has no segments of a log (*.otlp); give the folder STATE-log of an evaluator")
    return segments


def _entries(path: Path, damage: list[str]) -> Iterator[TrafficEntry]:
    for file in recorded_files(path):
        yield from _entries_of(file, damage)


def _entries_of(path: Path, damage: list[str]) -> Iterator[TrafficEntry]:
    try:
        with path.open("rb", buffering=_BUFFER) as raw, _plain(path, raw) as file:
            first = file.read(1)
            if first and first[0] <= MOST_BYTES >> 24:
                yield from _of(_frames(path, first, file, damage), damage)
            elif first:
                yield from _refuse_noise(path, _of(_lines(path, first, file, damage), damage), damage)
    except _BROKEN as error:
        raise TrafficFileError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None


def _plain(path: Path, raw: IO[bytes]) -> IO[bytes]:
    """The file without its compression."""
    magic = raw.read(len(_ZSTD))
    raw.seek(0)
    if magic.startswith(_GZIP):
        return io.BufferedReader(gzip.GzipFile(fileobj=raw))
    return io.BufferedReader(_zstd(path, raw)) if magic == _ZSTD else raw


def _refuse_noise(path: Path, entries: Iterator[TrafficEntry], damage: list[str]) -> Iterator[TrafficEntry]:
    """The entries of a file that has one among its first lines; every other text is lines too."""
    before = len(damage)
    first = next(entries, None)
    if first is None and len(damage) > before:
        del damage[before:]
        raise TrafficFileError(
            f"{path}: is no recording; give what `kc-otel serve` or the Collector's file exporter wrote"
        )
    if first is not None:
        yield first
    yield from entries


def _of(messages: Iterable[_Message], damage: list[str]) -> Iterator[TrafficEntry]:
    for where, message, is_json in messages:

        def damaged(said: str, where: str = where) -> None:
            damage.append(f"{where}: {said[:_SAID]}")

        if not is_json and (sealed := unsealed(message)) is not None:
            what, at, body = sealed
            if what == EVALUATED:
                yield TrafficEntry(at)
            elif body:
                yield TrafficEntry(at, body=body, damaged=damaged)
            continue
        try:
            request: Any = (from_json if is_json else from_protobuf)(message, METRICS, OWN_FILES)
        except BadRequestError as error:
            damaged(str(error))
            continue
        if (entry := entry_of(request)) is not None:
            yield entry


def _lines(path: Path, first: bytes, file: IO[bytes], damage: list[str]) -> Iterator[_Message]:
    number = 0
    try:
        for number, line in enumerate(file, 1):
            whole = (first + line if number == 1 else line).strip()
            if whole:
                yield f"{path}:{number}", whole, True
    except _BROKEN as error:
        damage.append(f"{path}:{number + 1}: the file breaks here ({error}); what follows is lost")


def _frames(path: Path, first: bytes, file: IO[bytes], damage: list[str]) -> Iterator[_Message]:
    number, head = 1, first
    while True:
        where = f"{path}: message {number}"
        try:
            head += file.read(_LENGTH.size - len(head))
            if not head:
                return
            length = _LENGTH.unpack(head)[0] if len(head) == _LENGTH.size else 0
            if length > MOST_BYTES:
                damage.append(f"{where}: a length of {length:,} bytes is none; what follows is lost")
                return
            message = file.read(length)
            if len(head) < _LENGTH.size or len(message) < length:
                damage.append(f"{where}: the file ends in the middle of it")
                return
        except _BROKEN as error:
            damage.append(f"{where}: the file breaks here ({error}); what follows is lost")
            return
        number, head = number + 1, b""
        try:
            plain = _zstd(path, io.BytesIO(message)).read(MOST_BYTES) if message.startswith(_ZSTD) else message
        except _BROKEN as error:
            damage.append(f"{where}: is not zstd ({error})")
            continue
        yield where, plain, plain.startswith(b"{")


def _zstd(path: Path, raw: IO[bytes]) -> Any:
    try:
        with extra("parquet", "zstd"):
            import pyarrow as pa  # noqa: PLC0415 - Python has no zstd of its own before 3.14
    except MissingExtraError as error:
        raise TrafficFileError(f"{path}: {error}; or decompress it with `zstd -d`") from None
    return pa.CompressedInputStream(raw, "zstd")
