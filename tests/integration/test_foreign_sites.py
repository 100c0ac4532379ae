"""A page in an operator's browser, and an evaluator on the same machine's loopback."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.integration.conftest import CONTRACT, Evaluator

PIN = {"contract": "policy", "kernel": "train-kernel", "by": "mallory", "why": "because"}


@pytest.mark.slow
def test_a_page_of_another_site_neither_reads_nor_acts(tmp_path: Path) -> None:
    """Under its own name by DNS rebinding, or across sites; and what the options allow, goes on."""
    (tmp_path / "policy.yaml").write_text(CONTRACT)
    evaluator = Evaluator(
        tmp_path / "policy.yaml", tmp_path / "state.sqlite", {}, "--no-webhooks", "--allowed-host", "evaluator",
    )  # fmt: skip
    try:
        with httpx.Client(base_url=evaluator.api, trust_env=False) as client:

            def pinned(**headers: str) -> int:
                return client.post("/api/v1/decisions/pin", json=PIN, headers=headers).status_code

            assert client.get("/api/v1/verdicts", headers={"host": "evil.example"}).status_code == 421
            assert pinned(host="evil.example", origin="http://evil.example") == 421
            assert pinned(origin="https://evil.example") == 403
            assert client.get("/api/v1/decisions").json()["pins"] == []
            assert client.get("/metrics", headers={"host": "evaluator:4320"}).status_code == 200
            otlp = f"{evaluator.http}/v1/metrics"
            sent = {"content": b"{}", "headers": {"content-type": "application/json", "host": "evil.example"}}
            assert client.post(otlp, **sent).status_code == 421
            assert client.post(otlp, **sent | {"headers": sent["headers"] | {"host": "evaluator"}}).status_code == 200
            assert pinned(origin=evaluator.api) == 200
            assert pinned() == 200
    finally:
        evaluator.stop()
