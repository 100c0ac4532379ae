"""A real evaluator: what `kc-otel doctor` prints beside it, what another site's page gets of it, and its log."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.conftest import Evaluator

pytestmark = pytest.mark.slow


def doctor(*words: str, **environ: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "kc_otel", "doctor", *words],
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(sys.path), **environ},
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def test_it_says_that_nothing_arrives_and_where_to_send(serve: Callable[..., Evaluator], contract_file: Path) -> None:
    """The endpoint that accepts an export is said, and that no other request came."""
    evaluator = serve()
    assert "--external-url" in evaluator.log, "what it sends links to an address that nobody else knows"
    assert "state.sqlite, a new file: no routes, pins, silences or promotions are in force" in evaluator.log
    evaluator.wait("/api/v1/health", lambda health: health["evaluated_at"] is not None)
    evaluator.stop()
    evaluator = serve()
    assert re.search(r"state.sqlite, evaluated last \d+s ago: no order that was given since is in it", evaluator.log)
    evaluator.wait("/api/v1/health", lambda health: health["evaluated_at"] is not None)
    endpoint = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{evaluator.grpc}"}
    code, said = doctor(str(contract_file), "--url", evaluator.api, **endpoint)
    assert code == 1
    accepted = "and an export without metrics was accepted"
    assert f"ok: recorders in this environment send grpc to {evaluator.grpc}, {accepted}" in said
    assert "error: the evaluator had accepted no OTLP request before this check" in said
    code, said = doctor(str(contract_file), "--url", evaluator.api, OTEL_EXPORTER_OTLP_ENDPOINT=evaluator.http)
    assert f"send grpc to {evaluator.http.removeprefix('http://')}, {accepted.replace('was', 'was not')}" in said
    code, text = doctor("--url", evaluator.api, "--json", **endpoint)
    found: dict[str, list[dict[str, Any]]] = json.loads(text)
    assert [finding["level"] for finding in found["This process's environment"]] == ["ok"]
    assert code == 1


def test_it_goes_on_where_no_evaluator_answers() -> None:
    code, said = doctor("--url", "http://127.0.0.1:9", OTEL_SDK_DISABLED="true")
    assert code == 1
    assert "OTEL_SDK_DISABLED=true turns every recorder off" in said
    assert "its API cannot be read" in said


def test_a_page_of_another_site_neither_reads_nor_acts(serve: Callable[..., Evaluator]) -> None:
    """Under its own name by DNS rebinding, or across sites; and what the options allow, goes on."""
    evaluator = serve("--no-webhooks", "--allowed-host", "evaluator")
    with httpx.Client(base_url=evaluator.api, trust_env=False) as client:

        def pinned(**headers: str) -> int:
            pin = {"contract": "policy", "kernel": "train-kernel", "by": "mallory", "why": "because"}
            return client.post("/api/v1/decisions/pin", json=pin, headers=headers).status_code

        def sent(host: str) -> int:
            headers = {"content-type": "application/json", "host": host}
            return client.post(f"{evaluator.http}/v1/metrics", content=b"{}", headers=headers).status_code

        assert client.get("/api/v1/verdicts", headers={"host": "evil.example"}).status_code == 421
        assert pinned(host="evil.example", origin="http://evil.example") == 421
        assert pinned(origin="https://evil.example") == 403
        assert client.get("/api/v1/decisions").json()["pins"] == []
        assert client.get("/metrics", headers={"host": "evaluator:4320"}).status_code == 200
        assert [sent("evil.example"), sent("evaluator")] == [421, 200]
        assert [pinned(origin=evaluator.api), pinned()] == [200, 200]


def test_every_line_of_a_json_log_is_an_object(serve: Callable[..., Evaluator]) -> None:
    """The start, what is announced, and the end: each line says its time, level and message."""
    evaluator = serve("--no-webhooks", "--log-format", "json")
    assert evaluator.stop() == 0
    said = [json.loads(line) for line in evaluator.log.splitlines()]
    assert len(said) > 1
    assert all({"time", "level", "logger", "message"} <= line.keys() for line in said)
