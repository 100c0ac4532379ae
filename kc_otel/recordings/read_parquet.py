"""Recordings in .parquet: one row per sequence, its numbers in list columns."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kc_otel._extras import MissingExtraError, extra
from kc_otel.contract.json_text import read_json_text
from kc_otel.contract.slices import Scalar
from kc_otel.recordings.columns import ATTRIBUTES, LOGITS, resolve
from kc_otel.recordings.read_jsonl import scalars_of
from kc_otel.recordings.recording import RecordingError
from kc_otel.recordings.rows import Problems, Ragged, RaggedTable

__all__ = ["arrow", "read_parquet"]


def arrow(path: Path) -> Any:
    """The modules pyarrow and pyarrow.parquet.

    Raises:
        RecordingError: If pyarrow is not installed.
    """
    try:
        with extra("parquet", ".parquet"):
            import pyarrow  # noqa: ICN001, PLC0415 - an optional dependency
            import pyarrow.parquet  # noqa: PLC0415
    except MissingExtraError as error:
        raise RecordingError(f"{path}: {error}") from None
    return pyarrow


def read_parquet(path: Path, columns: Mapping[str, str] | None) -> RaggedTable:
    """The columns of a .parquet file.

    Raises:
        RecordingError: If it is no such file, a column does not hold numbers, or pyarrow is not installed.
    """
    source, pa = str(path), arrow(path)
    try:
        file = pa.parquet.read_table(path)
    except (OSError, pa.ArrowInvalid) as error:
        raise RecordingError(f"{source}: cannot be read as .parquet ({error})") from None
    names = resolve(source, file.column_names, columns)
    if "token_ids" in names and pa.types.is_string(file.schema.field(names["token_ids"]).type):
        del names["token_ids"]
    names.pop("lengths", None)
    problems = Problems(source)
    ragged = {}
    for role, name in names.items():
        part = _ragged(role, name, file.column(name).combine_chunks(), pa, problems)
        if part is not None:
            ragged[role] = part
    if problems.all():
        raise RecordingError(*problems.all())
    attributes, unread = _attributes(file, names, pa)
    return RaggedTable(source, ragged, names, attributes, lambda row: f"row {row}", unread)


def _ragged(role: str, name: str, column: Any, pa: Any, problems: Problems) -> Ragged | None:
    if column.null_count:
        row = int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])
        problems.add(f"row {row}: {name}: is missing, not a list of numbers, one per token", times=column.null_count)
        return None
    if role == "advantages" and not _is_list(column.type, pa):
        return Ragged(column.to_numpy(zero_copy_only=False), np.ones(len(column), dtype=np.int64))
    if role in LOGITS or not _is_list(column.type, pa) or not _is_number(column.type.value_type, pa):
        problems.add(f"{name}: holds {column.type}, not a list of numbers, one per token")
        return None
    lengths = pa.compute.list_value_length(column).to_numpy(zero_copy_only=False).astype(np.int64)
    flat = column.flatten()
    if flat.null_count and role == "token_ids":
        problems.add(f"{name}: {flat.null_count} tokens have no id; leave the column out, or fill it")
        return None
    # Elsewhere a missing number becomes NaN, which is told of with its place when the columns are put together.
    return Ragged(flat.to_numpy(zero_copy_only=False), lengths)


def _attributes(
    file: Any, names: Mapping[str, str], pa: Any
) -> tuple[tuple[Mapping[str, Scalar], ...], Mapping[str, str]]:
    """Attributes of each row, and the columns that are none, with the reason."""
    others = [field for field in file.schema if field.name not in names.values() and field.name != ATTRIBUTES]
    unread = {field.name: f"holds {field.type}, not plain values" for field in others if not _is_plain(field.type, pa)}
    plain = [field.name for field in others if field.name not in unread]
    found = [scalars_of(row) for row in file.select(plain).to_pylist()] if plain else [{} for _ in range(len(file))]
    if ATTRIBUTES in file.column_names:
        for row, (into, written) in enumerate(zip(found, file.column(ATTRIBUTES).to_pylist(), strict=True)):
            given = (read_json_text(written) if isinstance(written, str) else written) or {}
            into.update(scalars_of(given))
            for name in given.keys() - into.keys() - unread.keys():
                if given[name] is not None:
                    unread[name] = f"holds {given[name]!r:.40} in row {row}, not a plain value"
    return tuple(found), unread


def _is_list(kind: Any, pa: Any) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _is_plain(kind: Any, pa: Any) -> bool:
    of = kind.value_type if pa.types.is_dictionary(kind) else kind
    return bool(pa.types.is_string(of) or pa.types.is_large_string(of) or pa.types.is_null(of) or _is_number(of, pa))


def _is_number(kind: Any, pa: Any) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))
