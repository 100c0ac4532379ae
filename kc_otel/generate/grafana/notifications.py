"""Notifications of Grafana's alerts: contact points, policies, message templates.

They are kept apart from the rules, because a policy tree in a provisioned file replaces the organisation's own. Secrets
are never written: Grafana puts environment variables in when it reads the file, and refuses to start without them.
Interpolation takes what follows a `$` for a variable, so that templates use `.Labels` and not `$labels`.

Source: Grafana documentation, alerting file provisioning and webhook notifier.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import Any, Final

from kc_otel.contract.model import Contract
from kc_otel.generate.alert_steps import repeat_interval
from kc_otel.generate.files import GeneratedFile, as_yaml
from kc_otel.generate.links import FOLDER
from kc_otel.generate.state_alerts import STATE_ALERTS

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
    known = tuple(contracts)
    actions = [action for contract in known for step in contract.escalation for action in step.do]
    endpoints = sorted({str(action.target) for action in actions if action.kind == "webhook"})
    points = [_contact_point(None), *(_contact_point(name) for name in endpoints)]
    variables = (f"  {_variable(name, what)}" for name in (None, *endpoints) for what in ("URL", "SECRET"))
    content: dict[str, Any] = {
        "apiVersion": 1,
        "contactPoints": points,
        "policies": [_policy(known, endpoints)],
        "templates": [{"orgId": _ORG_ID, "name": "kernel_contracts", "template": _TEMPLATE}],
    }
    path = PurePosixPath("grafana", "notifications", "kernel-contracts.yaml")
    return GeneratedFile(path, as_yaml(content, *_NOTES, *variables))


def _contact_point(endpoint: str | None) -> dict[str, Any]:
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


def _policy(contracts: tuple[Contract, ...], endpoints: list[str]) -> dict[str, Any]:
    """A branch of Grafana's tree for the folder of the alerts; in it a route for each webhook of each contract.

    Routes go on to the next, so that a step with a webhook and `notify` reaches both, and one with a webhook alone
    reaches nobody else. A step with neither reaches people too.
    """
    routes = [
        {"receiver": _receiver(endpoint), **steps, "continue": True}
        for endpoint in endpoints
        for contract in contracts
        for steps in (*_steps(contract, endpoint), *_states(contract, endpoint))
    ]
    routes += [{"receiver": _receiver(None), **steps} for contract in contracts for steps in _steps(contract, None)]
    branch = {"receiver": _receiver(None), "object_matchers": [["grafana_folder", "=", FOLDER]]}
    return {
        "orgId": _ORG_ID,
        "receiver": _receiver(None),
        "group_by": _GROUP_BY,
        "group_wait": "30s",
        "group_interval": "5m",
        "repeat_interval": repeat_interval(),
        "routes": [{**branch, "routes": routes}] if routes else [],
    }


def _steps(contract: Contract, endpoint: str | None) -> list[dict[str, Any]]:
    """The steps that send to a webhook, or that tell people, by how often they remind."""
    kind = "notify" if endpoint is None else "webhook"
    found: dict[str, list[str]] = {}
    for number, step in enumerate(contract.escalation, start=1):
        if any(action.kind == kind and action.target == endpoint for action in step.do):
            found.setdefault(repeat_interval(step.repeat), []).append(str(number))
    return [
        {
            "object_matchers": [["contract", "=", contract.name], ["step", "=~", "|".join(numbers)]],
            "repeat_interval": repeat,
        }
        for repeat, numbers in found.items()
    ]


def _states(contract: Contract, endpoint: str) -> list[dict[str, Any]]:
    """Tell whomever a step on FAIL calls about what no step waits for, at once."""
    told = {action.target for step in contract.escalation if step.on == "fail" for action in step.do}
    names = "|".join(dict.fromkeys(alert.name for alert in STATE_ALERTS))
    name = ["alertname", "=~", f"({names}).*"]  # Grafana's alerts are named by the title of their rule
    at_once = {"object_matchers": [["contract", "=", contract.name], name], "group_wait": "0s"}
    return [at_once] if endpoint in told else []


def _receiver(endpoint: str | None) -> str:
    return _PREFIX if endpoint is None else f"{_PREFIX}-{endpoint}"


def _variable(endpoint: str | None, what: str) -> str:
    middle = "" if endpoint is None else f"_{re.sub(r'[^A-Z0-9]', '_', endpoint.upper())}"
    return f"KC_OTEL_GRAFANA_WEBHOOK{middle}_{what}"
