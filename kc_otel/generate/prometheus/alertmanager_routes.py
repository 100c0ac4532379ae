"""Alertmanager's configuration: each step's webhooks get that step's alerts; the others are on its own page.

Addresses and credentials stay out of it: Alertmanager reads them from files, one pair per endpoint.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import Any, Final

from kc_otel.contract.model import Contract
from kc_otel.generate.alert_steps import repeat_interval
from kc_otel.generate.files import GeneratedFile, as_yaml
from kc_otel.generate.state_alerts import EVALUATOR_DOWN, STATE_ALERTS

SECRETS: Final = "/etc/alertmanager/secrets"
"""Folder of the files `NAME.url` and `NAME.token`."""

_PAGE_ONLY_RECEIVER: Final = "page-only"
_INCIDENT_LABELS: Final = ["alertname", "contract", "kernel_train", "kernel_inference"]
"""Labels that identify one incident, as in the evaluator: the kind of fault, and the pair of kernels."""
_CELL_LABELS: Final = ["alertname", "contract", "clause", "slice", "kernel_train", "kernel_inference"]


def routes_file(contracts: Iterable[Contract]) -> GeneratedFile:
    """The configuration for all contracts together."""
    routes: list[dict[str, Any]] = []
    endpoints: set[str] = set()
    names = "|".join(dict.fromkeys(alert.name for alert in STATE_ALERTS))
    for contract in contracts:
        own, callees = f'contract="{contract.name}"', set[str]()
        for number, step in enumerate(contract.escalation, start=1):
            targets = {str(action.target) for action in step.do if action.kind == "webhook"}
            for endpoint in sorted(targets):
                route = {"receiver": endpoint, "matchers": [own, f'step="{number}"'], "continue": True}
                routes.append(route | {"repeat_interval": repeat_interval(step.repeat)})
            endpoints |= targets
            callees |= targets if step.on == "fail" else set()
        at_once = {"matchers": [own, f'alertname=~"{names}"'], "group_wait": "0s", "continue": True}
        routes += [{"receiver": endpoint, **at_once} for endpoint in sorted(callees)]
    # Whoever acts on a contract's verdicts has to know that there are none; it has waited by itself.
    down = {
        "matchers": [f'alertname="{EVALUATOR_DOWN.name}"'],
        "group_by": ["alertname"],
        "group_wait": "0s",
        "group_interval": "1m",
    }
    routes += [{"receiver": endpoint, **down, "continue": True} for endpoint in sorted(endpoints)]
    content = {
        "route": {
            "receiver": _PAGE_ONLY_RECEIVER,
            "group_by": _INCIDENT_LABELS,
            "group_wait": "30s",
            "group_interval": "5m",
            "repeat_interval": repeat_interval(),
            "routes": routes,
        },
        # A critical step says all that the warning before it says.
        "inhibit_rules": [
            {
                "source_matchers": ['severity="critical"'],
                "target_matchers": ['severity=~"warning|info"'],
                "equal": _CELL_LABELS,
            }
        ],
        "receivers": [{"name": _PAGE_ONLY_RECEIVER}, *map(_receiver, sorted(endpoints))],
    }
    notes = (
        f"Routes from the contracts' policies. For each receiver NAME put its address into {SECRETS}/NAME.url and the",
        f"bearer token that it expects into {SECRETS}/NAME.token; kc_otel.client.webhooks.receiver checks it.",
    )
    return GeneratedFile(PurePosixPath("prometheus", "alertmanager", "alertmanager.yaml"), as_yaml(content, *notes))


def _receiver(name: str) -> dict[str, Any]:
    credentials = {"type": "Bearer", "credentials_file": f"{SECRETS}/{name}.token"}
    webhook = {
        "url_file": f"{SECRETS}/{name}.url",
        "send_resolved": True,
        "http_config": {"authorization": credentials},
    }
    return {"name": name, "webhook_configs": [webhook]}
