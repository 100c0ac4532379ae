"""Alerts for Alertmanager's own API, `POST /api/v2/alerts`.

Alertmanager takes an alert that nobody repeats for resolved when it ends. So one that fires is posted again every
minute, and ends some minutes after each post, as Prometheus does it. Where the evaluator is gone, Alertmanager lets go
of its alerts after that time; that the evaluator is gone is told by an alert of Prometheus' own.
Source: prometheus/alertmanager, api/v2/openapi.yaml, `postableAlert`; prometheus/prometheus, rules/alerting.go.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final

__all__ = ["alerts"]

_AHEAD: Final = timedelta(minutes=5)


def alerts(body: Mapping[str, Any], now: float) -> list[dict[str, Any]]:
    """The postable alerts of a stored body, posted at unix time `now`, seconds.

    What was found out about their incident is an annotation, which has no part in which alert it is.
    """
    ahead = (datetime.fromtimestamp(now, UTC) + _AHEAD).isoformat()
    incident = body["kernelContract"]["incident"]
    found = [] if incident is None else [f"{each['kind']}: {each['text']}" for each in incident["diagnoses"]]
    return [
        {
            "labels": alert["labels"],
            "annotations": {**alert["annotations"], **({"diagnosis": "\n".join(found)} if found else {})},
            "startsAt": alert["startsAt"],
            "endsAt": ahead if alert["status"] == "firing" else alert["endsAt"],
            **({"generatorURL": alert["generatorURL"]} if alert["generatorURL"] else {}),
        }
        for alert in body["alerts"]
    ]
