"""Files that are read again when they change: tokens, certificates, credentials of webhooks."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Final

_log: Final = logging.getLogger(__name__)


class UnusableFileError(Exception):
    """A file, or what names it, cannot be used; the message says where and why, and holds no secret."""


class WatchedFiles(ABC):
    """Content of files, read again once they change; while that fails, the content read before stays in force."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._paths = tuple(paths)
        self._seen = [_stamp(path) for path in self._paths]
        self._read()

    def renew(self) -> bool:
        """Read the files again if one has changed, as when a link leads to another; return True if that worked."""
        before, self._seen = self._seen, [_stamp(path) for path in self._paths]
        if before == self._seen:
            return False
        try:
            self._read()
        except UnusableFileError as error:
            _log.error("%s; what was read before stays in force", error)
            return False
        _log.info("%s: read again, and in force", ", ".join(map(str, self._paths)))
        return True

    @abstractmethod
    def _read(self) -> None:
        """Read the files; raises UnusableFileError."""


def _stamp(path: Path) -> tuple[int, ...] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns  # the last is of rights, too
