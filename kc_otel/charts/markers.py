"""Events of a cell, as signs on its history."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

_ALERT_MARKERS: Final = {
    "firing": "▲", "silence-ended": "▲", "would-fire": "△", "resolved": "▽", "would-resolve": "▽",
}  # fmt: skip
_PERSON_MARKER: Final = "☞"


@dataclass(frozen=True, slots=True)
class Marker:
    """Something that happened at a moment (Unix time, seconds): a sign of one character, and a description."""

    at: float
    sign: str
    text: str


def markers_of(events: Iterable[Mapping[str, Any]], contract: str, clause: str, slice: str) -> tuple[Marker, ...]:
    """Alerts of a clause on a slice, what people did to it, and steps of promotions.

    Events are as `/api/v1/events` has them.
    """
    found = []
    for event in events:
        data, kind = event["data"], event["kind"]
        if event["contract"] != contract:
            continue
        if kind == "promotion":
            sign = "→"
        elif kind in _ALERT_MARKERS:
            sign = _ALERT_MARKERS[kind] if (data.get("clause"), data.get("slice")) == (clause, slice) else ""
        else:
            whole = data.get("clause") in {None, clause} and data.get("slice") in {None, slice}
            sign = _PERSON_MARKER if data.get("by") and whole else ""
        if sign:
            said = event["message"].removeprefix(f"{contract}: ")
            found.append(Marker(event["at"], sign, f"{kind.replace('-', ' ')}: {said}"))
    return tuple(found)
