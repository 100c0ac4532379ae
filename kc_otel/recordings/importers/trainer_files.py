"""Files of trainers, and the sequences that these hold, in any of the formats that trainers write."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kc_otel.contract.slices import Scalar
from kc_otel.recordings.importers import pickled_batches as batches
from kc_otel.recordings.importers.trainer_formats import (
    META,
    OTHERS,
    TABLE,
    Columns,
    FormatName,
    TrainerFormat,
    floats,
    given,
    plain,
)
from kc_otel.recordings.read_table import LinesRead, Problems, first_record
from kc_otel.recordings.recording import RecordingError, group_of, prompt_id
from kc_otel.recordings.recording_files import load_own

LINE_ENDINGS: Final = (".jsonl", ".jsonl.gz")
_BATCH_ENDINGS: Final = (".pkl", ".pickle", ".pt", ".pth", ".dp")
_ENDINGS: Final = (*LINE_ENDINGS, ".npz", ".parquet", *_BATCH_ENDINGS)


@dataclass(frozen=True, slots=True, eq=False)
class Imported:
    """One sequence of T tokens; what a file does not say is None.

    `train` and `inference` are log P and log Q in nats, `versions` the step of the weights that sampled each token.
    `train_kept` is the log of P's mass on the tokens that truncation kept, over which both sides are renormalised.
    """

    train: NDArray[np.float64]
    inference: NDArray[np.float64]
    attributes: Mapping[str, Scalar]
    token_ids: NDArray[np.int64] | None = None
    advantages: NDArray[np.float64] | None = None
    train_kept: NDArray[np.float64] | None = None
    versions: NDArray[np.int64] | None = None

    @property
    def weights(self) -> tuple[int | str | None, int | str | None]:
        """Versions of both kernels' weights, the training kernel's first."""
        return _version(self.attributes.get("train_weights")), _version(self.attributes.get("inference_weights"))

    @property
    def prompt(self) -> Scalar | None:
        """Name of the prompt."""
        return group_of(self.attributes)


def _version(value: object) -> int | str | None:
    return value if isinstance(value, int | str) and not isinstance(value, bool) else None


def files_of(paths: Iterable[Path]) -> list[Path]:
    """The files that paths name: themselves, and of folders whatever could be imported, by name in natural order."""
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = (file for file in path.rglob("*") if file.is_file())
            found += sorted((file for file in inside if file.name.lower().endswith(_ENDINGS)), key=_natural)
        elif path.exists():
            found.append(path)
        else:
            raise FileNotFoundError(f"{path}: there is no such file or folder")
    return list(dict.fromkeys(found))


def _natural(path: Path) -> list[int | str]:
    """Step 9 before step 10."""
    return [int(part) if place % 2 else part for place, part in enumerate(re.split(r"([0-9]+)", str(path)))]


def format_of(path: Path) -> FormatName:
    """Return the format of a file, from its name and its begin."""
    name = path.name.lower()
    if name.endswith(_BATCH_ENDINGS):
        marked = (format for format, known in TABLE.items() if known.marks and batches.names_in(path, *known.marks))
        return next(marked, "verl")
    if not name.endswith(LINE_ENDINGS):
        return "generic"
    keys = (first_record(path) or {}).keys()
    if {"input", "output", "step"} <= keys and keys.isdisjoint({"old_log_probs", "rollout_log_probs"}):
        raise RecordingError(
            f"{path}: is a dump of trainer.rollout_data_dir: text and scores without log-probabilities; set "
            f"rollout.calculate_log_probs=True and save batches with DataProto.save_to_disk"
        )
    for format, known in TABLE.items():
        if known.keys and (known.keys <= keys or (known.name is not None and known.name.search(path.as_posix()))):
            return format
    return "generic"


def read_file(
    path: Path,
    refusals: Problems,
    format: FormatName | None = None,
    *,
    columns: Mapping[str, str] | None = None,
    read: LinesRead | None = None,
) -> Iterator[Imported]:
    """Read the sequences of a file; records that cannot become one are `refusals`, by `contract.input_reasons`.

    `format` is None to find out whose it is; `columns` are for generic files. Lines that `read` counts are skipped, and
    it advances with each further one.
    """
    format = format or format_of(path)
    if format == "generic":
        yield from _generic(path, columns, read)
        return
    known = TABLE[format]
    for place, record in known.records(path, read) if known.batch is None else _rows(known, known.batch, path):
        if missing := [name for name in known.needed if record.get(name) is None]:
            refusals.add(f"{place}: has no {' and no '.join(missing)}{known.hint}", kind="no_logprobs")
            continue
        try:
            found = _sequence(record, known.needed, known.columns(record, path))
        except RecordingError as error:
            raise RecordingError(f"{place}: {error}") from None
        except KeyError as error:
            refusals.add(f"{place}: has no {error.args[0]}", kind="no_logprobs")
        except (ValueError, TypeError) as error:
            if known.batch is not None:  # it is of one shape
                raise RecordingError(f"{place}: {error}") from None
            refusals.add(f"{place}: {error}", kind="shape_mismatch")
        else:
            if found is None:
                refusals.add(f"{place}: {known.masks} leave no token", kind="no_tokens")
            else:
                yield found


def _generic(path: Path, columns: Mapping[str, str] | None, read: LinesRead | None) -> Iterator[Imported]:
    """The sequences of a recording; a file with one bad sequence is refused as a whole."""
    log = load_own(path, columns, read)
    ends = np.cumsum(log.lengths)
    per_token = ("token_ids", "advantages", "train_kept", "versions")
    given = {name: values for name in per_token if (values := getattr(log, name)) is not None}
    for begin, end, attributes in zip(ends - log.lengths, ends, log.attributes, strict=True):
        here = slice(int(begin), int(end))
        numbers = {name: values[here] for name, values in given.items()}
        yield Imported(log.train[here], log.inference[here], attributes, **numbers)


def _rows(
    known: TrainerFormat, batch: Callable[[Path], batches.Batch], path: Path
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of a batch, with the plain values of other columns as `OTHERS`, and what is said of all as `META`."""
    tensors, others, meta = batch(path)
    if missing := [name for name in known.needed if name not in tensors]:
        only = ", ".join(sorted(tensors))
        raise RecordingError(f"{path}: has no {' and no '.join(missing)}, only {only}{known.hint}")
    count = len(tensors[known.needed[0]])
    whole = {name: values for name, values in others.items() if len(values) == count}
    for row in range(count):
        own = {name: values[row] for name, values in tensors.items() if values.ndim and len(values) == count}
        plains = plain({name: values[row] for name, values in whole.items()})
        yield f"{path}: row {row}", {**own, OTHERS: plains, META: meta}


def _sequence(record: Mapping[str, Any], sides: tuple[str, ...], columns: Columns) -> Imported | None:
    """The tokens of a record that count; None for none. Ids and advantages of another shape are left out."""
    train, inference = (floats(record[name]) for name in sides[:2])
    kept = columns.mask
    if not train.shape == inference.shape == kept.shape:
        raise ValueError(f"log-probabilities and mask have {train.size}, {inference.size}, {kept.size} entries")
    if not kept.any():
        return None
    ids, gains = (
        None if values is None or np.shape(values) != kept.shape else np.asarray(values)[kept]
        for values in (columns.token_ids, columns.advantages)
    )
    named = given(train_weights=columns.weights[0], inference_weights=columns.weights[1])
    if columns.prompt_ids is not None:
        named["prompt_id"] = prompt_id(np.asarray(columns.prompt_ids, dtype=np.int64))
    return Imported(
        train[kept],
        inference[kept],
        {**named, **columns.attributes},
        None if ids is None else ids.astype(np.int64),
        None if gains is None else gains.astype(np.float64),
    )


def prime_rl_is_complete(path: Path) -> bool:
    """Return True if the folder of an export holds the file STABLE; files elsewhere count as complete."""
    return path.parent.parent.name != "token_exports" or (path.parent / "STABLE").exists()
