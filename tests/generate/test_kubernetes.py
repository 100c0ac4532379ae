"""The evaluator on Kubernetes: the example is valid by its schemas and fits the evaluator; rules are wrapped."""

from __future__ import annotations

import shlex
from importlib.metadata import version
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from kc_otel.contract.load import load
from kc_otel.generate.prometheus import prometheus_files
from tests.handbook.snippets import HANDBOOK, snippets
from tests.tools.commands import commands

REPOSITORY = Path(__file__).resolve().parents[2]
CONTRACTS = [REPOSITORY / "contracts" / name for name in ("serving-int8.yaml", "rl-rollouts-bf16-fp8.yaml")]
EXAMPLE = REPOSITORY / "examples" / "kubernetes" / "evaluator"
NAME = "kc-otel-evaluator"


@pytest.fixture(scope="module")
def documents():
    """Every document of the example but the contract."""
    paths = [path for path in sorted(EXAMPLE.glob("*.yaml")) if path.name != "contract.yaml"]
    return [document for path in paths for document in yaml.safe_load_all(path.read_text())]


def of_kind(documents, kind, name=NAME):
    (found,) = [document for document in documents if document["kind"] == kind and document["metadata"]["name"] == name]
    return found


@pytest.mark.slow
def test_everything_is_valid_by_the_schemas_of_kubernetes(documents):
    plain = [document for document in documents if document["kind"] not in {"ServiceMonitor", "Kustomization"}]
    assert {document["kind"] for document in plain} == {"Service", "StatefulSet", "NetworkPolicy"}
    for document in plain:
        kubernetes_validate.validate(document, "1.31", strict=True)


def test_the_kustomization_names_files_that_exist_and_a_contract_that_loads():
    """What it leaves out is what only the Prometheus Operator has."""
    content = yaml.safe_load((EXAMPLE / "kustomization.yaml").read_text())
    (contracts,) = content["configMapGenerator"]
    named = {*content["resources"], *contracts["files"]}
    assert named | {"kustomization.yaml", "scrape.yaml"} == {path.name for path in EXAMPLE.iterdir()}
    assert load(EXAMPLE / "contract.yaml").name


def test_names_ports_and_labels_fit_together(documents):
    workload = of_kind(documents, "StatefulSet")["spec"]
    labels = workload["template"]["metadata"]["labels"]
    (container,) = workload["template"]["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    service = of_kind(documents, "Service")
    assert service["spec"]["selector"] == labels == workload["selector"]["matchLabels"]
    assert {port["targetPort"]: port["port"] for port in service["spec"]["ports"]} == ports
    for name in (NAME, f"{NAME}-scrape"):
        policy = of_kind(documents, "NetworkPolicy", name)
        assert policy["spec"]["podSelector"]["matchLabels"] == labels
    monitor = of_kind(documents, "ServiceMonitor")
    assert monitor["spec"]["endpoints"][0]["port"] in ports
    assert workload["serviceName"] == service["metadata"]["name"] == NAME
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    claims = {claim["metadata"]["name"] for claim in workload["volumeClaimTemplates"]}
    assert mounted == claims | {volume["name"] for volume in workload["template"]["spec"]["volumes"]}


def test_the_evaluator_is_started_with_options_that_it_has(documents):
    (container,) = of_kind(documents, "StatefulSet")["spec"]["template"]["spec"]["containers"]
    known = commands("serve")("--help", width=200)[1]
    command, contracts, *options = container["args"]
    assert (command, contracts) == ("serve", "/contracts")
    for option in options:
        assert f" {option.partition('=')[0]} " in known, option
    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert not any("--allow-unauthenticated" in option for option in options)


def test_the_evaluator_is_known_by_every_name_of_its_service(documents):
    """Also from other namespaces, and started again where it is up and judges nothing."""
    (container,) = of_kind(documents, "StatefulSet")["spec"]["template"]["spec"]["containers"]
    (variable,) = container["env"]
    assert variable["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.namespace"
    given = [argument.partition("=")[2] for argument in container["args"] if argument.startswith("--allowed-host=")]
    names = {host.replace(f"$({variable['name']})", "rl") for host in given}
    assert names == {NAME, f"{NAME}.rl", f"{NAME}.rl.svc", f"{NAME}.rl.svc.cluster.local"}
    probe = container["livenessProbe"]
    assert probe["exec"]["command"][-1] == "/readyz"
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 300
    assert all("/readyz" not in container[kind]["exec"]["command"] for kind in ("readinessProbe", "startupProbe"))


def test_the_handbooks_secret_is_the_one_that_is_mounted(documents):
    (snippet,) = [block.text for block in snippets(HANDBOOK / "run" / "operations.md", language="sh") if block.run_by]
    pod = of_kind(documents, "StatefulSet")["spec"]["template"]["spec"]
    (secret,) = [volume["secret"]["secretName"] for volume in pod["volumes"] if "secret" in volume]
    assert f"create secret generic {secret} --from-file=access.yaml" in snippet
    (kustomization,) = [document for document in documents if document["kind"] == "Kustomization"]
    assert f"--namespace {kustomization['namespace']} create secret" in snippet
    assert f"kubectl apply -k {EXAMPLE.relative_to(REPOSITORY)}" in snippet


@pytest.mark.slow
def test_rules_are_those_for_prometheus_as_resources(tmp_path):
    assert commands("generate")("generate", "prometheus", *CONTRACTS, "--kubernetes", "--out", tmp_path)[0] == 0
    written = {path.relative_to(tmp_path): path.read_text() for path in tmp_path.rglob("*.yaml")}
    plain = [file for file in prometheus_files(list(map(load, CONTRACTS))) if "rules" in file.path.parts]
    assert len(written) == len(plain) == 5
    for file in plain:
        folder = "standalone" if "standalone" in file.path.parts else "rules"
        resource = yaml.safe_load(written[Path("kubernetes", folder, file.path.name)])
        assert resource["kind"] == "PrometheusRule"
        assert resource["spec"] == yaml.safe_load(file.text)
        assert set(resource["metadata"]["name"]) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")


def test_the_handbooks_manifest_is_one() -> None:
    [manifest] = [snippet for snippet in snippets(HANDBOOK / "run" / "scaling.md") if snippet.title == "kuberay.yaml"]
    job, *plain = yaml.safe_load_all(manifest.text)
    for document in plain:
        kubernetes_validate.validate(document, "1.31", strict=True)
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    cluster = job["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        pod = {"apiVersion": "v1", "kind": "Pod", **group["template"]}
        pod["metadata"] = {"name": "pod", **pod["metadata"]}
        kubernetes_validate.validate(pod, "1.31", strict=True)
        mounts = {mount["name"] for mount in group["template"]["spec"]["containers"][0]["volumeMounts"]}
        assert mounts == {volume["name"] for volume in group["template"]["spec"]["volumes"]}
    assert version("ray").split(".")[:2] == cluster["rayVersion"].split(".")[:2]
    program, command, *arguments = shlex.split(job["spec"]["entrypoint"])
    assert (program, command) == ("kc-otel", "serve")
    told = "".join(commands("serve")(*arguments, width=200)[1:])
    assert "No such option" not in told
    assert "contracts" in told  # which folder is not on this machine
