"""The rescoring side of the spool: take, score, and only then forget."""

from __future__ import annotations

import fcntl
import logging
import os
import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import Final, Self

from kc_otel.recordings.request import COLUMNS, SampledRequest, decode
from kc_otel.recordings.spool.spool_file import SpoolError, connect, expire, forget

_log: Final = logging.getLogger("kc_otel")


class SpoolReader:
    """The one reader of a spool.

    What `take` returned and `done` did not confirm is there again for the next reader: at least once, never lost.

    Args:
        path: The file.

    Raises:
        SpoolError: If the file is no spool, or another process reads it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path: Final = Path(path)
        self._taken = 0
        # A lock of the operating system ends with the process, however it ends.
        self._lock = os.open(f"{self.path}.reader", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._connection = connect(self.path)
        except (OSError, SpoolError) as error:
            os.close(self._lock)
            if isinstance(error, SpoolError):
                raise
            msg = f"{self.path}: another process is rescoring this spool; stop it first"
            raise SpoolError(msg) from None

    def take(self, limit: int) -> list[tuple[int, SampledRequest]]:
        """The next requests, oldest first, with the numbers that `done` wants; each is taken once by this reader.

        A row that cannot be read is removed and logged.

        Raises:
            SpoolError: If the file cannot be read.
        """
        try:
            rows = self._connection.execute(
                f"SELECT id, {COLUMNS} FROM requests WHERE id > ? ORDER BY id LIMIT ?",  # noqa: S608 - constants
                (self._taken, limit),
            ).fetchall()
        except sqlite3.Error as error:
            raise SpoolError(f"{self.path}: cannot be read ({error})") from None
        found = []
        for number, *row in rows:
            try:
                found.append((number, decode(tuple(row))))
            except ValueError as error:
                _log.warning("%s: %s; it is removed", self.path, error)
                self.done([number])
            self._taken = number
        return found

    def done(self, numbers: Iterable[int]) -> None:
        """Forget requests whose drift has been exported.

        Raises:
            SpoolError: If the file cannot be written; they will be scored again after a restart.
        """
        try:
            forget(self._connection, numbers)
        except sqlite3.Error as error:
            raise SpoolError(f"{self.path}: scored requests cannot be removed ({error})") from None

    def expire(self, before: float) -> int:
        """Forget requests that were finished before a Unix time, scored or not; how many.

        Raises:
            SpoolError: If the file cannot be written.
        """
        try:
            return expire(self._connection, before)
        except sqlite3.Error as error:
            raise SpoolError(f"{self.path}: old requests cannot be removed ({error})") from None

    def __len__(self) -> int:
        """Requests in the file, those that were taken included."""
        return int(self._connection.execute("SELECT count(*) FROM requests").fetchone()[0])

    def close(self) -> None:
        """Let another process read."""
        self._connection.close()
        os.close(self._lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
