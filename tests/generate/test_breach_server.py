"""A breach from the recorder to the pager without the evaluator: OTLP, a real store, its rules, Alertmanager.

The store is Prometheus or VictoriaMetrics with vmalert. Debian's Prometheus has no OTLP receiver, so that a bridge
passes exports on by remote write 1.0, histograms as native ones; to VictoriaMetrics it passes them as they are.
"""

from __future__ import annotations

import asyncio
import gzip
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import httpx
import numpy as np
import pytest
import yaml
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

import kc_otel
from kc_otel.client.webhooks import receiver
from kc_otel.contract import Contract
from kc_otel.generate.prometheus.alertmanager_routes import SECRETS, routes_file
from kc_otel.generate.prometheus.standalone_rules import standalone_file
from kc_otel.generate.prometheus.victoria import victoria_file

pytestmark = pytest.mark.slow

WINDOW = 20.0
TOKEN = "t0ken"
SELECTED = ("kc.drift.tv_token", "code")
"""Quantity and slice whose exports are remembered."""


@dataclass
class Store:
    """A store that runs rules.

    Attributes:
        client: Of the store.
        rules: Of whatever evaluates the rules.
        write: Sends an OTLP request's body.
        behind: How far behind the newest export a recorded bound can be, seconds.
        flush: Makes what was written visible at once, as it is within a second by itself on a machine with time.
    """

    client: httpx.Client
    rules: httpx.Client
    write: Callable[[bytes], httpx.Response]
    behind: float
    flush: Callable[[], object] = lambda: None

    def ask(self, query: str) -> list[dict]:
        """Result of an instant query."""
        self.flush()
        answer = self.client.get("/api/v1/query", params={"query": query}).json()
        assert answer["status"] == "success", answer
        return answer["data"]["result"]

    def take(self, plain: bytes) -> int:
        """Pass on an export; the status to answer its sender with."""
        return 200 if self.write(plain).is_success else 503

    def health(self) -> set[tuple[str, str]]:
        """Health and last error of every rule."""
        groups = self.rules.get("/api/v1/rules").json()["data"]["groups"]
        return {(rule["health"], rule.get("lastError", "")) for group in groups for rule in group["rules"]}


@pytest.fixture(scope="module")
def contract() -> Contract:
    """Drift of one slice, with a warning at once and a page after three seconds."""
    return Contract.model_validate(
        {
            "apiVersion": "kernel-contract/v1",
            "kind": "KernelContract",
            "metadata": {"name": "live", "version": 1, "owner": "tests"},
            "kernels": {"train": {"engine": "torch"}, "inference": {"engine": "vllm"}},
            "slices": {"code": {"where": {"task": "code"}}},
            "statistical": [
                {"id": "tv", "metric": "tv_token", "unit": "token", "limit": 0.05},
                {"id": "tail", "metric": "abs_log_ratio", "statistic": "p99", "limit": 0.4},
            ],
            "observability": {"window": f"{WINDOW:g}s", "long_window": "40s", "min_samples": 500, "heartbeat": "5s"},
            "escalation": [
                {"on": "fail", "do": ["notify"]},
                {"on": "fail", "for": "3s", "severity": "critical", "do": [{"webhook": "pager"}]},
                {"on": "no-data", "severity": "info", "do": ["notify"]},
            ],
        }
    )


class Traffic:
    """A recorder, and every ratio that it was given."""

    def __init__(self, contract: Contract, endpoint: str) -> None:
        exporter = OTLPMetricExporter(endpoint=f"{endpoint}/v1/metrics", timeout=2)
        self.recorder = kc_otel.Recorder(contract, metric_exporter=exporter, export_interval=1.0, sampling=1.0)
        self.ratios: list[np.ndarray] = []
        self._rng = np.random.default_rng(0)

    def send(self, sigma: float) -> None:
        inference = np.log(self._rng.uniform(0.05, 0.4, (16, 32))).astype(np.float32).astype(np.float64)
        noise = self._rng.normal(-sigma * sigma / 2, sigma, inference.shape)
        train = np.minimum(inference + noise, 0.0).astype(np.float32).astype(np.float64)
        self.recorder.compare(train, inference, attributes={"task": "code"})
        self.ratios.append((train - inference).ravel())


@pytest.fixture(params=["prometheus", "victoriametrics"])
def store(request, program, servers: ModuleType, remote_write: ModuleType, contract: Contract, tmp_path: Path):
    """A function that starts the store with the contract's rules, given the address of an Alertmanager."""

    @contextmanager
    def start(alertmanager: str) -> Iterator[Store]:
        with ExitStack() as stack:
            run = _prometheus if request.param == "prometheus" else _victoria
            yield run(stack, program, servers, remote_write, contract, tmp_path, alertmanager)

    return start


def test_a_breach_reaches_the_pager(
    store, servers: ModuleType, remote_write: ModuleType, alertmanager_command: list[str], contract: Contract, tmp_path
) -> None:
    """Recorder, OTLP, recording rules, alert, generated routes, Alertmanager, ready receiver; bounds as in float64."""
    bodies: list[dict] = []
    exports: list[tuple[float, int]] = []
    app = receiver(None, bodies.append, bearer=TOKEN)

    def notified(body: bytes, headers: Mapping[str, str]) -> int:
        async def post() -> int:
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://receiver") as client:
                return (await client.post("/", content=body, headers=headers)).status_code

        return asyncio.run(post())

    with ExitStack() as stack:
        pager, address = stack.enter_context(servers.sink(notified)), servers.free_address()
        alertmanager = _alertmanager(servers, alertmanager_command, contract, tmp_path, address, pager)
        stack.enter_context(alertmanager)
        judge = stack.enter_context(store(address))

        def bridge(body: bytes, headers: Mapping[str, str]) -> int:
            plain = gzip.decompress(body) if headers.get("Content-Encoding") == "gzip" else body
            for metric, point in remote_write.points(ExportMetricsServiceRequest.FromString(plain)):
                slice = {item.key: item.value.string_value for item in point.attributes}["kc.slice"]
                if (metric.name, slice) == SELECTED:
                    exports.append((point.time_unix_nano / 1e9, point.count))
            return judge.take(plain)

        traffic = Traffic(contract, stack.enter_context(servers.sink(bridge)))
        stack.callback(traffic.recorder.shutdown)

        def until(query: str, sigma: float) -> None:
            end = time.monotonic() + 60
            while not judge.ask(query):
                assert time.monotonic() < end, (query, judge.ask("{__name__=~'kc_rule.*',kc_slice='code'}"), exports)
                traffic.send(sigma)
                time.sleep(0.2)

        until('kc_rule_status{kc_clause="tv", kc_slice="code"} == 0', 0.02)
        assert not bodies
        until('kc_rule_status{kc_clause="tv", kc_slice="code"} == 3', 0.5)
        until('ALERTS{alertstate="firing", severity="critical", clause="tv", slice="code"}', 0.5)
        end = time.monotonic() + 30
        while not (alerts := [one for body in bodies for one in body["alerts"] if one["labels"]["clause"] == "tv"]):
            assert time.monotonic() < end, (tmp_path / "alertmanager.log").read_text()
            time.sleep(0.1)
        assert judge.health() == {("ok", "")}
        _as_in_float64(judge, exports, np.concatenate(traffic.ratios))
    alert = alerts[0]
    assert alert["labels"]["alertname"] == "KernelContractBroken"
    assert {alert["labels"][name] for name in ("contract", "severity", "step")} == {"live", "critical", "2"}
    assert "Now: estimate 0." in alert["annotations"]["description"]


def _alertmanager(servers: ModuleType, command: list[str], contract: Contract, folder: Path, address: str, pager: str):
    """Alertmanager with the generated routes, and the two files that they name."""
    secrets = folder / "secrets"
    secrets.mkdir()
    (secrets / "pager.url").write_text(f"{pager}/alerts")
    (secrets / "pager.token").write_text(TOKEN)
    text = routes_file([contract]).text.replace(SECRETS, str(secrets))
    content = yaml.safe_load(text)
    content["route"] |= {"group_wait": "0s", "group_interval": "1s"}
    (folder / "alertmanager.yaml").write_text(yaml.safe_dump(content))
    options = (
        f"--config.file={folder / 'alertmanager.yaml'}",
        f"--storage.path={folder / 'alertmanager'}",
        f"--web.listen-address={address}",
        "--cluster.listen-address=",
    )
    return servers.running([*command, *options], folder / "alertmanager.log", f"http://{address}/-/ready")


def _prometheus(stack: ExitStack, program, servers, remote_write, contract: Contract, folder: Path, alertmanager: str):
    """Prometheus that takes remote writes and runs the standalone rules every second."""
    (folder / "rules.yaml").write_text(standalone_file(contract).text.replace("interval: 15s", "interval: 1s"))
    config = {
        "global": {"evaluation_interval": "1s"},
        "rule_files": ["rules.yaml"],
        "alerting": {"alertmanagers": [{"static_configs": [{"targets": [alertmanager]}]}]},
    }
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    address = servers.free_address()
    options = (
        f"--config.file={folder / 'prometheus.yaml'}",
        f"--storage.tsdb.path={folder / 'prometheus'}",
        f"--web.listen-address={address}",
        "--web.enable-remote-write-receiver",
        "--enable-feature=native-histograms",
        "--rules.alert.resend-delay=1s",
    )
    ready = f"http://{address}/-/ready"
    stack.enter_context(servers.running([program("prometheus"), *options], folder / "prometheus.log", ready))
    client = stack.enter_context(httpx.Client(base_url=f"http://{address}", timeout=10, trust_env=False))

    def write(plain: bytes) -> httpx.Response:
        request = ExportMetricsServiceRequest.FromString(plain)
        content = remote_write.body(remote_write.of_request(request))
        return client.post("/api/v1/write", content=content, headers=remote_write.HEADERS)

    return Store(client, client, write, 1.5)


def _victoria(stack: ExitStack, program, servers, _: ModuleType, contract: Contract, folder: Path, alertmanager: str):
    """VictoriaMetrics that takes OTLP, and vmalert that runs its rules every four seconds."""
    text = victoria_file(contract).text.replace("interval: 15s", "interval: 4s").replace("[10s] offset", "[3s] offset")
    for intervals in (1, 2, 3):
        text = text.replace(f"offset {15 * intervals}s", f"offset {4 * intervals}s")
    (folder / "rules.yaml").write_text(text)
    store, alerts = servers.free_address(), servers.free_address()
    command = [
        program("victoria-metrics"),
        f"-httpListenAddr={store}",
        f"-storageDataPath={folder / 'store'}",
        "-opentelemetry.usePrometheusNaming",
        "-search.latencyOffset=0s",
        "-search.disableCache",
        "-inmemoryDataFlushInterval=1s",
    ]
    stack.enter_context(servers.running(command, folder / "store.log", f"http://{store}/health"))
    command = [
        program("vmalert"),
        f"-httpListenAddr={alerts}",
        f"-rule={folder / 'rules.yaml'}",
        *(f"-{name}.url=http://{store}" for name in ("datasource", "remoteWrite", "remoteRead")),
        f"-notifier.url=http://{alertmanager}",
        "-remoteWrite.flushInterval=100ms",
        "-rule.evalDelay=0s",
    ]
    stack.enter_context(servers.running(command, folder / "vmalert.log", f"http://{alerts}/health"))
    clients = (httpx.Client(base_url=f"http://{one}", timeout=10, trust_env=False) for one in (store, alerts))
    client, rules = map(stack.enter_context, clients)

    def write(plain: bytes) -> httpx.Response:
        headers = {"Content-Type": "application/x-protobuf"}
        return client.post("/opentelemetry/v1/metrics", content=plain, headers=headers)

    return Store(client, rules, write, 6.5, lambda: client.get("/internal/force_flush"))


def _as_in_float64(judge: Store, exports: list[tuple[float, int]], ratios: np.ndarray) -> None:
    """Recorded means are those of the ratios between the first and the last export that the rule can have seen."""
    values = np.maximum(1.0 - np.exp(ratios), 0.0)
    cell = '{kc_clause="tv", kc_slice="code", kc_window="short"}[20s]'
    (estimate,), (lower,), (upper,) = (
        judge.ask(f"kc_rule_window_{name}{cell}") for name in ("estimate", "lower", "upper")
    )
    # The last evaluation may have been caught between two rules.
    rows = zip(*(series["values"] for series in (estimate, lower, upper)), strict=False)
    compared = 0
    for (at, text), (_, low), (_, high) in rows:
        opened = {
            next(count for time_, count in exports if time_ > at - WINDOW - late)
            for late in np.linspace(0.0, judge.behind, 20)
        }
        closed = [count for time_, count in exports if at - judge.behind < time_ <= at]
        means = [float(values[first:last].mean()) for first in opened for last in closed if last > first]
        assert any(float(text) == pytest.approx(mean, rel=1e-6) for mean in means), (text, means)
        assert float(low) <= float(text) <= float(high)
        compared += 1
    assert compared >= 3
