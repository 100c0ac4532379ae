"""JSON that others wrote."""

from __future__ import annotations

import json
from typing import Any


def read_json_text(text: str | bytes) -> Any:
    """Parse JSON; ValueError if it is none, or nests too deep, where `json` raises RecursionError."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it nests too deeply to be read") from None
