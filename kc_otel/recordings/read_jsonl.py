"""Recordings in rows, one per sequence with its numbers in lists, such as .jsonl and .jsonl.gz."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kc_otel.contract.json_text import read_json_text
from kc_otel.contract.slices import Scalar
from kc_otel.recordings.columns import ATTRIBUTES, LOGITS, resolve
from kc_otel.recordings.recording import RecordingError
from kc_otel.recordings.rows import Problems, Ragged, RaggedTable


def read_jsonl(path: Path, columns: Mapping[str, str] | None) -> RaggedTable:
    """Read the objects of a .jsonl file, line by line; everything that is wrong is one RecordingError."""
    problems = Problems(str(path))

    def rows() -> Iterator[tuple[str, Mapping[str, Any]]]:
        for number, text in lines(path):
            try:
                row = read_json_text(text)
            except ValueError as error:
                problems.add(f"line {number}: is not JSON ({error}); every line is one object")
                continue
            if isinstance(row, dict):
                yield f"line {number}", row
            else:
                problems.add(f"line {number}: is {type(row).__name__}, not an object with one sequence")

    return table_of_rows(rows(), columns, problems)


def table_of_rows(
    rows: Iterable[tuple[str, Mapping[str, Any]]], columns: Mapping[str, str] | None, problems: Problems
) -> RaggedTable:
    """Put rows into columns, one after the other: only their numbers are kept in memory.

    Rows are a place, for messages, and values by column, of which the first has every one; `columns` are names by role.

    Raises:
        RecordingError: If anything is wrong.
    """
    names: dict[str, str] = {}
    parts: dict[str, list[NDArray[Any]]] = {}
    attributes: list[Mapping[str, Scalar]] = []
    unread: dict[str, str] = {}
    places: list[str] = []
    for place, row in rows:
        if not names:
            names = _resolved(problems.source, row, columns)
            parts = {role: [] for role in names}
        for role, name in names.items():
            parts[role].append(_numbers(role, name, row.get(name), place, problems))
        given = _attributes(row, names)
        attributes.append(scalars_of(given))
        for name in given.keys() - attributes[-1].keys() - unread.keys():
            if given[name] is not None:
                unread[name] = f"holds {_short(given[name])} in {place}, not a plain value"
        places.append(place)
    if not places:
        problems.add("has no sequence; write one object or row for each")
    if problems.all():
        raise RecordingError(*problems.all())
    ragged = {role: Ragged.of_rows(arrays) for role, arrays in parts.items()}
    return RaggedTable(problems.source, ragged, names, tuple(attributes), places.__getitem__, unread)


def first_record(path: Path) -> dict[str, Any] | None:
    """Return the first line's object; None where there is none, which `read_jsonl` then says."""
    with suppress(RecordingError):
        return next((record for _, record in records(path)), None)
    return None


def records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each line's object, with its place for messages, one at a time: a file's size does not matter.

    Raises:
        RecordingError: If a line is no JSON object, or the file cannot be read.
    """
    for number, line in lines(path):
        place = f"{path}:{number}"
        try:
            record = read_json_text(line)
        except ValueError as error:
            raise RecordingError(f"{place}: is not JSON ({error}); is the file still being written?") from None
        if not isinstance(record, dict):
            raise RecordingError(f"{place}: is not a JSON object but {type(record).__name__}")
        yield place, record


def scalars_of(values: Mapping[str, Any]) -> dict[str, Scalar]:
    """The plain values among them."""
    return {name: value for name, value in values.items() if isinstance(value, str | int | float | bool)}


def lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a file, packed or not, that hold anything, with their numbers.

    Raises:
        RecordingError: If it cannot be read.
    """
    packed = path.suffix == ".gz"
    try:
        with gzip.open(path, "rt", encoding="utf-8") if packed else path.open(encoding="utf-8") as file:
            for line, text in enumerate(file, 1):
                if text.strip():
                    yield line, text
    except OSError as error:
        raise RecordingError(f"{path}: cannot be read ({error.strerror or error})") from None
    except (EOFError, UnicodeDecodeError) as error:
        raise RecordingError(f"{path}: cannot be read ({error}); is it cut off, or not UTF-8?") from None


def _resolved(source: str, row: Mapping[str, Any], columns: Mapping[str, str] | None) -> dict[str, str]:
    names = resolve(source, row, columns)
    # Text under a name of token ids, and lengths beside lists that have theirs, are attributes.
    if isinstance(row.get(names.get("token_ids", "")), str):
        del names["token_ids"]
    names.pop("lengths", None)
    return names


def _numbers(role: str, name: str, value: Any, place: str, problems: Problems) -> NDArray[Any]:
    if role == "advantages" and isinstance(value, int | float):
        value = [value]
    if isinstance(value, list):
        with suppress(ValueError, TypeError, OverflowError):
            # None becomes NaN, which is told of with its place when the columns are put together
            numbers = np.asarray(value, dtype=np.int64 if role == "token_ids" else np.float64)
            if numbers.ndim == 1 + (role in LOGITS) or not value:
                return numbers
    what = "is missing" if value is None else f"holds {_short(value)}"
    problems.add(f"{place}: {name}: {what}, not a list of numbers, one per token")
    return np.empty(0)


def _attributes(row: Mapping[str, Any], names: Mapping[str, str]) -> Mapping[str, Any]:
    """Return a row's attributes: its other columns, and the content of `attributes`."""
    found = {name: value for name, value in row.items() if name not in names.values()}
    written = found.pop(ATTRIBUTES, None)
    if isinstance(written, str):  # as a column of .parquet has it
        written = read_json_text(written)
    return found | written if isinstance(written, dict) else found


def _short(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 40 else text[:37] + "..."
