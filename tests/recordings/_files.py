"""Files of recordings in any format, from columns that have a value for each row."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq


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
    """Rows of a .jsonl or .parquet; returns the path."""
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path
