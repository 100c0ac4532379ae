"""Recordings in files: reading whatever wrote them, and writing the layout that is read back number by number."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from kc_otel._extras import MissingExtraError, extra
from kc_otel.contract.json_text import read_json_text
from kc_otel.contract.slices import Scalar
from kc_otel.recordings.assemble import assembled
from kc_otel.recordings.columns import ALIASES, ATTRIBUTES, LOGITS, resolve
from kc_otel.recordings.read_jsonl import first_record, read_jsonl, table_of_rows
from kc_otel.recordings.recording import Recording, RecordingError
from kc_otel.recordings.responses import is_response, read_responses
from kc_otel.recordings.rows import Problems, Ragged, RaggedTable

_ROWS_AT_ONCE: Final = 256
"""Rows that are Python's numbers at a time."""


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
    """Read the rows of a .parquet file, some hundred at a time."""
    pa = arrow(path)
    try:
        with pa.parquet.ParquetFile(path) as file:
            batches = (batch.to_pylist() for batch in file.iter_batches(batch_size=_ROWS_AT_ONCE))
            rows = ((f"row {place}", row) for place, row in enumerate(chain.from_iterable(batches)))
            return table_of_rows(rows, columns, Problems(str(path)))
    except (OSError, pa.ArrowInvalid) as error:
        raise RecordingError(f"{path}: cannot be read as .parquet ({error})") from None


def read_npz(path: Path, columns: Mapping[str, str] | None) -> RaggedTable:
    """Read the arrays of a .npz file; nothing in it is unpickled."""
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
            given.shape != (sequences,)
            or given.dtype.kind not in "iu"
            or given.min(initial=0) < 0
            or given.max(initial=0) > width
        ):
            problems.add(f"{names['lengths']}: {_shown(given)} are not {sequences} whole numbers from 0 to {width}")
        return np.full(sequences, width, dtype=np.int64)
    if given is None:
        return np.array([leading.shape[0]], dtype=np.int64)
    if (
        given.ndim != 1
        or given.dtype.kind not in "iu"
        or given.min(initial=0) < 0
        or int(given.sum()) != leading.shape[0]
    ):
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


def _shown(array: NDArray[Any]) -> str:
    return f"{array.dtype} {np.array2string(array, threshold=6)} of shape {array.shape}"


Format = Literal["npz", "jsonl", "parquet"]

_READERS: Final[Mapping[Format, Callable[[Path, Mapping[str, str] | None], RaggedTable]]] = {
    "npz": read_npz,
    "jsonl": read_jsonl,
    "parquet": read_parquet,
}

_PER_TOKEN: Final = ("train", "inference", "token_ids", "advantages", "train_kept", "versions")
_ENDINGS: Final[Mapping[str, Format]] = {
    ".npz": "npz",
    ".jsonl": "jsonl",
    ".jsonl.gz": "jsonl",
    ".parquet": "parquet",
}


def load_recording(path: str | Path, *, columns: Mapping[str, str] | None = None) -> Recording:
    """Log-probabilities of both kernels, from whatever holds them.

    - Recordings in .npz, .jsonl, .jsonl.gz and .parquet. Layouts: padded arrays [S, T] with a mask or lengths, or
      packed arrays [N] with lengths (.npz); one row per sequence with its numbers in lists (.jsonl, .parquet), with or
      without a mask. A .npz without lengths is one sequence. It may also hold `train_logits` and `inference_logits`
      [N, V] with `token_ids`; log-probabilities that are missing are then taken from them.
    - What trainers write (`importers.FORMATS`), and folders of it as one recording. Pickles run nothing.
    - Saved responses of two servers (`responses`): `train=SCORED.jsonl,inference=SAMPLED.jsonl`, or lines that hold
      both under `train` and `inference`, or under the names in `columns`.

    Columns are found by the names that verl, TRL, NeMo-RL and prime-rl use (`columns.ALIASES`). `advantages` is one
    number per sequence or one per token. The attributes for slices are in a column `attributes` (a mapping, or its
    JSON) and in every other column with one plain value per sequence, or in a .npz with one for all of them.

    Where tokens were sampled with top-p or top-k, `train_kept_logprobs` and `inference_kept_logprobs` are the log of
    each kernel's mass on the tokens that were kept, for a side that is from before it: both are renormalised over them.

    `weight_versions` is the step of the weights that sampled each token, where an update came under way.

    Rows that a mask leaves no token of are dropped, and counted in `Recording.masked`.

    Args:
        path: The file, the folder, or two files as above.
        columns: Role to column name, where names are others, such as `{"train": "fsdp_lp", "inference": "vllm_lp"}`.
            Roles are train, inference, mask, lengths, token_ids, advantages, train_kept, inference_kept, versions,
            train_logits and inference_logits.

    Raises:
        RecordingError: If the file cannot be used, with each kind of fault that was found and how often it occurs: a
            column that is missing or ambiguous, rows whose sides differ in length, NaN, positive log-probabilities, a
            side of zeros, sides that are shifted by a token, no token at all.
    """
    if (sides := _sides(str(path))) is not None:
        return assembled(read_responses(*sides))
    where = Path(path)
    if where.is_file() and where.name.lower().endswith((".npz", ".parquet")):
        return load_own(where, columns)
    if where.name.removesuffix(".gz").endswith(".jsonl") and (names := _response_columns(where, columns)):
        return assembled(read_responses(where, where, names))
    return _trainers(where, columns)


def load_own(path: Path, columns: Mapping[str, str] | None) -> Recording:
    """Read a recording in .npz, .jsonl, .jsonl.gz or .parquet; errors as `load_recording`."""
    return assembled(_READERS[format_of(path)](path, columns))


def source_files(path: str | Path) -> tuple[Path, ...]:
    """Return the files that a recording is read from: one, or those of both sides."""
    return _sides(str(path)) or (Path(path),)


def _sides(text: str) -> tuple[Path, Path] | None:
    """Return the files of `train=A,inference=B`, in either order."""
    parts = dict(part.partition("=")[::2] for part in text.split(","))
    return (Path(parts["train"]), Path(parts["inference"])) if parts.keys() == {"train", "inference"} else None


def _response_columns(path: Path, columns: Mapping[str, str] | None) -> tuple[str, str] | None:
    """Return the names under which the lines of a file have two responses."""
    names = [(columns or {}).get(side, side) for side in ("train", "inference")]
    first = first_record(path)
    return (names[0], names[1]) if first is not None and all(is_response(first.get(name)) for name in names) else None


def _trainers(path: Path, columns: Mapping[str, str] | None) -> Recording:
    """Read what a trainer wrote, or a recording of one's own where no trainer did."""
    # The importers read recordings of one's own with what is above.
    from kc_otel.recordings.importers import detect  # noqa: PLC0415
    from kc_otel.recordings.importers.imported import Refusals, table_of  # noqa: PLC0415

    refusals = Refusals()
    try:
        if path.is_file() and detect.format_of(path) == "generic":
            return load_own(path, columns)
        files = detect.files_of([path])
        rows = [row for file in files for row in detect.read_file(file, refusals, columns=columns)]
    except OSError as error:
        raise RecordingError(str(error)) from None
    if faults := [
        f"{refusals.first[reason]}" + (f" ({more:,} more like this)" if (more := count - 1) else "")
        for reason, count in sorted(refusals.counts.items())
        if reason in {"no_logprobs", "shape_mismatch"}
    ]:
        raise RecordingError(*faults)
    if not rows:
        raise RecordingError(f"{path}: holds no sequence with a token that counts")
    left_out = sum(refusals.counts.values())
    return replace(assembled(table_of(str(path), rows)), masked=({},) * left_out)


def save_recording(recording: Recording, path: str | Path) -> None:
    """Write a recording to .npz (packed), .jsonl, .jsonl.gz or .parquet (one row per sequence).

    Raises:
        RecordingError: If the name says no format, or a recording with logits goes anywhere but into .npz.
        OSError: If the file cannot be written.
    """
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
