"""Wrappers that keep errors of the instrumentation out of verl's run."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final

from kc_otel.record.recorder import Recorder

_log: Final = logging.getLogger(__name__)


class Guarded:
    """A watch whose faults are counted by its recorder, once it has one, and logged once each before.

    Attributes:
        watched: What one call is about, for the log.
    """

    watched = "batch"

    def __init__(self) -> None:
        self._recorder: Recorder | None = None
        self._failed: set[str] = set()

    def _guarded(self, function: Callable[..., Any], *args: Any) -> Any:
        """Return what a function returns; None where it raises."""
        try:
            return function(*args)
        except Exception as error:  # noqa: BLE001 - the trainer must not fail because somebody watches
            text = f"{type(error).__name__}: {error}"
            if self._recorder is not None:
                self._recorder.drop("rollout-unusable", text)
            elif text not in self._failed:
                self._failed.add(text)
                _log.error("kc-otel: a %s of verl was not recorded: %s", self.watched, text)
            return None
