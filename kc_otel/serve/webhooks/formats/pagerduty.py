"""Events for PagerDuty's Events API v2: one for each message, with the incident's `dedup_key` from start to end.

An update is another `trigger` under the same key: PagerDuty adds it to the open incident and pages nobody again. A body
without an incident becomes an event for each alert.
Source: PagerDuty developer documentation, "Events API v2: send an alert event".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

__all__ = ["events"]

_SUMMARY: Final = 1024
_LISTED: Final = 50
"""Cells in the details of an event, which PagerDuty limits to 512 kB."""
_SEVERE: Final = ("critical", "warning", "info")


def events(body: Mapping[str, Any], routing_key: str) -> list[dict[str, Any]]:
    """The events of a stored body."""
    contract = body["kernelContract"]
    if contract["incident"] is not None:
        return [_of_incident(body, contract["incident"], routing_key)]
    return [
        _of_alert(alert, cell, contract["name"], routing_key)
        for alert, cell in zip(body["alerts"], contract["cells"], strict=True)
    ]


def _of_incident(body: Mapping[str, Any], incident: Mapping[str, Any], routing_key: str) -> dict[str, Any]:
    contract = body["kernelContract"]
    event: dict[str, Any] = {
        "routing_key": routing_key,
        "event_action": "trigger" if body["status"] == "firing" else "resolve",
        "dedup_key": f"kc-otel/{contract['name']}/{incident['id']}",
    }
    if body["status"] == "resolved":
        return event
    severities = {cell["step"]["severity"] for cell in contract["cells"]}
    runbook = body["alerts"][0]["annotations"].get("runbook_url", "")
    links = [(incident["url"], "incident"), (runbook, "runbook")]
    details = {
        name: incident[name] for name in ("state", "extents", "grew", "slices", "kernels", "diagnoses", "alerts")
    }
    return event | {
        "payload": {
            "summary": f"{contract['name']}: {incident['headline']}"[:_SUMMARY],
            "source": incident["kernels"]["inference"] or contract["name"],
            "severity": next(one for one in _SEVERE if one in severities),
            "timestamp": incident["since"],
            "group": contract["name"],
            "class": contract["cells"][0]["clause"],
            "custom_details": details | {"evidence": contract["evidence"], "cells": contract["cells"][:_LISTED]},
        },
        "client": "kc-otel",
        "links": [{"href": href, "text": text} for href, text in links if href],
    }


def _of_alert(alert: Mapping[str, Any], cell: Mapping[str, Any], contract: str, routing_key: str) -> dict[str, Any]:
    event: dict[str, Any] = {
        "routing_key": routing_key,
        "event_action": "trigger" if alert["status"] == "firing" else "resolve",
        "dedup_key": f"kc-otel/{contract}/{alert['fingerprint']}",
    }
    if alert["status"] == "resolved":
        return event
    links = [(alert["generatorURL"], "cell"), (alert["annotations"].get("runbook_url", ""), "runbook")]
    return event | {
        "payload": {
            "summary": alert["annotations"]["summary"][:_SUMMARY],
            "source": cell["kernels"]["inference"] or contract,
            "severity": cell["step"]["severity"],
            "timestamp": alert["startsAt"],
            "component": cell["slice"],
            "group": contract,
            "class": cell["clause"],
            "custom_details": {"description": alert["annotations"]["description"], **cell},
        },
        "client": "kc-otel",
        "links": [{"href": href, "text": text} for href, text in links if href],
    }
