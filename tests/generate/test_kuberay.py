"""The manifest that the handbook shows for KubeRay: Kubernetes takes its parts, and the command its entry point."""

from __future__ import annotations

import shlex
from importlib.metadata import version

import kubernetes_validate
import yaml

from tests.handbook.snippets import HANDBOOK, snippets
from tests.tools.commands import commands


def test_the_handbooks_manifest_is_one() -> None:
    [manifest] = [snippet for snippet in snippets(HANDBOOK / "run" / "scaling.md") if snippet.title == "kuberay.yaml"]
    job, *plain = yaml.safe_load_all(manifest.text)
    for document in plain:
        kubernetes_validate.validate(document, "1.31", strict=True)
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    cluster = job["spec"]["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    for group in groups:
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        pod = {"apiVersion": "v1", "kind": "Pod", **group["template"]}
        pod["metadata"] = {"name": "pod", **pod["metadata"]}
        kubernetes_validate.validate(pod, "1.31", strict=True)
    pod = cluster["headGroupSpec"]["template"]["spec"]
    claims = {entry["metadata"]["name"]: entry for entry in plain if entry["kind"] == "PersistentVolumeClaim"}
    assert claims.keys() == {
        volume["persistentVolumeClaim"]["claimName"] for volume in pod["volumes"] if "persistentVolumeClaim" in volume
    }
    for group in groups:
        mounts = {mount["name"] for mount in group["template"]["spec"]["containers"][0]["volumeMounts"]}
        assert mounts == {volume["name"] for volume in group["template"]["spec"]["volumes"]}
        assert "shared" in mounts
    assert claims["kc-otel-shared"]["spec"]["accessModes"] == ["ReadWriteMany"]
    [service] = [entry for entry in plain if entry["kind"] == "Service"]
    assert {port["port"] for port in service["spec"]["ports"]} == {
        port["containerPort"] for port in pod["containers"][0]["ports"]
    }
    assert version("ray").split(".")[:2] == cluster["rayVersion"].split(".")[:2]
    program, command, *arguments = shlex.split(job["spec"]["entrypoint"])
    assert (program, command) == ("kc-otel", "serve")
    told = "".join(commands("serve")(*arguments, width=200)[1:])
    assert "No such option" not in told
    assert "contracts" in told  # which folder is not on this machine
