from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")


from examples.demo.evaluator import receiving
from kc_otel.client.webhooks import Secret, new_secret, sign

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


def test_receiver_takes_only_what_is_signed():
    secret, heard = new_secret(), []
    body = json.dumps({"status": "firing"}).encode()
    with receiving(secret, heard.append) as url:
        host, port = re.fullmatch(r"http://(.+):(\d+)/pager", url).groups()

        def post(headers):
            connection = http.client.HTTPConnection(host, int(port), timeout=5)
            connection.request("POST", "/pager", body, headers)
            response = connection.getresponse()
            response.read()
            connection.close()
            return response.status

        signed = sign([Secret.parse(secret)], "msg_1", body, now=time.time())
        assert post(signed) == 204
        assert post({**signed, "webhook-id": "msg_2"}) == 401
    assert heard == [{"status": "firing"}]
    with pytest.raises(ConnectionRefusedError):
        http.client.HTTPConnection(host, int(port), timeout=5).connect()


def _demo(weights, *arguments):
    ours = ("OTEL_", "KC_OTEL_", "COV")
    return subprocess.Popen(
        [sys.executable, "-u", "-m", "examples.demo", "--quick", "--weights", str(weights), *arguments],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if not name.startswith(ours)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


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
        "route: tables are served by the training kernel",
        "webhook, signature verified: resolved",
        "recovered",
    )
    passes, fails, fires, routed, resolved, recovered = (told_again.index(moment) for moment in moments)
    assert passes < fails < fires < resolved < recovered, told_again
    assert fails < routed < resolved, told_again  # at once, while the message waits for what belongs to it
    assert "on all (int8) is FAIL" not in told_again[: min(fires, routed)]
    assert "Traceback" not in told
    ports = re.findall(r"-port (\d+)", told)
    assert len(ports) == 3
    for port in ports:
        with pytest.raises(ConnectionRefusedError):
            http.client.HTTPConnection("127.0.0.1", int(port), timeout=5).connect()


@pytest.mark.slow
def test_demo_without_the_fault_is_quiet(demo_weights):
    with _demo(demo_weights, "--no-fault") as process:
        told = process.stdout.read()
    assert process.returncode == 0, told
    assert "no alert fired" in told
    assert "alert fires" not in told
    assert "webhook, signature" not in told
