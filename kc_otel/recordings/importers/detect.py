"""Format of a file, and whether it is complete."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final, Literal

from kc_otel.recordings.importers import nemo_rl_files as nemo_rl
from kc_otel.recordings.importers import prime_rl_files as prime_rl
from kc_otel.recordings.importers import roll_files as roll
from kc_otel.recordings.importers import skyrl_files as skyrl
from kc_otel.recordings.importers import slime_files as slime
from kc_otel.recordings.importers import verl_files as verl
from kc_otel.recordings.read_jsonl import first_record
from kc_otel.recordings.recording import RecordingError

Format = Literal["verl", "slime", "skyrl", "roll", "prime-rl", "nemo-rl", "generic"]
FORMATS: Final[tuple[Format, ...]] = ("verl", "slime", "skyrl", "roll", "prime-rl", "nemo-rl", "generic")
_JSONL_SUFFIXES: Final = (".jsonl", ".jsonl.gz")
_AREAL_ADVICE: Final = "give Recorder.compare the batch's logprobs, versions and the actor's recomputed ones"
_RECORDING_SUFFIXES: Final = (".npz", ".parquet")


def format_of(path: Path) -> Format:
    """Return the format of a file, from its name and first record.

    Raises:
        RecordingError: If its first line is no JSON object, or it holds text without log-probabilities.
    """
    name = path.name.lower()
    if name.endswith(verl.ENDINGS):
        return _of_batches(path)
    if not name.endswith(_JSONL_SUFFIXES):
        return "generic"
    record = first_record(path)
    if verl.is_text_dump(record):
        msg = (
            f"{path}: is a dump of trainer.rollout_data_dir: text and scores without log-probabilities; set "
            f"rollout.calculate_log_probs=True and save batches with DataProto.save_to_disk"
        )
        raise RecordingError(msg)
    if record is not None and {"head_version", "tail_version", "completion"} <= set(record):
        msg = f"{path}: is a dump of AReaL's rollouts: text and rewards without log-probabilities; {_AREAL_ADVICE}"
        raise RecordingError(msg)
    if prime_rl.looks_like(path, record):
        return "prime-rl"
    return "nemo-rl" if nemo_rl.looks_like(path, record) else "generic"


def _of_batches(path: Path) -> Format:
    """Return the format of a pickle or file of tensors."""
    if skyrl.looks_like(path):
        return "skyrl"
    if roll.looks_like(path):
        return "roll"
    return "slime" if slime.looks_like(path) else "verl"


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
            msg = f"{path}: there is no such file or folder"
            raise FileNotFoundError(msg)
    return list(dict.fromkeys(found))


def complete(path: Path) -> bool:
    """Return True if the trainer is done with a file, or never says so."""
    return prime_rl.complete(path)


_KNOWN_SUFFIXES: Final = (*_JSONL_SUFFIXES, *_RECORDING_SUFFIXES, *verl.ENDINGS)


def _natural(path: Path) -> tuple[tuple[int, int | str], ...]:
    """Step 9 before step 10."""
    digits, parts = "", []
    for letter in (*str(path), ""):
        if letter.isdecimal() and letter.isascii():
            digits += letter
            continue
        if digits:
            parts.append((0, int(digits)))
            digits = ""
        parts.append((1, letter))
    return tuple(parts)
