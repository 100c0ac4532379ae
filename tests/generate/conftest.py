"""The contract that these tests generate from, and programs from Debian's archive."""

import importlib.util
import sys
from pathlib import Path

import pytest

from kc_otel.contract import Contract, load

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]


@pytest.fixture(scope="session")
def debian():
    """The module that fetches programs from Debian's archive."""
    path = HERE.parent / "tools" / "debian.py"
    spec = importlib.util.spec_from_file_location("kc_otel_tests_debian", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def repository() -> Path:
    """The checkout."""
    return REPOSITORY


@pytest.fixture(scope="session")
def schemas() -> Path:
    """Folder of JSON Schemas beside the checkout; skips where it is not."""
    folder = REPOSITORY.parent / "shared" / "data"
    if not (folder / "grafana-jsonschema").is_dir():
        pytest.skip(f"not validated against JSON Schemas: {folder} does not exist")
    return folder


@pytest.fixture(scope="session")
def policy_path() -> Path:
    """A contract file with every kind of step, slices with limits of their own, and text that templates would eat."""
    return HERE / "policy.yaml"


@pytest.fixture(scope="session")
def policy(policy_path: Path) -> Contract:
    """The contract of `policy_path`."""
    return load(policy_path)


@pytest.fixture(scope="session")
def program(debian):
    """A function from a program's name to its path; skips the test where the program cannot be had."""

    def find(name: str) -> str:
        try:
            return str(debian.find(name, say=print))
        except debian.UnavailableError as error:
            pytest.skip(f"not run: {error}")

    return find
