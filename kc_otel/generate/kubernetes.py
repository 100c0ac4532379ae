"""Rules as PrometheusRules of the Prometheus Operator, which Mimir's and VictoriaMetrics' operators read too."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Final

import yaml

from kc_otel.contract.model import Contract
from kc_otel.generate.files import GeneratedFile, as_yaml
from kc_otel.generate.links import NOWHERE, Sites
from kc_otel.generate.prometheus import prometheus_files

_FOLDERS: Final = {
    PurePosixPath("prometheus", "rules"): PurePosixPath("kubernetes", "rules"),
    PurePosixPath("prometheus", "standalone", "rules"): PurePosixPath("kubernetes", "standalone"),
}


def kubernetes_files(contracts: Sequence[Contract], sites: Sites = NOWHERE) -> tuple[GeneratedFile, ...]:
    """Return a PrometheusRule for each rule file of `generate prometheus`; load one of the two folders."""
    return tuple(_rule_resource(file) for file in prometheus_files(contracts, sites) if file.path.parent in _FOLDERS)


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
    return GeneratedFile(_FOLDERS[file.path.parent] / file.path.name, as_yaml(content, *comments[1:]))
