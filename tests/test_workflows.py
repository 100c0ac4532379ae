"""What a forge runs: the suite once a push, and a release only where a person pushes a tag."""

import tomllib
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]


def workflow(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What starts a workflow, and its jobs."""
    found = yaml.safe_load((ROOT / ".github" / "workflows" / f"{name}.yaml").read_text())
    return found[True], found["jobs"]  # YAML 1.1 reads `on` as true


def commands(jobs: dict[str, Any]) -> list[str]:
    return [step["run"] for job in jobs.values() for step in job.get("steps", ()) if "run" in step]


def test_a_push_runs_the_suite_once():
    started, jobs = workflow("ci")
    assert set(started) == {"push", "pull_request"}
    assert commands(jobs) == [".ci/run"]
    assert "strategy" not in jobs["everything"]
    started, _ = workflow("versions")
    assert not {"push", "pull_request"} & set(started)


def test_the_versions_that_are_declared_are_tested():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    names = {line.rpartition(" ")[2] for line in declared if line.startswith("Programming Language :: Python :: 3.")}
    _, jobs = workflow("versions")
    assert names == {"3.11", *jobs["python"]["strategy"]["matrix"]["python"]}


def test_only_a_tag_that_somebody_pushes_is_published():
    started, jobs = workflow("release")
    assert set(started) == {"push"}
    assert set(started["push"]) == {"tags"}
    assert set(jobs["publish"]["needs"]) == set(jobs) - {"publish"}
    assert {name for name, job in jobs.items() if "id-token" in job.get("permissions", {})} == {"publish"}
    uses = [step["uses"] for step in jobs["publish"]["steps"]]
    assert any("attest-build-provenance" in action for action in uses)
    systems = jobs["wheels"]["strategy"]["matrix"]["system"]
    assert any(system.startswith("macos") for system in systems)
    assert any(system.startswith("ubuntu") for system in systems)
