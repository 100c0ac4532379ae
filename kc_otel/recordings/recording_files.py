"""Recordings in files: reading whatever wrote them, and writing the layout that is read back number by number."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from kc_otel.contract.slices import Scalar
from kc_otel.recordings.assemble import assembled
from kc_otel.recordings.read_table import (
    ALIASES,
    ATTRIBUTES,
    LOGITS,
    LinesRead,
    Problems,
    RaggedTable,
    arrow,
    read_jsonl,
    read_npz,
    read_parquet,
)
from kc_otel.recordings.recording import GROUPS, Recording, RecordingError

Format = Literal["npz", "jsonl", "parquet"]

_READERS: Final[Mapping[Format, Callable[[Path, Mapping[str, str] | None], RaggedTable]]] = {
    "npz": read_npz,
    "jsonl": read_jsonl,
    "parquet": read_parquet,
}

_PER_TOKEN: Final = ("train", "inference", "token_ids", "advantages", "train_kept", "versions")
_ENDINGS: Final[Mapping[str, Format]] = {".npz": "npz", ".jsonl": "jsonl", ".jsonl.gz": "jsonl", ".parquet": "parquet"}


def load_recording(path: str | Path, *, columns: Mapping[str, str] | None = None) -> Recording:
    """Log-probabilities of both kernels: from a recording, or what a trainer wrote, or a folder of it.

    Recordings in .npz are padded arrays [S, T] with a mask or lengths, or packed ones [N] with lengths; a row of .jsonl
    and .parquet is a sequence. `columns` maps roles to column names where `read_table.ALIASES` has none. Both sides are
    renormalised over the mass on what truncation kept, where a file has it. A RecordingError has each kind of fault
    that was found, and how often it occurs.
    """
    where = Path(path)
    if where.is_file() and where.name.lower().endswith((".npz", ".parquet")):
        return load_own(where, columns)
    return _trainers(where, columns)


def load_own(path: Path, columns: Mapping[str, str] | None, read: LinesRead | None = None) -> Recording:
    """Read a recording in .npz, .jsonl, .jsonl.gz or .parquet, without the lines that `read` counts so far."""
    format = format_of(path)
    table = read_jsonl(path, columns, read) if format == "jsonl" else _READERS[format](path, columns)
    try:
        return assembled(table)
    except RecordingError as error:
        raise RecordingError(*error.problems, sequences=len(table.attributes)) from None


def _trainers(path: Path, columns: Mapping[str, str] | None) -> Recording:
    """Read what a trainer wrote, or a recording of one's own where no trainer did."""
    # The importers read recordings of one's own with what is above.
    from kc_otel.recordings.importers import trainer_files  # noqa: PLC0415

    refusals = Problems()
    try:
        if path.is_file() and trainer_files.format_of(path) == "generic":
            return load_own(path, columns)
        files = trainer_files.files_of([path])
        rows = [
            replace(row, attributes=_group_of_file(row.attributes, file)) if len(files) > 1 else row
            for file in files
            for row in trainer_files.read_file(file, refusals, columns=columns)
        ]
    except OSError as error:
        raise RecordingError(str(error)) from None
    masked = refusals.counts["no_tokens"]
    if refusals.counts.keys() - {"no_tokens"}:
        refusals.first.pop("no_tokens", None)
        raise RecordingError(*refusals.all())
    if not rows:
        raise RecordingError(f"{path}: holds no sequence with a token that counts")
    columns_of = {"train": [row.train if row.train_kept is None else row.train + row.train_kept for row in rows]}
    for role in ("inference", "token_ids", "advantages", "versions"):
        values = [getattr(row, role) for row in rows]
        without = sum(value is None for value in values)
        if role == "versions" and 0 < without < len(rows):
            said = f"{without:,} of {len(rows):,} sequences have no weight_versions; write the column in every file"
            raise RecordingError(f"{path}: {said}, or give the files one by one")
        if not without:  # ids and advantages that only some of them have are left out
            columns_of[role] = values
    if any(row.train_kept is not None for row in rows):  # without truncation the kept mass is 1
        columns_of["train_kept"] = [
            np.zeros_like(row.train) if row.train_kept is None else row.train_kept for row in rows
        ]
    names = {"train": "train log-probabilities", "inference": "inference log-probabilities"}
    table = RaggedTable(str(path), columns_of, names, [row.attributes for row in rows], "sequence {}".format)
    return replace(assembled(table), masked=({},) * masked)


def _group_of_file(attributes: Mapping[str, Scalar], file: Path) -> Mapping[str, Scalar]:
    """Name group numbers after their file, where they may begin anew in each; names and uids are those of all files."""
    numbers = {
        name: value for name in GROUPS if name != "uid" and isinstance(value := attributes.get(name), int | float)
    }
    return {**attributes, **{name: f"{file}: {value}" for name, value in numbers.items() if not math.isnan(value)}}


def save_recording(recording: Recording, path: str | Path) -> None:
    """Write a recording to .npz (packed), .jsonl, .jsonl.gz or .parquet (one row per sequence); logits to .npz only."""
    where = Path(path)
    chosen = format_of(where)
    if recording.train_kept is not None:  # a file has log-probabilities from before truncation
        recording = replace(recording, train=recording.train + recording.train_kept)
    arrays = {ALIASES[role][0]: values for role in _PER_TOKEN if (values := getattr(recording, role)) is not None}
    logits = {role: values for role in LOGITS if (values := getattr(recording, role)) is not None}
    if chosen == "npz":
        _npz(recording, where, arrays | logits)
    elif logits:
        raise RecordingError(f"{where}: logits are kept in .npz only; write to .npz, or drop them with replace()")
    elif chosen == "jsonl":
        _jsonl(recording, where, arrays)
    else:
        _parquet(recording, where, arrays)


def format_of(path: Path) -> Format:
    """The format that a file's name says; a RecordingError where it says none."""
    for ending, format in _ENDINGS.items():
        if path.name.lower().endswith(ending):
            return format
    raise RecordingError(f"{path}: the name does not end in {', '.join(_ENDINGS)}: rename it to match its format")


def _npz(recording: Recording, path: Path, arrays: dict[str, NDArray[Any]]) -> None:
    written: dict[str, Any] = {**arrays, "lengths": recording.lengths}
    if any(recording.attributes):
        written[ATTRIBUTES] = np.array([json.dumps(dict(attribute)) for attribute in recording.attributes])
    with path.open("wb") as file:
        np.savez_compressed(file, **written)


def _jsonl(recording: Recording, path: Path, arrays: dict[str, NDArray[Any]]) -> None:
    ends = np.cumsum(recording.lengths).tolist()
    begin = 0
    with gzip.open(path, "wt", encoding="utf-8") if path.suffix == ".gz" else path.open("w", encoding="utf-8") as file:
        for end, attributes in zip(ends, recording.attributes, strict=True):
            row: dict[str, Any] = {name: values[begin:end].tolist() for name, values in arrays.items()}
            if attributes:
                row[ATTRIBUTES] = dict(attributes)
            file.write(json.dumps(row) + "\n")
            begin = end


def _parquet(recording: Recording, path: Path, arrays: dict[str, NDArray[Any]]) -> None:
    pa = arrow(path)
    offsets = pa.array(np.append(0, np.cumsum(recording.lengths)), type=pa.int64())
    columns = {name: pa.LargeListArray.from_arrays(offsets, pa.array(values)) for name, values in arrays.items()}
    if any(recording.attributes):
        columns[ATTRIBUTES] = pa.array([json.dumps(dict(attribute)) for attribute in recording.attributes])
    pa.parquet.write_table(pa.table(columns), path)
