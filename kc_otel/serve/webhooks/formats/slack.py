"""A message for Slack's incoming webhooks, and for Mattermost, Rocket.Chat and Discord (`/slack`), which read the same.

Source: Slack API documentation, "Sending messages using incoming webhooks" and "Legacy secondary attachments".
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

__all__ = ["message"]

_COLORS: Final = {"critical": "#d62728", "warning": "#ff9f1c", "info": "#1f77b4"}
_RESOLVED: Final = "#2ca02c"
_MOST: Final = 20
"""Attachments beyond this many make a message that nobody reads; Slack refuses more than 100."""


def message(body: Mapping[str, Any]) -> dict[str, Any]:
    """The message of a stored body."""
    alerts, cells = body["alerts"], body["kernelContract"]["cells"]
    text = alerts[0]["annotations"]["summary"]
    if len(alerts) > 1:
        text += f", and {len(alerts) - 1} more"
    attachments = [_attachment(alert, cell) for alert, cell in zip(alerts[:_MOST], cells, strict=False)]
    return {"text": _escaped(f"[{body['status']}] {text}"), "attachments": attachments}


def _attachment(alert: Mapping[str, Any], cell: Mapping[str, Any]) -> dict[str, Any]:
    annotations, resolved = alert["annotations"], alert["status"] == "resolved"
    fields = {
        "Slice": cell["slice"],
        "Severity": cell["step"]["severity"],
        "Inference kernel": cell["kernels"]["inference"] or "none has reported",
        "Verdict": cell["verdict"],
    }
    attachment = {
        "color": _RESOLVED if resolved else _COLORS[cell["step"]["severity"]],
        "fallback": _escaped(annotations["summary"]),
        "title": _escaped(annotations["summary"]),
        "text": _escaped(annotations["description"]),
        "fields": [{"title": title, "value": _escaped(value), "short": True} for title, value in fields.items()],
        "ts": int(datetime.fromisoformat(alert["endsAt"] if resolved else alert["startsAt"]).timestamp()),
    }
    link = alert["generatorURL"] or annotations.get("runbook_url", "")
    return {**attachment, "title_link": link} if link else attachment


def _escaped(text: str) -> str:
    """Slack's three control characters; a slice named `<!channel>` must wake nobody."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
