"""Credentials in files that change while the evaluator runs: a secret is rotated without a restart."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from kc_otel.escalation.endpoints import Endpoint, EndpointError, credential_files, endpoints_from_env

__all__ = ["Rotation"]

_log: Final = logging.getLogger(__name__)
_EVERY: Final = 5.0


class Rotation:
    """Looks at the endpoints' credential files every few seconds.

    Args:
        names: Names of the endpoints.
        environ: Where they are configured.
        now: Monotonic seconds.
    """

    def __init__(self, names: Iterable[str], environ: Mapping[str, str], now: float) -> None:
        self._names = tuple(names)
        self._environ = environ
        self._looked = now
        self._seen = self._stamps()

    def renewed(self, now: float) -> dict[str, Endpoint] | None:
        """The endpoints as they are configured now, where a file has changed since the last look; None otherwise.

        While the new content is wrong, what was there before stays in force.
        """
        if now - self._looked < _EVERY:
            return None
        self._looked = now
        stamps = self._stamps()
        if stamps == self._seen:
            return None
        self._seen = stamps
        try:
            endpoints = endpoints_from_env(self._names, self._environ)
        except EndpointError as error:
            _log.warning("the old webhook credentials stay in force: %s", error)
            return None
        _log.info("webhook credentials were read again")
        return endpoints

    def _stamps(self) -> dict[Path, tuple[int, int, int] | None]:
        return {path: _stamp(path) for path in credential_files(self._names, self._environ)}


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size
