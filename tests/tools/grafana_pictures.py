"""Draws panels of the generated dashboards with Grafana's published components, from a real Prometheus, in Chromium.

npm's `@grafana/ui` and `@grafana/data` draw what our JSON asks for: units, thresholds, mappings, overrides, legends.
They are Grafana's components and not Grafana, whose own panels and layout are in no package: stat and time series are
drawn.

    npm ci --prefix tests/tools/grafana_panels --ignore-scripts --legacy-peer-deps     # once; `make pictures` does it
    python -m tests.tools.grafana_pictures FOLDER
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kc_otel.contract import load
from kc_otel.generate.grafana import grafana_files
from tests.tools import debian
from tests.tools.chromium import Chromium
from tests.tools.panel_rows import World
from tests.tools.panel_store import Store, filled, played, rate_interval

HERE = Path(__file__).parent / "grafana_panels"
CONTRACTS = Path(__file__).parents[1] / "generate"
DRAWN = ("stat", "timeseries")
SECONDS, STEP = 420, 10
"""What the pictures show: as long as the recorders were played, a point for each scrape."""


def bundle(folder: Path) -> None:
    """The page's script and style, with everything in them.

    Raises:
        subprocess.CalledProcessError: If npm's packages are not installed, or the script is wrong.
    """
    files = ("svg=text", *(f"{name}=dataurl" for name in ("woff", "woff2", "ttf")))
    command = [
        *("node", HERE / "node_modules" / "esbuild" / "bin" / "esbuild", HERE / "panels.jsx"),
        *("--bundle", "--minify", "--format=iife", "--jsx=automatic", "--log-level=error"),
        *(f"--loader:.{one}" for one in files),
        '--define:process.env.NODE_ENV="production"',
        f"--outfile={folder / 'panels.js'}",
    ]
    subprocess.run([*map(str, command)], check=True)
    (folder / "index.html").write_text(
        '<!doctype html><meta charset="utf-8"><link rel="stylesheet" href="panels.css">'
        '<div id="panels"></div><script src="panels.js"></script>'
    )


def answered(store: Store, board: Mapping[str, Any], picked: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """Each panel of a board that is drawn, with the frames that Grafana's data source makes of Prometheus' answers."""
    world = store.world.but(picked=dict(picked))
    for panel in (inner for outer in board["panels"] for inner in (outer, *outer.get("panels", []))):
        if panel["type"] in DRAWN and "repeat" not in panel:
            frames = [
                frame for target in panel["targets"] if "expr" in target for frame in _frames(store, target, world)
            ]
            yield {"panel": panel, "title": _titled(panel["title"], world), "frames": frames}


def _titled(title: str, world: World) -> str:
    return re.sub(r"\$(\w+)", lambda found: world.picked[found[1]], title)


def _frames(store: Store, target: Mapping[str, Any], world: World) -> Iterator[dict[str, Any]]:
    if target["refId"] == "Unit":
        return  # the transformation that reads it is Grafana's own
    now = world.but(rate=rate_interval(target, world), range=SECONDS)
    end = world.recorded.end
    span = {"start": end - SECONDS, "end": end, "step": STEP} if target.get("range") else {"time": end}
    path = "/query_range" if target.get("range") else "/query"
    answer = store.client.get(path, params={"query": filled(target["expr"], now), **span}).json()
    assert answer["status"] == "success", answer
    for row in answer["data"]["result"]:
        values = row.get("values") or [row["value"]]
        legend = re.sub(
            r"{{(\w+)}}", lambda found, of=row["metric"]: of.get(found[1], ""), target.get("legendFormat", "")
        )
        yield {
            "refId": target["refId"],
            "name": legend,
            "labels": row["metric"],
            "times": [1000 * at for at, _ in values],
            "values": [float(value) for _, value in values],
        }


def pictures(folder: Path) -> dict[str, str]:
    """The Overview, Health, and the Slice board of a cell that is broken, as files; and what each says, by its name."""
    said: dict[str, str] = {}
    folder.mkdir(parents=True, exist_ok=True)
    contracts = load(CONTRACTS / "panels.yaml"), load(CONTRACTS / "silent.yaml")
    boards = {one.path.stem: json.loads(one.text) for one in grafana_files([]) if one.path.suffix == ".json"}
    every = dict.fromkeys(("contract", "slice", "kernel_train", "kernel_inference"), ".*")
    cell = {"contract": contracts[0].name, "slice": "code", "clause": "token-tv", "quantity": "kc_drift_tv_token"}
    more = {"operator": ".*", "step": "30", "clauses": "token-tv", "slices": "code"}
    with tempfile.TemporaryDirectory() as place, tempfile.TemporaryDirectory() as profile:
        bundle(Path(place))
        (Path(place) / "data").mkdir()
        browser = Chromium(debian.command("chromium", say=print), Path(profile))
        try:
            with played(str(debian.find("prometheus", say=print)), contracts, Path(place) / "data") as store:
                for name, picked in (
                    ("overview", every),
                    ("health", {**every, **more}),
                    ("slice", {**every, **more, **cell}),
                ):
                    panels = [*answered(store, boards[name], picked)]
                    end = 1000 * store.world.recorded.end
                    browser.open(f"file://{place}/index.html", width=1460, height=200)
                    browser.wait("window.drawn")
                    browser.evaluate(f"drawn({json.dumps(panels)}, {end - 1000 * SECONDS}, {end})")
                    browser.wait(f"document.querySelectorAll('[id^=panel-]').length === {len(panels)}", 60)
                    browser.wait("!panels.innerText.includes('Loading')")
                    said[name] = browser.evaluate("panels.innerText")
                    assert not browser.complaints(), browser.complaints()
                    browser.screenshot(folder / f"{name}.png", full=True)
        finally:
            browser.close()
    return said


if __name__ == "__main__":
    pictures(Path(sys.argv[1]))
