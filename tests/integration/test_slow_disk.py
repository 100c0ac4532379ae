"""A disk under the log that takes its time holds nobody up but those whose requests wait for it."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import grpc
import httpx
import pytest

from tests.benchmarks.bench_overload import message
from tests.integration.conftest import CONTRACT, Evaluator

SYNC = 3.0
"""Seconds that the disk takes."""
QUICK = 2.0
"""Seconds in which a port answers, on a machine that has much else to do."""


class SlowDisk(Evaluator):
    """An evaluator whose log lies on such a disk."""

    command = (
        sys.executable,
        "-c",
        (
            f"import os, time; sync = os.fdatasync; os.fdatasync = lambda file: (time.sleep({SYNC}), sync(file))\n"
            "from kc_otel.__main__ import main; main()"
        ),
    )


@pytest.mark.slow
def test_every_port_answers_while_the_disk_takes_its_time(tmp_path: Path) -> None:
    """Health, the API and both ports for telemetry; the export waits for the disk, and is acknowledged after it."""
    (tmp_path / "policy.yaml").write_text(CONTRACT)
    evaluator = SlowDisk(tmp_path / "policy.yaml", tmp_path / "state.sqlite", {}, "--no-webhooks")
    took: list[float] = []

    def export() -> None:
        began = time.monotonic()
        body = message(["b"], time.time_ns() - 10**9, 1000)
        headers = {"content-type": "application/x-protobuf"}
        answer = httpx.post(f"{evaluator.http}/v1/metrics", content=body, headers=headers, timeout=60)
        assert answer.status_code == 200
        took.append(time.monotonic() - began)

    def grpc_answers() -> None:
        with grpc.insecure_channel(evaluator.grpc) as channel, pytest.raises(grpc.RpcError) as refused:
            channel.unary_unary("/no/Such")(b"", timeout=10)
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED

    try:
        httpx.get(f"{evaluator.api}/api/v1/health", timeout=20)  # what is imported at the first request is there
        sending = threading.Thread(target=export)
        sending.start()
        slowest, asked = 0.0, 0
        while sending.is_alive():
            for ask in (
                lambda: httpx.get(f"{evaluator.api}/healthz").raise_for_status(),
                lambda: httpx.get(f"{evaluator.api}/api/v1/cells").raise_for_status(),
                lambda: httpx.get(f"{evaluator.http}/v1/metrics"),
                grpc_answers,
            ):
                began = time.monotonic()
                ask()
                slowest, asked = max(slowest, time.monotonic() - began), asked + 1
        sending.join()
    finally:
        evaluator.stop()
    assert took[0] >= SYNC
    assert asked >= 4
    assert slowest < QUICK
