"""Files of recordings in any format, and the sequences of trainers' files."""

import gzip
import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from kc_otel.recordings.read_table import ALIASES, FLOATS, Problems
from kc_otel.recordings.recording import group_of
from kc_otel.recordings.recording_files import read_file, save_recording


def write_columns(path, **columns):
    """An array for each column in .npz, an object or a row for each sequence elsewhere; returns the path."""
    if path.suffix == ".npz":
        np.savez(path, **columns)
        return path
    plain = {name: np.asarray(values).tolist() if not isinstance(values, list) else values
             for name, values in columns.items()}  # fmt: skip
    rows = [dict(zip(plain, row, strict=True)) for row in zip(*plain.values(), strict=True)]
    return write_rows(path, rows)


def write_rows(path, rows):
    """Rows of a .jsonl, .jsonl.gz or .parquet; returns the path."""
    text = "".join(f"{json.dumps(row)}\n" for row in rows).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def write_recording(of, path):
    """A recording in any format: packed in .npz, else a row for each sequence; returns the path."""
    if path.suffix == ".npz":
        save_recording(of, path)
        return path
    raw = of if of.train_kept is None else replace(of, train=of.train + of.train_kept)
    names = {role: ALIASES[role][0] for role in (*FLOATS, "token_ids") if getattr(raw, role, None) is not None}
    columns = [{name: row.tolist() for name, row in zip(names.values(), rows, strict=True)}
               for rows in zip(*map(raw.rows, names), strict=True)]  # fmt: skip
    return write_rows(path, [{**row, "attributes": of.attributes[at]} for at, row in enumerate(columns)])


def read(path, refusals=None, columns=None):
    """The sequences of a file that the importer reads, one by one."""
    found = read_file(path, Problems() if refusals is None else refusals, columns)
    roles = ("train", "inference", "token_ids", "advantages")
    return [] if found is None else [
        SimpleNamespace(
            attributes=row, prompt=group_of(row), weights=(row.get("train_weights"), row.get("inference_weights")),
            **{role: rows[index] if (rows := found.rows(role)) else None for role in roles},
        )
        for index, row in enumerate(found.attributes)
    ]  # fmt: skip
