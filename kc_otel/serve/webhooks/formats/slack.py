"""A message for Slack's incoming webhooks, and for Mattermost, Rocket.Chat and Discord (`/slack`), which read the same.

Source: Slack API documentation, "Sending messages using incoming webhooks", "Block Kit", "Legacy secondary
attachments", "Formatting text for app surfaces".
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

__all__ = ["message"]

_COLORS: Final = {"critical": "#d62728", "warning": "#ff9f1c", "info": "#1f77b4"}
_RESOLVED: Final = "#2ca02c"
_SECTION: Final = 3000
"""Characters that Slack takes in a section."""
_WORDS: Final = {
    "reminder": "Reminder",
    "silence-ended": "A silence has ended",
    "update": "Update",
    "unfollowed": "No longer followed",
}
_MOST: Final = 20
"""Attachments beyond this many make a message that nobody reads; Slack refuses more than 100."""


def message(body: Mapping[str, Any]) -> dict[str, Any]:
    """The message of a stored body: an incident in blocks, or an attachment for each alert where there is none."""
    if body["kernelContract"]["incident"] is not None:
        return _of_incident(body, body["kernelContract"]["incident"])
    alerts, cells = body["alerts"], body["kernelContract"]["cells"]
    text = alerts[0]["annotations"]["summary"]
    if len(alerts) > 1:
        text += f", and {len(alerts) - 1} more"
    attachments = [_attachment(alert, cell) for alert, cell in zip(alerts[:_MOST], cells, strict=False)]
    return {"text": _escaped(f"[{body['status']}] {text}"), "attachments": attachments}


def _of_incident(body: Mapping[str, Any], incident: Mapping[str, Any]) -> dict[str, Any]:
    contract, reason = body["kernelContract"], body["kernelContract"]["reason"]
    word = _WORDS.get(reason, "Resolved" if body["status"] == "resolved" else incident["state"].capitalize())
    title = f"{word}: {contract['name']}: {incident['headline']}"
    since = int(datetime.fromisoformat(incident["since"]).timestamp())
    facts = [f"Since <!date^{since}^{{time}} on {{date_short}}|{incident['since']}>"]
    facts += [f"it grew: {_escaped(incident['grew'])}"] if incident["grew"] else []
    facts += [f"kernel {_escaped(incident['kernels']['inference'])}"] if incident["kernels"]["inference"] else []
    facts += [_escaped(contract["evidence"])] if contract["evidence"] else []
    links = [(incident["url"], "Incident"), (body["alerts"][0]["annotations"].get("runbook_url", ""), "Runbook")]
    shown = " · ".join(f"<{_escaped(href)}|{text}>" for href, text in links if href)
    lines = [_escaped(one) for one in incident["extents"][:_MOST]]
    severity = "resolved" if body["status"] == "resolved" else contract["cells"][0]["step"]["severity"]
    blocks: list[dict[str, Any]] = [_section(f"*{_escaped(title)}*")]
    if lines and body["status"] == "firing":
        blocks.append(_section("\n".join(lines)))
    if found := [f"*{each['kind']}*: {_escaped(each['text'])}" for each in incident["diagnoses"]]:
        blocks.append(_section("\n".join(found)))
    blocks.append({"type": "context", "elements": [{"type": "mrkdwn", "text": "; ".join(facts)}]})
    if shown:
        blocks.append(_section(shown))
    color = _RESOLVED if severity == "resolved" else _COLORS[severity]
    return {"text": _escaped(title), "attachments": [{"color": color, "fallback": _escaped(title), "blocks": blocks}]}


def _section(text: str) -> dict[str, Any]:
    return {"type": "section", "text": {"type": "mrkdwn", "text": text[:_SECTION]}}


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
