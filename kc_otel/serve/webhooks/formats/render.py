"""From a stored body to the HTTP requests that an endpoint of some format wants, with their credentials.

| format          | what is sent                                        | credential                    |
| --------------- | --------------------------------------------------- | ----------------------------- |
| kernel-contract | Alertmanager's version 4 body with `kernelContract` | Standard Webhooks signature   |
| alertmanager    | alerts, to Alertmanager's own API version 2         | `Authorization`, if any       |
| grafana         | Grafana's webhook body, version 1                   | hex HMAC-SHA256 of the body   |
| pagerduty       | one Events API v2 event for the incident            | routing key, in the body      |
| slack           | a message in blocks about the incident              | the URL itself                |
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from kc_otel.client.signing import Secret, sign
from kc_otel.serve.webhooks.formats import alertmanager, pagerduty, slack
from kc_otel.serve.webhooks.formats import grafana_webhook as grafana

__all__ = ["GRAFANA_SIGNATURE", "Format", "Outgoing", "render"]

GRAFANA_SIGNATURE = "x-grafana-alerting-signature"


class Format(StrEnum):
    """What a receiver reads."""

    KERNEL_CONTRACT = "kernel-contract"
    ALERTMANAGER = "alertmanager"
    GRAFANA = "grafana"
    PAGERDUTY = "pagerduty"
    SLACK = "slack"


@dataclass(frozen=True, slots=True)
class Outgoing:
    """One HTTP POST.

    Attributes:
        url: Where to.
        headers: All but those of HTTP itself.
        body: The bytes.
    """

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
) -> tuple[Outgoing, ...]:
    """The requests of one message: the same ones in the same order at every attempt.

    Args:
        format: What the receiver reads.
        url: The endpoint's URL.
        stored: The body in the outbox.
        message_id: `webhook-id`, the same at every attempt.
        now: Unix time of this attempt, seconds.
        secrets: Signing secrets of `kernel-contract`.
        key: Routing key of `pagerduty`; signing secret of `grafana`, empty for none.
    """
    if format is Format.KERNEL_CONTRACT:
        return (Outgoing(url, sign(secrets, message_id, stored, now=now), stored),)
    body: dict[str, Any] = json.loads(stored)
    if body["kernelContract"]["incident"] is not None:  # what waits since before there were diagnoses has none
        body["kernelContract"]["incident"].setdefault("diagnoses", [])
    if format is Format.ALERTMANAGER:
        return (_json(_alertmanager_url(url), alertmanager.alerts(body, now)),)
    if format is Format.PAGERDUTY:
        return tuple(_json(url, event) for event in pagerduty.events(body, key))
    if format is Format.SLACK:
        return (_json(url, slack.message(body)),)
    request = _json(url, grafana.body(body))
    if not key:
        return (request,)
    digest = hmac.new(key.encode(), request.body, hashlib.sha256).hexdigest()
    return (Outgoing(url, {GRAFANA_SIGNATURE: digest}, request.body),)


def _json(url: str, value: Any) -> Outgoing:
    return Outgoing(url, {}, json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode())


def _alertmanager_url(url: str) -> str:
    """The API's path where only the server is named."""
    parts = urlsplit(url)
    if parts.path.rstrip("/").endswith("/api/v2/alerts"):
        return url
    return urlunsplit(parts._replace(path=parts.path.rstrip("/") + "/api/v2/alerts"))
