"""`kc-otel aggregate` as a process: killed again and again, and what it acknowledged reaches the evaluator."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from typer.testing import CliRunner

from kc_otel.contract import load_text
from kc_otel.contract.registry import METRICS
from kc_otel.judge.evaluator import Evaluator, SeriesId
from kc_otel.serve.aggregator import aggregate
from kc_otel.serve.aggregator.aggregate import AggregatorConfig, AggregatorError, run_aggregator
from kc_otel.serve.receivers.fair_turns import FairTurns
from kc_otel.serve.store.state_file import open_state
from tests.integration.test_acknowledged import CONTRACT, Source
from tests.judge.conftest import Sender
from tests.tools.servers import free_address, running, sink

KILLS = 1


@pytest.mark.slow
def test_what_is_acknowledged_survives_kill_9(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Senders over HTTP and gRPC; the evaluator is away for a while; in the end all is counted, once."""
    evaluator = Evaluator([load_text(CONTRACT, "policy.yaml")])
    messages: list[int] = []
    here = False

    def receive(body: bytes, headers: Mapping[str, str]) -> int:
        if not here:
            return 503
        assert headers["authorization"] == "Bearer secret"
        request = ExportMetricsServiceRequest.FromString(gzip.decompress(body))
        messages.append(evaluator.ingest_metrics(request, time.time()).rejected)
        return 200

    http, grpc = free_address(), free_address()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "Authorization=Bearer secret")
    sources = [Source(str(number), cumulative=True, over_grpc=number == 2) for number in range(3)]
    for source in sources:
        source.evaluator = SimpleNamespace(http=f"http://{http}", grpc=grpc)  # type: ignore[assignment]
    with sink(receive) as url:
        command = [
            *(sys.executable, "-m", "kc_otel", "aggregate", "--to", url, "--state", tmp_path / "state.sqlite"),
            *("--interval", "0.2s", "--metrics-port", "0"),
            *("--http-port", http.rpartition(":")[2], "--grpc-port", grpc.rpartition(":")[2]),
        ]
        for source in sources:
            source.start()
        for number in range(KILLS + 1):
            with running(command, tmp_path / "log", f"http://{http}/", answers=404) as process:
                time.sleep(0.4)
                here = number > 0
                time.sleep(0.4)
                if number < KILLS:
                    process.kill()
                    process.wait(10)
                    continue
                end = time.monotonic() + 30  # a busy machine takes longer
                while sum(source.acknowledged for source in sources) <= 1000 and time.monotonic() < end:
                    time.sleep(0.1)
                for source in sources:
                    source.stop()
                acknowledged = sum(source.acknowledged for source in sources)
                end = time.monotonic() + 30
                while counted(evaluator) < acknowledged and time.monotonic() < end:
                    time.sleep(0.1)
    assert acknowledged > 1000
    assert counted(evaluator) == acknowledged == sum(source.sent for source in sources)
    assert not any(messages)
    assert [source.trouble for source in sources] == ["", "", ""]
    assert evaluator.stream_count == 1, "three processes, one stream"


def counted(evaluator: Evaluator) -> int:
    of = SeriesId("policy", "kc.drift.tv_token", "all", "a", "b")
    with suppress(KeyError, RuntimeError):  # the receiver's thread may be adding the series
        return int(evaluator.distribution(of, 43_200.0, time.time()).count.sum())
    return 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--to", "judge:4317"], "is no URL of OTLP over HTTP"),
        (["--to", "http://"], "is no URL of OTLP over HTTP"),
        (["--to", "http://localhost:4318"], "is this aggregator itself"),
        (["--to", "http://judge:4318", "--host", "0.0.0.0"], "lets other machines send here"),
        (["--to", "http://judge:4318", "--interval", "soon"], "--interval"),
        (["--to", "http://judge:4318", "--interval", "0s"], "--interval is shorter than"),
        (["--to", "http://judge:99999"], "Port out of range"),
        (["--to", "http://[::1"], "Invalid IPv6 URL"),
        (["--to", "http://judge:4318/v1/metrics"], "leave out what comes after the address"),
        (["--to", "http://judge:4318", "--http-port", "4317"], "are both 4317"),
        (["--to", "http://judge:4318", "--grpc-port", "99999"], "--grpc-port 99999 is no port"),
        (["--to", "http://judge:4318", "--http-port", "70000"], "--http-port 70000 is no port; give one of 1 to 65535"),
        (["--to", "http://judge:4318", "--state", __file__], "no aggregator has written this"),
    ],
)
def test_what_cannot_be_is_refused(arguments: list[str], said: str, tmp_path: Path) -> None:
    """No URL, itself, an address that others reach, and no time."""
    import typer

    from kc_otel.cli import aggregate_command

    app = typer.Typer()
    app.command("other")(lambda: None)
    aggregate_command.register(app)
    found = CliRunner().invoke(app, ["aggregate", "--state", str(tmp_path / "state"), *arguments])
    assert found.exit_code == 2
    assert said in " ".join(found.output.split())


def test_headers_that_cannot_be_read_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the token that they hold everything would be refused."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "Authorization=Bearer s\N{LATIN SMALL LETTER E WITH ACUTE}cret")
    with pytest.raises(AggregatorError, match="OTEL_EXPORTER_OTLP_HEADERS cannot be read; write name=value"):
        run_aggregator(AggregatorConfig("http://judge:4318", tmp_path / "state"))


@pytest.mark.slow
def test_a_state_file_has_one_aggregator(tmp_path: Path) -> None:
    """The second is told so, and not what an evaluator would be told."""
    with closing(open_state(tmp_path / "state")), pytest.raises(AggregatorError, match="another aggregator is using"):
        run_aggregator(AggregatorConfig("http://judge:4318", tmp_path / "state"))


@pytest.mark.slow
def test_both_ports_share_their_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who floods one of them takes no more than a sender's part from those on the other."""
    seen: dict[FairTurns, list[object]] = {}

    class Watched(FairTurns):
        def turn(self, sender, size):
            seen.setdefault(self, []).append(sender)
            return super().turn(sender, size)

    monkeypatch.setattr(aggregate, "FairTurns", Watched)
    http, grpc = free_address(), free_address()
    ports = [int(address.rpartition(":")[2]) for address in (grpc, http)]
    sources = [Source(str(number), cumulative=True, over_grpc=bool(number)) for number in range(2)]

    def send() -> None:
        for source in sources:
            source.evaluator = SimpleNamespace(http=f"http://{http}", grpc=grpc)  # type: ignore[assignment]
            source.start()
        while not all(source.acknowledged for source in sources):
            time.sleep(0.01)
        for source in sources:
            source.stop()
        os.kill(os.getpid(), signal.SIGTERM)

    async def run() -> None:
        config = AggregatorConfig(f"http://{free_address()}", tmp_path / "state", "127.0.0.1", *ports, metrics_port=0)
        await asyncio.gather(aggregate._aggregate(config), asyncio.to_thread(send))

    asyncio.run(asyncio.wait_for(run(), 30))
    ((_, senders),) = seen.items()
    assert {type(sender) for sender in senders} == {str, tuple}, "gRPC's and HTTP's"


def samples(text: str) -> dict[str, float]:
    """Of Prometheus' text format."""
    lines = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
    return {name.removeprefix("kc_aggregator_"): float(value) for name, _, value in lines}


@pytest.mark.slow
def test_it_observes_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it received, refused, keeps and sent, on /metrics and by OTLP, also while the evaluator is away."""
    told: dict[str, object] = {}

    def receive(_body: bytes, _headers: Mapping[str, str]) -> int:
        return 200 if there.is_set() else 503

    def observe(body: bytes, _headers: Mapping[str, str]) -> int:
        request = ExportMetricsServiceRequest.FromString(body)
        for metric in request.resource_metrics[0].scope_metrics[0].metrics:
            told[metric.name] = metric
        return 200

    there = threading.Event()
    http, grpc, metrics = free_address(), free_address(), free_address()
    ports = {"--http-port": http, "--grpc-port": grpc, "--metrics-port": metrics}
    with sink(receive) as url, sink(observe) as watcher:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", f"{watcher}/v1/metrics")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
        monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "200")
        command = [
            *(sys.executable, "-m", "kc_otel", "aggregate", "--to", url, "--state", tmp_path / "state.sqlite"),
            *("--interval", "0.2s", "--log-format", "json"),
            *(part for option, address in ports.items() for part in (option, address.rpartition(":")[2])),
        ]
        with running(command, tmp_path / "log", f"http://{metrics}/healthz"):

            def post(body: bytes) -> int:
                kind = {"content-type": "application/x-protobuf"}
                return httpx.post(f"http://{http}/v1/metrics", content=body, headers=kind).status_code

            def read(until: Callable[[dict[str, float]], bool]) -> dict[str, float]:
                end = time.monotonic() + 20
                while not until(found := samples(httpx.get(f"http://{metrics}/metrics").text)):
                    assert time.monotonic() < end, found
                    time.sleep(0.05)
                return found

            now = time.time()
            assert post(Sender(start=now).request(now, [0.1, 0.2]).SerializeToString()) == 200
            assert post(Sender(start=now, cumulative=False).request(now, [0.1]).SerializeToString()) == 200
            assert post(Sender(start=now).request(now + 3600, [0.1]).SerializeToString()) == 200
            assert post(b"no message") == 400
            found = read(lambda found: found.get('messages_total{kc_outcome="failed"}', 0) > 0)
            assert found['points_total{kc_outcome="passed_on"}'] == 1
            assert found['points_total{kc_outcome="future"}'] == 1
            assert found['requests_total{kc_outcome="bad_request",kc_transport="http"}'] == 1
            assert found['requests_total{kc_outcome="partial",kc_transport="http"}'] == 1
            assert found['request_duration_seconds_count{kc_outcome="accepted",kc_transport="http"}'] == 2
            assert found["due"] == found["sums"] == found["streams"] == 1
            assert found["held_bytes"] > 0
            assert found["disk_free_bytes"] > 0
            assert "last_message_seconds" not in found
            there.set()
            found = read(lambda found: not found["due"] and not found["held_bytes"])
            assert found['messages_total{kc_outcome="taken"}'] >= 2
            assert time.time() - found["last_message_seconds"] < 60
            end = time.monotonic() + 20
            while not {"kc.aggregator.last_message", "kc.aggregator.request.duration"} <= told.keys():
                assert time.monotonic() < end, told.keys()
                time.sleep(0.05)
            assert httpx.get(f"http://{metrics}/metrics", headers={"host": "elsewhere"}).status_code == 421
    assert {name for name in METRICS if name.startswith("kc.aggregator.")} == told.keys()
    assert all(json.loads(line)["message"] for line in (tmp_path / "log").read_text().splitlines())


@pytest.mark.slow
def test_a_round_that_fails_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever nobody thought of: it is in the log, and the next round is tried."""
    rounds: list[int] = []

    async def forward(_: object) -> None:
        rounds.append(len(rounds))
        if len(rounds) < 3:
            raise ZeroDivisionError
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(aggregate.Forwarder, "forward", forward)
    config = AggregatorConfig(
        f"http://{free_address()}", tmp_path / "state", grpc_port=0, http_port=0, metrics_port=0, interval=0.1
    )
    asyncio.run(asyncio.wait_for(aggregate._aggregate(config), 30))
    assert len(rounds) >= 3
    assert caplog.text.count("could not be sent") == 2
