"""The same rules as resources of the Prometheus Operator, which Mimir's and VictoriaMetrics' operators read too."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any, Final

from kc_otel.contract.model import Contract
from kc_otel.generate.alert_steps import alert_steps
from kc_otel.generate.files import GeneratedFile, as_yaml
from kc_otel.generate.prometheus.alerting_rules import rule_group
from kc_otel.generate.prometheus.standalone_rules import notes, standalone_groups

__all__ = ["kubernetes_file", "kubernetes_standalone_file", "resource"]

_API: Final = "monitoring.coreos.com/v1"


def kubernetes_file(contract: Contract) -> GeneratedFile:
    """A PrometheusRule of the alerts on the evaluator's verdicts."""
    groups = [rule_group(contract)] if alert_steps(contract) else []
    note = f"Alerting rules of {contract.name}, for the Prometheus Operator: kubectl apply -f FILE"
    path = PurePosixPath("prometheus", "kubernetes", f"{contract.name}.yaml")
    return GeneratedFile(path, as_yaml(_of_contract(contract, "", groups), note))


def kubernetes_standalone_file(contract: Contract) -> GeneratedFile:
    """A PrometheusRule of the recording rules and their alerts, which need no evaluator."""
    content = _of_contract(contract, "-standalone", standalone_groups(contract))
    path = PurePosixPath("prometheus", "standalone", "kubernetes", f"{contract.name}.yaml")
    return GeneratedFile(path, as_yaml(content, *notes(contract)))


def _of_contract(contract: Contract, suffix: str, groups: Sequence[dict[str, Any]]) -> dict[str, Any]:
    name = f"kernel-contract-{contract.name}{suffix}".replace("_", "-")  # a resource's name has no underscore
    return resource(name, contract.name, groups)


def resource(name: str, instance: str, groups: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A PrometheusRule of this name, about this instance of kernel contracts."""
    # The operator takes rules by label; `release` and the like are a cluster's own, and kustomize can add them.
    labels = {"app.kubernetes.io/name": "kernel-contract", "app.kubernetes.io/instance": instance}
    return {
        "apiVersion": _API,
        "kind": "PrometheusRule",
        "metadata": {"name": name, "labels": labels},
        "spec": {"groups": list(groups)},
    }
