"""The contract that these tests generate from."""

from pathlib import Path

import pytest

from kc_otel.contract import Contract, load

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]


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
