"""An evaluator on Kubernetes, as a Kustomize base that overlays build upon.

The workload and its network are plain Kubernetes. What needs the Prometheus Operator is a component of its own, and so
are the boards, which Grafana's sidecar reads from ConfigMaps: an overlay takes what its cluster has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, Final

from kc_otel.contract.model import Contract
from kc_otel.generate.files import GeneratedFile, as_yaml
from kc_otel.generate.prometheus import prometheus_files

__all__ = ["IMAGE", "NAME", "kubernetes_files"]

NAME: Final = "kc-otel-evaluator"
IMAGE: Final = "kc-otel"
_LABELS: Final = {"app.kubernetes.io/name": "kc-otel", "app.kubernetes.io/component": "evaluator"}
_CLIENTS: Final = {"kc-otel/client": "true"}
_PORTS: Final = {"otlp-grpc": 4317, "otlp-http": 4318, "api": 4320}
_USER: Final = 10001
_STATE: Final = "/var/lib/kc-otel"
_ACCESS: Final = f"{NAME}-access"
_KUSTOMIZE: Final = "kustomize.config.k8s.io"
_ALIVE: Final = ["python", "-m", "kc_otel.client.alive"]
_NAMES: Final = (NAME, *(f"{NAME}.$(NAMESPACE){rest}" for rest in ("", ".svc", ".svc.cluster.local")))
"""What clients call it by, from its own namespace and from others; Kubernetes fills the namespace in."""
_GRACE: Final = 60
"""Seconds to write and send what was acknowledged before the pod is ended; the evaluator takes a few."""


def kubernetes_files(
    contracts: Sequence[Contract], texts: Mapping[str, str], boards: Sequence[GeneratedFile], image: str = IMAGE
) -> tuple[GeneratedFile, ...]:
    """A base, the components `monitoring` and `boards`, and an overlay that has all of them.

    Args:
        contracts: The contracts, of different names.
        texts: Their YAML, by name.
        boards: Grafana's dashboards.
        image: The evaluator's image without its tag, which overlays set.

    Raises:
        ValueError: If two contracts have the same name.
    """
    rules = [each for each in prometheus_files(contracts) if each.path.parts[:2] == ("prometheus", "kubernetes")]
    return (
        *_base(texts, image),
        *_monitoring(rules),
        *_boards([each for each in boards if each.path.suffix == ".json"]),
        _overlay(image),
    )


def _base(texts: Mapping[str, str], image: str) -> list[GeneratedFile]:
    files = [_file(f"base/contracts/{name}.yaml", text) for name, text in sorted(texts.items())]
    kustomization = {
        "apiVersion": f"{_KUSTOMIZE}/v1beta1",
        "kind": "Kustomization",
        "labels": [{"pairs": _LABELS}],
        "resources": ["workload.yaml", "network.yaml"],
        # A hash in its name: a changed contract starts the evaluator again, which goes on from its volume.
        "configMapGenerator": [
            {"name": f"{NAME}-contracts", "files": [f"contracts/{name}.yaml" for name in sorted(texts)]}
        ],
    }
    access = f"kubectl create secret generic {_ACCESS} --from-file=access.yaml"
    return [
        *files,
        _file("base/kustomization.yaml", as_yaml(kustomization)),
        _file("base/workload.yaml", _documents([_stateful_set(image)], f"Needs the secret of tokens: {access}")),
        _file("base/network.yaml", _documents([_service(), _network_policy()])),
    ]


def _stateful_set(image: str) -> dict[str, Any]:
    alive = {"exec": {"command": _ALIVE}, "timeoutSeconds": 5}
    judging = {"exec": {"command": [*_ALIVE, f"127.0.0.1:{_PORTS['api']}", "/readyz"]}, "timeoutSeconds": 5}
    container = {
        "name": "evaluator",
        "image": image,
        "args": [
            "serve", "/contracts", "--host=0.0.0.0", "--access=/access/access.yaml",
            f"--state={_STATE}/state.sqlite", *(f"--allowed-host={name}" for name in _NAMES), "--log-format=json",
        ],
        "env": [{"name": "NAMESPACE", "valueFrom": {"fieldRef": {"fieldPath": "metadata.namespace"}}}],
        "ports": [{"name": name, "containerPort": port} for name, port in _PORTS.items()],
        "envFrom": [{"secretRef": {"name": f"{NAME}-webhooks", "optional": True}}],
        "startupProbe": {**alive, "periodSeconds": 5, "failureThreshold": 24},
        # Started again after five minutes in which it has judged nothing; what it takes meanwhile is on its disk, so
        # that it stays ready for senders.
        "livenessProbe": {**judging, "periodSeconds": 20, "failureThreshold": 15},
        "readinessProbe": {**alive, "periodSeconds": 10},
        "resources": {"requests": {"cpu": "500m", "memory": "512Mi"}, "limits": {"memory": "1Gi"}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            {"name": "state", "mountPath": _STATE},
            {"name": "contracts", "mountPath": "/contracts", "readOnly": True},
            {"name": "access", "mountPath": "/access", "readOnly": True},
            {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108 - the pod's own
        ],
    }  # fmt: skip
    pod = {
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": _GRACE,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": _USER,
            "runAsGroup": _USER,
            "fsGroup": _USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": [
            {"name": "contracts", "configMap": {"name": f"{NAME}-contracts"}},
            {"name": "access", "secret": {"secretName": _ACCESS, "defaultMode": 0o440}},
            {"name": "tmp", "emptyDir": {"medium": "Memory", "sizeLimit": "64Mi"}},
        ],
    }
    claim = {
        "metadata": {"name": "state"},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "10Gi"}}},
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": {"name": NAME},
        "spec": {
            "serviceName": NAME,
            "replicas": 1,
            "selector": {"matchLabels": _LABELS},
            "template": {"metadata": {"labels": _LABELS}, "spec": pod},
            "volumeClaimTemplates": [claim],
        },
    }


def _service() -> dict[str, Any]:
    ports = [{"name": name, "port": port, "targetPort": name} for name, port in _PORTS.items()]
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": NAME},
        "spec": {"selector": _LABELS, "ports": ports},
    }


def _network_policy() -> dict[str, Any]:
    """In: pods that say to be clients, in any namespace. Out: names and HTTPS, for webhooks."""
    dns = [{"port": 53, "protocol": "UDP"}, {"port": 53, "protocol": "TCP"}]
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": NAME},
        "spec": {
            "podSelector": {"matchLabels": _LABELS},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [_let_in(_CLIENTS, *_PORTS.values())],
            "egress": [{"ports": dns}, {"ports": [{"port": 443, "protocol": "TCP"}]}],
        },
    }


def _let_in(labels: Mapping[str, str], *ports: int) -> dict[str, Any]:
    peer = {"namespaceSelector": {}, "podSelector": {"matchLabels": labels}}
    return {"from": [peer], "ports": [{"port": port} for port in ports]}


def _monitoring(rules: Sequence[GeneratedFile]) -> list[GeneratedFile]:
    monitor = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "ServiceMonitor",
        "metadata": {"name": NAME},
        "spec": {
            "selector": {"matchLabels": _LABELS},
            "endpoints": [
                {
                    "port": "api",
                    "path": "/metrics",
                    "interval": "15s",
                    "authorization": {"credentials": {"name": f"{NAME}-prometheus", "key": "token"}},
                }
            ],
        },
    }
    scrape = {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": f"{NAME}-scrape"},
        "spec": {
            "podSelector": {"matchLabels": _LABELS},
            "policyTypes": ["Ingress"],
            "ingress": [_let_in({"app.kubernetes.io/name": "prometheus"}, _PORTS["api"])],
        },
    }
    named = [(each.path.name, each.text) for each in rules]
    note = (
        f"kubectl create secret generic {NAME}-prometheus --from-file=token=prometheus.token, of a token that may read"
    )
    return [
        _component("monitoring", ["scrape.yaml", *(name for name, _ in named)]),
        _file("monitoring/scrape.yaml", _documents([monitor, scrape], note)),
        *(_file(f"monitoring/{name}", text) for name, text in named),
    ]


def _boards(boards: Sequence[GeneratedFile]) -> list[GeneratedFile]:
    options = {"labels": {"grafana_dashboard": "1"}, "disableNameSuffixHash": True}
    generators = [
        {"name": f"kc-otel-board-{each.path.stem}", "files": [each.path.name], "options": options} for each in boards
    ]
    files = [_file(f"boards/{each.path.name}", each.text) for each in boards]
    return [_component("boards", [], configMapGenerator=generators), *files]


def _component(name: str, resources: Sequence[str], **rest: Any) -> GeneratedFile:
    content = {"apiVersion": f"{_KUSTOMIZE}/v1alpha1", "kind": "Component", **rest}
    if resources:
        content["resources"] = list(resources)
    return _file(f"{name}/kustomization.yaml", as_yaml(content))


def _overlay(image: str) -> GeneratedFile:
    content = {
        "apiVersion": f"{_KUSTOMIZE}/v1beta1",
        "kind": "Kustomization",
        "namespace": "kernel-contracts",
        "resources": ["../../base"],
        "components": ["../../monitoring", "../../boards"],
        "images": [{"name": image, "newTag": "0.1.0"}],
    }
    notes = ("kubectl apply -k FOLDER, where the Prometheus Operator and Grafana's sidecar run; copy it for your own",)
    return _file("overlays/everything/kustomization.yaml", as_yaml(content, *notes))


def _documents(contents: Sequence[Mapping[str, Any]], *notes: str) -> str:
    first, *others = (as_yaml(each, *(notes if not index else ())) for index, each in enumerate(contents))
    return "---\n".join([first, *(other.split("\n", 1)[1] for other in others)])


def _file(path: str, text: str) -> GeneratedFile:
    return GeneratedFile(PurePosixPath("kubernetes", path), text)
