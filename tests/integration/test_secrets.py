"""Webhook secrets and tokens are nowhere but where they were given: not in logs, answers, state, or a crash's dump."""

from __future__ import annotations

import base64
import signal
from pathlib import Path

import httpx
import numpy as np
import pytest
import yaml

import kc_otel
from kc_otel.client.webhooks import Secret
from kc_otel.contract.load import load
from kc_otel.serve.access.access_file import digest_of, new_token
from tests.integration.conftest import SECRET, logprobs


def hidden(secrets: list[bytes], where: bytes) -> bool:
    """Whether none of them is there, nor its base64."""
    return not any(secret in where or base64.b64encode(secret).rstrip(b"=") in where for secret in secrets)


@pytest.mark.slow
def test_no_secret_leaves_the_process(serve, contract_file, tmp_path: Path, monkeypatch):
    """Every path that can be read, the state and the log on disk, evidence, the log, and a dump of all threads."""
    token = new_token()
    entry = {"name": "ops", "may": ["send", "read", "act"], "sha256": digest_of(token)}
    (tmp_path / "access.yaml").write_text(yaml.safe_dump({"tokens": [entry]}))
    authorization = "Basic dXNlcjpodW50ZXIyaHVudGVyMg=="
    evaluator = serve(
        "--access", str(tmp_path / "access.yaml"),
        PYTHONFAULTHANDLER="1", KC_OTEL_WEBHOOK_PAGER_AUTHORIZATION=authorization, KC_OTEL_WEBHOOK_PAGER_URL="http://127.0.0.1:9/",
    )  # fmt: skip
    secrets = [token.encode(), SECRET.encode(), Secret.parse(SECRET).key, authorization.split()[1].encode()]
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://{evaluator.grpc}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", f"authorization=Bearer%20{token}")
    train, inference = logprobs(np.random.default_rng(0), 128, 32, 0.3)
    with kc_otel.Recorder(load(contract_file), sampling=1.0) as recorder:
        recorder.compare(train, inference, attributes={"task": "code"})
    with httpx.Client(base_url=evaluator.api, headers={"authorization": f"Bearer {token}"}, timeout=10) as client:
        client.post("/api/v1/decisions/pin", json={"contract": "policy", "kernel": "bad", "by": "me", "why": token})
        client.get("/", headers={"authorization": "Basic " + base64.b64encode(f"me:{token}".encode()).decode()})
        client.get(f"/no-such-path/{token}")
        read = b""
        for path, methods in client.get("/openapi.json").json()["paths"].items():
            if "get" in methods:
                filled = path.replace("{contract}", "policy").replace("{kernel}", "k").replace("{number}", "1")
                names = {param["name"] for param in methods["get"].get("parameters", ()) if param["in"] == "query"}
                query = {"contract": "policy", "clause": "token-tv", "kernel": "k", "stage": "canary"}
                answer = client.get(filled, params={name: query[name] for name in names & query.keys()})
                read += answer.content + str(answer.headers).encode()
    assert b"token-tv" in read
    assert hidden(secrets, read)
    evaluator.process.send_signal(signal.SIGABRT)
    evaluator._end()
    assert "Fatal Python error: Aborted" in evaluator.log
    assert hidden(secrets, evaluator.log.encode())
    for file in tmp_path.rglob("*"):
        if file.is_file():
            assert hidden(secrets, file.read_bytes()), file
