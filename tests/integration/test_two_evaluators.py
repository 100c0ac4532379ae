"""An active evaluator and a standby as real processes: killed, returned, replaced, and never two that act."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter

import kc_otel
from kc_otel.client.router import Router
from kc_otel.contract.load import load
from tests.tools.servers import free_address
from tests.tools.waiting import eventually

from .conftest import Evaluator, Meanwhile, Pager, logprobs, paging

pytestmark = pytest.mark.slow


class Rollouts(Meanwhile):
    """A recorder that sends broken batches all the time, whoever listens."""

    def __init__(self, contract: Path, url: str) -> None:
        self._rng = np.random.default_rng(0)
        exporter = OTLPMetricExporter(endpoint=f"{url}/v1/metrics", timeout=1)
        self.recorder = kc_otel.Recorder(contract, metric_exporter=exporter, export_interval=0.25, sampling=1.0)
        self.sigma = 0.2
        super().__init__(0.1)

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self.recorder.shutdown()

    def act(self) -> None:
        for task in ("code", "prose"):
            self.recorder.compare(*logprobs(self._rng, 16, 64, self.sigma), attributes={"task": task})


class Versions(Meanwhile):
    """Asks for the decision table all the time, as a client would, and keeps what it was given."""

    def __init__(self, url: str) -> None:
        self.seen: list[dict[str, Any]] = []
        self._url = url
        super().__init__(0.02)

    def act(self) -> None:
        with suppress(httpx.HTTPError):
            self.seen.append(httpx.get(f"{self._url}/api/v1/decisions", timeout=2).json())


class Twins:
    """Evaluators that are started alike: the same contract, state file and ports, each prepared to stand by."""

    def __init__(self, contract: Path, folder: Path, pager: Pager) -> None:
        grpc, http, api = (free_address().rpartition(":")[2] for _ in range(3))
        self.http, self.api = f"http://127.0.0.1:{http}", f"http://127.0.0.1:{api}"
        self._command = [
            *(sys.executable, "-m", "kc_otel", "serve", str(contract), "--state", str(folder / "state.sqlite")),
            *("--grpc-port", grpc, "--http-port", http, "--api-port", api, "--tick", "0.2", "--standby"),
            *("--group-wait", "0s", "--group-interval", "0s"),
        ]
        self._folder = folder
        self._environ = os.environ | paging(pager.url)
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, until: str) -> subprocess.Popen[bytes]:
        """Another one, once it has said something."""
        with (self._folder / f"{len(self.processes)}.log").open("wb") as log:
            process = subprocess.Popen(self._command, env=self._environ, stderr=log)
        self.processes.append(process)
        self.wait_for(process, until)
        return process

    def log(self, process: subprocess.Popen[bytes]) -> str:
        return (self._folder / f"{self.processes.index(process)}.log").read_text()

    def wait_for(self, process: subprocess.Popen[bytes], said: str, seconds: float = 60.0) -> None:
        eventually(lambda: said in self.log(process), seconds, 0.02, lambda: self.log(process))

    def get(self, path: str) -> Any:
        return httpx.get(self.api + path, timeout=5).json()

    def wait(self, path: str, until: Callable[[Any], bool], seconds: float = 60.0) -> None:
        eventually(lambda: until(self.get(path)), seconds, 0.1, lambda: self.get(path))


@pytest.fixture
def twins(contract_file: Path, tmp_path: Path, pager: Pager) -> Iterator[Twins]:
    found = Twins(contract_file, tmp_path, pager)
    yield found
    for process in found.processes:
        process.kill()
        process.wait(10)


def firings(pager: Pager) -> list[tuple[str, str, str]]:
    """(webhook id, fingerprint, startsAt) of every alert that was said to fire, once for each delivery."""
    return [
        (id, alert["fingerprint"], alert["startsAt"])
        for id, body in zip(pager.ids, pager.bodies, strict=True)
        for alert in body["alerts"]
        if alert["status"] == "firing"
    ]


def test_a_killed_evaluator_is_followed_and_its_return_changes_nothing(twins, pager, contract_file):
    """The standby goes on with the same alerts, webhooks and table; the one that returns stands by in its turn."""
    first = twins.start(until="judging policy")
    second = twins.start(until="standing by")
    with (
        Rollouts(contract_file, twins.http) as rollouts,
        Versions(twins.api) as versions,
        Router(twins.api, contracts=[load(contract_file)], wait=1.0) as router,
    ):
        twins.wait("/api/v1/decisions", lambda table: len(table["routes"]) == 3)
        twins.wait("/api/v1/health", lambda health: not health["outbox"][0]["waiting"])
        before = twins.get("/api/v1/decisions")
        eventually(lambda: router.table.version >= before["version"])  # it may pause, having come before the evaluator
        assert "taking over" not in twins.log(second)

        first.kill()
        killed = time.monotonic()
        twins.wait_for(second, "judging policy")
        assert time.monotonic() - killed < 10
        assert twins.get("/api/v1/decisions") == before
        assert router.choose("policy", {"task": "code"}) == "train-kernel"

        third = twins.start(until="standing by")
        rollouts.sigma = 0.005
        twins.wait("/api/v1/alerts", lambda answer: not answer["alerts"])
        assert "taking over" not in twins.log(third)

        second.terminate()
        assert second.wait(20) == 0
        twins.wait_for(third, "judging policy")
        # An end is told once what came after the fault proves it.
        eventually(lambda: len(resolutions(pager)) >= 3, 60.0, 0.1, lambda: pager.bodies)
        resolved = resolutions(pager)
        twins.wait("/api/v1/health", lambda health: not health["outbox"][0]["waiting"])
        assert router.choose("policy", {"task": "code"}) == "train-kernel"

    said = firings(pager)
    assert len({(alert, at) for _, alert, at in said}) == len({alert for _, alert, _ in said}) == 3
    assert len({(id, alert) for id, alert, _ in said}) == 3, "an alert was paged under two ids"
    assert sorted(resolved) == sorted({alert for _, alert, _ in said})
    numbers = [table["version"] for table in versions.seen]
    assert numbers == sorted(numbers), "the decision table went back"
    contents: dict[int, str] = {}
    for table in versions.seen:
        shown = json.dumps(table, sort_keys=True)
        assert contents.setdefault(table["version"], shown) == shown, "two tables have one version"


def resolutions(pager: Pager) -> list[str]:
    """Fingerprints of the alerts that were said to have ended, once for each message."""
    bodies = dict(zip(pager.ids, pager.bodies, strict=True)).values()  # a receiver drops an id that it has seen
    return [alert["fingerprint"] for body in bodies for alert in body["alerts"] if alert["status"] == "resolved"]


def test_an_evaluator_whose_state_file_is_replaced_ends(serve: Callable[..., Evaluator], tmp_path: Path) -> None:
    """Its lock guards nothing any more, and another may be acting on the file that is there now."""
    first = serve()
    (tmp_path / "state.sqlite").rename(tmp_path / "old.sqlite")
    second = serve()
    assert first.process.wait(10) == 2
    first._end()
    assert "no longer the state file that was opened" in first.log
    assert second.get("/api/v1/decisions")["routes"] == []
