"""examples/ci: the gate tells the two kernels apart, and the workflow's own commands run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "ci"
WORKFLOW = yaml.safe_load((EXAMPLE / "kernel-contract.yml").read_text())
STEPS = {step["name"]: step for step in WORKFLOW["jobs"]["gate"]["steps"] if "name" in step}


@pytest.mark.slow
def test_the_example_refuses_the_bad_kernel_and_lets_the_good_one_on():
    """`python -m examples.ci` exits with 0 when the gate told them apart, and prints what a reviewer reads."""
    done = subprocess.run(
        [sys.executable, "-m", "examples.ci"], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "advance: torch" in done.stdout
    assert "rollback: torch" in done.stdout
    assert "sound, and its recordings give the same verdicts" in done.stdout
    assert "## ❌ torch" in done.stdout


@pytest.fixture
def step(tmp_path):
    """Runs a step of the workflow, as Actions does, in a repository that has the example's files."""
    for name in ("contract.yaml", "record.py"):
        shutil.copy(EXAMPLE / name, tmp_path)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main", "-C", str(tmp_path)]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *command], check=True)
    environment = {
        **os.environ,
        **WORKFLOW["env"],
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "BASE": "main",
        "GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md"),
    }

    def invoke(name, **replaced):
        run = STEPS[name]["run"]
        for old, new in replaced.items():
            run = run.replace(old, new)
        shell = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", run]
        return subprocess.run(
            shell, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
        )

    return invoke


@pytest.mark.slow
def test_the_workflow_s_commands_run_as_they_are_written(step, tmp_path):
    for name in ("Check the contract", "Compare with the contract in force", "Record both kernels", "Gate"):
        done = step(name)
        assert done.returncode == 0, (name, done.stdout, done.stderr)
    assert (tmp_path / "summary.md").read_text(encoding="utf-8").startswith("## ✅ torch")
    assert {path.name for path in (tmp_path / "gate").iterdir()} == {"evidence.json", "junit.xml"}


@pytest.mark.slow
def test_the_workflow_fails_on_a_bad_kernel(step):
    assert step("Record both kernels", bfloat16="int4").returncode == 0
    assert step("Gate").returncode == 1


@pytest.mark.slow
def test_the_workflow_asks_for_a_review_when_a_contract_loosens(step, tmp_path):
    path = tmp_path / "contract.yaml"
    assert "::warning" not in step("Compare with the contract in force").stdout
    path.write_text(path.read_text().replace("limit: 0.01", "limit: 0.02"))
    done = step("Compare with the contract in force")
    assert done.returncode == 0
    assert "::warning file=contract.yaml::This change loosens the contract" in done.stdout
    path.write_text("kind: nothing")
    assert step("Compare with the contract in force").returncode == 2
