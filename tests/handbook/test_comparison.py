"""The comparison with other tools: each row rests on a source."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "kc_otel" / "handbook" / "pages" / "comparison.md"
ROWS = [
    [cell.strip() for cell in line.strip("|\n ").split(" | ")]
    for line in PAGE.read_text().splitlines()
    if line.startswith("| ") and not line.startswith(("| |", "| ---"))
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_a_row_names_a_source(row):
    _, theirs, ours = row
    assert re.search(r"\]\(https://[^)]+\)", theirs), theirs
    assert ours
