"""Recordings in .npz, .jsonl, .jsonl.gz and .parquet, in any program's names for its columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from kc_otel.recordings import RecordingError, load_recording
from kc_otel.recordings.importers.imported import Imported, ImportFileError

__all__ = ["read"]


def read(path: Path, columns: Mapping[str, str] | None = None) -> Iterator[Imported]:
    """The sequences of a recording; a file with one bad sequence is refused as a whole.

    Columns `train_weights` and `inference_weights` with one value per sequence are weight versions; `weight_versions`
    has the inference kernel's for each token.

    Raises:
        ImportFileError: If the recording cannot be used; every problem, one line each.
    """
    try:
        log = load_recording(path, columns=columns)
    except RecordingError as error:
        raise ImportFileError("\n".join(error.problems)) from None
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
