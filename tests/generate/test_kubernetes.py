"""Resources for Kubernetes: valid by its own schemas, fit together, and say what the evaluator needs."""

from __future__ import annotations

from pathlib import Path

import kubernetes_validate
import pytest
import typer
import yaml
from typer.testing import CliRunner

from kc_otel.cli import generate_command, serve_command
from kc_otel.contract import load
from kc_otel.generate.kubernetes import NAME
from tests.handbook.snippets import HANDBOOK, snippets

REPOSITORY = Path(__file__).resolve().parents[2]
CONTRACTS = [REPOSITORY / "contracts" / name for name in ("serving-int8.yaml", "rl-rollouts-bf16-fp8.yaml")]
CUSTOM = {"ServiceMonitor", "PrometheusRule", "Kustomization", "Component"}
"""What no schema of Kubernetes knows: the Prometheus Operator's, and Kustomize's own files."""


def run(*arguments):
    app = typer.Typer()
    generate_command.register(app)
    serve_command.register(app)
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "200", "NO_COLOR": "1"})


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kubernetes")
    found = run("generate", "kubernetes", *map(str, CONTRACTS), "--out", str(folder))
    assert found.exit_code == 0, found.output
    return folder / "kubernetes"


@pytest.fixture(scope="module")
def documents(out):
    """Every document of every YAML file but the contracts, by its file."""
    paths = [path for path in sorted(out.rglob("*.yaml")) if path.parent.name != "contracts"]
    return [(path, each) for path in paths for each in yaml.safe_load_all(path.read_text())]


def of_kind(documents, kind, name=NAME):
    (found,) = [each for _, each in documents if each["kind"] == kind and each["metadata"]["name"] == name]
    return found


@pytest.mark.slow
def test_everything_is_valid_by_the_schemas_of_kubernetes(documents):
    """Strictly: a field that Kubernetes does not know is a mistake."""
    plain = [(path, each) for path, each in documents if each["kind"] not in CUSTOM]
    assert {each["kind"] for _, each in plain} == {"Service", "StatefulSet", "NetworkPolicy"}
    for _, each in plain:
        kubernetes_validate.validate(each, "1.31", strict=True)


def test_kustomizations_name_files_that_exist_and_nothing_is_left_out(out):
    """Every generated file is reached from the overlay."""
    reached: set[Path] = set()

    def walk(folder: Path) -> None:
        reached.add(folder / "kustomization.yaml")
        content = yaml.safe_load((folder / "kustomization.yaml").read_text())
        for name in (*content.get("resources", ()), *content.get("components", ())):
            place = (folder / name).resolve()
            assert place.exists(), place
            walk(place) if place.is_dir() else reached.add(place)
        for generator in content.get("configMapGenerator", ()):
            for name in generator["files"]:
                assert (folder / name).stat().st_size < 1_000_000, "a ConfigMap holds a mebibyte"
                reached.add(folder / name)

    walk((out / "overlays" / "everything").resolve())
    assert {path.resolve() for path in reached} == {path.resolve() for path in out.rglob("*") if path.is_file()}


def test_names_ports_and_labels_fit_together(documents):
    """Service, policies and monitor select the pods; ports are those of the container."""
    workload = of_kind(documents, "StatefulSet")["spec"]
    labels = workload["template"]["metadata"]["labels"]
    (container,) = workload["template"]["spec"]["containers"]
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    service = of_kind(documents, "Service")
    assert service["spec"]["selector"] == labels == workload["selector"]["matchLabels"]
    assert {each["targetPort"]: each["port"] for each in service["spec"]["ports"]} == ports
    for name in (NAME, f"{NAME}-scrape"):
        policy = of_kind(documents, "NetworkPolicy", name)
        assert policy["spec"]["podSelector"]["matchLabels"] == labels
    monitor = of_kind(documents, "ServiceMonitor")
    assert monitor["spec"]["endpoints"][0]["port"] in ports
    assert workload["serviceName"] == service["metadata"]["name"] == NAME
    mounted = {each["name"] for each in container["volumeMounts"]}
    claims = {each["metadata"]["name"] for each in workload["volumeClaimTemplates"]}
    assert mounted == claims | {each["name"] for each in workload["template"]["spec"]["volumes"]}


def test_the_evaluator_is_started_with_options_that_it_has(documents):
    """Whatever `kc-otel serve` is told there, it takes; it asks for tokens and runs as nobody."""
    (container,) = of_kind(documents, "StatefulSet")["spec"]["template"]["spec"]["containers"]
    known = run("serve", "--help").output
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
    given = [each.partition("=")[2] for each in container["args"] if each.startswith("--allowed-host=")]
    names = {each.replace(f"$({variable['name']})", "rl") for each in given}
    service = "kc-otel-evaluator"
    assert names == {service, f"{service}.rl", f"{service}.rl.svc", f"{service}.rl.svc.cluster.local"}
    probe = container["livenessProbe"]
    assert probe["exec"]["command"][-1] == "/readyz"
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 300
    assert all("/readyz" not in container[one]["exec"]["command"] for one in ("readinessProbe", "startupProbe"))


def test_contracts_go_in_as_they_are(out):
    """The text with its comments, under the contract's name."""
    for path in CONTRACTS:
        copy = out / "base" / "contracts" / f"{load(path).name}.yaml"
        assert copy.read_text() == path.read_text()


def test_the_handbooks_secret_is_the_one_that_is_mounted(documents):
    """What the page of the evaluator tells to make is what the pod asks for."""
    (snippet,) = [each.text for each in snippets(HANDBOOK / "run" / "serving.md", language="sh") if each.run_by]
    pod = of_kind(documents, "StatefulSet")["spec"]["template"]["spec"]
    (secret,) = [each["secret"]["secretName"] for each in pod["volumes"] if "secret" in each]
    assert f"create secret generic {secret} --from-file=access.yaml" in snippet
    (overlay,) = [each for path, each in documents if "overlays" in path.parts]
    assert f"--namespace {overlay['namespace']} create secret" in snippet
