"""A breach from the recorder to the pager without the evaluator: OTLP, a real Prometheus, its rules, Alertmanager.

Debian's Prometheus has no OTLP receiver, so a bridge passes exports on by remote write 1.0, histograms as native ones.
"""

from __future__ import annotations

import asyncio
import gzip
import itertools
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import numpy as np
import pytest
import yaml
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

import kc_otel
from kc_otel.contract import Contract
from kc_otel.generate.prometheus.routes import SECRETS, routes_file
from kc_otel.generate.prometheus.standalone import standalone_file
from kc_otel.webhooks import receiver

pytestmark = pytest.mark.slow

WINDOW = 20.0
TOKEN = "t0ken"


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
                {"id": "tv", "metric": "tv_token", "limit": 0.05},
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


def varint(number: int) -> bytes:
    """A protobuf varint; negative numbers as 64 bits."""
    number &= 2**64 - 1
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes((*out, number))


def zigzag(number: int) -> bytes:
    return varint(number << 1 ^ number >> 63)


def field(number: int, wire: int, content: bytes) -> bytes:
    return varint(number << 3 | wire) + (varint(len(content)) if wire == 2 else b"") + content


def snappy(data: bytes) -> bytes:
    """Snappy's block format, in literals only."""
    chunks = (data[at : at + 60] for at in range(0, len(data), 60))
    return varint(len(data)) + b"".join(bytes(((len(chunk) - 1) << 2,)) + chunk for chunk in chunks)


def native(point) -> bytes:
    """An OTLP exponential point as remote write's Histogram, numbered by upper edges."""
    out = field(1, 0, varint(point.count)) + field(3, 1, struct.pack("<d", point.sum))
    out += (
        field(4, 0, zigzag(point.scale))
        + field(5, 1, struct.pack("<d", 1e-128))
        + field(6, 0, varint(point.zero_count))
    )
    for span, deltas, side in ((8, 9, point.negative), (11, 12, point.positive)):
        counts = list(side.bucket_counts)
        if counts:
            out += field(span, 2, field(1, 0, zigzag(side.offset + 1)) + field(2, 0, varint(len(counts))))
            steps = (b - a for a, b in itertools.pairwise([0, *counts]))
            out += field(deltas, 2, b"".join(map(zigzag, steps)))
    return out + field(15, 0, varint(point.time_unix_nano // 10**6))


def remote_write(request: ExportMetricsServiceRequest) -> bytes:
    """The exponential histograms of an OTLP request as a remote write 1.0 body."""
    series = b""
    for metric, point in exponential(request):
        labels = {item.key.replace(".", "_"): item.value.string_value for item in point.attributes}
        named = sorted({"__name__": metric.name.replace(".", "_"), **labels}.items())
        pairs = (field(1, 2, name.encode()) + field(2, 2, value.encode()) for name, value in named)
        series += field(1, 2, b"".join(field(1, 2, pair) for pair in pairs) + field(4, 2, native(point)))
    return snappy(series)


def exponential(request: ExportMetricsServiceRequest) -> Iterator:
    for resource in request.resource_metrics:
        for scope in resource.scope_metrics:
            for metric in scope.metrics:
                for point in metric.exponential_histogram.data_points:
                    yield metric, point


@contextmanager
def server(handle: Callable[[bytes, dict], int]) -> Iterator[str]:
    """An HTTP server on loopback that answers each POST with what `handle(body, headers)` returns."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            self.send_response(handle(body, dict(self.headers)))
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Stay quiet."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{http.server_port}"
        finally:
            http.shutdown()
            thread.join()


def free_address() -> str:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{sock.getsockname()[1]}"


@contextmanager
def running(command: list[str], log: Path, ready: str) -> Iterator[subprocess.Popen]:
    """A process, once its ready page answers."""
    with log.open("w") as out, subprocess.Popen(command, stdout=out, stderr=out) as process:
        try:
            end = time.monotonic() + 60
            while True:
                try:
                    if httpx.get(ready, trust_env=False).status_code == 200:
                        break
                except httpx.TransportError:
                    pass
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < end, log.read_text()
                time.sleep(0.1)
            yield process
        finally:
            process.terminate()


class Traffic:
    """A recorder in a thread-free loop, and every ratio that it was given."""

    def __init__(self, contract: Contract, endpoint: str) -> None:
        exporter = OTLPMetricExporter(endpoint=f"{endpoint}/v1/metrics", timeout=2)
        self.recorder = kc_otel.Recorder(contract, metric_exporter=exporter, export_interval=0.5, sampling=1.0)
        self.ratios: list[np.ndarray] = []
        self._rng = np.random.default_rng(0)

    def send(self, sigma: float) -> None:
        inference = np.log(self._rng.uniform(0.05, 0.4, (16, 32))).astype(np.float32).astype(np.float64)
        noise = self._rng.normal(-sigma * sigma / 2, sigma, inference.shape)
        train = np.minimum(inference + noise, 0.0).astype(np.float32).astype(np.float64)
        self.recorder.compare(train, inference, attributes={"task": "code"})
        self.ratios.append((train - inference).ravel())


def test_a_breach_reaches_the_pager_through_prometheus_alone(
    program, alertmanager_command: list[str], contract: Contract, tmp_path: Path
) -> None:
    """Recorder, OTLP, native histograms, recording rules, alert, generated routes, Alertmanager, ready receiver."""
    bodies: list[dict] = []
    exports: list[tuple[float, int]] = []
    app = receiver(None, bodies.append, bearer=TOKEN)

    def notified(body: bytes, headers: dict) -> int:
        async def ask() -> int:
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://receiver") as client:
                return (await client.post("/", content=body, headers=headers)).status_code

        return asyncio.run(ask())

    with ExitStack() as stack:
        pager = stack.enter_context(server(notified))
        prometheus, alerts = free_address(), free_address()
        client = stack.enter_context(httpx.Client(base_url=f"http://{prometheus}/api/v1", timeout=10, trust_env=False))

        def bridge(body: bytes, headers: dict) -> int:
            plain = gzip.decompress(body) if headers.get("Content-Encoding") == "gzip" else body
            request = ExportMetricsServiceRequest.FromString(plain)
            sent = {"Content-Type": "application/x-protobuf", "Content-Encoding": "snappy"}
            answer = client.post("/write", content=remote_write(request), headers=sent)
            for metric, point in exponential(request):
                slice = {item.key: item.value.string_value for item in point.attributes}["kc.slice"]
                if (metric.name, slice) == ("kc.drift.tv_token", "code"):
                    exports.append((point.time_unix_nano / 1e9, point.count))
            return 200 if answer.status_code == 204 else answer.status_code

        stack.enter_context(_alertmanager(alertmanager_command, contract, tmp_path, alerts, pager))
        stack.enter_context(_prometheus(program("prometheus"), contract, tmp_path, prometheus, alerts))
        traffic = Traffic(contract, stack.enter_context(server(bridge)))
        stack.callback(traffic.recorder.shutdown)

        def ask(query: str) -> list[dict]:
            answer = client.get("/query", params={"query": query}).json()
            assert answer["status"] == "success", answer
            return answer["data"]["result"]

        def until(query: str, sigma: float) -> None:
            end = time.monotonic() + 60
            while not ask(query):
                assert time.monotonic() < end, (query, ask("{__name__=~'kc_rule.*',kc_slice='code'}"), exports)
                traffic.send(sigma)
                time.sleep(0.1)

        until('kc_rule_status{kc_clause="tv", kc_slice="code"} == 0', 0.02)
        assert not bodies
        until('kc_rule_status{kc_clause="tv", kc_slice="code"} == 3', 0.5)
        until('ALERTS{alertstate="firing", severity="critical", clause="tv", slice="code"}', 0.5)
        end = time.monotonic() + 30
        while not bodies:
            assert time.monotonic() < end, (tmp_path / "alertmanager.log").read_text()
            time.sleep(0.1)
        groups = client.get("/rules").json()["data"]["groups"]
        found = {(rule["health"], rule.get("lastError", "")) for group in groups for rule in group["rules"]}
        assert found == {("ok", "")}
        _as_in_float64(ask, exports, np.concatenate(traffic.ratios))
    alert = next(one for body in bodies for one in body["alerts"])
    assert alert["labels"]["alertname"] == "KernelContractBroken"
    assert {alert["labels"][name] for name in ("contract", "severity", "step")} == {"live", "critical", "2"}
    assert "Now: estimate 0." in alert["annotations"]["description"]


def _alertmanager(command: list[str], contract: Contract, folder: Path, address: str, pager: str):
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
    return running([*command, *options], folder / "alertmanager.log", f"http://{address}/-/ready")


def _prometheus(binary: str, contract: Contract, folder: Path, address: str, alertmanager: str):
    """Prometheus that takes remote writes and runs the standalone rules every second."""
    (folder / "rules.yaml").write_text(standalone_file(contract).text.replace("interval: 15s", "interval: 1s"))
    config = {
        "global": {"evaluation_interval": "1s"},
        "rule_files": ["rules.yaml"],
        "alerting": {"alertmanagers": [{"static_configs": [{"targets": [alertmanager]}]}]},
    }
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    options = (
        f"--config.file={folder / 'prometheus.yaml'}",
        f"--storage.tsdb.path={folder / 'prometheus'}",
        f"--web.listen-address={address}",
        "--web.enable-remote-write-receiver",
        "--enable-feature=native-histograms",
        "--rules.alert.resend-delay=1s",
    )
    return running([binary, *options], folder / "prometheus.log", f"http://{address}/-/ready")


def _as_in_float64(ask: Callable, exports: list[tuple[float, int]], ratios: np.ndarray) -> None:
    """Recorded means are those of the ratios between the first and the last export that the rule can have seen."""
    values = np.maximum(1.0 - np.exp(ratios), 0.0)
    cell = '{kc_clause="tv", kc_slice="code", kc_window="short"}[10s]'
    ((estimates,), (lower,), (upper,)) = (
        ask(f"kc_rule_window_{name}{cell}") for name in ("estimate", "lower", "upper")
    )
    compared = 0
    for (at, text), (_, low), (_, high) in zip(estimates["values"], lower["values"], upper["values"], strict=True):
        first = next(count for time_, count in exports if time_ > at - WINDOW)
        seen = [count for time_, count in exports if at - 1.5 < time_ <= at and count > first]
        means = [float(values[first:count].mean()) for count in seen]
        assert any(float(text) == pytest.approx(mean, rel=1e-6) for mean in means), (text, means)
        assert float(low) <= float(text) <= float(high)
        compared += 1
    assert compared >= 5
