"""The conformance suite against a receiver that others wrote, rotel, an OTLP collector in Rust; and rotel as a sender.

It shows that the suite asks what the specification says and not what our receiver does; tests/conformance/known holds
what this version of rotel does not meet.
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kc_otel.judge.otlp.sink import ExportResult, RequestCounts
from tests.conformance.clients import HttpClient
from tests.conformance.payloads import PROTOBUF, SIGNALS
from tests.tools.receivers import start_grpc
from tests.tools.servers import free_address, running

ROOT = Path(__file__).resolve().parents[2]
VERSION = "0.0.1a15"


@pytest.fixture(scope="module")
def rotel() -> Path:
    """The program, from its wheel on PyPI; skips where there is none for this machine."""
    folder = ROOT / ".cache" / f"rotel-{VERSION}"
    if not folder.exists():
        made = folder.with_suffix(f".{os.getpid()}")
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--retries", "1"]
        command = [*pip, "install", "--no-deps", "--only-binary=:all:", "--target", made, f"rotel=={VERSION}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"not run: rotel {VERSION} cannot be had: {done.stderr.strip()[-300:]}")
        made.rename(folder)
    return folder / "rotel" / "rotel-agent"


@pytest.fixture
def collector(rotel: Path, tmp_path: Path) -> Iterator[tuple[str, str]]:
    """Addresses of a running rotel: OTLP/HTTP, OTLP/gRPC."""
    http, grpc = free_address(), free_address()
    command = [
        *(rotel, "start", "--exporter", "blackhole", "--otlp-http-endpoint", http, "--otlp-grpc-endpoint", grpc),
        *("--pid-file", tmp_path / "pid", "--log-file", tmp_path / "log"),
    ]
    with running(command, tmp_path / "out", f"http://{http}/v1/metrics", answers=404):
        yield http, grpc


@pytest.mark.slow
@pytest.mark.parametrize("compression", ["gzip", "none"])
def test_what_rotel_forwards_arrives(rotel: Path, tmp_path: Path, compression: str) -> None:
    """Of each signal, all of it, over the gRPC that Rust's tonic and hyper speak."""
    arrived = dict.fromkeys(("metrics", "traces", "logs"), 0)

    class Sink:
        def metrics(self, request: Any) -> ExportResult:
            arrived["metrics"] += sum(len(s.metrics) for r in request.resource_metrics for s in r.scope_metrics)
            return ExportResult()

        def traces(self, request: Any) -> ExportResult:
            arrived["traces"] += sum(len(s.spans) for r in request.resource_spans for s in r.scope_spans)
            return ExportResult()

        def logs(self, request: Any) -> ExportResult:
            arrived["logs"] += sum(len(s.log_records) for r in request.resource_logs for s in r.scope_logs)
            return ExportResult()

    async def forwarded() -> dict[tuple[str, str], int]:
        counts = RequestCounts()
        server = await start_grpc(Sink(), port=0, counts=counts)
        http, grpc = free_address(), free_address()
        command = [
            *(rotel, "start", "--exporter", "otlp", "--otlp-exporter-endpoint", f"http://127.0.0.1:{server.port}"),
            *("--otlp-exporter-protocol", "grpc", "--otlp-exporter-compression", compression),
            *("--otlp-http-endpoint", http, "--otlp-grpc-endpoint", grpc, "--batch-timeout", "100ms"),
            *("--pid-file", tmp_path / "pid", "--log-file", tmp_path / "log"),
        ]

        def send() -> None:
            with running(command, tmp_path / "out", f"http://{http}/v1/metrics", answers=404):
                client = HttpClient(f"http://{http}")
                for _ in range(50):
                    for signal in SIGNALS:
                        assert client.post(signal.path, signal.body(PROTOBUF), PROTOBUF).status == 200
                client.close()
                end = time.monotonic() + 20
                while min(arrived.values()) < 50 and time.monotonic() < end:
                    time.sleep(0.1)

        await asyncio.to_thread(send)
        await server.stop()
        return dict(counts.snapshot())

    counts = asyncio.run(forwarded())
    assert counts.keys() == {("grpc", "accepted")}
    assert set(arrived.values()) == {50}


@pytest.mark.slow
def test_what_rotel_meets_is_as_the_table_says(collector: tuple[str, str]) -> None:
    """Each requirement that rotel is known not to meet fails, and every other one that can be tried passes."""
    http, grpc = collector
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "tests/conformance", "-q", "--tb=short", "-p", "no:cacheprovider"),
            *("--target", f"http://{http}", "--grpc-target", grpc, "--limit-mib", "24"),
            *("--deviations", "tests/conformance/known/rotel.json"),
        ],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    counted = re.findall(r"^(\w+) +(\d+) met, (\d+) not met, (\d+) open$", done.stdout, re.MULTILINE)
    assert counted == [("MUST", "23", "11", "1"), ("SHOULD", "6", "7", "3"), ("MAY", "2", "0", "3")]
