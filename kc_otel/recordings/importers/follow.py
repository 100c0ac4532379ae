"""Files one after the other, those that appear later too, and which of them are done."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from kc_otel.recordings.importers.detect import files_of
from kc_otel.recordings.importers.prime_rl_files import complete

_Version = tuple[str, int, int]


class Ledger:
    """Files that are done, by path, size and time of change, so that one that was written again is done again.

    Args:
        path: Where to remember them, one JSON list a line; None for this run alone.

    Raises:
        ValueError: If it is no such file.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._known: set[_Version] = set()
        lines = path.read_text(encoding="utf-8").splitlines() if path is not None and path.exists() else ()
        for number, line in enumerate(lines, 1):
            try:
                name, size, changed = json.loads(line)
            except (ValueError, TypeError):
                said = "is no record of a finished file; give --done a file of its own"
                raise ValueError(f"{path}:{number}: {said}") from None
            self._known.add((name, size, changed))

    def __contains__(self, path: Path) -> bool:
        return _version(path) in self._known

    def add(self, path: Path) -> None:
        """Add a finished file."""
        version = _version(path)
        self._known.add(version)
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(version) + "\n")


def unseen(
    paths: Sequence[Path], ledger: Ledger, stop: threading.Event, *, follow: bool, poll: float
) -> Iterator[Path]:
    """Files that are not done, each once; with `follow`, those that appear, when they have stopped growing.

    Raises:
        FileNotFoundError: If a path is not there.
    """
    tried: set[_Version] = set()
    grown: dict[Path, _Version] = {}
    while not stop.is_set():
        for path in files_of(paths):
            if stop.is_set():
                return
            version = _version(path)
            settled = not follow or (grown.get(path) == version and complete(path))
            grown[path] = version
            if settled and version not in tried and path not in ledger:
                tried.add(version)
                yield path
        if not follow or stop.wait(poll):
            return


def _version(path: Path) -> _Version:
    about = path.stat()
    return str(path.resolve()), about.st_size, about.st_mtime_ns
