"""The overlays that watch a vLLM on Kubernetes: valid once merged, and made of options and variables that exist."""

from __future__ import annotations

import re
from pathlib import Path

import kubernetes_validate
import pytest
import typer
import yaml
from typer.testing import CliRunner

from kc_otel.cli import register
from kc_otel.contract.load import load
from kc_otel.integrations.vllm import settings

ROOT = Path(__file__).resolve().parents[2] / "examples" / "kubernetes"
OVERLAYS = ("plugin", "sidecar")


def merged(base, patch):
    """As Kustomize's strategic merge has it: mappings by key, lists of mappings by their name, other lists replaced."""
    if isinstance(base, dict) and isinstance(patch, dict):
        return base | {key: merged(base.get(key), value) for key, value in patch.items()}
    if isinstance(base, list) and all(isinstance(item, dict) and "name" in item for item in (*base, *patch)):
        found = {item["name"]: item for item in base}
        return list((found | {item["name"]: merged(found.get(item["name"]), item) for item in patch}).values())
    return patch


def deployment(overlay):
    return merged(*(yaml.safe_load((ROOT / name).read_text()) for name in ("base/vllm.yaml", f"{overlay}/patch.yaml")))


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_what_is_merged_is_valid_and_keeps_what_was_there(overlay):
    found = deployment(overlay)
    kubernetes_validate.validate(found, "1.31", strict=True)
    pod = found["spec"]["template"]["spec"]
    own = next(container for container in pod["containers"] if container["name"] == "vllm")
    before = yaml.safe_load((ROOT / "base/vllm.yaml").read_text())["spec"]["template"]["spec"]["containers"][0]
    assert own["args"] == before["args"]
    assert {mount["name"] for mount in before["volumeMounts"]} < {mount["name"] for mount in own["volumeMounts"]}
    volumes = {volume["name"] for volume in pod["volumes"]}
    assert {mount["name"] for container in pod["containers"] for mount in container["volumeMounts"]} == volumes


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_options_and_variables_exist(overlay):
    app = typer.Typer()
    register(app, "rescore")
    register(app, "serve")
    for container in deployment(overlay)["spec"]["template"]["spec"]["containers"]:
        words = [*container.get("command", ()), *container["args"]] if "args" in container else container["command"]
        words = words[1:] if words[0] == "kc-otel" else words
        if words[0] in {"serve", "rescore"}:
            helped = CliRunner().invoke(app, [words[0], "--help"], env={"COLUMNS": "200", "NO_COLOR": "1"}).output
            for option in (word.partition("=")[0] for word in words if word.startswith("--")):
                assert f"{option} " in helped, option
        for variable in (entry["name"] for entry in container.get("env", ())):
            assert variable.startswith("OTEL_") or re.search(rf"`{variable}`", settings.__doc__), variable
    assert load(ROOT / overlay / "contract.yaml").name == "served-policy"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_kustomization_names_what_is_there(overlay):
    """Resources, patches and files exist; the images that it sets are those of the containers."""
    content = yaml.safe_load((ROOT / overlay / "kustomization.yaml").read_text())
    for name in (*content["resources"], *(entry["path"] for entry in content["patches"])):
        assert (ROOT / overlay / name).exists(), name
        assert not (ROOT / overlay).is_relative_to((ROOT / overlay / name).resolve()), "Kustomize refuses a cycle"
    for generator in content["configMapGenerator"]:
        assert all((ROOT / overlay / name).exists() for name in generator["files"])
    images = {container["image"] for container in deployment(overlay)["spec"]["template"]["spec"]["containers"]}
    assert images == {image["name"] for image in content["images"]}


def test_compose_says_which_version_it_needs():
    """`required: false` of env_file is new in Compose 2.24, and the head of the file says so."""
    text = (ROOT.parents[1] / "docker-compose.yml").read_text()
    assert "required: false" in text
    assert "Compose 2.24" in text.split("name: kc-otel", maxsplit=1)[0]
