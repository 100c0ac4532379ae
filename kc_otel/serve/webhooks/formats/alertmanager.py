"""Alerts for Alertmanager's own API, `POST /api/v2/alerts`.

Alertmanager takes an alert that nobody repeats for resolved after `resolve_timeout`. Ours are sent once when they fire
and once when they resolve, so a firing one says that it ends a year from its start; resolving replaces that.
Source: prometheus/alertmanager, api/v2/openapi.yaml, `postableAlert`.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any, Final

__all__ = ["alerts"]

_OPEN_END: Final = timedelta(days=365)


def alerts(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The postable alerts of a stored body."""
    found = []
    for alert in body["alerts"]:
        ends = alert["endsAt"]
        if alert["status"] == "firing":
            ends = (datetime.fromisoformat(alert["startsAt"]) + _OPEN_END).isoformat()
        found.append(
            {
                "labels": alert["labels"],
                "annotations": alert["annotations"],
                "startsAt": alert["startsAt"],
                "endsAt": ends,
                **({"generatorURL": alert["generatorURL"]} if alert["generatorURL"] else {}),
            }
        )
    return found
