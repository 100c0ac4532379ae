"""An evaluator that dies, with a real Prometheus and a real Alertmanager: one message within a minute, and its end."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
import yaml

from kc_otel.contract.model import Contract
from kc_otel.generate.files import write
from kc_otel.generate.prometheus import prometheus_files
from kc_otel.generate.prometheus.alerting_rules import SECRETS
from tests.tools import servers

pytestmark = pytest.mark.slow

ENDED = ["KernelContractEvaluatorDown"]


def _until(holds: Callable[[], bool], seconds: float, what: Callable[[], object]) -> float:
    start = time.monotonic()
    while not holds():
        assert time.monotonic() - start < seconds, what()
        time.sleep(0.2)
    return time.monotonic() - start


def test_its_end_is_one_message_within_a_minute(
    program, alertmanager_command: list[str], policy: Contract, policy_path: Path, tmp_path: Path
) -> None:
    write(prometheus_files([policy]), tmp_path)
    bodies: list[dict] = []
    api, alerts, prometheus = (servers.free_address() for _ in range(3))
    serve = [
        *(sys.executable, "-m", "kc_otel", "serve", policy_path, "--state", tmp_path / "state.sqlite"),
        *("--grpc-port", "0", "--http-port", "0", "--api-port", api.partition(":")[2], "--no-webhooks"),
    ]

    def evaluator():
        return servers.running(serve, tmp_path / "serve.log", f"http://{api}/healthz")

    def told() -> list[tuple[str, list[str]]]:
        return [(body["status"], sorted({entry["labels"]["alertname"] for entry in body["alerts"]})) for body in bodies]

    def take(body: bytes, _: object) -> int:
        bodies.append(json.loads(body))
        return 200

    with servers.sink(take) as pager:
        routes = (tmp_path / "prometheus" / "alertmanager" / "alertmanager.yaml").read_text()
        content = yaml.safe_load(routes.replace(SECRETS, str(tmp_path)))
        for route in content["route"]["routes"]:
            route["group_interval"] = "1s"  # its end is told a minute later otherwise
        (tmp_path / "alertmanager.yaml").write_text(yaml.safe_dump(content))
        (tmp_path / "pager.url").write_text(f"{pager}/alerts")
        (tmp_path / "pager.token").write_text("t0ken")
        config = {
            "global": {"scrape_interval": "15s", "evaluation_interval": "15s"},
            "rule_files": [str(tmp_path / "prometheus" / "rules" / "*.yaml")],
            "alerting": {"alertmanagers": [{"static_configs": [{"targets": [alerts]}]}]},
            "scrape_configs": [{"job_name": "kc-otel", "static_configs": [{"targets": [api]}]}],
        }
        (tmp_path / "prometheus.yaml").write_text(yaml.safe_dump(config))
        options = (f"--storage.path={tmp_path / 'alerts'}", "--cluster.listen-address=")
        manager = [*alertmanager_command, f"--config.file={tmp_path / 'alertmanager.yaml'}", *options]
        store = [
            program("prometheus"),
            f"--config.file={tmp_path / 'prometheus.yaml'}",
            f"--storage.tsdb.path={tmp_path / 'store'}",
            f"--web.listen-address={prometheus}",
        ]
        with (
            evaluator() as first,
            servers.running(
                [*manager, f"--web.listen-address={alerts}"], tmp_path / "alerts.log", f"http://{alerts}/-/ready"
            ),
            servers.running(store, tmp_path / "store.log", f"http://{prometheus}/-/ready"),
        ):

            def scraped() -> bool:
                query = {"query": "kc_evaluator_last_evaluation_seconds > time() - 60"}
                answer = httpx.get(f"http://{prometheus}/api/v1/query", params=query, trust_env=False).json()
                return bool(answer["data"]["result"])

            _until(scraped, 60, (tmp_path / "store.log").read_text)
            first.kill()
            assert _until(lambda: bool(bodies), 90, told) < 60
            with evaluator():
                _until(lambda: ("resolved", ENDED) in told(), 90, told)
    assert told() == [("firing", ENDED), ("resolved", ENDED)]
    (alert,) = bodies[0]["alerts"]
    assert alert["labels"]["severity"] == "critical"
    assert "restart it" in alert["annotations"]["runbook"]
