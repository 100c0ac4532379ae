"""Notifications of Grafana's alerts: contact points, policies, message templates.

They are kept apart from the rules, because a policy tree in a provisioned file replaces the organisation's own. Secrets
are environment variables, which Grafana puts in when it reads the file; templates use `.Labels` and not `$labels`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import Any, Final

from kc_otel.contract.model import Contract
from kc_otel.generate.alert_steps import AlertRoute, alert_routes, repeat_interval
from kc_otel.generate.files import GeneratedFile, as_yaml
from kc_otel.generate.links import FOLDER

_PREFIX: Final = "kernel-contracts"
_ORG_ID: Final = 1
_GROUP_BY: Final = ["grafana_folder", "alertname", "contract", "kernel_train", "kernel_inference"]
"""Labels that identify one incident, as in the evaluator: the kind of fault, and the pair of kernels."""
_NOTES: Final = (
    "Contact points, notification policies and message templates for the alerts of kernel contracts.",
    "Copy it into provisioning/alerting beside the rules. Its policy tree REPLACES that of the organisation: where",
    "there is one already, move the route below into it instead.",
    "Grafana needs these environment variables:",
)
_TEMPLATE: Final = """\
{{ define "kernel_contracts.title" -}}
[{{ .Status | toUpper }}{{ if .Alerts.Firing }}: {{ len .Alerts.Firing }}{{ end }}] \
{{ .CommonLabels.contract }}{{ with .CommonLabels.clause }} / {{ . }}{{ end }}\
{{ with .CommonLabels.slice }} / {{ . }}{{ end }}
{{- end }}
{{ define "kernel_contracts.lines" -}}
{{ range . }}{{ .Status | toUpper }}, {{ .Labels.severity }}: {{ .Annotations.summary }}
{{ end }}
{{- end }}
{{ define "kernel_contracts.message" -}}
{{ if gt (len .Alerts) 10 -}}
{{ template "kernel_contracts.lines" slice .Alerts 0 10 -}}
and others: {{ len .Alerts.Firing }} fire, {{ len .Alerts.Resolved }} are resolved
{{ else -}}
{{ template "kernel_contracts.lines" .Alerts -}}
{{ end -}}
{{ with .Alerts.Firing }}{{ with index . 0 }}
{{ .Annotations.description }}

{{ with .Annotations.runbook }}What to do:
{{ . }}

{{ end -}}
{{ with .PanelURL }}Panel: {{ . }}
{{ end -}}
{{ with .Annotations.runbook_url }}Runbook: {{ . }}
{{ end -}}
{{ end }}{{ end }}
{{- end }}
"""
"""Message for alerts that fire together as one incident: a line for each of the first ten, and the first one's
words."""


def notifications_file(contracts: Iterable[Contract]) -> GeneratedFile:
    """One file for all contracts: a contact point for people, and one for each webhook that a step names."""
    routes = [route for contract in contracts for route in alert_routes(contract)]
    endpoints = sorted({route.endpoint for route in routes} - {""})
    points = [_contact_point(""), *(_contact_point(name) for name in endpoints)]
    variables = (f"  {_variable(name, what)}" for name in ("", *endpoints) for what in ("URL", "SECRET"))
    content: dict[str, Any] = {
        "apiVersion": 1,
        "contactPoints": points,
        "policies": [_policy(routes)],
        "templates": [{"orgId": _ORG_ID, "name": "kernel_contracts", "template": _TEMPLATE}],
    }
    path = PurePosixPath("grafana", "notifications", "kernel-contracts.yaml")
    return GeneratedFile(path, as_yaml(content, *_NOTES, *variables))


def _contact_point(endpoint: str) -> dict[str, Any]:
    """A webhook whose body Grafana signs: hex HMAC-SHA256 of `timestamp:body`, so that it cannot be sent again."""
    settings = {
        "url": f"${_variable(endpoint, 'URL')}",
        "httpMethod": "POST",
        "title": '{{ template "kernel_contracts.title" . }}',
        "message": '{{ template "kernel_contracts.message" . }}',
        "hmacConfig": {
            "secret": f"${_variable(endpoint, 'SECRET')}",
            "header": "X-Grafana-Alerting-Signature",
            "timestampHeader": "X-Grafana-Alerting-Timestamp",
        },
    }
    name = _receiver(endpoint)
    uid = f"kc-{hashlib.sha256(name.encode()).hexdigest()[:16]}"
    receiver = {"uid": uid, "type": "webhook", "settings": settings}
    return {"orgId": _ORG_ID, "name": name, "receivers": [{**receiver, "disableResolveMessage": False}]}


def _policy(found: list[AlertRoute]) -> dict[str, Any]:
    """A branch of Grafana's tree for the folder of the alerts; in it a route for each webhook of each contract.

    Routes of webhooks come first and go on to the next, so that a step with a webhook and `notify` reaches both, and
    one with a webhook alone reaches nobody else. A step with neither reaches people too.
    """
    routes = [
        {
            "receiver": _receiver(route.endpoint),
            "object_matchers": [list(matcher) for matcher in route.matchers],
            **route.settings,
            **({"continue": True} if route.endpoint else {}),
        }
        for route in sorted(found, key=lambda route: not route.endpoint)
    ]
    branch = {"receiver": _receiver(""), "object_matchers": [["grafana_folder", "=", FOLDER]]}
    return {
        "orgId": _ORG_ID,
        "receiver": _receiver(""),
        "group_by": _GROUP_BY,
        "group_wait": "30s",
        "group_interval": "5m",
        "repeat_interval": repeat_interval(),
        "routes": [{**branch, "routes": routes}] if routes else [],
    }


def _receiver(endpoint: str) -> str:
    return f"{_PREFIX}-{endpoint}" if endpoint else _PREFIX


def _variable(endpoint: str, what: str) -> str:
    middle = f"_{re.sub(r'[^A-Z0-9]', '_', endpoint.upper())}" if endpoint else ""
    return f"KC_OTEL_GRAFANA_WEBHOOK{middle}_{what}"
