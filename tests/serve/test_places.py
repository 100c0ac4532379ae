"""Drift by position of an incident: a chart of the page, and metrics for Grafana, while it lasts."""

from __future__ import annotations

import time
from collections import Counter

from kc_otel.serve.self_metrics import read
from tests.tools.api import client_of


def places_of(core, incident):
    client = client_of(core)
    return client.get("/api/v1/charts/places", params={"incident": incident})


def test_an_incident_shows_drift_by_position_and_its_metrics_do(make_core, drift, open_file, tmp_path):
    """With an interval for each bin that responses reach, also after a restart; without an incident there is none."""
    core = make_core(open_file(tmp_path / "state.db"))
    assert not read(core, Counter(), Counter())["kc.place.lower"]
    assert places_of(core, "0" * 12).status_code == 404
    core.metrics(drift(0.3))
    core.tick(time.time())
    (incident,) = core.incidents()
    chart = places_of(core, incident.id).json()
    assert [row[1][0] for row in chart["rows"]] == ["tokens 0 to 15", "tokens 16 to 63"]
    found = read(core, Counter(), Counter())
    bounds = [{of["kc.slice"]: value for of, value in found[f"kc.place.{name}"]} for name in ("lower", "upper")]
    assert list(bounds[0]) == ["position:0", "position:16"]
    assert all(0.0 < bounds[0][place] < bounds[1][place] < 1.0 for place in bounds[0])
    core._connection.close()
    again = make_core(open_file(tmp_path / "state.db"), time.time())
    again.tick(time.time())
    assert again.by_place(again.incidents()[0]).keys() == {"position:0", "position:16"}
