"""Prometheus rules made from contracts, and Alertmanager's routes.

Of two sets of rules one is loaded: `rules/` alerts on the evaluator's verdicts; `standalone/rules/` finds the verdicts
itself, from recorders' histograms, in Prometheus or Mimir.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import Any, Final

from kc_otel.contract.model import Contract
from kc_otel.contract.units import format_duration
from kc_otel.generate.alert_steps import unique_names
from kc_otel.generate.files import GeneratedFile, as_yaml
from kc_otel.generate.links import NOWHERE, Sites
from kc_otel.generate.prometheus.alerting_rules import rule_file
from kc_otel.generate.prometheus.alertmanager_routes import routes_file
from kc_otel.generate.prometheus.standalone_rules import standalone_file
from kc_otel.generate.state_alerts import EVALUATOR_DOWN, STATE_ALERTS, StateAlert

_INTERVAL_SECONDS: Final = 5.0
"""Seconds between evaluations: three of other rules would be most of the minute."""
_EVALUATOR_FILE: Final = "_evaluator.yaml"
"""No contract's name begins so."""


def prometheus_files(contracts: Iterable[Contract], sites: Sites = NOWHERE) -> tuple[GeneratedFile, ...]:
    """Return each contract's rules, then the rule that an evaluator lives, and the routes; ValueError as below."""
    ordered = unique_names(contracts)
    of_each = (make(contract, sites) for contract in ordered for make in (rule_file, standalone_file))
    return (*of_each, evaluator_file(sites), routes_file(ordered))


def evaluator_file(sites: Sites = NOWHERE) -> GeneratedFile:
    """Return the rule file, which is the same for all contracts."""
    rules = [_rule(alert, sites) for alert in (EVALUATOR_DOWN, *STATE_ALERTS)]
    group = {"name": "kernel-contracts-evaluator", "interval": format_duration(_INTERVAL_SECONDS), "rules": rules}
    text = as_yaml(
        {"groups": [group]}, "Whether an evaluator lives, and what nobody judges; the same for every contract."
    )
    return GeneratedFile(PurePosixPath("prometheus", "rules", _EVALUATOR_FILE), text)


def _rule(alert: StateAlert, sites: Sites) -> dict[str, Any]:
    def of(label: str) -> str:
        return f"{{{{ $labels.{label} }}}}"

    links = {**sites.dashboard(f"/d/{alert.panel[0]}"), **sites.runbook(alert.name)}
    return {
        "alert": alert.name,
        "expr": alert.expression,
        **({"for": format_duration(alert.after)} if alert.after else {}),
        "labels": alert.labels(of),
        "annotations": {**alert.texts(of), **links},
    }
