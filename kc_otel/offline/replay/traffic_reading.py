"""Recordings from files of `kc-otel serve --record` and of the Collector's file exporter (`format: proto`).

A message that is damaged is skipped and named. Where a length is wrong, nothing says where the next message begins, so
the rest of that file is lost.
"""

from __future__ import annotations

import heapq
import struct
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import IO, Final

from kc_otel.judge.otlp.decode import from_protobuf
from kc_otel.judge.otlp.request_errors import BadRequestError
from kc_otel.judge.otlp.signals import METRICS
from kc_otel.judge.otlp.traffic_entries import EVALUATED, MOST_BYTES, OWN_FILES, TrafficEntry, entry_of, unmarked

_LENGTH: Final = struct.Struct(">I")
_BUFFER_BYTES: Final = 256 * 1024
"""Bytes that are read at once: a message has some ten thousand."""
_MAX_QUOTED_CHARACTERS: Final = 300
"""Characters of what a parser says."""
_HEAD_ENTRIES: Final = 100
"""Entries of a file that are looked at to see whether it says when the evaluator judged."""


class TrafficFileError(Exception):
    """A recording that cannot be used; the message says what to do."""


def read_recordings(paths: Sequence[Path], damage: list[str]) -> Iterator[TrafficEntry]:
    """The entries of all files and folders by time; `damage` takes a sentence for everything that was left out."""
    return heapq.merge(*(_entries(path, damage) for path in paths), key=lambda entry: entry.at)


def evaluations_recorded(paths: Iterable[Path]) -> bool:
    """Return True if every recording states when the evaluator judged."""
    return all(any(entry.is_evaluation for entry in islice(_entries(path, []), _HEAD_ENTRIES)) for path in paths)


def recorded_files(path: Path) -> list[Path]:
    """The file, or the files of a recording's folder, oldest first."""
    if not path.is_dir():
        return [path]
    try:
        files = sorted(file for file in path.iterdir() if file.suffix == ".otlp")
    except OSError as error:
        raise TrafficFileError(f"{path}: cannot be read ({error.strerror or error})") from None
    if not files:
        raise TrafficFileError(f"{path}: has no recording (*.otlp); give the folder STATE-recording of an evaluator")
    return files


def _entries(path: Path, damage: list[str]) -> Iterator[TrafficEntry]:
    for file in recorded_files(path):
        yield from _entries_of(file, damage)


def _entries_of(path: Path, damage: list[str]) -> Iterator[TrafficEntry]:
    try:
        with path.open("rb", buffering=_BUFFER_BYTES) as file:
            first = file.read(1)
            if first and first[0] > MOST_BYTES >> 24:
                raise TrafficFileError(
                    f"{path}: is no recording; give what `kc-otel serve --record` wrote, or the Collector's file "
                    "exporter with `format: proto` and no compression"
                )
            yield from _of(_messages(path, first, file, damage), damage)
    except OSError as error:
        raise TrafficFileError(f"{path}: cannot be read ({error.strerror or error})") from None


def _of(messages: Iterable[tuple[str, bytes]], damage: list[str]) -> Iterator[TrafficEntry]:
    for where, message in messages:

        def damaged(said: str, where: str = where) -> None:
            damage.append(f"{where}: {said[:_MAX_QUOTED_CHARACTERS]}")

        if (marked := unmarked(message)) is not None:
            what, at, body = marked
            if what == EVALUATED:
                yield TrafficEntry(at)
            elif body:
                yield TrafficEntry(at, body=body, damaged=damaged)
            continue
        try:
            request = from_protobuf(message, METRICS, OWN_FILES)
        except BadRequestError as error:
            damaged(str(error))
            continue
        if (entry := entry_of(request)) is not None:
            yield entry


def _messages(path: Path, first: bytes, file: IO[bytes], damage: list[str]) -> Iterator[tuple[str, bytes]]:
    number, head = 1, first
    while True:
        where = f"{path}: message {number}"
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
        yield where, message
        number, head = number + 1, b""
