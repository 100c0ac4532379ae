"""Whoever opens an example reads first what it shows."""

from pathlib import Path

import pytest
import yaml

EXAMPLES = Path(__file__).parents[2] / "examples"
FOLDERS = [path for path in sorted(EXAMPLES.iterdir()) if path.is_dir() and path.name != "__pycache__"]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_every_example_says_how_it_is_run_and_what_one_sees(folder):
    text = (folder / "README.md").read_text()
    assert text.startswith("# ")
    assert f"examples.{folder.name}" in text or f"examples/{folder.name}" in text or f"make {folder.name}" in text
    assert sum(len(line) > 60 for line in text.splitlines()) > 3


def test_the_collectors_routes_lead_to_an_evaluator_and_nothing_waits_on_the_way():
    """Spans take the way of their contract's points; every part that is named exists; neither queue nor batch."""
    config = yaml.safe_load((EXAMPLES / "collector" / "config.yaml").read_text())
    pipelines, connectors = config["service"]["pipelines"], config["connectors"]
    used = {part for pipeline in pipelines.values() for parts in pipeline.values() for part in parts}
    assert used == {name for kind in ("receivers", "processors", "connectors", "exporters") for name in config[kind]}
    spans, points = (
        {
            row["condition"]: [target.partition("/")[2] for target in row["pipelines"]]
            for row in connectors[f"routing/{signal}"]["table"]
            if row["context"] != "metric"
        }
        for signal in ("traces", "metrics")
    )
    assert spans == points
    targets = {target for connector in connectors.values() for row in connector["table"] for target in row["pipelines"]}
    assert targets == {name for name in pipelines if not name.endswith("/in")}
    assert all(not exporter["sending_queue"]["enabled"] for exporter in config["exporters"].values())
    assert {name.partition("/")[0] for name in config["processors"]} == {"memory_limiter", "filter"}
