"""What a sender was told has been taken is counted, whatever ended the evaluator, and nothing is done twice."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2_grpc import MetricsServiceStub

from tests.integration.conftest import Evaluator, ForkedEvaluator, Pager

KILLS = int(os.environ.get("KC_OTEL_KILLS", "6"))
CONTRACT = """\
apiVersion: kernel-contract/v1
kind: KernelContract
metadata: {name: policy, version: 1, owner: tests}
kernels:
  train: {engine: torch, dtype: float32}
  inference: {engine: vllm, dtype: bfloat16}
statistical:
  - {id: token-tv, metric: tv_token, unit: token, limit: 0.02}
observability: {window: 12h, long_window: 24h, min_samples: 500, heartbeat: 12h}
escalation:
  - {on: fail, severity: critical, do: [{webhook: pager}]}
"""


@pytest.fixture
def contract_file(tmp_path: Path) -> Path:
    path = tmp_path / "policy.yaml"
    path.write_text(CONTRACT)
    return path


@pytest.fixture
def evaluator_class() -> type[Evaluator]:
    """One that starts in a fraction of a second: what is killed hundreds of times is not imported as often."""
    return ForkedEvaluator


class Source(threading.Thread):
    """One stream: sends a request after the other, each again until it is acknowledged."""

    def __init__(self, name: str, *, cumulative: bool, over_grpc: bool) -> None:
        super().__init__(daemon=True)
        self.sent, self.acknowledged, self.trouble = 0, 0, ""
        self._name, self._cumulative, self._over_grpc = name, cumulative, over_grpc
        self._began = self._last = time.time_ns()
        self._stopped = threading.Event()
        self.evaluator: Evaluator | None = None

    def run(self) -> None:
        while not self._stopped.is_set():
            count = random.randint(1, 20)
            self.sent += count
            request = self._request(count)
            while not self._export(request):
                time.sleep(0.02)
            self.acknowledged += count
            time.sleep(0.002)

    def stop(self) -> None:
        self._stopped.set()
        self.join(60)

    def _request(self, count: int) -> ExportMetricsServiceRequest:
        request, now = ExportMetricsServiceRequest(), time.time_ns()
        resource = request.resource_metrics.add()
        resource.resource.attributes.add(key="service.instance.id").value.string_value = self._name
        data = resource.scope_metrics.add().metrics.add(name="kc.drift.tv_token", unit="1").exponential_histogram
        data.aggregation_temporality = 2 if self._cumulative else 1
        start = self._began if self._cumulative else self._last
        point = data.data_points.add(start_time_unix_nano=start, time_unix_nano=now)
        for key, value in (("contract", "policy"), ("slice", "all"), ("kernel.train", "a"), ("kernel.inference", "b")):
            point.attributes.add(key=f"kc.{key}").value.string_value = value
        point.count = self.sent if self._cumulative else count
        point.sum = 0.5 * point.count
        point.positive.offset = -2  # of scale 0: (0.25, 0.5]
        point.positive.bucket_counts.append(point.count)
        self._last = now
        return request

    def _export(self, request: Any) -> bool:
        assert self.evaluator is not None
        try:
            if self._over_grpc:
                with grpc.insecure_channel(self.evaluator.grpc) as channel:
                    answer = MetricsServiceStub(channel).Export(request, timeout=5)
            else:
                response = httpx.post(
                    f"{self.evaluator.http}/v1/metrics",
                    content=request.SerializeToString(),
                    headers={"content-type": "application/x-protobuf"},
                    timeout=5,
                )
                if response.status_code != 200:
                    return False
                answer = ExportMetricsServiceRequest.FromString(response.content)
        except (httpx.HTTPError, grpc.RpcError):
            return False
        if answer.ByteSize():
            self.trouble = str(answer)
        return True


def sources() -> list[Source]:
    return [
        Source(f"{cumulative} {over_grpc}", cumulative=cumulative, over_grpc=over_grpc)
        for cumulative in (False, True)
        for over_grpc in (False, True)
    ]


def counted(evaluator: Evaluator) -> int:
    """Observations in the windows."""
    found = evaluator.get(
        "/api/v1/distribution", contract="policy", clause="token-tv", kernel_train="a", kernel_inference="b"
    )
    return int(found["total"])


@pytest.mark.slow
@pytest.mark.timeout(60 + 30 * KILLS)
def test_kill_9_loses_nothing_that_was_acknowledged(
    serve: Callable[..., Evaluator], pager: Pager, contract_file: Path
) -> None:
    """HTTP and gRPC, deltas and cumulative sums: the count is exact in the end, and one message goes out."""
    del contract_file
    running, evaluator = sources(), serve("--tick", "0.5")
    ports = ("--tick", "0.5", "--grpc-port", evaluator.grpc.rsplit(":", 1)[1])
    ports += ("--http-port", evaluator.http.rsplit(":", 1)[1])
    for source in running:
        source.evaluator = evaluator
        source.start()
    try:
        for _ in range(KILLS):
            time.sleep(random.uniform(0.05, 1.0))
            evaluator.kill()
            least = sum(source.acknowledged for source in running)
            evaluator = serve(*ports)
            evaluator.wait("/api/v1/cells", lambda answer: bool(answer["cells"]))
            assert counted(evaluator) >= least
    finally:
        for source in running:
            source.stop()
    assert [source.trouble for source in running] == [""] * 4
    assert all(source.acknowledged == source.sent > 0 for source in running)
    assert counted(evaluator) == sum(source.sent for source in running)
    evaluator.wait("/api/v1/cells", lambda answer: all(one["verdict"]["status"] == "FAIL" for one in answer["cells"]))
    while not pager.ids:
        time.sleep(0.1)
    assert len(set(pager.ids)) == 1
    assert evaluator.stop() == 0


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["always", "never"])
def test_a_graceful_stop_loses_nothing(serve: Callable[..., Evaluator], sync: str, contract_file: Path) -> None:
    """SIGTERM between two ticks: what was acknowledged since the last one is there after the next start."""
    del contract_file
    evaluator = serve("--tick", "30", "--sync", sync)
    running = sources()
    for source in running:
        source.evaluator = evaluator
        source.start()
    time.sleep(2.0)
    for source in running:
        source.stop()
    assert evaluator.stop() == 0
    again = serve("--tick", "30")
    assert counted(again) == sum(source.acknowledged for source in running) > 0


@pytest.mark.slow
def test_a_damaged_state_is_set_aside_and_judged_anew_from_the_log(
    serve: Callable[..., Evaluator], tmp_path: Path, contract_file: Path
) -> None:
    """Without being told so it does not start; then what was acknowledged is judged, and what is lost is an event."""
    del contract_file
    evaluator = serve("--tick", "0.2")
    running = sources()
    for source in running:
        source.evaluator = evaluator
        source.start()
    evaluator.wait("/api/v1/cells", lambda answer: any(one["verdict"]["status"] == "FAIL" for one in answer["cells"]))
    for source in running:
        source.stop()
    assert evaluator.stop() == 0
    (state,) = tmp_path.glob("*.sqlite")
    content = bytearray(state.read_bytes())
    content[4096:8192] = bytes(4096)
    state.write_bytes(content)

    with pytest.raises(pytest.fail.Exception, match=r"the state file is damaged.*--set-aside-damaged"):
        serve()
    again = serve("--set-aside-damaged")
    assert counted(again) == sum(source.acknowledged for source in running) > 0
    again.wait("/api/v1/cells", lambda answer: any(one["verdict"]["status"] == "FAIL" for one in answer["cells"]))
    assert "state-lost" in {event["kind"] for event in again.get("/api/v1/events")["events"]}
    (aside,) = tmp_path.glob("*.damaged-*Z")
    assert aside.read_bytes() == bytes(content)
    assert again.stop() == 0
