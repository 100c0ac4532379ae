"""`kc-otel serve --engine ray` on a cluster of several nodes in this machine, of which one is killed under load."""

import os
import random
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from kc_otel.contract.load import load_text
from kc_otel.judge.evaluator import Evaluator as Judge
from tests.integration.conftest import Evaluator, paging
from tests.tools.exact_senders import CONTRACT, ExactSender
from tests.tools.load import HEADERS
from tests.tools.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
_LONG = CONTRACT.replace("window: 1m, long_window: 5m", "window: 12h, long_window: 24h")
_STORE = 80 * 1024 * 1024
_SENDERS = 6
_OURS = "KC_OTEL_TEST_CLUSTER"
"""Names a cluster's processes in their environment: others may run Ray beside it."""


def processes_of_ray(mark: str) -> set[int]:
    """Processes that Ray began and whose environment has the mark."""
    found = set()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                line, around = ((folder / name).read_bytes() for name in ("cmdline", "environ"))
            except OSError:
                continue
            of_ray = b"raylet" in line or b"gcs_server" in line or line.startswith(b"ray::")
            if of_ray and f"{_OURS}={mark}".encode() in around.split(b"\0"):
                found.add(int(folder.name))
    return found


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Ray's own cluster for tests: a head without room for shards, and two nodes with room for two each."""
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    mark = uuid.uuid4().hex
    monkeypatch.setenv(_OURS, mark)
    head = {"num_cpus": 0, "object_store_memory": _STORE, "include_dashboard": False}
    made = Cluster(initialize_head=True, head_node_args=head)
    for _ in range(2):
        made.add_node(num_cpus=2, object_store_memory=_STORE, wait=False)
    made.wait_for_nodes()
    assert processes_of_ray(mark)
    try:
        yield made
    finally:
        made.shutdown()
    eventually(lambda: not processes_of_ray(mark), 20.0, 0.1, lambda: processes_of_ray(mark))


class Source(threading.Thread):
    """A sender: exports again and again, each until it is acknowledged; every fourth twice."""

    def __init__(self, number: int, url: str) -> None:
        super().__init__(daemon=True)
        self.acknowledged: list[bytes] = []
        self.refused: dict[int, str] = {}
        self._url, self._rng, self._stopped = url, random.Random(number), threading.Event()
        self._sender = ExactSender(number, time.time_ns())

    def run(self) -> None:
        with httpx.Client(timeout=15.0) as client:
            while not self._stopped.is_set():
                body = self._sender.export(time.time_ns(), self._rng, drifts=True)
                for _ in range(1 + (self._rng.random() < 0.25)):
                    self._send(client, body)
                self.acknowledged.append(body)
                self._stopped.wait(0.2)

    def _send(self, client: httpx.Client, body: bytes) -> None:
        while True:
            answer = client.post(self._url, content=body, headers=HEADERS)
            if answer.status_code == 200:
                assert not answer.content, answer.content
                return
            assert answer.headers["retry-after"] == "1"
            self.refused[answer.status_code] = answer.text
            time.sleep(0.1)

    def stop(self) -> None:
        self._stopped.set()
        self.join(60)
        assert not self.is_alive()


def one_process(sources: list[Source]) -> Judge:
    judge = Judge([load_text(_LONG, "policy.yaml")])
    now = time.time()
    for source in sources:
        for body in source.acknowledged:
            judge.ingest_metrics(ExportMetricsServiceRequest.FromString(body), now)
    return judge


def test_nothing_is_lost_and_nothing_done_twice_where_a_node_is_killed_under_load(cluster, pager, tmp_path):
    """A node is killed, a shard stopped and continued: counts, verdicts and actions are those of one process."""
    path = tmp_path / "policy.yaml"
    path.write_text(_LONG)
    options = ("--engine", "ray", "--ray-address", cluster.address, "--shards", "2", "--tick", "0.3")
    options += ("--shard-folder", str(tmp_path / "shards"))
    evaluator = Evaluator(path, tmp_path / "state", paging(pager.url), *options)
    sources = [Source(number, f"{evaluator.http}/v1/metrics") for number in range(_SENDERS)]
    try:
        for source in sources:
            source.start()

        def healthy(shards: list[dict[str, Any]]) -> bool:
            return not any(shard["trouble"] for shard in shards) and all(shard["points"] for shard in shards)

        def shards_once(until: Callable[[list[dict[str, Any]]], bool], seconds: float = 60.0) -> list[dict[str, Any]]:
            shards: list[dict[str, Any]] = evaluator.wait(
                "/api/v1/health", lambda health: until(health["shards"]), seconds
            )["shards"]
            return shards

        before = shards_once(healthy)
        assert len(before) == 2
        cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)  # as a machine that loses power
        after = shards_once(
            lambda found: healthy(found) and {shard["pid"] for shard in found} != {shard["pid"] for shard in before},
            120.0,
        )
        paused = after[0]["pid"]
        os.kill(paused, signal.SIGSTOP)  # as a network that pauses
        try:
            shards_once(lambda found: bool(found[0]["trouble"]))
            assert "shard 0" in httpx.get(f"{evaluator.api}/readyz").text
        finally:
            os.kill(paused, signal.SIGCONT)
        shards_once(healthy)
        for source in sources:
            source.stop()
        assert set().union(*(source.refused for source in sources)) == {503}
        expected = one_process(sources)
        shards_once(lambda found: not any(shard["lag"] + shard["waiting"] for shard in found))
        time.sleep(1.0)  # two evaluations
        judged = {
            (verdict.cell.clause, verdict.cell.slice): (verdict.status.value, verdict.samples, verdict.estimate)
            for verdict in expected.evaluate(time.time())["policy"].verdicts
        }
        verdicts = evaluator.get("/api/v1/verdicts")["verdicts"]
        assert {(v["clause"], v["slice"]): (v["status"], v["samples"], v["estimate"]) for v in verdicts} == judged
        assert {status for status, _, _ in judged.values()} >= {"FAIL", "INCONCLUSIVE"}
        assert evaluator.get("/api/v1/health")["invalid"]["policy"]["shape"] == sum(range(_SENDERS))
        assert "kc_evaluator_shard_lag_bytes" in httpx.get(f"{evaluator.api}/metrics").text
        assert len(set(pager.ids)) == len(pager.bodies)
    finally:
        for source in sources:
            source._stopped.set()
        assert evaluator.stop() == 0
    assert len([body for body in pager.bodies if body["status"] == "firing"]) >= 1
