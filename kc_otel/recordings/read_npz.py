"""Recordings in NumPy's .npz: padded [S, T] with a mask or lengths, or packed [N] with lengths."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kc_otel.contract.json_text import read_json_text
from kc_otel.contract.slices import Scalar
from kc_otel.recordings.columns import ATTRIBUTES, LOGITS, resolve
from kc_otel.recordings.recording import RecordingError
from kc_otel.recordings.rows import Problems, Ragged, RaggedTable

__all__ = ["read_npz"]


def read_npz(path: Path, columns: Mapping[str, str] | None) -> RaggedTable:
    """The arrays of a .npz file; nothing in it is unpickled.

    Raises:
        RecordingError: If it is no such file, or its arrays do not fit together.
    """
    source = str(path)
    try:
        # Opened here: of an archive that is broken, NumPy leaves the file open.
        with path.open("rb") as content:
            is_one = content.read(2) == b"PK"
            content.seek(0)
            with np.load(content, allow_pickle=False) if is_one else nullcontext() as file:
                arrays = {} if file is None else {name: file[name] for name in file.files}
    except OSError as error:
        raise RecordingError(f"{source}: cannot be read ({error.strerror or error})") from None
    except ValueError as error:
        raise RecordingError(
            f"{source}: cannot be read ({error}); arrays of Python objects are not: save rows of different lengths "
            f"packed, one after the other, with an array `lengths`"
        ) from None
    except Exception as error:  # noqa: BLE001 - zipfile and NumPy raise what they like for a broken archive
        raise RecordingError(f"{source}: is not a .npz file ({error})") from None
    if not is_one:
        raise RecordingError(f"{source}: is not a .npz file, whatever its name says; numpy.savez writes one")
    names = resolve(source, arrays, columns)
    chosen = {role: arrays[name] for role, name in names.items()}
    problems = Problems(source)
    lengths = _lengths(chosen, names, problems)
    shape = chosen[_leading(chosen)].shape[:2]
    ragged = {
        role: part
        for role, array in chosen.items()
        if role != "lengths" and (part := _ragged(role, array, shape, lengths, names, problems)) is not None
    }
    others = {name: array for name, array in arrays.items() if name not in names.values()}
    attributes, unread = _attributes(others, lengths.size, problems)
    if problems.all():
        raise RecordingError(*problems.all())
    if chosen[_leading(chosen)].ndim > 1 + (_leading(chosen) in LOGITS) and "lengths" in chosen:
        ragged["mask"] = _within(chosen, ragged, np.asarray(chosen["lengths"], dtype=np.int64))
    return RaggedTable(source, ragged, names, attributes, lambda row: f"row {row}", unread)


def _leading(chosen: Mapping[str, NDArray[Any]]) -> str:
    """The role whose shape says how the file is laid out."""
    return "train" if "train" in chosen else "train_logits"


def _lengths(chosen: Mapping[str, NDArray[Any]], names: Mapping[str, str], problems: Problems) -> NDArray[np.int64]:
    """Numbers stored of each row, padding included."""
    role = _leading(chosen)
    leading = chosen[role]
    flat = leading.ndim == 1 + (role in LOGITS)
    given = chosen.get("lengths")
    if not flat:
        if leading.ndim != 2 + (role in LOGITS):
            problems.add(f"{names[role]}: shape {leading.shape} is neither padded [S, T] nor packed [N]")
            return np.zeros(0, dtype=np.int64)
        sequences, width = leading.shape[:2]
        if given is not None and (
            given.shape != (sequences,) or not _whole(given) or given.min(initial=0) < 0 or given.max(initial=0) > width
        ):
            problems.add(f"{names['lengths']}: {_shown(given)} are not {sequences} whole numbers from 0 to {width}")
        return np.full(sequences, width, dtype=np.int64)
    if given is None:
        return np.array([leading.shape[0]], dtype=np.int64)
    if given.ndim != 1 or not _whole(given) or given.min(initial=0) < 0 or int(given.sum()) != leading.shape[0]:
        problems.add(
            f"{names['lengths']}: {_shown(given)} do not add up to the {leading.shape[0]} numbers of {names[role]}: "
            f"write one whole number per sequence"
        )
        return np.array([leading.shape[0]], dtype=np.int64)
    return given.astype(np.int64)


def _ragged(
    role: str,
    array: NDArray[Any],
    shape: tuple[int, ...],
    lengths: NDArray[np.int64],
    names: Mapping[str, str],
    problems: Problems,
) -> Ragged | None:
    """A role's numbers; `shape` is that of the padded rows, where they are padded."""
    tail = 1 if role in LOGITS else 0
    stored = int(lengths.sum())
    if array.dtype.kind not in "biuf":
        if role == "token_ids":  # text under one of its names: an attribute at best
            return None
        problems.add(f"{names[role]}: holds {array.dtype}, not numbers")
        return None
    if array.ndim == 2 + tail and array.shape[:2] == shape:
        return Ragged(array.reshape(-1, *array.shape[2:]), lengths)
    if array.ndim == 1 + tail and array.shape[0] == stored:
        return Ragged(array, lengths)
    if role == "advantages" and array.shape == (lengths.size,):
        return Ragged(array, np.ones(lengths.size, dtype=np.int64))
    problems.add(f"{names[role]}: shape {array.shape} does not go with {lengths.size} rows of {stored} numbers in all")
    return None


def _within(chosen: Mapping[str, NDArray[Any]], ragged: Mapping[str, Ragged], lengths: NDArray[np.int64]) -> Ragged:
    """The mask that `lengths` of padded rows means, and the file's own on top of it."""
    sequences, width = chosen[_leading(chosen)].shape[:2]
    inside = (np.arange(width) < lengths[:, None]).reshape(-1)
    both = np.where(inside, ragged["mask"].values, 0) if "mask" in ragged else inside
    return Ragged(both, np.full(sequences, width, dtype=np.int64))


def _attributes(
    others: Mapping[str, NDArray[Any]], rows: int, problems: Problems
) -> tuple[tuple[Mapping[str, Scalar], ...], Mapping[str, str]]:
    """Attributes of each row; a single value is every row's. And the arrays that are none, with the reason."""
    columns: dict[str, list[Any]] = {}
    unread: dict[str, str] = {}
    for name, array in others.items():
        if name == ATTRIBUTES:
            continue
        plain = _text(array) if array.dtype.kind == "S" else array
        if plain.shape in {(rows,), ()} and plain.dtype.kind in "biufU":
            columns[name] = np.broadcast_to(plain, rows).tolist()
        else:
            kind = "text" if array.dtype.kind == "U" else array.dtype
            unread[name] = f"holds {kind} of shape {array.shape}, not a plain value for each of {rows:,} rows"
    found: list[dict[str, Scalar]] = [{name: values[row] for name, values in columns.items()} for row in range(rows)]
    written = others.get(ATTRIBUTES)
    if written is None:
        return tuple(found), unread
    if written.shape != (rows,) or written.dtype.kind != "U":
        problems.add(f"{ATTRIBUTES}: {_shown(written)} are not {rows} JSON objects, one per row")
        return tuple(found), unread
    for row, (into, text) in enumerate(zip(found, written.tolist(), strict=True)):
        try:
            into.update(read_json_text(text))
        except ValueError as error:
            problems.add(f"row {row}: {ATTRIBUTES}: {text!r} is not a JSON object ({error})")
    return tuple(found), unread


def _text(array: NDArray[Any]) -> NDArray[Any]:
    """Bytes as the text that they are; themselves where they are none."""
    try:
        return np.char.decode(array, "utf-8")
    except UnicodeDecodeError:
        return array


def _whole(array: NDArray[Any]) -> bool:
    return array.dtype.kind in "iu"


def _shown(array: NDArray[Any]) -> str:
    return f"{array.dtype} {np.array2string(array, threshold=6)} of shape {array.shape}"
