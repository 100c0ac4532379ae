"""Reading a recording, whatever wrote it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, Literal

from kc_otel.recordings.assemble import assembled
from kc_otel.recordings.read_jsonl import read_jsonl
from kc_otel.recordings.read_npz import read_npz
from kc_otel.recordings.read_parquet import read_parquet
from kc_otel.recordings.recording import Recording, RecordingError
from kc_otel.recordings.rows import RaggedTable

__all__ = ["Format", "format_of", "load_recording"]

Format = Literal["npz", "jsonl", "parquet"]

_READ: Final[Mapping[Format, Callable[[Path, Mapping[str, str] | None], RaggedTable]]] = {
    "npz": read_npz,
    "jsonl": read_jsonl,
    "parquet": read_parquet,
}

_ENDINGS: Final[Mapping[str, Format]] = {
    ".npz": "npz",
    ".jsonl": "jsonl",
    ".jsonl.gz": "jsonl",
    ".parquet": "parquet",
}


def load_recording(
    path: str | Path, *, columns: Mapping[str, str] | None = None, format: Format | None = None
) -> Recording:
    """Log-probabilities of both kernels from .npz, .jsonl, .jsonl.gz or .parquet.

    Layouts: padded arrays [S, T] with a mask or lengths, or packed arrays [N] with lengths (.npz); one row per sequence
    with its numbers in lists (.jsonl, .parquet), with or without a mask. A .npz without lengths is one sequence. It may
    also hold `train_logits` and `inference_logits` [N, V] with `token_ids`; log-probabilities that are missing are then
    taken from them.

    Columns are found by the names that verl, TRL, NeMo-RL and prime-rl use (`columns.ALIASES`). `advantages` is one
    number per sequence or one per token. What slices are made of is in a column `attributes` (a mapping, or its JSON)
    and in every other column with one plain value per sequence.

    Rows that a mask leaves no token of are dropped, and counted in `Recording.masked`.

    Args:
        path: The file.
        columns: Role to column name, where names are others, such as `{"train": "fsdp_lp", "inference": "vllm_lp"}`.
            Roles are train, inference, mask, lengths, token_ids, advantages, train_at_rollout, policy, train_logits
            and inference_logits.
        format: `npz`, `jsonl` or `parquet`, where the file's name does not say.

    Raises:
        RecordingError: If the file cannot be used, with every problem that was found, up to a cap: a column that is
            missing or ambiguous, rows whose sides differ in length, NaN, positive log-probabilities, a side of zeros,
            sides that are shifted by a token, no token at all.
    """
    where = Path(path)
    return assembled(_READ[format or format_of(where)](where, columns))


def format_of(path: Path) -> Format:
    """The format that a file's name says.

    Raises:
        RecordingError: If it says none.
    """
    name = path.name.lower()
    for ending, format in _ENDINGS.items():
        if name.endswith(ending):
            return format
    raise RecordingError(f"{path}: the name does not end in .npz, .jsonl, .jsonl.gz or .parquet; say the format")
