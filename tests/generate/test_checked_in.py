"""What is checked in and generated: dashboards/ from the contract that compose serves, and the handbook's reference."""

from pathlib import Path

import pytest

from kc_otel.contract.load import load_all
from kc_otel.generate.files import Sites, stale
from kc_otel.generate.grafana import grafana_files
from kc_otel.generate.prometheus import prometheus_files
from kc_otel.handbook.generated_pages import FOLDER, PAGES, page

SLOW = {"reference/http-api.md", "reference/python.md"}
"""Pages that take longest to write; all other files together take less than a second."""


@pytest.fixture(scope="module")
def generated(repository: Path):
    contracts = load_all([repository / "examples" / "traffic" / "contract.yaml"])
    sites = Sites("http://127.0.0.1:3000", "http://127.0.0.1:4320")
    return (*grafana_files(contracts, sites=sites), *prometheus_files(contracts, sites))


def test_the_checked_in_files_are_current_and_nothing_is_left_over(repository: Path, generated) -> None:
    folder = repository / "dashboards"
    assert [str(file.path) for file in stale(generated, folder)] == []
    present = {path.relative_to(folder) for kind in ("grafana", "prometheus") for path in (folder / kind).rglob("*.*")}
    assert {str(path) for path in present} == {str(file.path) for file in generated}


@pytest.mark.parametrize("path", [pytest.param(path, marks=[pytest.mark.slow] * (path in SLOW)) for path in PAGES])
def test_the_handbooks_reference_is_current(path: str) -> None:
    assert (FOLDER / path).read_text(encoding="utf-8") == page(path)
