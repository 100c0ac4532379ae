"""Real processes: `kc-otel serve` as a user starts it, a webhook receiver, log-probs with a known drift."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import httpx
import numpy as np
import pytest
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

import kc_otel
from kc_otel.client.webhooks import WebhookError, verify
from tests.tools.axe import violations
from tests.tools.chromium import Chromium
from tests.tools.forked import ForkedCommand
from tests.tools.servers import sink

SECRET = "whsec_c3VwZXItc2VjcmV0LWZvci10ZXN0cy1vbmx5ISE="  # "super-secret-for-tests-only!!"

TRAIN = kc_otel.Kernel("torch", dtype="float32")
GOOD = kc_otel.Kernel("vllm", version="1", dtype="bfloat16")

CONTRACT = """\
apiVersion: kernel-contract/v1
kind: KernelContract
metadata: {name: policy, version: 1, owner: tests}
kernels:
  train: {engine: torch, dtype: float32}
  inference: {engine: vllm, dtype: bfloat16}
assumptions: {reward_range: [0, 1]}
slices:
  code: {where: {task: code}}
  prose: {where: {task: prose}}
statistical:
  - {id: token-tv, metric: tv_token, unit: token, limit: 0.02}
observability: {window: 6s, long_window: 12s, min_samples: 500, heartbeat: 3s}
escalation:
  - {on: fail, for: 1s, clear_for: 1s, severity: critical, do: [{route: train-kernel}, {webhook: pager}, sample-more]}
  - {on: no-data, for: 2s, severity: warning, do: [hold-promotion]}
"""


def paging(url: str) -> dict[str, str]:
    """Variables of an evaluator whose endpoint `pager` is at a private address."""
    return {
        "KC_OTEL_WEBHOOK_PAGER_URL": url,
        "KC_OTEL_WEBHOOK_PAGER_SECRET": SECRET,
        "KC_OTEL_WEBHOOK_PAGER_ALLOW_PRIVATE": "1",
    }


def command(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """A command of `kc-otel` in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "kc_otel", *words], env=os.environ | environ,
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip


class Evaluator:
    """`kc-otel serve` in a process of its own."""

    command = (sys.executable, "-m", "kc_otel")

    def __init__(self, contract: Path, state: Path, environ: dict[str, str], *options: str) -> None:
        self.log = ""
        ports = ("--grpc-port", "0", "--http-port", "0", "--api-port", "0", "--tick", "0.2")
        waits = ("--group-wait", "0s", "--group-interval", "0s")
        self.process = self.begun(("serve", str(contract), "--state", str(state), *ports, *waits, *options), environ)
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log += line
            found = re.search(r"OTLP/gRPC (\S+), OTLP/HTTP (\S+), API (\S+)", line)
            if found:
                self.grpc, self.http, self.api = found[1], found[2], found[3]
                break
        else:
            self.process.stderr.close()
            self.process.wait()
            pytest.fail(f"kc-otel serve ended: {self.log}")
        self._reader = threading.Thread(target=self._drain)
        self._reader.start()

    def begun(self, arguments: tuple[str, ...], environ: dict[str, str]) -> Any:
        return subprocess.Popen(
            [*self.command, *arguments], env=os.environ | environ, stderr=subprocess.PIPE, text=True
        )

    def get(self, path: str, **parameters: Any) -> Any:
        response = httpx.get(self.api + path, params=parameters, timeout=30)
        response.raise_for_status()
        return response.json()

    def wait(self, path: str, until: Callable[[Any], bool], seconds: float = 60.0) -> Any:
        """The first answer that will do; fails with the last answer and the log."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            answer = self.get(path)
            if until(answer):
                return answer
            time.sleep(0.1)
        pytest.fail(f"{path}: {json.dumps(answer, indent=1)[:4000]}\n{self.log[-4000:]}")

    def kill(self) -> None:
        """As a machine that loses power would."""
        self.process.send_signal(signal.SIGKILL)
        self._end()

    def stop(self) -> int:
        """As an operator would."""
        self.process.terminate()
        self._end()
        return self.process.returncode

    def _end(self) -> None:
        self.process.wait(60)
        self._reader.join(60)
        self.process.stderr.close()

    def _drain(self) -> None:
        for line in self.process.stderr:
            self.log += line


class Pager:
    """A webhook endpoint that keeps what it can verify."""

    def __init__(self) -> None:
        self.url = ""
        self.bodies: list[dict[str, Any]] = []
        self.ids: list[str] = []
        self.refused: list[str] = []

    def take(self, body: bytes, headers: Mapping[str, str]) -> int:
        try:
            self.bodies.append(verify(SECRET, dict(headers), body))
            self.ids.append({name.lower(): value for name, value in headers.items()}["webhook-id"])
        except WebhookError as error:
            self.refused.append(str(error))
        return 204


@pytest.fixture
def pager() -> Iterator[Pager]:
    pager = Pager()
    with sink(pager.take) as pager.url:
        yield pager


class Meanwhile:
    """Does something on a thread, again and again with a pause before each time, as long as a block lasts."""

    def __init__(self, pause: float) -> None:
        self._pause, self._stopped = pause, threading.Event()
        self._thread = threading.Thread(target=self._repeat)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def act(self) -> None:
        raise NotImplementedError

    def _repeat(self) -> None:
        while not self._stopped.wait(self._pause):
            self.act()


@pytest.fixture
def contract_file(tmp_path: Path) -> Path:
    path = tmp_path / "policy.yaml"
    path.write_text(CONTRACT)
    return path


@pytest.fixture
def patient(contract_file: Path) -> None:
    """Windows that outlast a slow machine: what is broken is still broken when somebody looks."""
    text = CONTRACT.replace("window: 6s, long_window: 12s", "window: 60s, long_window: 120s")
    contract_file.write_text(text.replace("heartbeat: 3s", "heartbeat: 8s"))


class ForkedEvaluator(Evaluator):
    """The same of a process that need not import anything first: for tests that start hundreds."""

    def begun(self, arguments: tuple[str, ...], environ: dict[str, str]) -> Any:
        return ForkedCommand(arguments, environ)


@pytest.fixture
def evaluator_class() -> type[Evaluator]:
    return Evaluator


@pytest.fixture
def serve(
    contract_file: Path, tmp_path: Path, pager: Pager, evaluator_class: type[Evaluator]
) -> Iterator[Callable[..., Evaluator]]:
    """Starts an evaluator on the test's state file; every one that still runs is stopped at the end."""
    started: list[Evaluator] = []

    def start(*options: str, **more: str) -> Evaluator:
        evaluator = evaluator_class(contract_file, tmp_path / "state.sqlite", paging(pager.url) | more, *options)
        started.append(evaluator)
        return evaluator

    yield start
    for evaluator in started:
        if evaluator.process.poll() is None:
            evaluator.stop()


def logprobs(rng: np.random.Generator, sequences: int, tokens: int, sigma: float) -> tuple[np.ndarray, np.ndarray]:
    """Log-probs of both kernels, [sequences, tokens], whose log ratio is Gaussian: TV is about 0.4 sigma."""
    inference = np.log(rng.uniform(0.05, 1.0, (sequences, tokens)))
    train = inference + rng.normal(-sigma * sigma / 2, sigma, (sequences, tokens))
    return -np.abs(train), inference


class Traffic:
    """A recorder of one kernel version, whose batches have the drift that a test asks for."""

    def __init__(self, contract: Path, exporter: Any, inference: kc_otel.Kernel = GOOD) -> None:
        self.recorder = kc_otel.Recorder(
            contract, train=TRAIN, inference=inference, metric_exporter=exporter, export_interval=0.25, sampling=1.0
        )
        self._rng = np.random.default_rng(0)

    def send(self, step: int | None = None, **sigma: float) -> None:
        """A batch of each slice, whose log ratios have this standard deviation."""
        for task, size in sigma.items():
            both = logprobs(self._rng, 16, 64, size)
            self.recorder.compare(*both, attributes={"task": task}, weights=None if step is None else (step, step))
        self.recorder.force_flush()

    def send_until(self, happens: Callable[[], bool], otherwise: Callable[[], Any], **sigma: float) -> None:
        end = time.monotonic() + 60.0
        while not happens():
            assert time.monotonic() < end, otherwise()
            self.send(**sigma)
            time.sleep(0.2)


class Collector:
    """OTLP/HTTP endpoints that keep what they receive, as a Collector would pass it on."""

    def __init__(self) -> None:
        self.metrics: list[Any] = []
        self.logs: list[Any] = []

    def take_metrics(self, body: bytes, _headers: Mapping[str, str]) -> int:
        for resource in ExportMetricsServiceRequest.FromString(body).resource_metrics:
            self.metrics += [metric for scope in resource.scope_metrics for metric in scope.metrics]
        return 200

    def take_logs(self, body: bytes, _headers: Mapping[str, str]) -> int:
        for resource in ExportLogsServiceRequest.FromString(body).resource_logs:
            self.logs += [record for scope in resource.scope_logs for record in scope.log_records]
        return 200


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    """What an evaluator that is started now exports to."""
    collector = Collector()
    with sink(collector.take_metrics) as metrics, sink(collector.take_logs) as logs:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", metrics)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_LOGS_ENDPOINT", logs)
        yield collector


@pytest.fixture(scope="module")
def browser(debian: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The machine's Chromium, or Debian's, unpacked; skips with the reason where neither can be had."""
    present = shutil.which("chromium-headless-shell") or shutil.which("chromium")
    try:
        command = (present,) if present else debian.command("chromium")
    except debian.UnavailableError as error:
        pytest.skip(f"not run: {error}")
    browser = Chromium(command, tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


def wrong(browser: Any) -> list[Any]:
    """What axe-core finds on the page that is open."""
    browser.wait("document.getAnimations().every(one => one.playState === 'finished')")  # half there, all is pale
    return violations(browser)
