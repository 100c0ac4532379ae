"""Log lines that cannot be forged, as sentences or as JSON: text from others starts no line and drives no terminal."""

from __future__ import annotations

import json
import logging
import math
from datetime import UTC, datetime
from typing import Any

from kc_otel.contract.plain_text import plain, plain_lines


class PlainFormatter(logging.Formatter):
    """A formatter that escapes characters that are not plain; a traceback keeps its lines, and is indented."""

    def format(self, record: logging.LogRecord) -> str:
        """A message, and the traceback that it comes with."""
        others, record.exc_text = record.exc_text, None  # another formatter's, which left everything in it
        try:
            return super().format(record)
        finally:
            record.exc_text = others

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the library's name
        """Return a log record as one line."""
        record.message = plain(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:  # noqa: N802 - the library's name
        """A traceback, whose lines cannot be taken for messages."""
        return "    " + plain_lines(super().formatException(ei)).replace("\n", "\n    ")


class JsonFormatter(logging.Formatter):
    """A formatter that writes each record as one line of JSON, with the `attributes` that it was given."""

    def format(self, record: logging.LogRecord) -> str:
        """Return a log record as one line."""
        said: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": plain(record.getMessage()),
        }
        attributes = getattr(record, "attributes", None)
        if attributes:
            said["attributes"] = {name: _in_json(value) for name, value in attributes.items()}
        if record.exc_info:
            said["exception"] = plain_lines(self.formatException(record.exc_info))
        return json.dumps(said, allow_nan=False)


def _in_json(value: Any) -> Any:
    """A number or a bool as it is, where JSON has it; all else as text."""
    if isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return plain(str(value))
