"""The contract that these tests generate from, and the dashboards that it gives."""

import json
import subprocess
from pathlib import Path

import pytest

from kc_otel.contract.load import load
from kc_otel.contract.model import Contract

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]


@pytest.fixture(scope="session")
def repository() -> Path:
    return REPOSITORY


@pytest.fixture(scope="session")
def schemas() -> Path:
    return REPOSITORY / "tests" / "data"


@pytest.fixture(scope="session")
def policy_path() -> Path:
    """A contract file with every kind of step, slices with limits of their own, and text that templates would eat."""
    return HERE / "policy.yaml"


@pytest.fixture(scope="session")
def policy(policy_path: Path) -> Contract:
    return load(policy_path)


@pytest.fixture(scope="session")
def boards() -> dict[str, dict]:
    from kc_otel.generate.grafana import grafana_files

    files = [file for file in grafana_files([]) if file.path.suffix == ".json"]
    return {file.path.stem: json.loads(file.text) for file in files}


@pytest.fixture
def promtool(program):
    """A function that runs promtool and returns its exit code and what it printed."""
    path = program("promtool")

    def run(*arguments: object) -> tuple[int, str]:
        done = subprocess.run([path, *map(str, arguments)], capture_output=True, text=True, timeout=300, check=False)
        return done.returncode, done.stdout + done.stderr

    return run
