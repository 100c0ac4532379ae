"""A disk that takes its time holds nobody up but those whose requests wait for it."""

import threading
import time
from pathlib import Path

import grpc
import httpx
import pytest

from tests.integration.conftest import CONTRACT, Evaluator
from tests.tools.load import HEADERS, message
from tests.tools.slow_disk import slow_disk

SYNC = 3.0
"""Seconds that the disk takes for each sync. An evaluation waits for the commit before it, and for its own."""
WAIT_SECONDS = 60.0
"""Seconds in which an evaluation ends: it waits for several syncs where the write-ahead log is checkpointed."""
QUICK = 2.0
"""Seconds in which a port answers, on a machine that has much else to do."""
SILENCE = {"contract": "policy", "clause": "token-tv", "slice": "code", "by": "ann", "why": "known"}


@pytest.mark.slow
def test_every_port_answers_while_the_disk_takes_its_time(tmp_path: Path) -> None:
    """Also while it is evaluated; an export and a person's order wait for the disk, and are acknowledged after it."""
    (tmp_path / "policy.yaml").write_text(CONTRACT)
    slow = tmp_path / "slow"
    environ = slow_disk(tmp_path, KC_SLOW=str(slow), KC_SLOW_SECONDS=str(SYNC))
    evaluator = Evaluator(tmp_path / "policy.yaml", tmp_path / "state.sqlite", environ, "--no-webhooks")
    client, took = httpx.Client(), dict[str, float]()

    def export() -> None:
        began = time.monotonic()
        body = message(["b"], time.time_ns() - 10**9, 1000)
        httpx.post(f"{evaluator.http}/v1/metrics", content=body, headers=HEADERS, timeout=60).raise_for_status()
        took["export"] = time.monotonic() - began

    def order() -> None:
        began = time.monotonic()
        said = SILENCE | {"until": time.time() + 3600}
        httpx.post(f"{evaluator.api}/api/v1/silences", json=said, timeout=60).raise_for_status()
        took["order"] = time.monotonic() - began

    def grpc_answers() -> None:
        with grpc.insecure_channel(evaluator.grpc) as channel, pytest.raises(grpc.RpcError) as refused:
            channel.unary_unary("/no/Such")(b"", timeout=10)
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED

    def evaluated() -> float:
        return float(client.get(f"{evaluator.api}/api/v1/health", timeout=20).json()["evaluated_at"])

    try:
        evaluator.wait("/api/v1/health", lambda health: health["evaluated_at"] is not None)
        first = evaluated()  # what is imported at the first request is there
        slow.touch()
        sending = [threading.Thread(target=export), threading.Thread(target=order)]
        for thread in sending:
            thread.start()
        slowest, asked, end = 0.0, 0, time.monotonic() + 4 * SYNC
        while any(thread.is_alive() for thread in sending) or time.monotonic() < end or evaluated() <= first + SYNC:
            for ask in (
                lambda: client.get(f"{evaluator.api}/healthz").raise_for_status(),
                lambda: client.get(f"{evaluator.api}/api/v1/verdicts").raise_for_status(),
                lambda: client.get(f"{evaluator.http}/v1/metrics"),
                grpc_answers,
            ):
                began = time.monotonic()
                ask()
                slowest, asked = max(slowest, time.monotonic() - began), asked + 1
            assert time.monotonic() < end + WAIT_SECONDS
        for thread in sending:
            thread.join()
    finally:
        slow.unlink(missing_ok=True)
        client.close()
        evaluator.stop()
    assert took["export"] >= SYNC
    assert took["order"] >= SYNC
    assert asked >= 100
    assert slowest < QUICK
