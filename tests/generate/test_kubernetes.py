"""What is for Kubernetes: examples are valid by its schemas once merged, and fit the commands; rules are wrapped."""

from __future__ import annotations

import re
import shlex
from functools import reduce
from importlib.metadata import version
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from kc_otel.contract.load import load
from kc_otel.generate.prometheus import prometheus_files
from kc_otel.integrations.vllm import settings
from tests.handbook.snippets import HANDBOOK, snippets
from tests.tools.commands import accepted, commands

REPOSITORY = Path(__file__).resolve().parents[2]
CONTRACTS = [REPOSITORY / "contracts" / name for name in ("serving-int8.yaml", "rl-rollouts-bf16-fp8.yaml")]
KUBERNETES = REPOSITORY / "examples" / "kubernetes"
EXAMPLE = KUBERNETES / "evaluator"
OVERLAYS = ("plugin", "sidecar")
"""Which watch the vLLM of the base."""
NAME = "kc-otel-evaluator"


@pytest.fixture(scope="module")
def documents():
    """Every document of the evaluator but the contract."""
    paths = [path for path in sorted(EXAMPLE.glob("*.yaml")) if path.name != "contract.yaml"]
    return [document for path in paths for document in yaml.safe_load_all(path.read_text())]


def of_kind(documents, kind, name=NAME):
    (found,) = [document for document in documents if document["kind"] == kind and document["metadata"]["name"] == name]
    return found


def merged(base, patch):
    """As Kustomize's strategic merge has it: mappings by key, lists of mappings by their name, other lists replaced."""
    if isinstance(base, dict) and isinstance(patch, dict):
        return base | {key: merged(base.get(key), value) for key, value in patch.items()}
    if isinstance(base, list) and all(isinstance(item, dict) and "name" in item for item in (*base, *patch)):
        found = {item["name"]: item for item in base}
        return list((found | {item["name"]: merged(found.get(item["name"]), item) for item in patch}).values())
    return patch


def deployment(*overlay):
    """The base, or what an overlay makes of it."""
    files = ("base/vllm.yaml", *(f"{name}/patch.yaml" for name in overlay))
    return reduce(merged, (yaml.safe_load((KUBERNETES / name).read_text()) for name in files))


@pytest.mark.slow
def test_everything_is_valid_by_the_schemas_of_kubernetes(documents):
    plain = [document for document in documents if document["kind"] not in {"ServiceMonitor", "Kustomization"}]
    assert {document["kind"] for document in plain} == {"Service", "StatefulSet", "NetworkPolicy"}
    for document in (*plain, *map(deployment, OVERLAYS)):
        kubernetes_validate.validate(document, "1.31", strict=True)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_an_overlay_keeps_what_was_there(overlay):
    pod, base = (of["spec"]["template"]["spec"] for of in (deployment(overlay), deployment()))
    own = next(container for container in pod["containers"] if container["name"] == "vllm")
    (before,) = base["containers"]
    assert own["args"] == before["args"]
    assert {mount["name"] for mount in before["volumeMounts"]} < {mount["name"] for mount in own["volumeMounts"]}
    volumes = {volume["name"] for volume in pod["volumes"]}
    assert {mount["name"] for container in pod["containers"] for mount in container["volumeMounts"]} == volumes


@pytest.mark.parametrize("folder", ["evaluator", *OVERLAYS])
def test_the_kustomization_names_what_is_there(folder, documents):
    """All files but what only the Prometheus Operator has, a contract that loads, and the images of the containers."""
    content = yaml.safe_load((KUBERNETES / folder / "kustomization.yaml").read_text())
    (contracts,) = content["configMapGenerator"]
    named = {*content["resources"], *contracts["files"], *(patch["path"] for patch in content.get("patches", ()))}
    for name in named:
        assert (KUBERNETES / folder / name).exists(), name
        assert not (KUBERNETES / folder).is_relative_to((KUBERNETES / folder / name).resolve()), "a cycle is refused"
    assert {path.name for path in (KUBERNETES / folder).iterdir()} <= named | {"kustomization.yaml", "scrape.yaml"}
    assert load(KUBERNETES / folder / "contract.yaml").name
    workload = of_kind(documents, "StatefulSet") if folder == "evaluator" else deployment(folder)
    images = {container["image"] for container in workload["spec"]["template"]["spec"]["containers"]}
    assert images == {image["name"] for image in content["images"]}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_options_and_variables_exist(overlay):
    for container in deployment(overlay)["spec"]["template"]["spec"]["containers"]:
        program, *words = [*container.get("command", [container["image"]]), *container.get("args", ())]
        if program == "kc-otel":
            accepted(words)
        for variable in (entry["name"] for entry in container.get("env", ())):
            assert variable.startswith("OTEL_") or re.search(rf"`{variable}`", settings.__doc__), variable


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
    assert container["args"][:2] == ["serve", "/contracts"]
    accepted(container["args"])
    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert not any("--allow-unauthenticated" in option for option in container["args"])


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
    accepted([command, *arguments])
