"""The body that Grafana's webhook contact point sends, for receivers that already read it.

Source: Grafana documentation, "Configure webhook notifications", body version 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["body"]


def body(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Grafana's body for a stored one."""
    firing = [alert for alert in stored["alerts"] if alert["status"] == "firing"]
    incident = stored["kernelContract"]["incident"]
    many = incident["alerts"] if incident is not None else len(firing)
    title = f"[{stored['status'].upper()}:{many or len(stored['alerts'])}] {stored['groupLabels']['contract']}"
    if incident is not None:
        title += f": {incident['headline']}"
    found = [] if incident is None else [f"{each['kind']}: {each['text']}" for each in incident["diagnoses"]]
    said = [f"{one['annotations']['summary']}. {one['annotations']['description']}" for one in stored["alerts"]]
    return {
        "receiver": stored["receiver"],
        "status": stored["status"],
        "orgId": 1,
        "alerts": [
            _alert(alert, cell) for alert, cell in zip(stored["alerts"], stored["kernelContract"]["cells"], strict=True)
        ],
        "groupLabels": stored["groupLabels"],
        "commonLabels": stored["commonLabels"],
        "commonAnnotations": stored["commonAnnotations"],
        "externalURL": stored["externalURL"],
        "version": "1",
        "groupKey": stored["groupKey"],
        "truncatedAlerts": stored["truncatedAlerts"],
        "title": title,
        "state": "alerting" if stored["status"] == "firing" else "ok",
        "message": "\n".join([*found, *said]),
    }


def _alert(alert: Mapping[str, Any], cell: Mapping[str, Any]) -> dict[str, Any]:
    values = {name: cell[name] for name in ("estimate", "lower", "upper", "limit") if cell[name] is not None}
    return {**alert, "values": values, "silenceURL": "", "dashboardURL": "", "panelURL": "", "imageURL": ""}
