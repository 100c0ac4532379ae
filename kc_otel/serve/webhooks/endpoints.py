"""Formats of webhooks, and the endpoints that get them: addresses and credentials from the environment.

`webhook: pager` in a contract reads these variables, each with the prefix `KC_OTEL_WEBHOOK_PAGER_`:

| variable                            | meaning                                                              |
| ----------------------------------- | -------------------------------------------------------------------- |
| `URL`                               | where to POST                                                        |
| `FORMAT`                            | one of `FORMATS`: kernel-contract (default), pagerduty or slack      |
| `SECRET`, or `SECRET_FILE`          | kernel-contract: `whsec_...`, several while one is rotated;          |
|                                     | pagerduty: the routing key                                           |
| `AUTHORIZATION`, or `..._FILE`      | value of the `Authorization` header, where the receiver wants one    |
| `ALLOW_PRIVATE`                     | `1` when the address may be loopback or of a private network         |

`kernel-contract` is Alertmanager's version 4 body with `kernelContract`, signed as Standard Webhooks ask; `pagerduty`
one Events API v2 event for the incident; `slack` a message in blocks. Credential files are read again when they change.
URLs often carry tokens, so neither they nor the secrets show in a repr.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

from kc_otel.client.webhooks import Secret, SecretError, sign
from kc_otel.serve.watched_files import UnusableFileError, WatchedFiles

_log: Final = logging.getLogger(__name__)
DEFAULT_FORMAT: Final = "kernel-contract"


class Format(NamedTuple):
    """A receiver's body format.

    `lay_out` makes its message of a stored body and the endpoint's key; None sends the stored body, signed. `secret`
    says what `SECRET` holds; "" for a format that takes none.
    """

    lay_out: Callable[[Mapping[str, Any], str], dict[str, Any]] | None
    secret: str


class WebhookEndpointError(UnusableFileError, ValueError):
    """Endpoints are not configured; the message names every variable that is missing or wrong."""


@dataclass(frozen=True, slots=True)
class WebhookEndpoint:
    """A receiver of webhooks: `secrets` sign for kernel-contract; `key` is the routing key of pagerduty."""

    name: str
    url: str = field(repr=False)
    secrets: tuple[Secret, ...] = field(default=(), repr=False)
    format: str = DEFAULT_FORMAT
    key: str = field(default="", repr=False)
    authorization: str = field(default="", repr=False)
    allow_private: bool = False

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            valid = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
        except ValueError:
            valid = False
        if not valid or any(character.isspace() for character in self.url):
            raise WebhookEndpointError(f"endpoint {self.name!r}: the URL is not valid; write https://host/path")
        if not (self.authorization.isascii() and self.authorization.isprintable()):
            raise WebhookEndpointError(
                f"endpoint {self.name!r}: the Authorization header has characters that a header cannot contain"
            )

    def request(self, stored: bytes, message_id: str, now: float) -> tuple[dict[str, str], bytes]:
        """Return the headers and the body of an attempt; only time and signature differ from the one before."""
        lay_out = FORMATS[self.format].lay_out
        if lay_out is None:
            return sign(self.secrets, message_id, stored, now=now), stored
        message = lay_out(json.loads(stored), self.key)
        return {}, json.dumps(message, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def endpoints_from_env(names: Iterable[str], environ: Mapping[str, str]) -> dict[str, WebhookEndpoint]:
    """Read the named endpoints from the environment; one error names everything that is missing or wrong."""
    endpoints: dict[str, WebhookEndpoint] = {}
    taken: dict[str, str] = {}
    problems: list[str] = []
    for name in sorted(set(names)):
        prefix = _prefix(name)
        if taken.setdefault(prefix, name) != name:
            problems.append(f"{name!r} and {taken[prefix]!r} read the same {prefix}_URL; rename one of them")
            continue
        try:
            endpoints[name] = _endpoint(name, prefix, environ)
        except (ValueError, OSError) as error:
            problems.append(f"{name!r}: {error}")
    if problems:
        raise WebhookEndpointError("webhook endpoints are not configured: " + "; ".join(problems))
    return endpoints


def _prefix(name: str) -> str:
    return f"KC_OTEL_WEBHOOK_{re.sub(r'[^A-Z0-9]', '_', name.upper())}"


def _endpoint(name: str, prefix: str, environ: Mapping[str, str]) -> WebhookEndpoint:
    format = environ.get(f"{prefix}_FORMAT", "").strip().lower() or DEFAULT_FORMAT
    if format not in FORMATS:
        raise WebhookEndpointError(f"{prefix}_FORMAT: {format!r} is not one of {', '.join(FORMATS)}")
    lay_out, kind = FORMATS[format]
    url, secret = environ.get(f"{prefix}_URL", "").strip(), _credential(f"{prefix}_SECRET", environ)
    missing = [f"{prefix}_URL"] * (not url)
    if kind and not secret:
        missing.append(f"{prefix}_SECRET or {prefix}_SECRET_FILE to its {kind}")
    if missing:
        raise WebhookEndpointError(f"set {' and '.join(missing)}")
    if secret and not kind:
        raise WebhookEndpointError(
            f"{prefix}_SECRET: {format} messages are not signed; leave it out, or use {prefix}_AUTHORIZATION"
        )
    try:
        secrets = tuple(Secret.parse(part) for part in re.split(r"[\s,]+", secret) if part) if lay_out is None else ()
    except SecretError as error:
        suffix = "_FILE" if environ.get(f"{prefix}_SECRET_FILE") else ""
        raise WebhookEndpointError(f"{prefix}_SECRET{suffix}: {error}") from None
    private = environ.get(f"{prefix}_ALLOW_PRIVATE", "").strip()
    if private not in {"", "1"}:
        raise WebhookEndpointError(f"{prefix}_ALLOW_PRIVATE: {private!r} says nothing; write 1, or leave it out")
    return WebhookEndpoint(
        name,
        url,
        secrets,
        format=format,
        key="" if lay_out is None else secret,
        authorization=_credential(f"{prefix}_AUTHORIZATION", environ),
        allow_private=private == "1",
    )


def _credential(variable: str, environ: Mapping[str, str]) -> str:
    text, path = environ.get(variable, ""), environ.get(f"{variable}_FILE", "")
    if text and path:
        raise WebhookEndpointError(f"set only one of {variable} or {variable}_FILE")
    return (Path(path).read_text(encoding="utf-8") if path else text).strip()


class EndpointFiles(WatchedFiles):
    """Endpoints by name, read again when a file of credentials changes; if not `required`, none where one is wrong."""

    def __init__(self, names: Iterable[str], environ: Mapping[str, str], *, required: bool = True) -> None:
        self._names, self._environ = sorted(set(names)), environ
        self.endpoints: dict[str, WebhookEndpoint] = {}
        variables = (f"{_prefix(name)}_{what}_FILE" for name in self._names for what in ("SECRET", "AUTHORIZATION"))
        try:
            super().__init__(Path(path) for variable in variables if (path := environ.get(variable)))
        except WebhookEndpointError as error:
            if required:
                message = f"{error}; or start with --no-webhooks, and they wait in the outbox"
                raise WebhookEndpointError(message) from None
            _log.info("webhooks wait in the outbox, as --no-webhooks asks: %s", error)

    def _read(self) -> None:
        self.endpoints = endpoints_from_env(self._names, self._environ)


_PAGERDUTY_SUMMARY_CHARACTERS: Final = 1024
_PAGERDUTY_MAX_CELLS: Final = 50
"""Cells in the details of an event, which PagerDuty limits to 512 kB."""
_SEVERITIES: Final = ("critical", "warning", "info")


def pagerduty_event(body: Mapping[str, Any], routing_key: str) -> dict[str, Any]:
    """The event of a stored body.

    Its `dedup_key` is that of the incident from start to end, or of the alert where there is no incident. An update is
    another `trigger` under the same key: PagerDuty adds it to the open incident and pages nobody again. So is the last
    message about a breach that nobody watches any more: nothing has refuted it, and a person resolves it.
    Source: PagerDuty developer documentation, "Events API v2: send an alert event".
    """
    contract, alert, cell = body["kernelContract"], body["alerts"][0], body["kernelContract"]["cells"][0]
    incident, unwatched = contract["incident"], contract["reason"] == "unfollowed"
    over = body["status"] == "resolved" and not unwatched
    event: dict[str, Any] = {
        "routing_key": routing_key,
        "event_action": "resolve" if over else "trigger",
        "dedup_key": f"kc-otel/{contract['name']}/{alert['fingerprint'] if incident is None else incident['id']}",
    }
    if over:
        return event
    if incident is None:
        link, kernel, since = (alert["generatorURL"], "cell"), cell["kernels"]["inference"], alert["startsAt"]
        summary = alert["annotations"]["summary"]
        details = {"description": alert["annotations"]["description"], **cell}
    else:
        link, kernel, since = (incident["url"], "incident"), incident["kernels"]["inference"], incident["since"]
        summary = alert["annotations"]["summary"] if unwatched else _summary(contract, incident)
        names = ("done", "state_text", "extents", "grew", "slices", "kernels", "diagnoses", "alerts")
        details = {"next": contract["next"], **{name: incident[name] for name in names}}
        details |= {"evidence": contract["evidence"], "cells": contract["cells"][:_PAGERDUTY_MAX_CELLS]}
    severities = {cell["step"]["severity"] for cell in contract["cells"]}
    links = [link, (alert["annotations"].get("runbook_url", ""), "runbook")]
    return event | {
        "payload": {
            "summary": summary[:_PAGERDUTY_SUMMARY_CHARACTERS],
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
    effect = contract["impact"] or f"{incident['state_text']}."
    parts = (f"{contract['name']}:", effect, f"{incident['headline']}, {since}.", *done, contract.get("as_of", ""))
    return " ".join(filter(None, parts))


_SLACK_COLORS: Final = {"critical": "#d62728", "warning": "#ff9f1c", "info": "#1f77b4", "resolved": "#2ca02c"}
_PROVEN_ENDS: Final = ("Resolved", "First data arrived", "No longer measured as broken: the breach is over")
_SLACK_SECTION_CHARACTERS: Final = 3000
_TITLE_OF_REASON: Final = {
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
        texts = [_escaped(alert["annotations"]["description"])]
    else:
        link = incident["url"], "Incident"
        words = (_TITLE_OF_REASON.get(contract["reason"]), incident["state_text"], contract["name"])
        title = ": ".join((*filter(None, words), contract["impact"] or incident["headline"]))
        texts = _incident_texts(contract, incident)
    links = [link, (alert["annotations"].get("runbook_url", ""), "Runbook")]
    texts.append(" · ".join(f"<{_escaped(href)}|{text}>" for href, text in links if href))
    if incident is not None:
        extents = incident["extents"][:_MAX_EXTENTS] if body["status"] == "firing" else ()
        texts.append("\n".join(map(_escaped, extents)))
        texts.append("\n".join(f"*{entry['kind']}*: {_escaped(entry['text'])}" for entry in incident["diagnoses"]))
    blocks = [_section(text) for text in (f"*{_escaped(title)}*", *texts) if text]
    as_of = "" if incident is None else contract.get("as_of", "")
    if facts := [_escaped(text) for text in (contract["evidence"], as_of, contract.get("links", "")) if text]:
        blocks.append({"type": "context", "elements": [{"type": "mrkdwn", "text": " ".join(facts)}]})
    severity = "resolved" if body["status"] == "resolved" else contract["cells"][0]["step"]["severity"]
    if severity == "resolved" and incident is not None and not incident["state_text"].startswith(_PROVEN_ENDS):
        severity = "info"
    if severity == "critical" and incident is not None and incident["state"] == "contained":
        severity = "warning"
    attachment = {"color": _SLACK_COLORS[severity], "fallback": _escaped(title), "blocks": blocks}
    return {"text": _escaped(title), "attachments": [attachment]}


def _incident_texts(contract: Mapping[str, Any], incident: Mapping[str, Any]) -> list[str]:
    since = int(datetime.fromisoformat(incident["since"]).timestamp())
    onset = f"Since <!date^{since}^{{time}} on {{date_short}}|{incident['since']}>"
    onset += f"; it grew: {_escaped(incident['grew'])}" if incident["grew"] else ""
    where = f"{_escaped(incident['headline'])}. " if contract["impact"] else ""
    done = "*Done*: " * bool(incident["done"]) + "; ".join(map(_escaped, incident["done"]))
    return [where + onset, done, _escaped(contract["next"]).replace("Now:", "*Now*:", 1)]


def _section(text: str) -> dict[str, Any]:
    return {"type": "section", "text": {"type": "mrkdwn", "text": text[:_SLACK_SECTION_CHARACTERS]}}


def _escaped(text: str) -> str:
    """Slack's three control characters; a slice named `<!channel>` must wake nobody."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


FORMATS: Final = {
    DEFAULT_FORMAT: Format(None, "signing secret"),
    "pagerduty": Format(pagerduty_event, "routing key"),
    "slack": Format(lambda body, _key: slack_message(body), ""),
}
"""Formats by the name that `FORMAT` takes."""
