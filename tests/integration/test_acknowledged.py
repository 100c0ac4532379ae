"""What a sender was told has been taken is counted, whatever ended the evaluator, and nothing is said or done twice."""

import math
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from operator import eq, ge
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from kc_otel.judge.verdict import Status
from kc_otel.offline.replay import read_recordings
from tests.integration.conftest import Evaluator, ForkedEvaluator, Pager
from tests.tools.contracts import contract_text
from tests.tools.load import EXPORT, HEADERS, message

KILLS = int(os.environ.get("KC_OTEL_KILLS", "6"))
TICK = 0.5
"""Seconds between evaluations."""
WINDOWS = {"policy": ("12h", "24h"), "recent": ("60s", "100s")}
"""Of each contract; a step of the past of the second one's verdicts lasts five seconds."""


@pytest.fixture
def contract_file(tmp_path: Path) -> Path:
    folder = tmp_path / "contracts"
    folder.mkdir()
    for name, (window, long_window) in WINDOWS.items():
        text = contract_text(
            name,
            statistical=[{"id": "token-tv", "metric": "tv_token", "unit": "token", "limit": 0.02}],
            observability={"window": window, "long_window": long_window, "min_samples": 500, "heartbeat": window},
            escalation=[
                {"on": "fail", "severity": "critical", "do": [{"route": "train-kernel"}, {"webhook": "pager"}]}
            ],
        )
        (folder / f"{name}.yaml").write_text(text)
    return folder


@pytest.fixture
def evaluator_class() -> type[Evaluator]:
    """One that starts in a fraction of a second: what is killed hundreds of times is not imported as often."""
    return ForkedEvaluator


class Source(threading.Thread):
    """One stream of a kernel version: sends a request after the other, each again until it is acknowledged."""

    def __init__(self, kernel: str, *, cumulative: bool, over_grpc: bool) -> None:
        super().__init__(daemon=True)
        self.sent, self.acknowledged, self.trouble = 0, 0, ""
        self.kernel, self._cumulative, self._over_grpc = kernel, cumulative, over_grpc
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

    def _request(self, count: int) -> bytes:
        now = time.time_ns()
        began, total = (self._began, self.sent) if self._cumulative else (self._last, count)
        self._last = now
        delta = not self._cumulative
        return message([self.kernel], began, total, WINDOWS, ended=now, delta=delta, instance=self.kernel)

    def _export(self, body: bytes) -> bool:
        assert self.evaluator is not None
        try:
            if self._over_grpc:
                with grpc.insecure_channel(self.evaluator.grpc) as channel:
                    answer = channel.unary_unary(EXPORT)(body, timeout=5)
            else:
                response = httpx.post(f"{self.evaluator.http}/v1/metrics", content=body, headers=HEADERS, timeout=5)
                if response.status_code != 200:
                    return False
                answer = response.content
        except (httpx.HTTPError, grpc.RpcError):
            return False
        if answer:
            self.trouble = str(answer)
        return True


def sources() -> list[Source]:
    """Two for each transport and temporality, each of a kernel version of its own."""
    return [
        Source(f"{kind}-{transport}-{number}", cumulative=kind == "cumulative", over_grpc=transport == "grpc")
        for kind in ("delta", "cumulative")
        for transport in ("http", "grpc")
        for number in (1, 2)
    ]


def histories(evaluator: Evaluator, contract: str) -> tuple[float, dict[str, list[tuple[float, int, int]]]]:
    """Seconds of a step, and (time, samples, status code) of what is remembered of each kernel, oldest first."""
    found = evaluator.get("/api/v1/history", contract=contract, clause="token-tv")
    return found["step"], {
        series["kernel_inference"]: [(point[0], point[5], point[6]) for point in series["points"]]
        for series in found["series"]
        if series["kernel_inference"]
    }


@pytest.mark.slow
@pytest.mark.timeout(60 + 30 * KILLS)
def test_kill_9_loses_nothing_that_was_acknowledged(serve, pager, contract_file):
    """HTTP and gRPC, deltas and cumulative sums: counts are exact, no verdict is missing, nothing is sent twice."""
    del contract_file
    running, evaluator, away = sources(), serve("--tick", f"{TICK}"), list[tuple[float, float]]()
    ports = ("--tick", f"{TICK}", "--grpc-port", evaluator.grpc.rsplit(":", 1)[1])
    ports += ("--http-port", evaluator.http.rsplit(":", 1)[1])
    for source in running:
        source.evaluator = evaluator
        source.start()
    try:
        for _ in range(KILLS):
            time.sleep(random.uniform(0.05, 1.0))
            # Whoever is killed before the first evaluation is on the disk was not there.
            if not away or _back(evaluator, away):
                away.append((time.time(), math.inf))
            evaluator.kill()
            least = {source: source.acknowledged for source in running}
            evaluator = serve(*ports)
            evaluator.wait("/api/v1/verdicts", lambda answer: bool(answer["verdicts"]))
            _back(evaluator, away)
            taken = {source.kernel: number for source, number in least.items()}
            wait_for_samples(evaluator, taken, ge)
    finally:
        for source in running:
            source.stop()
    assert [source.trouble for source in running] == [""] * len(running)
    assert all(source.acknowledged == source.sent > 0 for source in running)
    evaluator.wait("/api/v1/verdicts", lambda answer: all(cell["status"] == "FAIL" for cell in answer["verdicts"]))
    sent = {source.kernel: source.sent for source in running}
    wait_for_samples(evaluator, sent)
    alerts_due = 2 * len(running)  # one for each contract and kernel
    while len(set(pager.ids)) < alerts_due:
        time.sleep(0.1)
    for contract in WINDOWS:
        _nothing_is_missing(evaluator, contract, sent, away)
    table = evaluator.get("/api/v1/decisions")
    evaluator.stop()
    routed = [(route["contract"], route["avoid"]) for route in table["routes"]]
    assert len(routed) == len(set(routed)) == alerts_due
    decided = {(route["contract"], route["since"]) for route in table["routes"]}  # a contract's at a time are one
    assert table["version"] == len(decided), "no decision was taken again"
    assert len(set(pager.ids)) == alerts_due
    alerts = Counter(alert["fingerprint"] for body in _once(pager) for alert in body["alerts"])
    assert set(alerts.values()) == {1}


def _back(evaluator: Evaluator, away: list[tuple[float, float]]) -> bool:
    """Note when an evaluator was there again, once it has evaluated. Returns whether it has."""
    gone, back = away[-1]
    if back == math.inf and (at := evaluator.get("/api/v1/health")["evaluated_at"]) is not None:
        away[-1] = (gone, at)
    return away[-1][1] < math.inf


def samples(cells: Sequence[Any], contract: str) -> dict[str, int]:
    """Observations that the verdicts of a contract rest on, by kernel."""
    return {cell["kernel_inference"]: cell["samples"] for cell in cells if cell["contract"] == contract}


def wait_for_samples(evaluator: Evaluator, expected: Mapping[str, int], holds: Callable[[int, int], bool] = eq) -> None:
    """Wait until the verdicts of an evaluation rest on as many observations of each kernel."""

    def all_there(answer: Any) -> bool:
        found = samples(answer["verdicts"], "policy")
        return all(holds(found.get(kernel, 0), number) for kernel, number in expected.items())

    evaluator.wait("/api/v1/verdicts", all_there)


def _once(pager: Pager) -> list[Any]:
    """Messages, each once: one that was being sent when the evaluator was killed is sent again, under the same id."""
    return list(dict(zip(pager.ids, pager.bodies, strict=True)).values())


def _nothing_is_missing(
    evaluator: Evaluator, contract: str, sent: Mapping[str, int], away: Sequence[tuple[float, float]]
) -> None:
    """The past of every kernel is that of an evaluator that was never killed: each step once, FAIL from its FAIL on.

    A step may be missing for the whole of which none was there, which takes a machine with much else to do.
    """
    changes: dict[str, list[Any]] = {}
    fired: Counter[str] = Counter()
    for event in evaluator.get("/api/v1/events", contract=contract, newest=1000)["events"]:
        kernel = event["data"]["kernel_inference"]
        if event["kind"] == "verdict" and kernel:
            changes.setdefault(kernel, []).append((event["at"], event["data"]["before"], event["data"]["status"]))
        elif event["kind"] == "firing":
            fired[kernel] += 1
    assert fired == dict.fromkeys(sent, 1)
    step, past = histories(evaluator, contract)
    assert past.keys() == changes.keys() == sent.keys()
    for kernel, points in past.items():
        times, counts, statuses = zip(*points, strict=True)
        assert list(times) == sorted(set(times))
        first, said = changes[kernel][0][0], [(before, after) for _, before, after in changes[kernel]]
        steps = range(int(first // step), int(times[-1] // step) + 1)
        for number in set(steps) - {int(at // step) for at in times}:
            assert any(gone <= step * number + TICK and step * (number + 1) - TICK <= back for gone, back in away), (
                f"{kernel} of {contract}: a step without a verdict"
            )
        assert set(statuses[statuses.index(Status.FAIL.code) :]) == {Status.FAIL.code}
        assert said[0][0] is None
        assert [before for before, _ in said[1:]] == [after for _, after in said[:-1]]
        assert len(set(said)) == len(said), f"{kernel} of {contract}: said twice"
        assert said[-1][1] == "FAIL"
        if contract == "policy":  # its windows hold all of it
            assert list(counts) == sorted(counts)
            assert counts[-1] == sent[kernel]


def _observations(request: ExportMetricsServiceRequest) -> int:
    metrics = (metric for of in request.resource_metrics for scope in of.scope_metrics for metric in scope.metrics)
    return sum(point.count for metric in metrics for point in metric.exponential_histogram.data_points)


@pytest.mark.slow
def test_a_graceful_stop_loses_nothing(serve, contract_file, tmp_path):
    """What was acknowledged between two ticks is recorded, and there after SIGTERM and the next start."""
    del contract_file
    evaluator = serve("--tick", "30", "--record")
    running = sources()
    for source in running:
        source.evaluator = evaluator
        source.start()
    time.sleep(2.0)
    for source in running:
        source.stop()
    page = httpx.get(f"{evaluator.api}/metrics").text
    assert "kc_evaluator_inbox_size_bytes" in page, "it observes itself also where it records"
    assert evaluator.stop() == 0
    damage: list[str] = []
    entries = list(read_recordings([tmp_path / "state.sqlite-recording"], damage))
    assert (damage, any(entry.is_evaluation for entry in entries)) == ([], True)
    recorded = [entry.read() for entry in entries if not entry.is_evaluation]
    assert sum(_observations(request) for request in recorded) >= sum(source.acknowledged for source in running)
    again = serve("--tick", "30")
    wait_for_samples(again, {source.kernel: source.acknowledged for source in running})
    assert all(source.acknowledged for source in running)
