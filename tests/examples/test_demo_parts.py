from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

pytest.importorskip("torch")

from examples.demo.__main__ import what_next
from examples.demo.evaluator import receiving
from examples.demo.terminal import Terminal
from kc_otel.client.webhooks import Secret, new_secret, sign

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


def test_receiver_takes_only_what_is_signed():
    secret, heard = new_secret(), []
    body = json.dumps({"status": "firing"}).encode()
    with receiving(secret, heard.append) as url:
        signed = sign([Secret.parse(secret)], "msg_1", body, now=time.time())
        assert httpx.post(url, content=body, headers=signed).status_code == 204
        assert httpx.post(url, content=body, headers={**signed, "webhook-id": "msg_2"}).status_code == 401
    assert heard == [{"status": "firing"}]
    with pytest.raises(httpx.ConnectError):
        httpx.get(url)


def _demo(weights, *arguments):
    command = [sys.executable, "-u", "-m", "examples.demo", "--quick", "--weights", str(weights), *arguments]
    env = {name: value for name, value in os.environ.items() if not name.startswith(("OTEL_", "KC_OTEL_", "COV"))}
    out = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=out, stderr=subprocess.STDOUT, text=True)


@pytest.mark.slow
def test_demo_tells_the_whole_story_and_leaves_nothing_behind(demo_weights):
    with _demo(demo_weights, "--stay") as process:
        told = ""
        for line in process.stdout:
            told += line
            if "What to do next" in told and "tokens/s" in line:  # it serves again
                process.send_signal(signal.SIGINT)
                break
        told += process.stdout.read()
    assert process.returncode == 0, told
    told_again = told[told.index("What happened") : told.index("What to do next")]
    moments = (
        "every cell of the contract passes",
        "on tables (int8) is FAIL",
        "webhook, signature verified: firing",
        "route: tables are to be served by the training kernel",
        "webhook, signature verified: resolved",
        "int8 is contained, not repaired",
    )
    passes, fails, fires, routed, resolved, recovered = (told_again.index(moment) for moment in moments)
    assert passes < fails < fires < resolved < recovered, told_again
    assert fails < routed < resolved, told_again  # at once, while the message waits for what belongs to it
    assert "on all (int8) is FAIL" not in told_again[: min(fires, routed)]
    assert "Traceback" not in told
    ports = re.findall(r"-port (\d+)", told)
    assert len(ports) == 3
    for port in ports:
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"http://127.0.0.1:{port}")


def test_it_says_where_the_command_that_it_names_is_installed(monkeypatch, capsys):
    monkeypatch.setenv("PATH", "")
    what_next(Terminal(), "http://127.0.0.1:1", fault=True, stay=False)
    assert f'PATH="{Path(sys.executable).parent}:$PATH"' in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.long
def test_demo_without_the_fault_is_quiet(demo_weights):
    with _demo(demo_weights, "--no-fault") as process:
        told = process.stdout.read()
    assert process.returncode == 0, told
    assert "no alert fired" in told
    assert "alert fires" not in told
    assert "webhook, signature" not in told
