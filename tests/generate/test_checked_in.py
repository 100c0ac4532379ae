"""What is checked in under dashboards/: the boards, and all that is generated from the contract that compose serves."""

from pathlib import Path

import pytest

from kc_otel.contract import load_all
from kc_otel.generate.files import stale
from kc_otel.generate.grafana import grafana_files
from kc_otel.generate.prometheus import prometheus_files


@pytest.fixture(scope="module")
def generated(repository: Path):
    """What the contract generates now."""
    contracts = load_all([repository / "examples" / "traffic" / "contract.yaml"])
    return (*grafana_files(contracts), *prometheus_files(contracts))


@pytest.mark.slow
def test_the_checked_in_files_are_current(repository: Path, generated) -> None:
    """Byte for byte; `make generate` brings them up to date."""
    assert [str(file.path) for file in stale(generated, repository / "dashboards")] == []


@pytest.mark.slow
def test_nothing_is_left_over(repository: Path, generated) -> None:
    """No file of a contract that is gone stays in the generated folders."""
    folder = repository / "dashboards"
    present = {path.relative_to(folder) for kind in ("grafana", "prometheus") for path in (folder / kind).rglob("*.*")}
    assert {str(path) for path in present} == {str(file.path) for file in generated}
