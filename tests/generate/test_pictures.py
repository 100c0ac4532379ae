"""Grafana's published components read our JSON as it is meant. Run where npm's packages are there: `make pictures`."""

from pathlib import Path

import pytest

from tests.tools.grafana_pictures import HERE, pictures

pytestmark = pytest.mark.slow


def test_grafanas_components_draw_what_the_boards_ask_for(program, tmp_path: Path) -> None:
    """States in words and shapes, units, thresholds and legends, without a complaint of the browser."""
    if not (HERE / "node_modules").exists():
        pytest.skip("not run: npm's packages are not installed; `make pictures` installs them")
    program("prometheus")
    program("chromium")
    said = pictures(tmp_path)
    assert {path.stem for path in tmp_path.glob("*.png")} == {"overview", "slice", "health"}
    for text in ("Broken", "Evaluated", "c/s"):
        assert text in said["overview"]
    for text in ("✕ FAIL", "4 minutes ago", "%", "training", "limit", "upper", "99.9th percentile"):
        assert text in said["slice"]
    assert "unknown" not in said["overview"]
