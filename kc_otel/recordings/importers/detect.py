"""Format of a file, and the sequences that it holds."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final, Literal, get_args

import numpy as np

from kc_otel.recordings.importers import nemo_rl_files as nemo_rl
from kc_otel.recordings.importers import prime_rl_files as prime_rl
from kc_otel.recordings.importers import roll_files as roll
from kc_otel.recordings.importers import skyrl_files as skyrl
from kc_otel.recordings.importers import slime_files as slime
from kc_otel.recordings.importers import verl_files as verl
from kc_otel.recordings.importers.imported import Imported, Refusals
from kc_otel.recordings.read_table import first_record
from kc_otel.recordings.recording import RecordingError
from kc_otel.recordings.recording_files import load_own

Format = Literal["verl", "slime", "skyrl", "roll", "prime-rl", "nemo-rl", "generic"]
FORMATS: Final[tuple[Format, ...]] = get_args(Format)
_READERS: Final[Mapping[str, Callable[[Path, Refusals], Iterator[Imported]]]] = {
    "verl": verl.read,
    "skyrl": skyrl.read,
    "roll": roll.read,
    "slime": slime.read,
    "prime-rl": prime_rl.read,
    "nemo-rl": nemo_rl.read,
}
_JSONL_SUFFIXES: Final = (".jsonl", ".jsonl.gz")
_KNOWN_SUFFIXES: Final = (*_JSONL_SUFFIXES, ".npz", ".parquet", *verl.ENDINGS)


def format_of(path: Path) -> Format:
    """Return the format of a file, from its name and first record.

    Raises:
        RecordingError: If its first line is no JSON object, or it holds text without log-probabilities.
    """
    name = path.name.lower()
    if name.endswith(verl.ENDINGS):
        named: dict[Format, Callable[[Path], bool]] = {
            "skyrl": skyrl.looks_like, "roll": roll.looks_like, "slime": slime.looks_like
        }  # fmt: skip
        return next((format for format, looks_like in named.items() if looks_like(path)), "verl")
    if not name.endswith(_JSONL_SUFFIXES):
        return "generic"
    record = first_record(path)
    if verl.is_text_dump(record):
        raise RecordingError(
            f"{path}: is a dump of trainer.rollout_data_dir: text and scores without log-probabilities; set "
            f"rollout.calculate_log_probs=True and save batches with DataProto.save_to_disk"
        )
    if prime_rl.looks_like(path, record):
        return "prime-rl"
    return "nemo-rl" if nemo_rl.looks_like(path, record) else "generic"


def files_of(paths: Iterable[Path]) -> list[Path]:
    """The files that paths name: themselves, and of folders whatever could be imported, by name in natural order.

    Raises:
        FileNotFoundError: If a path is not there.
    """
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = (file for file in path.rglob("*") if file.is_file())
            found += sorted((file for file in inside if file.name.lower().endswith(_KNOWN_SUFFIXES)), key=_natural)
        elif path.exists():
            found.append(path)
        else:
            raise FileNotFoundError(f"{path}: there is no such file or folder")
    return list(dict.fromkeys(found))


def _natural(path: Path) -> list[int | str]:
    """Step 9 before step 10."""
    return [int(part) if place % 2 else part for place, part in enumerate(re.split(r"([0-9]+)", str(path)))]


def read_file(
    path: Path,
    refusals: Refusals,
    format: Format | None = None,
    *,
    columns: Mapping[str, str] | None = None,
) -> Iterator[Imported]:
    """Read the sequences of a file; records that cannot become one are counted.

    Args:
        path: The file.
        refusals: Where they are counted.
        format: Whose it is; None to find out.
        columns: Role to column name, for generic files.

    Raises:
        RecordingError: If it cannot be used.
        OSError: If it cannot be read.
    """
    format = format or format_of(path)
    return read_generic(path, columns) if format == "generic" else _READERS[format](path, refusals)


def read_generic(path: Path, columns: Mapping[str, str] | None = None) -> Iterator[Imported]:
    """The sequences of a recording; a file with one bad sequence is refused as a whole.

    Columns `train_weights` and `inference_weights` with one value per sequence are weight versions; `weight_versions`
    has the inference kernel's for each token.

    Raises:
        RecordingError: If the recording cannot be used; every problem, one line each.
    """
    log = load_own(path, columns)
    ends = np.cumsum(log.lengths)
    for begin, end, attributes in zip(ends - log.lengths, ends, log.attributes, strict=True):
        here = slice(int(begin), int(end))
        train, inference = (_version(attributes.get(f"{side}_weights")) for side in ("train", "inference"))
        yield Imported(
            log.train[here],
            log.inference[here],
            None if log.token_ids is None else log.token_ids[here],
            None if log.advantages is None else log.advantages[here],
            attributes,
            (train, inference),
            versions=None if log.versions is None else log.versions[here],
            train_kept=None if log.train_kept is None else log.train_kept[here],
        )


def _version(value: object) -> int | str | None:
    return value if isinstance(value, int | str) and not isinstance(value, bool) else None
