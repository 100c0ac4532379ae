"""Our lines in vLLM's own log, where its operator looks.

A program that starts vLLM configures no logging of ours, and dependencies of vLLM set the level of the root logger to
ERROR: a warning of a full disk would be seen by nobody.
"""

from __future__ import annotations

import logging
from typing import Final

_OWN_LOGGER: Final = logging.getLogger("kc_otel")
_VLLM: Final = "vllm"


class EngineLog(logging.Handler):
    """Gives the records of `kc_otel` to the handlers of vLLM's logger, at vLLM's level and in its format.

    They are looked up for each record: vLLM may be imported, and configured anew, later. Where it has none, because
    VLLM_CONFIGURE_LOGGING is 0, the program's own get them as ever, and without any, standard error does. A handler
    that the root logger has too gets them from there, once.
    """

    @classmethod
    def attach(cls) -> None:
        """Begin, once in a process, unless somebody has given `kc_otel` handlers of its own."""
        if _OWN_LOGGER.handlers:
            return
        _OWN_LOGGER.addHandler(cls())
        if _OWN_LOGGER.level == logging.NOTSET:
            _OWN_LOGGER.setLevel(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        """Hand a record over."""
        engine = logging.getLogger(_VLLM)
        programs = logging.getLogger().handlers
        handlers = [handler for handler in engine.handlers if handler not in programs]
        if not engine.handlers and not programs and logging.lastResort is not None:
            handlers = [logging.lastResort]
        if engine.isEnabledFor(record.levelno):
            for handler in handlers:
                if record.levelno >= handler.level:
                    handler.handle(record)
