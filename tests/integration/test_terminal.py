"""What a person at a terminal gets from a running evaluator."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter

import kc_otel

from .conftest import Evaluator, logprobs

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("patient")]


def command(*arguments: str, width: int = 80) -> subprocess.CompletedProcess[str]:
    """Run kc-otel as a script would, on a terminal so many columns wide."""
    return subprocess.run(
        [sys.executable, "-m", "kc_otel", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=os.environ | {"COLUMNS": str(width), "NO_COLOR": "1"},
    )


@pytest.fixture
def broken(serve: Callable[..., Evaluator], contract_file: Path) -> Evaluator:
    """An evaluator that has seen a breach on slice code."""
    evaluator = serve()
    exporter, rng = OTLPMetricExporter(endpoint=f"{evaluator.http}/v1/metrics"), np.random.default_rng(0)
    with kc_otel.Recorder(contract_file, metric_exporter=exporter, sampling=1.0) as recorder:
        for task, sigma in (("code", 0.3), ("prose", 0.005)):
            recorder.compare(*logprobs(rng, 32, 64, sigma), attributes={"task": task})
    evaluator.wait("/api/v1/decisions", lambda answer: answer["routes"])
    return evaluator


def test_status_shows_what_is_broken_why_and_what_was_done(broken: Evaluator) -> None:
    """The worst first, on 80 columns without a broken line; the reason in words; the route and how to lift it."""
    shown = command("status", "--url", broken.api)
    assert shown.returncode == 1
    lines = shown.stdout.splitlines()
    said = " ".join(shown.stdout.split())
    assert re.match(
        r"Broken; routing to the training kernel was ordered at \d\d:\d\d UTC, but no router has applied it policy: ",
        said,
    )
    assert "policy: token-tv is above its limit on code" in said
    (since,) = (
        k for k, line in enumerate(lines) if re.fullmatch(r"  for \d+s, \d slices?; incident [0-9a-f]{12}", line)
    )
    assert since <= 2
    assert lines[since + 1].startswith("  on ")
    assert re.search(r" \d\d:\d\d:\d\d .* to the training kernel was ordered, but no router has applied it", said)
    (table,) = [index for index, line in enumerate(lines) if line.startswith("policy   inference kernel")]
    assert lines[table + 2].startswith("FAIL")
    assert "…" not in shown.stdout
    assert "lower bound" in shown.stdout
    assert "policy/code is to avoid" in said
    assert "is to avoid" not in command("status", "--contract", "another", "--url", broken.api).stdout
    wide = command("status", "--url", broken.api, width=160)
    assert "interval" in wide.stdout
    answer = json.loads(command("status", "--url", broken.api, "--json").stdout)
    assert {cell["slice"] for cell in answer} == {"all", "code", "prose"}


def test_resume_lifts_a_route_with_a_reason(broken: Evaluator) -> None:
    """Who and why are kept as an event."""
    done = command(
        "route", "resume", "policy", "--slice", "code", "--why", "patched", "--by", "ada", "--url", broken.api
    )
    assert done.returncode == 0, done.stderr
    assert "routes lifted: 1;" in done.stdout
    assert "code" not in {route["slice"] for route in broken.get("/api/v1/decisions")["routes"]}
    again = command(
        "route", "resume", "policy", "--slice", "code", "--why", "patched", "--by", "ada", "--url", broken.api
    )
    assert again.returncode != 0
    assert "no route is in force" in again.stderr


def test_without_an_evaluator_the_remedy_is_named() -> None:
    """No traceback when nothing listens."""
    began = time.monotonic()
    shown = command("status", "--url", "http://127.0.0.1:9")
    assert shown.returncode == 2
    assert "kc-otel serve" in shown.stderr
    assert "Traceback" not in shown.stderr
    assert time.monotonic() - began < 30
