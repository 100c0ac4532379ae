"""Files that are read again when they change: tokens, certificates, credentials of webhooks."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


class WatchedFiles:
    """Files of which it is known whether they have changed, also when a link to another file takes the place of one."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._paths = tuple(paths)
        self._seen = [_stamp(path) for path in self._paths]

    def changed(self) -> bool:
        """Return whether a file has changed since the last call."""
        before, self._seen = self._seen, [_stamp(path) for path in self._paths]
        return before != self._seen


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns
