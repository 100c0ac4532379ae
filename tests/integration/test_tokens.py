"""Tokens with real ports: recorder, router and commands take one, and no secret leaves the process."""

import base64
import json
import signal
from collections.abc import Callable
from pathlib import Path

import httpx
import numpy as np
import pytest
import yaml

import kc_otel
from kc_otel.client.router import Router
from kc_otel.client.webhooks import Secret
from kc_otel.contract.load import load
from tests.integration.conftest import SECRET, Evaluator, command, logprobs
from tests.tools.access import access_of, token_of
from tests.tools.waiting import eventually

pytestmark = pytest.mark.slow


@pytest.fixture
def guarded(serve: Callable[..., Evaluator], tmp_path: Path):
    """An evaluator that asks for tokens, the files of its tokens, and the file that lets them in."""
    tokens, files = [], {}
    for name, may in (("sender", ("send",)), ("person", ("read", "act"))):
        files[name] = tmp_path / f"{name}.token"
        words = [word for role in may for word in ("--may", role)]
        done = command("token", name, *words, "--out", str(files[name]))
        assert done.returncode == 0, done.stderr
        tokens += yaml.safe_load(done.stdout)
    access = tmp_path / "access.yaml"
    access.write_text(yaml.safe_dump({"tokens": tokens}))
    evaluator = serve("--no-webhooks", "--access", str(access))
    yield evaluator, files, access
    for file in files.values():
        assert file.read_text().strip() not in evaluator.log


def _bearer(file: Path) -> str:
    return f"Bearer {file.read_text().strip()}"


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_a_token_sends_reads_and_acts(guarded, contract_file, monkeypatch, protocol):
    """Recorder, router and commands all take one, and events say whose it was."""
    evaluator, files, _ = guarded
    for name, value in {
        "OTEL_EXPORTER_OTLP_PROTOCOL": protocol,
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{evaluator.grpc}" if protocol == "grpc" else evaluator.http,
        "OTEL_EXPORTER_OTLP_HEADERS": f"authorization={_bearer(files['sender']).replace(' ', '%20')}",
        "OTEL_METRIC_EXPORT_INTERVAL": "200",
    }.items():
        monkeypatch.setenv(name, value)
    train, inference = logprobs(np.random.default_rng(0), 128, 32, 0.3)
    with kc_otel.Recorder(load(contract_file), sampling=1.0) as recorder:
        recorder.compare(train, inference, attributes={"task": "code"})
    me = {"KC_OTEL_URL": evaluator.api, "KC_OTEL_TOKEN_FILE": str(files["person"])}

    def fails() -> bool:
        alerts = json.loads(command("alerts", "list", "--json", **me).stdout)["alerts"]
        return any(alert["on"] == "fail" for alert in alerts)

    eventually(fails, 60.0, 0.1, lambda: evaluator.log)
    assert command("route", "pin", "policy", "train-kernel", "--why", "because", "--by", "eve", **me).returncode == 0
    assert "person (as eve) pinned" in command("events", **me).stdout
    with Router(evaluator.api, token_file=files["person"], wait=0.2, refresh=0.1) as router:
        assert router.wait_for_table(10)
        assert router.choose("policy", "all") == "train-kernel"


def test_without_a_token_there_is_nothing_to_be_had(guarded):
    """Neither on the API, nor over OTLP; the command says what to give, and a token that ends is out within a tick."""
    evaluator, files, access = guarded
    assert httpx.get(f"{evaluator.api}/metrics").status_code == 401
    assert httpx.get(f"{evaluator.api}/healthz").status_code == 200
    empty = {"content": b"", "headers": {"content-type": "application/x-protobuf"}}
    assert httpx.post(f"{evaluator.http}/v1/metrics", **empty).status_code == 401
    done = command("status", "--url", evaluator.api)
    assert done.returncode == 2
    assert "KC_OTEL_TOKEN" in done.stderr
    person = {"authorization": _bearer(files["person"])}
    assert httpx.get(f"{evaluator.api}/api/v1/contracts", headers=person).status_code == 200
    document = yaml.safe_load(access.read_text())
    document["tokens"] = [token for token in document["tokens"] if token["name"] != "person"]
    access.write_text(yaml.safe_dump(document))
    eventually(lambda: httpx.get(f"{evaluator.api}/api/v1/contracts", headers=person).status_code == 401, 10.0, 0.1)


def hidden(secrets: list[bytes], where: bytes) -> bool:
    return not any(secret in where or base64.b64encode(secret).rstrip(b"=") in where for secret in secrets)


def test_no_secret_leaves_the_process(serve, contract_file, tmp_path: Path, monkeypatch):
    """Every path that can be read, the state and the log on disk, evidence, the log, and a dump of all threads."""
    access_of(tmp_path, ops="send read act")
    token = token_of("ops")
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
