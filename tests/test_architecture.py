"""The arrows of the design: each box imports only boxes to its left."""

import ast
from pathlib import Path

import pytest

import kc_otel

ROOT = Path(kc_otel.__file__).parent
ORDER = (
    "contract",
    "bounds",
    "measure",
    "telemetry",
    "instrument",
    "otlp",
    "evaluator",
    "escalation",
    "routing",
    "promotion",
    "explain",
    "replay",  # runs what decides, and `serve --record` in service writes what it reads
    "generate",
    "report",
    "service",
    "cli",
)
EVERYWHERE = {"contract", "bounds"}
FACADES = {"webhooks"}


def boxes_imported(source: str) -> set[str]:
    """Boxes of kc_otel that a module's text imports, wherever in the module it does so."""
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide which box is meant"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return {name.split(".")[1] for name in names if name.startswith("kc_otel.")}


def test_every_box_is_in_the_design() -> None:
    """A folder that the design does not name has no place."""
    assert {path.parent.name for path in ROOT.glob("*/__init__.py")} == set(ORDER)
    assert {path.stem for path in ROOT.glob("*.py")} == {"__init__", *FACADES}


@pytest.mark.parametrize("box", ORDER)
def test_a_box_imports_only_boxes_to_its_left(box: str) -> None:
    """Data flows one way, and so do imports; bounds and contract know of nobody else."""
    left = set() if box == "bounds" else EVERYWHERE | set(ORDER[: ORDER.index(box)])
    if box == "contract":
        left = {"bounds"}
    for path in (ROOT / box).rglob("*.py"):
        wrong = boxes_imported(path.read_text()) - left - {box}
        assert not wrong, f"{path.relative_to(ROOT)} imports {sorted(wrong)}"


def test_an_arrow_against_the_flow_is_noticed() -> None:
    """The reader above sees plain, nested and aliased imports."""
    source = "def f():\n    from kc_otel.cli import main\nimport kc_otel.evaluator.panes as p\nfrom kc_otel import otlp"
    assert boxes_imported(source) == {"cli", "evaluator", "otlp"}
