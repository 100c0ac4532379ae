"""Recordings in .jsonl and .jsonl.gz: one JSON object per sequence, its numbers in lists."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping
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

__all__ = ["read_jsonl", "scalars_of"]


def read_jsonl(path: Path, columns: Mapping[str, str] | None) -> RaggedTable:
    """The objects of a .jsonl file, line by line: only their numbers are kept in memory.

    Raises:
        RecordingError: If a line is not a JSON object with the columns of the first, or a column does not hold numbers.
    """
    source = str(path)
    problems = Problems(source)
    names: dict[str, str] = {}
    rows: dict[str, list[NDArray[Any]]] = {}
    attributes: list[Mapping[str, Scalar]] = []
    unread: dict[str, str] = {}
    lines: list[int] = []
    for line, text in _lines(path):
        try:
            row = read_json_text(text)
        except ValueError as error:
            problems.add(f"line {line}: is not JSON ({error}); every line is one object")
            continue
        if not isinstance(row, dict):
            problems.add(f"line {line}: is {type(row).__name__}, not an object with one sequence")
            continue
        if not names:
            names = _resolved(source, row, columns)
            rows = {role: [] for role in names}
        for role, name in names.items():
            rows[role].append(_numbers(role, name, row.get(name), line, problems))
        given = _attributes(row, names)
        attributes.append(scalars_of(given))
        for name in given.keys() - attributes[-1].keys() - unread.keys():
            if given[name] is not None:
                unread[name] = f"holds {_short(given[name])} in line {line}, not a plain value"
        lines.append(line)
    if not lines:
        problems.add("has no line with a sequence; write one JSON object per line")
    if problems.all():
        raise RecordingError(*problems.all())
    ragged = {role: Ragged.of_rows(parts) for role, parts in rows.items()}
    return RaggedTable(source, ragged, names, tuple(attributes), lambda row: f"line {lines[row]}", unread)


def scalars_of(values: Mapping[str, Any]) -> dict[str, Scalar]:
    """The plain values among them."""
    return {name: value for name, value in values.items() if isinstance(value, str | int | float | bool)}


def _lines(path: Path) -> Iterator[tuple[int, str]]:
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


def _numbers(role: str, name: str, value: Any, line: int, problems: Problems) -> NDArray[Any]:
    if role == "advantages" and isinstance(value, int | float):
        value = [value]
    if isinstance(value, list):
        with suppress(ValueError, TypeError, OverflowError):
            # None becomes NaN, which is told of with its place when the columns are put together
            numbers = np.asarray(value, dtype=np.int64 if role == "token_ids" else np.float64)
            if numbers.ndim == 1 + (role in LOGITS) or not value:
                return numbers
    what = "is missing" if value is None else f"holds {_short(value)}"
    problems.add(f"line {line}: {name}: {what}, not a list of numbers, one per token")
    return np.empty(0)


def _attributes(row: Mapping[str, Any], names: Mapping[str, str]) -> Mapping[str, Any]:
    """What may be an attribute: a row's other columns, and what stands in `attributes`."""
    found = {name: value for name, value in row.items() if name not in names.values()}
    written = found.pop(ATTRIBUTES, None)
    return found | written if isinstance(written, dict) else found


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."
