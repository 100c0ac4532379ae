"""Prometheus rules made from contracts, as files and as resources of Kubernetes, and Alertmanager's routes.

Of two sets of rules one is loaded: `rules/` alerts on the evaluator's verdicts; `standalone/rules/` finds the verdicts
itself, from recorders' histograms, in Prometheus or Mimir.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import Final

import yaml

from kc_otel.contract.model import Contract
from kc_otel.generate.alert_texts import unique_names
from kc_otel.generate.files import NOWHERE, GeneratedFile, Sites, as_yaml
from kc_otel.generate.prometheus.alerting_rules import evaluator_file, routes_file, rule_file
from kc_otel.generate.prometheus.standalone_rules import standalone_file

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
    """Return a PrometheusRule for each rule file, which Mimir's and VictoriaMetrics' operators read, too."""
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
