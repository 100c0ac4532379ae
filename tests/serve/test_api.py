"""The API: what it documents is what it answers."""

import re
import time
from collections import Counter
from dataclasses import replace

import pytest
from openapi_spec_validator import validate
from starlette.testclient import TestClient

from kc_otel.contract.registry.own_metrics import METRICS, prometheus_name
from kc_otel.judge.decisions import Canary, changed
from kc_otel.judge.recorders import KernelInfo
from kc_otel.judge.verdict import Status
from kc_otel.serve import people_orders
from kc_otel.serve.api.app import make_api
from kc_otel.serve.api.routes_decisions import Changes
from kc_otel.serve.core import Core
from kc_otel.serve.self_metrics import read
from tests.tools.api import route_kept


@pytest.fixture
def client(core: Core) -> TestClient:

    counts, attempts = Counter(), Counter({("pager", "delivered"): 2})
    counts["grpc", "accepted"] += 1
    return TestClient(make_api(core, lambda: read(core, counts, attempts), Changes(), "0"))


@pytest.mark.slow
def test_the_document_is_valid_openapi(client: TestClient) -> None:
    document = client.get("/openapi.json").json()
    validate(document)
    assert {"/metrics", "/healthz", "/readyz", "/api/v1/verdicts", "/api/v1/decisions"} <= set(document["paths"])
    for path, operations in document["paths"].items():
        for operation in operations.values():
            assert operation["description"], path


def test_verdicts_say_what_decided_them(client: TestClient) -> None:
    """Estimate, interval, limit, samples, window, method, reason, contract, and what they are about."""
    answer = client.get("/api/v1/verdicts").json()
    assert {verdict["slice"] for verdict in answer["verdicts"]} == {"all", "code"}
    for verdict in answer["verdicts"]:
        assert verdict["limit"] < verdict["lower"] <= verdict["estimate"] <= verdict["upper"]
        assert verdict["margin"] < 0
        assert verdict["samples"] == 64 * 64
        assert "lower bound" in verdict["reason"]
        assert verdict["about"] == "traffic"
        assert (verdict["status"], verdict["firing"], verdict["evidence"]) == ("FAIL", ["critical"], 1.0)


def test_what_failed_stays_while_its_alert_fires(client, core, monkeypatch):
    """As it was last, though its kernel is gone; and its alert stands on its own row, not on the stable kernel's."""
    stable = [
        (replace(verdict, status=Status.PASS, cell=verdict.cell._replace(kernel_inference="stable")), since)
        for verdict, since in core.history.cells("policy")
    ]
    monkeypatch.setattr(core.history, "cells", lambda *_: stable)
    cells = [cell for cell in client.get("/api/v1/verdicts").json()["verdicts"] if cell["slice"] == "code"]
    assert {(cell["status"], tuple(cell["firing"]), cell["gone"]) for cell in cells} == {
        ("PASS", (), False),
        ("FAIL", ("critical",), True),
    }


def test_a_cell_whose_requests_go_elsewhere_has_no_traffic(client, core, monkeypatch):
    """It is silent as ordered and obeyed, neither PASS nor missing data; else it is missing data."""
    quiet = [(replace(verdict, status=Status.NO_DATA), since) for verdict, since in core.history.cells("policy")]
    monkeypatch.setattr(core.history, "cells", lambda *_: quiet)

    def said() -> tuple[set[tuple[str, bool]], dict[str, int]]:
        verdicts = client.get("/api/v1/verdicts").json()["verdicts"]
        overview = client.get("/api/v1/overview").json()
        assert overview["counts"] == {"policy": {"NO_DATA": 2}}
        return {(verdict["slice"], verdict["no_traffic"]) for verdict in verdicts}, overview["no_traffic"]

    assert said() == ({("all", False), ("code", False)}, {"policy": 0}), "nobody has taken the order"
    route_kept(core, core.evaluated_at)
    core.evaluated_at += 1.0
    assert said() == ({("all", True), ("code", True)}, {"policy": 2})
    people_orders.lift(core, "route", "policy", None, "ada", "kernel patched", 10.0)
    assert said() == ({("all", False), ("code", False)}, {"policy": 0})


def test_contracts_are_spelled_out(client: TestClient) -> None:
    """Clauses with their units and statistics, slices, kernels, the worst status, and what is asked of trainers."""
    (contract,) = client.get("/api/v1/contracts").json()["contracts"]
    assert contract["status"] == "FAIL"
    assert (contract["clauses"][0]["statistic"], contract["clauses"][0]["per"]) == ("mean", "token")
    assert contract["clauses"][0]["description"] == "share of mass that the kernels place apart"
    assert {kernel["role"] for kernel in contract["kernels"]} == {"train", "inference"}


def test_the_metric_of_routes_follows_pins_as_routers_do(client: TestClient) -> None:
    """The newest pin of a slice or of all traffic decides, else the route."""

    def to_training() -> set[str]:
        lines = [line for line in client.get("/metrics").text.splitlines() if line.startswith("kc_route{")]
        return {
            slice for slice in ("all", "code") if any(f'"train-kernel",kc_slice="{slice}"' in line for line in lines)
        }

    def pin(slice: str, kernel: str) -> None:
        body = {"contract": "policy", "slice": slice, "kernel": kernel, "by": "ada", "why": "a test"}
        assert client.post("/api/v1/decisions/pin", json=body).status_code == 200

    assert to_training() == {"all", "code"}, "as routed"
    pin("all", "inference-kernel")
    assert to_training() == set()
    pin("code", "train-kernel")
    assert to_training() == {"code"}
    pin("all", "inference-kernel")
    assert to_training() == set()


def test_the_metric_of_routes_names_the_version_that_is_avoided(client: TestClient, core: Core) -> None:
    """Another version of the same slice is served as before, and one without a share by nobody."""
    (avoided,) = {route.avoid for route in core.decisions.routes}
    known = core.evaluator.kernels("policy")
    other = KernelInfo("inference", "v2", {}, 0.0)
    core.evaluator.kernels = lambda _: (*known, other)  # type: ignore[method-assign]
    decisions = changed(core.decisions, 1.0, canaries=[Canary("policy", "v3", 0.0, "rolled back", 0.0)])
    core.escalation = replace(core.escalation, decisions=decisions)
    lines = [line for line in client.get("/metrics").text.splitlines() if line.startswith("kc_route{")]
    routed = {line.split('kc_kernel_inference="')[1].split('"')[0]: line for line in lines if 'kc_slice="code"' in line}
    expected = {avoided: True, "v2": False, "v3": True}
    assert {version: "train-kernel" in line for version, line in routed.items()} == expected


def test_every_metric_of_the_page_is_in_the_registry(client: TestClient) -> None:
    """And every metric that the registry says the evaluator has is on the page."""
    from prometheus_client.parser import text_string_to_metric_families

    page = client.get("/metrics").text
    found = {family.name for family in text_string_to_metric_families(page)}
    # Recorders, engines, trainers and rules have the others.
    others = ("kc.recorder.", "kc.capture.", "kc.input.", "kc.kernel.", "kc.quarantine.", "kc.rule.")
    own = {m for m in METRICS.values() if not m.name.startswith(others)}
    assert found == {prometheus_name(metric).removesuffix("_total") for metric in own}
    assert re.search(r'kc_verdict\{kc_clause="token-tv",kc_contract="policy",.*,kc_slice="code"\} 3.0\n', page)
    assert 'kc_outbox_attempts_total{kc_endpoint="pager",kc_outcome="delivered"} 2.0' in page
    assert re.search(r'kc_action_active\{kc_action="webhook:pager",kc_clause="[a-z-]+",kc_contract="policy",', page)
    (incident,) = client.get("/api/v1/incidents").json()["incidents"]
    named = f'kc_contract="policy",kc_incident="{incident["id"]}",kc_incident_on="fail"'
    code = {"broken": 2.0, "contained": 1.0}[incident["state"]]
    assert re.search(rf"kc_incident\{{{named},kc_kernel_.*\}} {code}\n", page)


def test_metrics_show_drift_by_position_while_an_incident_lasts(make_core, drift, open_file, tmp_path):
    """With an interval for each bin that responses reach, also after a restart; without an incident there is none."""
    core = make_core(open_file(tmp_path / "state.db"))
    assert not read(core, Counter(), Counter())["kc.place.lower"]
    core.metrics(drift(0.3))
    core.tick(time.time())
    found = read(core, Counter(), Counter())
    bounds = [{place: value for _, place, _, _, value in found[f"kc.place.{name}"]} for name in ("lower", "upper")]
    assert list(bounds[0]) == ["position:0", "position:16"]
    assert all(0.0 < bounds[0][place] < bounds[1][place] < 1.0 for place in bounds[0])
    core.connection.close()
    again = make_core(open_file(tmp_path / "state.db"), time.time())
    again.tick(time.time())
    assert list(dict.fromkeys(place for _, place, *_ in read(again, Counter(), Counter())["kc.place.lower"])) == [
        "position:0", "position:16",
    ]  # fmt: skip
