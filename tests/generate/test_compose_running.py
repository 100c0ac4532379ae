"""What `docker compose up` shows: its evaluator, traffic, Prometheus and Alertmanager, as processes of this machine.

Contract, rules, configurations and options are those that the compose file mounts; addresses are put in their place.
The Collector and Grafana are left out: neither is in a package.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

import httpx
import pytest
import yaml

from examples.traffic.__main__ import DRIFT, SOON
from tests.tools import servers

pytestmark = pytest.mark.slow


def test_one_slice_drifts_and_recovers_and_nothing_else_fires(program, alertmanager_command, repository, tmp_path):
    """Quiet until the drift, then one incident, alerts on its slice alone, one notification group, and quiet again."""
    services = yaml.safe_load((repository / "docker-compose.yml").read_text())["services"]
    folder, contract = repository / "dashboards", repository / "examples" / "traffic" / "contract.yaml"
    api, grpc, store, alerts = (servers.free_address() for _ in range(4))
    settings = (folder / "provisioning" / "prometheus" / "prometheus.yaml").read_text()
    places = {
        "/etc/prometheus/rules": folder / "prometheus" / "rules",
        "evaluator:4320": api,
        "alertmanager:9093": alerts,
    }
    for place, own in {**places, "127.0.0.1:9090": store}.items():
        settings = settings.replace(place, str(own))
    (tmp_path / "prometheus.yaml").write_text(settings)
    own = ("--host=", "--allow-unauthenticated", "--state=", "--external-url=", "--allowed-host=")
    options = [word for word in services["evaluator"]["command"][2:] if not word.startswith(own)]
    serve = [
        *(sys.executable, "-m", "kc_otel", "serve", contract, *options, f"--state={tmp_path / 'state.sqlite'}"),
        *("--http-port=0", f"--grpc-port={grpc.partition(':')[2]}", f"--api-port={api.partition(':')[2]}"),
    ]
    prometheus = [
        program("prometheus"),
        f"--config.file={tmp_path / 'prometheus.yaml'}",
        f"--storage.tsdb.path={tmp_path / 'store'}",
        f"--web.listen-address={store}",
    ]
    alertmanager = [
        *alertmanager_command,
        f"--config.file={folder / 'provisioning' / 'alertmanager' / 'alertmanager.yaml'}",
        f"--storage.path={tmp_path / 'alerts'}",
        f"--web.listen-address={alerts}",
        "--cluster.listen-address=",
    ]
    traffic = [sys.executable, "-m", "examples.traffic", str(contract)]
    environment = {**os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{grpc}", "PYTHONPATH": str(repository)}
    with (
        servers.running(serve, tmp_path / "serve.log", f"http://{api}/healthz"),
        servers.running(alertmanager, tmp_path / "alerts.log", f"http://{alerts}/-/ready"),
        servers.running(prometheus, tmp_path / "store.log", f"http://{store}/-/ready"),
        httpx.Client(timeout=10, trust_env=False) as client,
        subprocess.Popen(traffic, env=environment) as demo,
    ):
        try:
            seen = _watched(client, f"http://{api}", f"http://{store}", f"http://{alerts}")
        finally:
            demo.terminate()
    before = [firing for at, firing, *_ in seen if at < SOON]
    assert before
    assert not any(before)
    drifting = set().union(*(firing for _, firing, *_ in seen))
    clauses = [clause["id"] for clause in yaml.safe_load(contract.read_text())["statistical"]]
    assert drifting == {("KernelContractBroken", clause, "code") for clause in clauses}
    assert {incidents for *_, incidents in seen} == {0, 1}
    assert max(groups for _, _, groups, _ in seen) == 1


def _watched(client: httpx.Client, api: str, store: str, alerts: str) -> list[tuple[float, set, int, int]]:
    """(Seconds, what fires in Prometheus, groups of Alertmanager, incidents), until all that fired is over."""
    start, seen = time.monotonic(), []
    while True:
        rules = client.get(f"{store}/api/v1/alerts").json()["data"]["alerts"]
        firing = {
            (alert["labels"]["alertname"], alert["labels"].get("clause", ""), alert["labels"].get("slice", ""))
            for alert in rules
            if alert["state"] == "firing"
        }
        groups = client.get(f"{alerts}/api/v2/alerts/groups").json()
        lasting = [
            incident
            for incident in client.get(f"{api}/api/v1/incidents").json()["incidents"]
            if incident["state"] != "resolved"
        ]
        at = time.monotonic() - start
        seen.append((at, firing, len(groups), len(lasting)))
        if at > SOON + DRIFT and not firing and not lasting and any(row[1] for row in seen):
            return seen
        assert at < 280, seen[-1]
        time.sleep(2)
