"""Writing a recording, in the layout that `load_recording` reads back number by number."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kc_otel.recordings.columns import ALIASES, ATTRIBUTES, LOGITS
from kc_otel.recordings.load import Format, format_of
from kc_otel.recordings.read_parquet import arrow
from kc_otel.recordings.recording import Recording, RecordingError

__all__ = ["save_recording"]

_PER_TOKEN: Final = ("train", "inference", "token_ids", "advantages", "train_at_rollout", "policy")


def save_recording(recording: Recording, path: str | Path, *, format: Format | None = None) -> None:
    """Write a recording to .npz (packed), .jsonl, .jsonl.gz or .parquet (one row per sequence).

    Args:
        recording: What to write.
        path: Where to.
        format: `npz`, `jsonl` or `parquet`, where the file's name does not say.

    Raises:
        RecordingError: If the name says no format, or a recording with logits goes anywhere but into .npz.
        OSError: If the file cannot be written.
    """
    where = Path(path)
    chosen = format or format_of(where)
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


def _npz(recording: Recording, path: Path, arrays: dict[str, NDArray[Any]]) -> None:
    written: dict[str, Any] = {**arrays, "lengths": recording.lengths}
    if any(recording.attributes):
        written[ATTRIBUTES] = np.array([json.dumps(dict(each)) for each in recording.attributes])
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
        columns[ATTRIBUTES] = pa.array([json.dumps(dict(each)) for each in recording.attributes])
    pa.parquet.write_table(pa.table(columns), path)
