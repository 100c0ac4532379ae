"""What `kc-otel serve --record` kept, judged again: the same decisions, and others under another contract."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter

import kc_otel

from .conftest import CONTRACT, Evaluator, Pager, logprobs

pytestmark = pytest.mark.slow


def replayed(*arguments: object) -> Any:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "kc_otel", "replay", *map(str, arguments), "--json"),
            *("--group-wait", "0s", "--group-interval", "0s"),  # as the evaluator that it is compared with
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in {0, 1}, done.stderr
    assert done.stderr == ""
    return json.loads(done.stdout)


def test_a_replay_of_the_same_contract_decides_what_the_evaluator_decided(
    serve: Callable[..., Evaluator], pager: Pager, contract_file: Path, tmp_path: Path
) -> None:
    """Every alert at the same instant; a tighter one earlier, a patient one later."""
    recording = tmp_path / "state.sqlite-log"
    evaluator = serve("--record")
    rng = np.random.default_rng(0)

    def recording_to(address: str) -> kc_otel.Recorder:
        return kc_otel.Recorder(
            contract_file,
            train=kc_otel.Kernel("torch", dtype="float32"),
            inference=kc_otel.Kernel("vllm", dtype="int8"),
            metric_exporter=OTLPMetricExporter(endpoint=address, insecure=True, timeout=2),
            export_interval=0.25,
            sampling=1.0,
        )

    def send(sigma: float, until: Callable[[], bool], seconds: float = 30.0) -> None:
        end = time.monotonic() + seconds
        while not until():
            assert time.monotonic() < end, evaluator.get("/api/v1/verdicts")
            for task in ("code", "prose"):
                recorder.compare(*logprobs(rng, 16, 64, sigma), attributes={"task": task})
            recorder.force_flush()
            time.sleep(0.2)

    def statuses() -> set[str]:
        return {verdict["status"] for verdict in evaluator.get("/api/v1/verdicts")["verdicts"]}

    with recording_to(evaluator.grpc) as recorder:
        send(0.005, lambda: statuses() == {"PASS"})
    # Silence comes first: later on all is routed away, and what nobody may reach has a reason to be silent.
    evaluator.wait(
        "/api/v1/alerts", lambda answer: {("no-data", "firing")} == {(a["on"], a["phase"]) for a in answer["alerts"]}
    )
    with recording_to(evaluator.grpc) as recorder:
        send(0.005, lambda: statuses() == {"PASS"})
        healthy = time.monotonic() + 2.0  # in which a tighter limit has time to be broken
        send(0.005, lambda: time.monotonic() > healthy)
        send(0.2, lambda: bool(pager.bodies))
        broken = time.monotonic() + 3.0  # in which a more patient contract fires, too
        send(0.2, lambda: time.monotonic() > broken)
        send(0.005, lambda: any(body["status"] == "resolved" for body in pager.bodies))
    events = evaluator.get("/api/v1/events", limit=1000)["events"]
    said = dict(
        line.rsplit(" ", 1) for line in httpx.get(f"{evaluator.api}/metrics").text.splitlines() if line[0] != "#"
    )
    for name in (
        "log_size_bytes",
        "tick_duration_seconds",
        "sync_duration_seconds",
        "disk_free_bytes",
        "last_evaluation_seconds",
    ):
        assert float(said[f"kc_evaluator_{name}"]) > 0.0, "it observes itself also where it records"
    assert "kc_evaluator_log_lag_bytes" in said
    evaluator.stop()

    happened = sorted(
        (event["at"], event["kind"], event["data"]["clause"], event["data"]["slice"])
        for event in events
        if event["kind"] in {"firing", "resolved"}
    )
    found = replayed(recording, "--contract", contract_file, "--against", contract_file)
    alerts = found["new"]["alerts"]
    edges = [(one["start"], "firing", one["clause"], one["slice"]) for one in alerts]
    edges += [(one["end"], "resolved", one["clause"], one["slice"]) for one in alerts if one["end"] is not None]
    known = {edge for edge in edges if edge[0] <= happened[-1][0]}
    assert known == set(happened)
    assert {one["on"] for one in alerts} == {"fail", "no-data"}
    # A slice that breaks or recovers after the first is an update of what fires still.
    assert len([one for one in found["new"]["messages"] if one["reason"] != "resolved"]) == len(
        [body for body in pager.bodies if body["status"] == "firing"]
    )

    for change, sign in (("limit: 0.0005", -1), ("for: 2s, clear_for: 1s", 1)):
        before = "limit: 0.02" if sign < 0 else "for: 1s, clear_for: 1s"
        changed = tmp_path / "changed.yaml"
        changed.write_text(CONTRACT.replace(before, change))
        moved = replayed(recording, "--contract", changed, "--against", contract_file)["changed"]["alerts_moved"]
        shifts = [one["later"] for one in moved if one["new"]["on"] == "fail"]
        assert shifts
        assert all(shift * sign > 0 for shift in shifts if shift)
        assert any(shifts)
