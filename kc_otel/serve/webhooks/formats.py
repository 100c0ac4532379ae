"""Turn a stored body into the HTTP request of an endpoint's format, with credentials.

| format          | what is sent                                        | credential                    |
| --------------- | --------------------------------------------------- | ----------------------------- |
| kernel-contract | Alertmanager's version 4 body with `kernelContract` | Standard Webhooks signature   |
| pagerduty       | one Events API v2 event for the incident            | routing key, in the body      |
| slack           | a message in blocks about the incident              | the URL itself                |
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any, Final

from kc_otel.client.webhooks import Secret, sign


class Format(StrEnum):
    """Body format of a receiver."""

    KERNEL_CONTRACT = "kernel-contract"
    PAGERDUTY = "pagerduty"
    SLACK = "slack"


@dataclass(frozen=True, slots=True)
class Outgoing:
    """One HTTP POST; the headers are all but those of HTTP itself."""

    url: str = field(repr=False)
    headers: Mapping[str, str] = field(repr=False)
    body: bytes


def render(
    format: Format,
    url: str,
    stored: bytes,
    message_id: str,
    *,
    now: float,
    secrets: tuple[Secret, ...] = (),
    key: str = "",
) -> Outgoing:
    """The request of one message: the same at every attempt, but for the time.

    `secrets` are those of `kernel-contract`, `key` is that of `pagerduty`.
    """
    if format is Format.KERNEL_CONTRACT:
        return Outgoing(url, sign(secrets, message_id, stored, now=now), stored)
    body: dict[str, Any] = json.loads(stored)
    said = pagerduty_event(body, key) if format is Format.PAGERDUTY else slack_message(body)
    return Outgoing(url, {}, json.dumps(said, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode())


_SUMMARY: Final = 1024
_MAX_CELLS: Final = 50
"""Cells in the details of an event, which PagerDuty limits to 512 kB."""
_SEVERITIES: Final = ("critical", "warning", "info")


def pagerduty_event(body: Mapping[str, Any], routing_key: str) -> dict[str, Any]:
    """The event of a stored body.

    Its `dedup_key` is that of the incident from start to end, or of the alert where there is no incident. An update is
    another `trigger` under the same key: PagerDuty adds it to the open incident and pages nobody again.
    Source: PagerDuty developer documentation, "Events API v2: send an alert event".
    """
    contract, alert, cell = body["kernelContract"], body["alerts"][0], body["kernelContract"]["cells"][0]
    incident = contract["incident"]
    event: dict[str, Any] = {
        "routing_key": routing_key,
        "event_action": "trigger" if body["status"] == "firing" else "resolve",
        "dedup_key": f"kc-otel/{contract['name']}/{alert['fingerprint'] if incident is None else incident['id']}",
    }
    if body["status"] == "resolved":
        return event
    if incident is None:
        link, kernel, since = (alert["generatorURL"], "cell"), cell["kernels"]["inference"], alert["startsAt"]
        summary = alert["annotations"]["summary"]
        details = {"description": alert["annotations"]["description"], **cell}
    else:
        link, kernel, since = (incident["url"], "incident"), incident["kernels"]["inference"], incident["since"]
        summary = _summary(contract, incident)
        names = ("done", "state_text", "extents", "grew", "slices", "kernels", "diagnoses", "alerts")
        details = {"next": contract["next"], **{name: incident[name] for name in names}}
        details |= {"evidence": contract["evidence"], "cells": contract["cells"][:_MAX_CELLS]}
    severities = {cell["step"]["severity"] for cell in contract["cells"]}
    links = [link, (alert["annotations"].get("runbook_url", ""), "runbook")]
    return event | {
        "payload": {
            "summary": summary[:_SUMMARY],
            "source": kernel or contract["name"],
            "severity": next(severity for severity in _SEVERITIES if severity in severities),
            "timestamp": since,
            "group": contract["name"],
            "class": cell["clause"],
            "custom_details": details,
        },
        "client": "kc-otel",
        "links": [{"href": href, "text": text} for href, text in links if href],
    }


def _summary(contract: Mapping[str, Any], incident: Mapping[str, Any]) -> str:
    since = f"since {incident['since'][:16].replace('T', ' ')} UTC"
    done = [f"Done: {'; '.join(incident['done'])}."] if incident["done"] else []
    parts = (f"{contract['name']}:", contract["impact"], f"{incident['headline']}, {since}.", *done)
    return " ".join(filter(None, parts))


_COLORS: Final = {"critical": "#d62728", "warning": "#ff9f1c", "info": "#1f77b4", "resolved": "#2ca02c"}
_SECTION: Final = 3000
"""Characters that Slack takes in a section."""
_WORDS: Final = {
    "reminder": "Reminder",
    "silence-ended": "A silence has ended",
    "update": "Update",
    "rolled-back": "Rolled back",
    "unfollowed": "No longer followed",
}
_MAX_EXTENTS: Final = 20
"""Clauses beyond this many make a message that nobody reads."""


def slack_message(body: Mapping[str, Any]) -> dict[str, Any]:
    """The message of a stored body, in blocks: about its incident, or about its alerts where there is none.

    For Slack's incoming webhooks, and for Mattermost, Rocket.Chat and Discord (`/slack`), which read the same.

    Source: Slack API documentation, "Sending messages using incoming webhooks", "Block Kit", "Legacy secondary
    attachments", "Formatting text for app surfaces".
    """
    contract, alert = body["kernelContract"], body["alerts"][0]
    incident = contract["incident"]
    if incident is None:
        link = alert["generatorURL"], "Cell"
        title = f"[{body['status']}] {alert['annotations']['summary']}"
        title += f", and {len(body['alerts']) - 1} more" * (len(body["alerts"]) > 1)
        told = [_escaped(alert["annotations"]["description"])]
    else:
        word = _WORDS.get(contract["reason"], incident["state_text"])
        link = incident["url"], "Incident"
        title = f"{word}: {contract['name']}: {contract['impact'] or incident['headline']}"
        told = _of_incident(contract, incident)
    links = [link, (alert["annotations"].get("runbook_url", ""), "Runbook")]
    told.append(" · ".join(f"<{_escaped(href)}|{text}>" for href, text in links if href))
    if incident is not None:
        extents = incident["extents"][:_MAX_EXTENTS] if body["status"] == "firing" else ()
        told.append("\n".join(map(_escaped, extents)))
        told.append("\n".join(f"*{entry['kind']}*: {_escaped(entry['text'])}" for entry in incident["diagnoses"]))
    blocks = [_section(text) for text in (f"*{_escaped(title)}*", *told) if text]
    if facts := [_escaped(text) for text in (contract["evidence"], contract.get("links", "")) if text]:
        blocks.append({"type": "context", "elements": [{"type": "mrkdwn", "text": " ".join(facts)}]})
    severity = "resolved" if body["status"] == "resolved" else contract["cells"][0]["step"]["severity"]
    attachment = {"color": _COLORS[severity], "fallback": _escaped(title), "blocks": blocks}
    return {"text": _escaped(title), "attachments": [attachment]}


def _of_incident(contract: Mapping[str, Any], incident: Mapping[str, Any]) -> list[str]:
    since = int(datetime.fromisoformat(incident["since"]).timestamp())
    onset = f"Since <!date^{since}^{{time}} on {{date_short}}|{incident['since']}>"
    onset += f"; it grew: {_escaped(incident['grew'])}" if incident["grew"] else ""
    where = f"{_escaped(incident['headline'])}. " if contract["impact"] else ""
    done = "*Done*: " * bool(incident["done"]) + "; ".join(map(_escaped, incident["done"]))
    return [where + onset, done, _escaped(contract["next"]).replace("Now:", "*Now*:", 1)]


def _section(text: str) -> dict[str, Any]:
    return {"type": "section", "text": {"type": "mrkdwn", "text": text[:_SECTION]}}


def _escaped(text: str) -> str:
    """Slack's three control characters; a slice named `<!channel>` must wake nobody."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
