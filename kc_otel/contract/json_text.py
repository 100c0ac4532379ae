"""JSON that others wrote."""

from __future__ import annotations

import json
from typing import Any


def read_json_text(text: str | bytes) -> Any:
    """Parse a JSON text.

    Raises:
        ValueError: If it is not JSON, or nests deeper than can be read, which `json` alone answers with a
            RecursionError.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it nests too deeply to be read") from None
