"""A real Prometheus scrapes a page like the evaluator's, runs every rule and answers every query of the dashboard."""

import json
import re
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
import yaml

from kc_otel.contract import Contract
from kc_otel.contract.registry import METRICS, Instrument
from kc_otel.evaluator.verdict import Status
from kc_otel.generate.grafana import grafana_files
from kc_otel.generate.names import label_name, prometheus_name
from kc_otel.generate.prometheus.rules import rule_file

pytestmark = pytest.mark.slow

BROKEN = ("token-tv", "code")
VALUES = {"kc.bound.estimate": 0.006, "kc.bound.lower": 0.005, "kc.bound.upper": 0.007, "kc.bound.limit": 0.004}


def page(policy: Contract, scrapes: int) -> str:
    """Every metric of the registry in the text format, one cell broken; counters grow with each scrape."""
    lines = []
    for metric in METRICS.values():
        name = prometheus_name(metric)
        kind = "counter" if metric.instrument is Instrument.COUNTER else "gauge"
        lines += [f"# HELP {name} {metric.meaning}", f"# TYPE {name} {kind}"]
        for clause in policy.clauses if "kc.clause" in metric.attributes else (None,):
            for slice in ("all", *policy.slices) if "kc.slice" in metric.attributes else (None,):
                labels = {label_name(attribute): "x" for attribute in metric.attributes}
                labels |= {"kc_contract": policy.name} if "kc.contract" in metric.attributes else {}
                labels |= {"kc_clause": clause.id} if clause else {}
                labels |= {"kc_slice": slice} if slice else {}
                labels |= {"kc_route_kernel": "train-kernel"} if metric.name == "kc.route" else {}
                broken = clause is not None and (clause.id, slice) == BROKEN
                value = VALUES.get(metric.name, 1.0)
                if metric.name == "kc.verdict":
                    value = (Status.FAIL if broken else Status.PASS).code
                if kind == "counter":
                    value = 10 * scrapes
                written = ",".join(f'{key}="{value}"' for key, value in labels.items())
                lines.append(f"{name}{{{written}}} {value}")
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="module")
def metrics_page(policy: Contract) -> Iterator[str]:
    """Address of a server whose `/metrics` is like the evaluator's."""
    scrapes = 0

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            nonlocal scrapes
            scrapes += 1
            body = page(policy, scrapes).encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: object) -> None:
            """Stay quiet."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def prometheus(program, policy: Contract, metrics_page: str, tmp_path_factory) -> Iterator[httpx.Client]:
    """A client of a Prometheus that scrapes the page and evaluates the contract's rules every second."""
    binary, folder = program("prometheus"), tmp_path_factory.mktemp("prometheus")
    rules = rule_file(policy).text.replace("interval: 15s", "interval: 1s")
    (folder / "rules.yaml").write_text(rules)
    config = {
        "global": {"scrape_interval": "500ms", "scrape_timeout": "500ms", "evaluation_interval": "1s"},
        "rule_files": ["rules.yaml"],
        "scrape_configs": [{"job_name": "kc-otel", "static_configs": [{"targets": [metrics_page]}]}],
    }
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    command = [
        binary,
        f"--config.file={folder / 'prometheus.yaml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={address}",
    ]
    with (folder / "log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            with httpx.Client(base_url=f"http://{address}/api/v1", timeout=10, trust_env=False) as client:
                _wait_for(client, process, folder / "log")
                yield client
        finally:
            process.terminate()


def _wait_for(client: httpx.Client, process: subprocess.Popen, log: Path) -> None:
    """Until counters have been scraped a few times and the first alert fires."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        try:
            grown = client.get("/query", params={"query": "kc_evaluator_points_total > 50"}).json()
            firing = client.get("/query", params={"query": 'ALERTS{alertstate="firing"}'}).json()
        except (httpx.TransportError, json.JSONDecodeError):
            grown = firing = {}
        if grown.get("data", {}).get("result") and firing.get("data", {}).get("result"):
            return
        time.sleep(0.2)
    pytest.fail(f"Prometheus did not get there:\n{log.read_text()[-3000:]}")


def _ask(client: httpx.Client, expression: str) -> list[dict]:
    filled = expression.replace("$__range", "1h").replace("$__rate_interval", "10s")
    answer = client.get("/query", params={"query": re.sub(r"\$(contract|slice)", ".+", filled)}).json()
    assert answer["status"] == "success", (expression, answer)
    return answer["data"]["result"]


def test_every_query_of_the_dashboard_finds_data(prometheus: httpx.Client, policy: Contract) -> None:
    """No panel is empty when every metric is there."""
    board = json.loads(grafana_files([policy])[0].text)
    panels = [inner for panel in board["panels"] for inner in (panel, *panel.get("panels", []))]
    asked = 0
    for panel in panels:
        for target in panel.get("targets", []):
            assert _ask(prometheus, target["expr"]), (panel["title"], target["expr"])
            asked += 1
    assert asked > 40


def test_variables_list_contracts_and_slices(prometheus: httpx.Client, policy: Contract) -> None:
    """`label_values` is a call of Grafana's; it asks Prometheus for the values of a label of matching series."""
    board = json.loads(grafana_files([policy])[0].text)
    found = {}
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            matched = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"])
            match = matched[1].replace("$contract", ".+")
            answer = prometheus.get(f"/label/{matched[2]}/values", params={"match[]": match}).json()
            found[variable["name"]] = answer["data"]
    assert found == {"contract": [policy.name], "slice": sorted(["all", *policy.slices])}


def test_the_top_of_the_board_says_what_is_broken(prometheus: httpx.Client, policy: Contract) -> None:
    """One cell fails, the others pass, and the table's first column says which."""
    board = json.loads(grafana_files([policy])[0].text)
    stats = {panel["title"]: panel["targets"][0]["expr"] for panel in board["panels"] if panel["type"] == "stat"}
    counts = {title: float(_ask(prometheus, query)[0]["value"][1]) for title, query in stats.items()}
    cells = len(policy.clauses) * (1 + len(policy.slices))
    assert counts["Broken"] == 1
    assert counts["Holding"] == cells - 1
    assert counts["No data"] == counts["Undecided"] == 0
    (table,) = (panel for panel in board["panels"] if panel["id"] == 7)
    states = {
        (row["metric"]["kc_clause"], row["metric"]["kc_slice"]): row["value"][1]
        for row in _ask(prometheus, table["targets"][0]["expr"])
    }
    assert [where for where, code in states.items() if code == "3"] == [BROKEN]


def test_every_rule_runs_and_the_breach_fires_with_its_numbers(prometheus: httpx.Client) -> None:
    """All rules are healthy; the step without `for` fires for the broken cell alone and tells bounds and limit."""
    groups = prometheus.get("/rules").json()["data"]["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert rules
    assert {(rule["health"], rule.get("lastError", "")) for rule in rules} == {("ok", "")}
    firing = [alert for rule in rules for alert in rule["alerts"] if alert["state"] == "firing"]
    (alert,) = (alert for alert in firing if alert["labels"]["severity"] == "warning")
    assert (alert["labels"]["clause"], alert["labels"]["slice"]) == BROKEN
    assert alert["labels"]["alertname"] == "KernelContractBroken"
    assert alert["annotations"]["summary"] == "policy-7b: token-tv is broken on slice code"
    numbers = "Now: estimate 0.006, lower bound 0.005, upper bound 0.007, limit 0.004."
    assert numbers in alert["annotations"]["description"]
    assert "{{ rewards }} and ${HOME}" in alert["annotations"]["description"]
    assert alert["annotations"]["dashboard"] == "/d/kc-overview?var-contract=policy-7b&var-slice=code"
