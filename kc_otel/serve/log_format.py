"""A log whose lines are what they seem: what others wrote into a message starts no line and drives no terminal."""

from __future__ import annotations

import logging
from typing import Any

from kc_otel.contract.plain_text import plain, plain_lines

__all__ = ["PlainFormatter"]


class PlainFormatter(logging.Formatter):
    """A formatter that writes what is not plain as an escape; a traceback keeps its lines, and is set in."""

    def format(self, record: logging.LogRecord) -> str:
        """A message, and the traceback that it comes with."""
        others, record.exc_text = record.exc_text, None  # another formatter's, which left everything in it
        try:
            return super().format(record)
        finally:
            record.exc_text = others

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the library's name
        """One line."""
        record.message = plain(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:  # noqa: N802 - the library's name
        """A traceback, whose lines cannot be taken for messages."""
        return "    " + plain_lines(super().formatException(ei)).replace("\n", "\n    ")
