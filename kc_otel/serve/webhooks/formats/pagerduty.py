"""Events for PagerDuty's Events API v2: one for each alert, and the same `dedup_key` for its end as for its start.

Source: PagerDuty developer documentation, "Events API v2: send an alert event".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

__all__ = ["events"]

_SUMMARY: Final = 1024


def events(body: Mapping[str, Any], routing_key: str) -> list[dict[str, Any]]:
    """The events of a stored body."""
    found = []
    contract = body["kernelContract"]
    for alert, cell in zip(body["alerts"], contract["cells"], strict=True):
        event: dict[str, Any] = {
            "routing_key": routing_key,
            "event_action": "trigger" if alert["status"] == "firing" else "resolve",
            "dedup_key": f"kc-otel/{contract['name']}/{alert['fingerprint']}",
        }
        if alert["status"] == "firing":
            links = [(alert["generatorURL"], "cell"), (alert["annotations"].get("runbook_url", ""), "runbook")]
            event |= {
                "payload": {
                    "summary": alert["annotations"]["summary"][:_SUMMARY],
                    "source": cell["kernels"]["inference"] or contract["name"],
                    "severity": cell["step"]["severity"],
                    "timestamp": alert["startsAt"],
                    "component": cell["slice"],
                    "group": contract["name"],
                    "class": cell["clause"],
                    "custom_details": {"description": alert["annotations"]["description"], **cell},
                },
                "client": "kc-otel",
                "links": [{"href": href, "text": text} for href, text in links if href],
            }
        found.append(event)
    return found
