"""An engine's own latency histograms become the `gen_ai.*` metrics that clauses on latency name."""

import socket
import time
from contextlib import nullcontext
from unittest.mock import Mock

import pytest
from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.sdk.metrics.export import MetricsData, ResourceMetrics, ScopeMetrics
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from prometheus_client import CollectorRegistry, Gauge, Histogram, generate_latest

from kc_otel.cli import measure_commands
from kc_otel.client.engine_latency import LATENCIES, EngineLatency
from kc_otel.contract.load import load_text
from kc_otel.judge.evaluator import Evaluator
from tests.tools.commands import commands
from tests.tools.verdicts import verdicts_of

CONTRACT = """\
apiVersion: kernel-contract/v1
kind: KernelContract
metadata: {name: serving, version: 1, owner: tests}
kernels: {train: {engine: torch}, inference: {engine: vllm}}
runtime: [{id: ttft, metric: gen_ai.server.time_to_first_token, statistic: p99, limit: 500ms}]
observability: {window: 5m, long_window: 1h, min_samples: 100, heartbeat: 60s}
"""
PAGE = "http://engine:8000/metrics"


class Engine:
    """A page as vLLM has it, and what is sent on of it to an evaluator."""

    def __init__(self) -> None:
        self.evaluator = Evaluator([load_text(CONTRACT, "c.yaml")])
        self.evaluator.listening(time.time())
        self.restart()
        self.source = EngineLatency(PAGE, lambda _: generate_latest(self.registry).decode())

    def restart(self) -> None:
        self.registry = CollectorRegistry()
        Gauge("process_start_time_seconds", "of the engine", registry=self.registry).set_to_current_time()
        names = ("engine", "model_name")
        self.histograms = [
            Histogram(name, "of vLLM", names, buckets=(0.1, 0.25, 0.5, 1.0, 2.5), registry=self.registry)
            for name in LATENCIES
        ]

    def serves(self, seconds: float, requests: int = 2000) -> None:
        for _ in range(requests):
            self.histograms[0].labels("0", "m").observe(seconds)

    def verdict(self) -> tuple[str, int]:
        now = time.time()
        metrics = self.source.collect(int(now * 1e9))
        scopes = [ScopeMetrics(InstrumentationScope("kc_otel"), metrics, "")]
        request = encode_metrics(MetricsData([ResourceMetrics(Resource({"service.instance.id": "0"}), scopes, "")]))
        assert self.evaluator.ingest_metrics(request, now).rejected == 0
        (found,) = verdicts_of(self.evaluator, now)
        return found.status.value, found.samples


def test_latencies_of_the_engine_are_judged() -> None:
    engine = Engine()
    engine.serves(0.2)
    assert engine.verdict() == ("PASS", 2000)
    assert engine.verdict() == ("PASS", 2000)
    engine.restart()
    engine.serves(2.0)
    assert engine.verdict() == ("FAIL", 4000)


def test_a_scrape_that_is_restarted_counts_nothing_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the same sender of the same counts; of a page that hides the engine's start, the first one only begins.

    Its name has no secret of the URL.
    """
    sent = []
    monkeypatch.setattr(measure_commands, "stopped_by_signals", lambda: nullcontext(Mock()))
    monkeypatch.setattr(measure_commands, "ExportLoop", lambda *_, **options: sent.append(options) or Mock())
    assert commands("scrape")(PAGE.replace("//", "//ada:secret@") + "?key=secret")[0] == 0
    assert sent[0]["resource"].attributes["service.instance.id"] == f"{socket.gethostname()} {PAGE}"
    engine = Engine()
    engine.registry.unregister(next(iter(engine.registry._names_to_collectors.values())))
    engine.serves(0.2, 500)
    engine.verdict()
    engine.source = EngineLatency(PAGE, lambda _: generate_latest(engine.registry).decode())
    engine.serves(0.2)
    assert engine.verdict() == ("PASS", 2000)


def test_names_units_and_the_model_are_those_of_the_conventions() -> None:
    engine = Engine()
    for histogram in engine.histograms:
        histogram.labels("0", "m").observe(0.3)
    found = engine.source.collect(time.time_ns())
    assert {metric.name for metric in found} == set(LATENCIES.values())
    for metric in found:
        (point,) = metric.data.data_points
        assert (metric.unit, point.count, point.sum) == ("s", 1, 0.3)
        assert (point.bucket_counts, point.explicit_bounds) == ([0, 0, 1, 0, 0, 0], [0.1, 0.25, 0.5, 1.0, 2.5])
        assert point.attributes["gen_ai.request.model"] == "m"


def test_a_page_that_cannot_be_read_is_said_once(caplog: pytest.LogCaptureFixture) -> None:

    def refused(_: str) -> str:
        raise ConnectionRefusedError(111, "Connection refused")

    for read, said in (
        (refused, "Connection refused"),
        (lambda _: "<html>", "no latency can be read"),
        (lambda _: "up 1\n", "is it vLLM's page?"),
    ):
        caplog.clear()
        source = EngineLatency(PAGE, read)
        assert [list(source.collect(time.time_ns())) for _ in range(3)] == [[], [], []]
        assert len(caplog.messages) == 1
        assert said in caplog.text
    with pytest.raises(ValueError, match=r"write one such as http://127\.0\.0\.1:8000/metrics"):
        EngineLatency("localhost:8000")


def test_a_scrape_that_would_send_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "none")
    monkeypatch.setattr(measure_commands, "stopped_by_signals", nullcontext)  # or it would wait for Ctrl-C
    code, _, err = commands("scrape")(PAGE)
    assert (code, "OTEL_METRICS_EXPORTER=none sends nothing; set it to otlp" in err) == (2, True)
