"""A file's content as columns of rows, by role, and the readers of .npz, .jsonl, .jsonl.gz and .parquet."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kc_otel._extras import MissingExtraError, extra
from kc_otel.contract.plain_text import read_json_text
from kc_otel.contract.slices import Scalar
from kc_otel.contract.words import listed
from kc_otel.recordings.recording import PROMPT_IDS, RecordingError, with_prompt

ALIASES: Final[Mapping[str, tuple[str, ...]]] = {
    "train": (
        "train_logprobs",
        "trainer_logprobs",  # prime-rl
        "old_log_probs",  # verl
        "old_log_prob",
        "old_per_token_logps",  # TRL
        "prev_logprobs",  # NeMo-RL
        "training_logprobs",
        "train_log_probs",
    ),
    "inference": (
        "inference_logprobs",  # prime-rl
        "rollout_log_probs",  # verl
        "rollout_log_prob",
        "sampling_per_token_logps",  # TRL
        "generation_logprobs",  # NeMo-RL
        "rollout_logprobs",
        "sampling_logprobs",
        "inference_log_probs",
    ),
    "mask": ("mask", "response_mask", "completion_mask", "loss_mask", "token_mask", "tool_mask"),
    "lengths": ("lengths", "response_lengths", "completion_lengths", "sequence_lengths"),
    "token_ids": ("token_ids", "responses", "completion_ids", "response_ids"),
    "advantages": ("advantages", "advantage"),
    "train_kept": ("train_kept_logprobs",),
    "inference_kept": ("inference_kept_logprobs",),
    "versions": ("weight_versions",),
    "train_logits": ("train_logits",),
    "inference_logits": ("inference_logits",),
}
"""Role -> column names that are understood for it, the canonical one first; `save_recording` writes that one."""

_COLUMNS: Final = frozenset(chain.from_iterable(ALIASES.values())) - {*ALIASES["lengths"]}

LOGITS: Final = ("train_logits", "inference_logits")
"""Roles that have a row of numbers per token."""
FLOATS: Final = ("train", "inference", "advantages", "train_kept", "inference_kept", "versions")
"""Roles that have a real number per token."""
MASK: Final = "mask"
"""The role of which a file may have several, such as TRL's completion_mask and tool_mask: a token counts under all.
Those after the first have roles of their own, which begin with it."""
_UNREAD_MASK: Final = (
    f"would be ignored, so that every token counts; name it {', '.join(ALIASES[MASK])}, say mask=NAME with columns, or "
    f"leave it out"
)
ATTRIBUTES: Final = "attributes"


def resolve(source: str, present: Iterable[str], columns: Mapping[str, str] | None) -> dict[str, str]:
    """Role -> name of its column, for every role that a file has; `columns` are those that the caller says."""
    names = list(present)
    there = listed(names, 20) or "no columns"
    problems = []
    found: dict[str, str] = {}
    for role, column in (columns or {}).items():
        if role not in ALIASES:
            problems.append(f"{source}: columns: {role!r} is not a role; roles are {', '.join(ALIASES)}")
        elif column not in names:
            problems.append(f"{source}: columns: there is no column {column!r} for {role}; there are {there}")
        else:
            found[role] = column
    for role, aliases in ALIASES.items():
        if role in (columns or {}):
            continue
        matching = [name for name in aliases if name in names and name not in found.values()]
        if len(matching) > 1 and matching[0] != aliases[0] and role in {"train", "inference"}:
            problems.append(
                f"{source}: {' and '.join(matching)} could both be the {role} kernel's log-probabilities; "
                f"say which with columns, such as {role}={matching[0]}"
            )
        elif matching:
            found[role] = matching[0]
            if role == MASK:
                found.update({f"{MASK} {name}": name for name in matching[1:]})
    problems += [
        f"{source}: no column has the {role} kernel's log-probabilities; there are {there}. "
        f"Name it {ALIASES[role][0]}, or say which it is with columns, such as {role}=NAME"
        for role in ("train", "inference")
        if role not in found and role not in (columns or {}) and not problems
    ]
    if problems:
        raise RecordingError(*problems)
    return found


@dataclass(frozen=True, slots=True, eq=False)
class RaggedTable:
    """A file's content: by role an array of each row, [tokens], or [tokens, V] of logits; attributes of each row.

    For messages: column names by role, `place` of a row, and columns of neither role nor attribute, with the reason.
    `trainer` is the one whose format the file has, empty for a recording of one's own.
    """

    source: str
    columns: Mapping[str, Sequence[NDArray[Any]]]
    names: Mapping[str, str]
    attributes: Sequence[Mapping[str, Scalar]]
    place: Callable[[int], str]
    unread: Mapping[str, str] = field(default_factory=dict)
    trainer: str = ""


def read_own(path: Path, columns: Mapping[str, str] | None, read: LinesRead | None = None) -> RaggedTable:
    """Read a .npz, .jsonl, .jsonl.gz or .parquet, of lines those after the ones that `read` counts so far."""
    name = path.name.lower()
    if name.endswith((".jsonl", ".jsonl.gz")):
        return read_jsonl(path, columns, read)
    if name.endswith(".npz"):
        return read_npz(path, columns)
    if name.endswith(".parquet"):
        return read_parquet(path, columns)
    endings = ".npz, .jsonl, .jsonl.gz, .parquet"
    raise RecordingError(f"{path}: the name does not end in {endings}: rename it to match its format")


_VARYING_PART: Final = re.compile(r"[-+]?\d[\d.,e+-]*|\b(?:nan|inf)\b")
"""Parts in which two sentences about one fault may differ."""


@dataclass(slots=True)
class Problems:
    """Faults of a file's rows by kind: how many there are, and a sentence about the first of each."""

    source: str = ""
    counts: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)

    def add(self, sentence: str, *, kind: str = "", times: int = 1) -> None:
        """Note a fault, and that it occurs so many times; without a kind, numbers alone make no other fault."""
        kind = kind or _VARYING_PART.sub("#", sentence)
        self.first.setdefault(kind, f"{self.source}: {sentence}" if self.source else sentence)
        self.counts[kind] += times

    def all(self) -> tuple[str, ...]:
        """Return a sentence for each kind."""
        return tuple(
            first + (f" ({more:,} more like this)" if (more := self.counts[kind] - 1) else "")
            for kind, first in self.first.items()
        )


_ROWS_AT_ONCE: Final = 256


class RewrittenError(RecordingError):
    """A file no longer begins with the lines that were read of it."""


@dataclass(slots=True)
class LinesRead:
    """Progress in a file of lines: the number of lines, the digest of their text, and the number of a torn last one."""

    count: int = 0
    digest: str = ""
    torn: int = 0


def read_jsonl(path: Path, columns: Mapping[str, str] | None, read: LinesRead | None = None) -> RaggedTable:
    """Read the objects of a .jsonl file, line by line; everything that is wrong is one RecordingError."""
    problems = Problems(str(path))
    rows = ((f"line {number}", row) for number, row in records(path, read, problems))
    return table_of_rows(rows, columns, problems)


def table_of_rows(
    rows: Iterable[tuple[str, Mapping[str, Any]]],
    columns: Mapping[str, str] | None,
    problems: Problems,
    names: Mapping[str, str] | None = None,
) -> RaggedTable:
    """Put rows, a place for messages and values by column, into arrays; `names` are what `resolve` returns."""
    late: frozenset[str] = frozenset()
    parts: dict[str, list[NDArray[Any]]] = {}
    attributes: list[Mapping[str, Scalar]] = []
    unread: dict[str, str] = {}
    places: list[str] = []
    for place, row in rows:
        if names is None:
            names, late = _resolved(problems.source, row, columns), _COLUMNS - row.keys()
        for role, name in names.items():
            parts.setdefault(role, []).append(_numbers(role, name, row.get(name), place, problems))
        given = row_attributes(row, names, place, problems)
        attributes.append(with_prompt(scalars_of(given), given))
        for name in given.keys() - attributes[-1].keys() - unread.keys():
            if given[name] is not None:
                unread[name] = f"holds {_short(given[name])} in {place}, not a plain value"
        tokens = len(parts["train"][-1])
        _refuse_ignored(
            {name: row[name] for name in row.keys() - names.values()},
            late,
            0 if MASK in (columns or {}) else tokens,
            place,
            problems,
        )
        places.append(place)
    if not places:
        problems.add("has no sequence; write one object or row for each")
    if problems.all():
        raise RecordingError(*problems.all(), sequences=len(places))
    return RaggedTable(problems.source, parts, names or {}, attributes, places.__getitem__, unread)


def _refuse_ignored(row: Mapping[str, Any], late: frozenset[str], tokens: int, place: str, problems: Problems) -> None:
    """Note the columns of no role that change what is measured: those of a later row alone, and masks of tokens."""
    for name, value in row.items():
        if name in late and value is not None and not isinstance(value, str):
            problems.add(f"{place}: {name}: is not in the first row; write it in every row", kind=name)
        elif MASK in name.lower() and isinstance(value, list) and len(value) == tokens:
            problems.add(f"{place}: {name}: {_UNREAD_MASK}", kind=name)


def records(
    path: Path, read: LinesRead | None = None, problems: Problems | None = None
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield each line's number and object; a line of none goes to `problems`, else is a RecordingError."""
    for number, line in lines(path, read):
        try:
            record = read_json_text(line)
            said = "" if isinstance(record, dict) else f"is not a JSON object but {type(record).__name__}"
        except ValueError as error:
            said = f"is not JSON ({error}); every line is one object; is the file still being written?"
        if not said:
            yield number, record
        elif problems is None:
            raise RecordingError(f"{path}:{number}: {said}")
        else:
            problems.add(f"line {number}: {said}")


def scalars_of(values: Mapping[str, Any]) -> dict[str, Scalar]:
    """The plain values among them."""
    return {name: value for name, value in values.items() if isinstance(value, str | int | float | bool)}


def lines(path: Path, read: LinesRead | None = None) -> Iterator[tuple[int, str]]:
    """Yield the lines that hold anything after those `read` counts, or a RewrittenError; `read` advances.

    With `read`, a last line that has no end and is no JSON yet is not yielded: its writer has not finished it.
    """
    packed = path.suffix == ".gz"
    known = LinesRead() if read is None else replace(read)
    line, digest = 0, hashlib.sha256()
    try:
        with gzip.open(path) if packed else path.open("rb") as file:
            for line, raw in enumerate(file, 1):
                if read is not None:
                    if not raw.endswith(b"\n") and _is_torn(raw):
                        read.torn, line = line, line - 1  # noqa: PLW2901 - the lines that there are
                        break
                    digest.update(raw.rstrip(b"\r\n") + b"\n")
                    if line == known.count and digest.hexdigest() != known.digest:
                        raise RewrittenError(f"{path}: no longer begins with the {known.count:,} lines that were read")
                    if line <= known.count:
                        continue
                    read.count, read.digest = line, digest.hexdigest()
                if raw.strip():
                    yield line, raw.decode()
        if line < known.count:
            raise RewrittenError(f"{path}: no longer has the {known.count:,} lines that were read")
    except OSError as error:
        raise RecordingError(f"{path}: cannot be read ({error.strerror or error})") from None
    except (EOFError, UnicodeDecodeError) as error:
        raise RecordingError(f"{path}: cannot be read ({error}); is it cut off, or not UTF-8?") from None


def _is_torn(raw: bytes) -> bool:
    try:
        read_json_text(raw)
    except ValueError:
        return True
    return False


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
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return value
    if isinstance(value, list):
        with suppress(ValueError, TypeError, OverflowError):
            # None becomes NaN, which is told of with its place when the columns are put together
            numbers = np.asarray(value, dtype=np.int64 if role == "token_ids" else np.float64)
            if numbers.ndim == 1 + (role in LOGITS) or not value:
                return numbers
    what = "is missing" if value is None else f"holds {_short(value)}"
    problems.add(f"{place}: {name}: {what}, not a list of numbers, one per token")
    return np.empty(0)


def row_attributes(row: Mapping[str, Any], names: Mapping[str, str], place: str, problems: Problems) -> dict[str, Any]:
    """Return a row's attributes: its other columns, and the content of `attributes`."""
    found = {name: value for name, value in row.items() if name not in names.values()}
    written = found.pop(ATTRIBUTES, None)
    if isinstance(written, str):  # as columns of .npz and .parquet have it
        with suppress(ValueError):
            written = read_json_text(written)
    if written is not None and not isinstance(written, dict):
        problems.add(f"{place}: {ATTRIBUTES}: {_short(written)} is not a JSON object")
        return found
    return found | (written or {})


def _short(value: Any) -> str:
    text = json.dumps(value.tolist() if isinstance(value, np.ndarray) else value, default=str)
    return text if len(text) <= 40 else text[:37] + "..."


def read_parquet(path: Path, columns: Mapping[str, str] | None) -> RaggedTable:
    """Read the rows of a .parquet file, some hundred at a time."""
    try:
        with extra("parquet", ".parquet"):
            import pyarrow as pa  # noqa: PLC0415 - an optional dependency
            import pyarrow.parquet  # noqa: PLC0415
    except MissingExtraError as error:
        raise RecordingError(f"{path}: {error}") from None
    try:
        with pa.parquet.ParquetFile(path) as file:
            batches = (batch.to_pylist() for batch in file.iter_batches(batch_size=_ROWS_AT_ONCE))
            rows = ((f"row {place}", row) for place, row in enumerate(chain.from_iterable(batches)))
            return table_of_rows(rows, columns, Problems(str(path)))
    except (OSError, pa.ArrowInvalid) as error:
        raise RecordingError(f"{path}: cannot be read as .parquet ({error})") from None


def read_npz(path: Path, columns: Mapping[str, str] | None) -> RaggedTable:
    """Read the arrays of a .npz file, padded or packed, as rows; nothing in it is unpickled."""
    arrays, problems = _arrays(path), Problems(str(path))
    names = resolve(problems.source, arrays, columns)
    lengths, shape = _layout(problems.source, arrays, names)
    given = arrays.pop(of_lengths := names.pop("lengths", ""), None)
    if shape and given is not None:
        names[f"{MASK} of {of_lengths}"] = of_lengths
        arrays[of_lengths] = np.arange(shape[1]) < np.asarray(given)[:, None]
    if "token_ids" in names and arrays[names["token_ids"]].dtype.kind == "U":
        del names["token_ids"]
    role_of = {name: role for role, name in names.items()}
    leading = arrays[names["train"]]
    values: dict[str, Sequence[Any]] = {}
    unread: dict[str, str] = {}
    for name, array in arrays.items():
        held = f"holds {'text' if array.dtype.kind == 'U' else array.dtype} of shape {array.shape}"
        if (found := _by_row(name, array, role_of.get(name), lengths, shape)) is not None:
            values[name] = found
        elif name in role_of:
            problems.add(f"{name}: {held}, not a number for each of {lengths.sum():,} tokens in {lengths.size:,} rows")
        elif name == ATTRIBUTES:
            problems.add(f"{name}: {held}, not a JSON object for each of {lengths.size:,} rows")
        elif MASK in name.lower() and MASK not in (columns or {}) and array.shape == leading.shape:
            problems.add(f"{name}: {_UNREAD_MASK}")
        else:
            unread[name] = f"{held}, not a plain value for each of {lengths.size:,} rows"
    if problems.all():
        raise RecordingError(*problems.all())
    rows = ((f"row {row}", {name: of[row] for name, of in values.items()}) for row in range(lengths.size))
    table = table_of_rows(rows, columns, problems, names)
    return replace(table, unread={**table.unread, **unread})


def _arrays(path: Path) -> dict[str, NDArray[Any]]:
    try:
        # Opened here: of an archive that is broken, NumPy leaves the file open.
        with path.open("rb") as content:
            is_one = content.read(2) == b"PK"
            content.seek(0)
            with np.load(content, allow_pickle=False) if is_one else nullcontext() as file:
                arrays = {} if file is None else {name: file[name] for name in file.files}
    except OSError as error:
        raise RecordingError(f"{path}: cannot be read ({error.strerror or error})") from None
    except ValueError as error:
        raise RecordingError(
            f"{path}: cannot be read ({error}); arrays of Python objects are not: save rows of different lengths "
            f"packed, one after the other, with an array `lengths`"
        ) from None
    except Exception as error:  # noqa: BLE001 - zipfile and NumPy raise what they like for a broken archive
        raise RecordingError(f"{path}: is not a .npz file ({error})") from None
    if not is_one:
        raise RecordingError(f"{path}: is not a .npz file, whatever its name says; numpy.savez writes one")
    return arrays


def _layout(
    source: str, arrays: Mapping[str, NDArray[Any]], names: Mapping[str, str]
) -> tuple[NDArray[np.int64], tuple[int, ...]]:
    """Numbers stored of each row, padding included, and the shape of padded rows; () where rows are packed."""
    leading, name = arrays[names["train"]], names["train"]
    given = arrays[names["lengths"]] if "lengths" in names else None
    whole = given is not None and given.ndim == 1 and given.dtype.kind in "iu" and given.min(initial=0) >= 0
    shown = "" if given is None else f"{given.dtype} {np.array2string(given, threshold=6)} of shape {given.shape}"
    if leading.ndim == 1:
        if given is None or (whole and int(given.sum()) == leading.size):
            return np.array([leading.size] if given is None else given, dtype=np.int64), ()
        said = f"{names['lengths']}: {shown} do not add up to the {leading.size} numbers of {name}"
        raise RecordingError(f"{source}: {said}: write one whole number per sequence")
    if leading.ndim != 2:
        raise RecordingError(f"{source}: {name}: shape {leading.shape} is neither padded [S, T] nor packed [N]")
    sequences, width = leading.shape
    if given is not None and not (whole and given.size == sequences and given.max(initial=0) <= width):
        said = f"{names['lengths']}: {shown} are not {sequences} whole numbers from 0 to {width}"
        raise RecordingError(f"{source}: {said}")
    return np.full(sequences, width, dtype=np.int64), leading.shape


def _by_row(
    name: str, array: NDArray[Any], role: str | None, lengths: NDArray[np.int64], shape: tuple[int, ...]
) -> Sequence[Any] | None:
    """Each row's part of an array, a row's tokens or its plain value; None where it has another shape."""
    of_rows = array.shape[:1] == lengths.shape
    if role is not None and array.dtype.kind in "biuf":
        axes = 1 + (role in LOGITS)
        if shape and array.ndim == 1 + axes and array.shape[:2] == shape:
            return list(array)
        if array.ndim == axes and array.shape[0] == lengths.sum():
            return np.split(array, np.cumsum(lengths)[:-1])
        if role != "advantages":
            return None
    if of_rows and name in PROMPT_IDS:
        return list(array)
    if array.shape in {lengths.shape, ()} and array.dtype.kind in "biufU":
        return list(np.broadcast_to(array, lengths.shape).tolist())
    return None
