"""Reading JSON lines one at a time, so that a file's size does not matter."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kc_otel.contract.json_text import read_json_text
from kc_otel.recordings.importers.imported import ImportFileError

__all__ = ["records"]


def records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each line's object, with its place for messages.

    Raises:
        ImportFileError: If a line is no JSON object.
        OSError: If the file cannot be read.
    """
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            place = f"{path}:{number}"
            try:
                record = read_json_text(line)
            except ValueError as error:
                msg = f"{place}: is not JSON ({error}); is the file still being written?"
                raise ImportFileError(msg) from None
            if not isinstance(record, dict):
                msg = f"{place}: is not a JSON object but {type(record).__name__}"
                raise ImportFileError(msg)
            yield place, record
