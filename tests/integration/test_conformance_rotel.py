"""The conformance suite against a receiver that others wrote: rotel, an OTLP collector in Rust.

It shows that the suite asks what the specification says and not what our receiver does; tests/conformance/known holds
what this version of rotel does not meet.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

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
