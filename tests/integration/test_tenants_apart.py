"""Two teams on one evaluator, each with tokens of its own: recorder, router and commands against real ports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import httpx
import numpy as np
import pytest
import yaml

import kc_otel
from kc_otel.client.router import Router
from kc_otel.contract import load
from tests.integration.conftest import CONTRACT, Evaluator, logprobs


def command(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """`kc-otel` as a person starts it."""
    return subprocess.run(
        [sys.executable, "-m", "kc_otel", *words], env=os.environ | environ, capture_output=True, text=True, check=False
    )


@pytest.fixture
def teams(tmp_path: Path):
    """An evaluator with a contract of each of two teams, and the files of their tokens."""
    contracts = tmp_path / "contracts"
    contracts.mkdir()
    for name in ("alpha", "beta"):
        (contracts / f"{name}.yaml").write_text(CONTRACT.replace("{name: policy", f"{{name: {name}"))
    tokens, files = [], {}
    for name, may in (("sender", ("send",)), ("person", ("read", "act"))):
        for team in ("alpha", "beta"):
            files[team, name] = tmp_path / f"{team}-{name}.token"
            words = [word for role in may for word in ("--may", role)]
            done = command("token", name, "--tenant", team, *words, "--out", str(files[team, name]))
            assert done.returncode == 0, done.stderr
            tokens += yaml.safe_load(done.stdout)
    access = tmp_path / "access.yaml"
    access.write_text(yaml.safe_dump({"tenants": {"alpha": ["alpha"], "beta": ["beta"]}, "tokens": tokens}))
    evaluator = Evaluator(
        contracts, tmp_path / "state.sqlite", {}, "--no-webhooks", "--access", str(access), "--host", "127.0.0.1"
    )
    yield evaluator, files, access, contracts
    if evaluator.process.poll() is None:
        evaluator.stop()
    for file in files.values():
        assert file.read_text().strip() not in evaluator.log


def _bearer(file: Path) -> str:
    return f"Bearer {file.read_text().strip()}"


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_each_team_sends_reads_and_acts_on_its_own(teams, monkeypatch, protocol):
    """Recorder, router and commands all take a token; the other team's contract stays as it was."""
    evaluator, files, _, contracts = teams
    for name, value in {
        "OTEL_EXPORTER_OTLP_PROTOCOL": protocol,
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{evaluator.grpc}" if protocol == "grpc" else evaluator.http,
        "OTEL_EXPORTER_OTLP_HEADERS": f"authorization={_bearer(files['alpha', 'sender']).replace(' ', '%20')}",
        "OTEL_METRIC_EXPORT_INTERVAL": "200",
    }.items():
        monkeypatch.setenv(name, value)
    train, inference = logprobs(np.random.default_rng(0), 128, 32, 0.3)
    for name in ("alpha", "beta"):  # alpha's token sends beta's measurements too
        with kc_otel.Recorder(load(contracts / f"{name}.yaml"), sampling=1.0) as recorder:
            recorder.compare(train, inference, attributes={"task": "code"})
    me = {"KC_OTEL_URL": evaluator.api, "KC_OTEL_TOKEN_FILE": str(files["alpha", "person"])}
    they = me | {"KC_OTEL_TOKEN_FILE": str(files["beta", "person"])}
    found = {}
    for _ in range(100):
        found = {
            team: json.loads(command("alerts", "--json", **env).stdout)["alerts"]
            for team, env in (("me", me), ("they", they))
        }
        if any(one["on"] == "fail" for one in found["me"]):
            break
        time.sleep(0.1)
    assert {one["contract"] for one in found["me"]} == {"alpha"}
    assert "fail" in {one["on"] for one in found["me"]}
    assert {one["on"] for one in found["they"]} <= {"no-data"}
    assert command("pin", "beta", "train-kernel", "--why", "because", **me).returncode != 0
    assert command("pin", "alpha", "train-kernel", "--why", "because", "--by", "eve", **me).returncode == 0
    assert "person (as eve) pinned" in command("events", **me).stdout
    assert "alpha" not in command("events", **they).stdout
    with Router(evaluator.api, token_file=files["alpha", "person"], wait=0.2, refresh=0.1) as mine:
        assert mine.wait_for_table(10)
        assert mine.choose("alpha", "all") == "train-kernel"
    with Router(evaluator.api, token_file=files["beta", "person"], wait=0.2, refresh=0.1) as theirs:
        assert theirs.wait_for_table(10)
        assert theirs.choose("alpha", "all") == "inference-kernel"


@pytest.mark.slow
def test_without_a_token_there_is_nothing_to_be_had(teams):
    """Neither on the API, nor over OTLP; the command says what to give, and a token that ends is out within a tick."""
    evaluator, files, access, _ = teams
    assert httpx.get(f"{evaluator.api}/metrics").status_code == 401
    assert httpx.get(f"{evaluator.api}/healthz").status_code == 200
    empty = {"content": b"", "headers": {"content-type": "application/x-protobuf"}}
    assert httpx.post(f"{evaluator.http}/v1/metrics", **empty).status_code == 401
    done = command("status", "--url", evaluator.api)
    assert done.returncode == 2
    assert "KC_OTEL_TOKEN" in done.stderr
    person = {"authorization": _bearer(files["alpha", "person"])}
    assert httpx.get(f"{evaluator.api}/api/v1/contracts", headers=person).status_code == 200
    document = yaml.safe_load(access.read_text())
    document["tokens"] = [one for one in document["tokens"] if one["name"] != "person"]
    access.write_text(yaml.safe_dump(document))
    end = time.monotonic() + 10
    while httpx.get(f"{evaluator.api}/api/v1/contracts", headers=person).status_code != 401:
        assert time.monotonic() < end
        time.sleep(0.1)
