"""`kc-otel locate run` on the demo's kernels: the one command that `make demo` ends with names the culprit."""

from __future__ import annotations

import json
import re

import pytest
from typer.testing import CliRunner

from examples.demo.__main__ import LOCATE
from kc_otel import cli


@pytest.mark.slow
def test_the_command_that_the_demo_prints_names_its_int8_outlier(demo_weights, monkeypatch):
    monkeypatch.setenv("DEMO_WEIGHTS", str(demo_weights))
    cli._register("locate")
    words = LOCATE.split()
    assert words[:3] == ["kc-otel", "locate", "run"]
    result = CliRunner().invoke(cli.app, [*words[1:], "--slice", "tables", "--limit", "12", "--json"])
    assert result.exit_code == 1, result.output
    found = json.loads(result.stdout)
    assert re.fullmatch(r"blocks\.[0-3]\.down", found["culprit"]["module"])
    assert found["culprit"]["tensors"][0] == f"{found['culprit']['module']}.input_scale"
    assert re.search(r"cuts off [0-9.]+ % of its inputs, in channel \d+ up to", found["culprit"]["sentence"])
    assert found["shares"]["components"][0]["name"].startswith("down_proj")
    assert found["shares"]["components"][0]["share"]["lower"] > 0.9


@pytest.mark.slow
def test_without_a_trained_model_it_says_what_to_run(tmp_path, monkeypatch):
    """Whoever copies the command from a page has not run the demo yet."""
    monkeypatch.setenv("DEMO_WEIGHTS", str(tmp_path / "none.pt"))
    cli._register("locate")
    result = CliRunner().invoke(cli.app, [*LOCATE.split()[1:], "--slice", "tables"])
    assert result.exit_code == 2
    assert "there is no trained model; run `make demo` first" in result.output
