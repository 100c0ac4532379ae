"""Whoever opens an example reads first what it shows."""

from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
FOLDERS = [*sorted(path.parent for path in EXAMPLES.glob("*/__main__.py")), EXAMPLES / "kubernetes"]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_every_example_says_how_it_is_run_and_what_one_sees(folder):
    text = (folder / "README.md").read_text()
    assert text.startswith("# ")
    assert f"examples.{folder.name}" in text or f"examples/{folder.name}" in text or f"make {folder.name}" in text
    assert sum(len(line) > 60 for line in text.splitlines()) > 3
