"""The arrows of the design: each room imports only rooms above it."""

import ast
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

import kc_otel

ROOT = Path(kc_otel.__file__).parent
ORDER = (
    "machine_code",  # below everything that has loops in C
    "contract",
    "stats",
    "record",
    "recordings",  # above the integrations: an engine's integration writes the spool, and scorers score its requests
    "integrations",
    "judge",
    "client",
    "offline",
    "diagnose",
    "serve",
    "generate",
    "cli",
)

APART = {"serve": {"offline", "diagnose"}, "judge": {"record", "recordings", "integrations"}}
"""Rooms above a room that it does without all the same: what both need is in a room above both."""


def rooms_imported(source: str) -> set[str]:
    """Rooms of kc_otel that a module's text imports, wherever in the module it does so; `_extras` is nobody's room."""
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide which room is meant"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return {name.split(".")[1] for name in names if name.startswith("kc_otel.")} - {"_extras"}


@pytest.mark.slow
def test_the_handbook_has_no_code_that_anything_imports() -> None:
    assert {path.name for path in (ROOT / "handbook").rglob("*.py")} == {"generated_pages.py"}
    assert "handbook" not in {room for path in ROOT.rglob("*.py") for room in rooms_imported(path.read_text())}


def test_every_room_is_in_the_design() -> None:
    assert {path.parent.name for path in ROOT.glob("*/__init__.py")} == set(ORDER)
    assert {path.stem for path in ROOT.glob("*.py")} == {"__init__", "__main__", "_extras"}


@pytest.mark.slow
@pytest.mark.parametrize("room", ORDER)
def test_a_room_imports_only_rooms_above_it(room: str) -> None:
    above = set(ORDER[: ORDER.index(room)]) - APART.get(room, set())
    for path in (ROOT / room).rglob("*.py"):
        wrong = rooms_imported(path.read_text()) - above - {room}
        assert not wrong, f"{path.relative_to(ROOT)} imports {sorted(wrong)}"


def test_an_arrow_against_the_flow_is_noticed() -> None:
    source = "def f():\n    from kc_otel.cli import main\nimport kc_otel.judge.series as p\nfrom kc_otel import serve"
    assert rooms_imported(source) == {"cli", "judge", "serve"}


def twice(names: Iterable[str]) -> list[str]:
    return sorted(name for name, count in Counter(names).items() if count > 1)


@pytest.mark.slow
def test_a_name_means_one_thing() -> None:
    files = [path for path in ROOT.rglob("*.py") if path.name not in {"__init__.py", "__main__.py"}]
    assert twice(path.name for path in files) == []
    classes = [
        node.name for path in files for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)
    ]
    assert twice(name for name in classes if not name.startswith("_")) == []


@pytest.mark.slow
def test_names_are_the_fields_words() -> None:
    slang = {"standing", "rounds", "ring", "rings", "readings", "deeds", "untold", "tap", "handover", "book", "roster"}
    found = set()
    for path in ROOT.rglob("*.py"):
        names = {path.stem}
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names.add(node.attr)
            elif isinstance(node, ast.arg):
                names.add(node.arg)
        words = {name: set(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower().split("_")) for name in names}
        found |= {f"{path.relative_to(ROOT)}: {name}" for name in names if words[name] & slang}
    assert not found
