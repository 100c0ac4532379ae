"""The picture of drift along depth, from what locating found as JSON: on an incident there is nothing else of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from kc_otel.charts import Chart, draw_depth
from kc_otel.diagnose.boundaries import Boundary

__all__ = ["depth_chart"]

_SERIES: Final = (
    ("own error, on the training kernel's inputs", "local"),
    ("drift as they run, completions (decode)", "decode"),
    ("drift as they run, prompts (prefill)", "prefill"),
    ("training kernel against itself", "train_noise"),
    ("inference kernel against itself", "inference_noise"),
    ("rounding to the inference kernel's number format", "precision"),
)
_MOST: Final = 10_000
"""Boundaries that are drawn: more than any model has."""


def depth_chart(evidence: Mapping[str, Any]) -> Chart:
    """Own errors, drift of prompts and completions apart, and noise floors along depth; the culprit is marked.

    Args:
        evidence: What `located_json` gives, perhaps of another version or by another program.

    Raises:
        ValueError: If it is something else.
    """
    try:
        rows = list(evidence["boundaries"])[:_MOST]
        places = [_boundary(row["boundary"]) for row in rows]
        values = [(said, [_value(row, name) for row in rows]) for said, name in _SERIES]
        culprit = evidence["culprit"] and _boundary(evidence["culprit"]["boundary"])
        marked = places.index(culprit) if culprit in places else None
        title = f"Drift along depth, slice {evidence['slice']!s:.80}"
        return draw_depth(title, [f"{each!s:.80}" for each in places], values, marked)
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise ValueError(f"this is not what locating found: {error!r:.80}") from None


def _boundary(said: Mapping[str, Any]) -> Boundary:
    layer = said["layer"]
    return Boundary(None if layer is None else int(layer), str(said["operator"]), int(said["part"]))


def _value(row: Mapping[str, Any], name: str) -> float:
    found = row[name]["estimate"] if name == "local" else row[name]
    value = float(found)
    # Completions that were not told apart are in the drift of all.
    return float(row["drift"]["estimate"]) if name == "decode" and math.isnan(value) else value
