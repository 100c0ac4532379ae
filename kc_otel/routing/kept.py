"""The last decision table in a file, for a serving process that starts while the evaluator is gone."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Final

from kc_otel.routing.table import DecisionTable

__all__ = ["Kept"]

_log: Final = logging.getLogger(__name__)


class Kept:
    """A file with one table. Processes may share it: each write replaces it in one step.

    Args:
        path: The file; its folder has to exist.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._failed = False

    def load(self) -> DecisionTable | None:
        """The table, or None where there is no file yet.

        Raises:
            ValueError: If it holds something else.
            OSError: If it cannot be read.
        """
        try:
            return DecisionTable.from_json(json.loads(self._path.read_bytes()))
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{self._path}: not a decision table ({error!r}); remove it, or keep another") from None

    def save(self, table: DecisionTable) -> None:
        """Replace the file; what goes wrong is logged once, because requests are routed all the same."""
        beside = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        try:
            beside.write_text(json.dumps(table.to_json(), separators=(",", ":")))
            beside.replace(self._path)
        except OSError as error:
            if not self._failed:
                _log.warning("the decision table cannot be kept in %s: %s", self._path, error)
            self._failed = True
        else:
            self._failed = False
