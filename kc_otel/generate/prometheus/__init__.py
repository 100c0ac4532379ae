"""Prometheus rules made from contracts, as files and as resources of Kubernetes, and Alertmanager's routes.

Of two sets of rules one is loaded: `rules/` alerts on the evaluator's verdicts; `standalone/rules/` finds the verdicts
itself, from recorders' histograms, in Prometheus or Mimir.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import Any, Final

import yaml

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
_KUBERNETES_FOLDERS: Final = {
    PurePosixPath("prometheus", "rules"): PurePosixPath("kubernetes", "rules"),
    PurePosixPath("prometheus", "standalone", "rules"): PurePosixPath("kubernetes", "standalone"),
}


def prometheus_files(contracts: Iterable[Contract], sites: Sites = NOWHERE) -> tuple[GeneratedFile, ...]:
    """Return each contract's rules, then the rule that an evaluator lives, and the routes; ValueError as below."""
    ordered = unique_names(contracts)
    of_each = (make(contract, sites) for contract in ordered for make in (rule_file, standalone_file))
    return (*of_each, evaluator_file(sites), routes_file(ordered))


def kubernetes_files(contracts: Iterable[Contract], sites: Sites = NOWHERE) -> tuple[GeneratedFile, ...]:
    """Return a PrometheusRule for each rule file of `prometheus_files`; load one of the two folders.

    The resource is the Prometheus Operator's, which Mimir's and VictoriaMetrics' operators read, too.
    """
    files = prometheus_files(contracts, sites)
    return tuple(_rule_resource(file) for file in files if file.path.parent in _KUBERNETES_FOLDERS)


def _rule_resource(file: GeneratedFile) -> GeneratedFile:
    suffix = "-standalone" if "standalone" in file.path.parts else ""
    # A resource's name has no underscore, and begins with a letter or a digit.
    name = f"kernel-contract-{file.path.stem}{suffix}".replace("_", "-").replace("--", "-")
    labels = {"app.kubernetes.io/name": "kernel-contract", "app.kubernetes.io/instance": file.path.stem.strip("_")}
    comments = [line.removeprefix("# ") for line in file.text.splitlines() if line.startswith("#")]
    content = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": name, "labels": labels},
        "spec": yaml.safe_load(file.text),
    }
    return GeneratedFile(_KUBERNETES_FOLDERS[file.path.parent] / file.path.name, as_yaml(content, *comments[1:]))


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
