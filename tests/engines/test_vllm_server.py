"""vLLM's real server under OpenTelemetry's launcher: clients get what they would have got, and the spool fills."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.sdk.metrics.export import MetricsData, ResourceMetrics, ScopeMetrics
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from examples.vllm_server.server import NAME, serving
from kc_otel.client.engine_latency import LATENCIES, EngineLatency
from kc_otel.judge.evaluator import Evaluator
from kc_otel.recordings.spool import SpoolReader
from tests.engines._served import wait_for
from tests.tools.contracts import contract_of
from tests.tools.verdicts import verdicts_of

pytestmark = pytest.mark.slow

CONTRACT = Path(__file__).resolve().parents[2] / "examples" / "vllm_server" / "contract.yaml"
LATENCY = contract_of(
    runtime=[{"id": "ttft", "metric": "gen_ai.server.time_to_first_token", "statistic": "p90", "limit": "80s"}],
    observability={"window": "5m", "long_window": "1h", "min_samples": 20, "heartbeat": "60s"},
)
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
PROMPT = "def main(argv):\n    "
BODIES = {
    "completion": ("completions", {"prompt": PROMPT, "max_tokens": 12, "seed": 1}),
    "two of two prompts": ("completions", {"prompt": [PROMPT, "The "], "n": 2, "max_tokens": 8, "seed": 2}),
    "log-probabilities": ("completions", {"prompt": PROMPT, "max_tokens": 8, "seed": 3, "logprobs": 2}),
    "stop": ("completions", {"prompt": PROMPT, "max_tokens": 40, "seed": 4, "stop": ["e"]}),
    "echo": ("completions", {"prompt": PROMPT, "max_tokens": 4, "seed": 4, "echo": True}),
    "tagged": ("completions", {"prompt": PROMPT, "max_tokens": 4, "seed": 5, "vllm_xargs": {"task": "code"}}),
    "chat": ("chat/completions", {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, "seed": 6}),
    "stream": ("completions", {"prompt": PROMPT, "max_tokens": 12, "seed": 7, "stream": True}),
    "chat stream": (
        "chat/completions",
        {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8, "seed": 8, "stream": True},
    ),
    "refused": ("completions", {"prompt": PROMPT, "max_tokens": 100_000}),
}
RECORDED = dict.fromkeys(BODIES, 1) | {"two of two prompts": 4, "refused": 0}


def answers(address):
    """What clients get, one after the other, without what is different each time."""
    found = {}
    with httpx.Client(base_url=f"{address}/v1", timeout=120.0) as client:
        for name, (path, body) in BODIES.items():
            headers = {"traceparent": TRACEPARENT, "baggage": "task=prose"} if name == "completion" else {}
            answer = client.post(path, json={"model": NAME, **body}, headers=headers)
            found[name] = answer.status_code, streamed(answer.text) if body.get("stream") else plain(answer.json())
    return found


def plain(body):
    return {name: value for name, value in body.items() if name not in {"id", "created"}}


def streamed(text):
    """A stream's text and its end; how many tokens are in one event is a matter of time."""
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    choices = [choice for event in events for choice in event["choices"]]
    words = [choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices]
    assert text.rstrip().endswith("data: [DONE]")
    return "".join(words), choices[-1]["finish_reason"], sorted({name for event in events for name in event})


def test_the_server_answers_as_ever_and_records(tiny_model, tmp_path):
    spool = tmp_path / "requests.sqlite"
    environment = {
        "KC_OTEL_CONTRACT": str(CONTRACT),
        "KC_OTEL_SPOOL": str(spool),
        "KC_OTEL_SAMPLING": "1",
        **{f"OTEL_{signal}_EXPORTER": "none" for signal in ("TRACES", "METRICS", "LOGS")},
    }
    launcher = [str(Path(sys.executable).with_name("opentelemetry-instrument"))]
    log = tmp_path / "instrumented.log"

    def served(environment, log, launcher=()):
        with serving(tiny_model, environment, log=log, launcher=launcher) as server:
            return answers(server.address)

    with ThreadPoolExecutor(2) as servers:  # starting takes most of the time
        plain = servers.submit(served, {}, tmp_path / "plain.log")
        instrumented = servers.submit(served, environment, log, launcher)
        expected = plain.result()
        assert instrumented.result() == expected
    with SpoolReader(spool) as reader:
        requests = [request for _, request in reader.take(1000)]
    assert len(requests) == sum(RECORDED.values()), log.read_text()[-3000:]
    assert len({request.request_id for request in requests}) == len(requests)
    assert {request.kernel.attention for request in requests} == {"CPU_ATTN"}
    tagged = [request for request in requests if request.attributes.get("task") == "code"]
    assert [request.token_ids.size for request in tagged] == [4]
    (traced,) = (request for request in requests if request.attributes.get("task") == "prose")
    assert traced.traceparent == TRACEPARENT
    assert traced.token_ids.size == expected["completion"][1]["usage"]["completion_tokens"]
    assert "kc-otel: vLLM is not instrumented" not in log.read_text()


def test_its_latencies_fill_a_clause(tiny_model, tmp_path):
    evaluator = Evaluator([LATENCY])
    evaluator.listening(time.time())
    with serving(tiny_model, {}, log=tmp_path / "server.log") as server:

        def ask(_):
            body = {"model": NAME, "prompt": PROMPT, "max_tokens": 2}
            httpx.post(f"{server.address}/v1/completions", json=body, timeout=120.0).raise_for_status()

        with ThreadPoolExecutor(8) as clients:
            list(clients.map(ask, range(150)))
        page = f"{server.address}/metrics"
        sent = tmp_path / "sent.json"
        with sent.open("w") as out:
            console = os.environ | {"OTEL_METRICS_EXPORTER": "console"}
            scraping = subprocess.Popen([sys.executable, "-m", "kc_otel", "scrape", page], env=console, stdout=out)
        try:
            wait_for(lambda: all(name in sent.read_text() for name in LATENCIES.values()), 300, "an export")
        finally:
            scraping.send_signal(signal.SIGINT)
        assert scraping.wait(60) == 0
        metrics = EngineLatency(page).collect(time.time_ns())
    assert {metric.name for metric in metrics} == set(LATENCIES.values())
    scopes = [ScopeMetrics(InstrumentationScope("kc_otel"), metrics, "")]
    evaluator.ingest_metrics(encode_metrics(MetricsData([ResourceMetrics(Resource({}), scopes, "")])), time.time())
    (found,) = (verdict for verdict in verdicts_of(evaluator, time.time()) if verdict.cell.clause == "ttft")
    assert (found.status.value, found.samples) == ("PASS", 150)


def test_an_operator_sees_what_is_lost(tiny_model, tmp_path):
    log = tmp_path / "server.log"
    environment = {
        "KC_OTEL_CONTRACT": str(CONTRACT),
        "KC_OTEL_SPOOL": str(tmp_path),  # a folder is no file
        "KC_OTEL_SAMPLING": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
    }
    with serving(tiny_model, environment, log=log) as server, httpx.Client(base_url=server.address) as client:
        body = {"model": NAME, "prompt": PROMPT, "max_tokens": 4}
        client.post("/v1/completions", json=body, timeout=120.0).raise_for_status()
        lost = 'kc_capture_dropped_total{kc_contract="tiny-server",kc_reason="spool-failed"} 1.0'
        wait_for(lambda: lost in client.get("/metrics").text, 300, lost)
    lines = [line for line in log.read_text().splitlines() if "INFO" in line or "WARNING" in line]
    assert sum("kc-otel: recording kernel" in line for line in lines) == 1
    assert sum("requests are not kept (spool-failed)" in line for line in lines) == 1
