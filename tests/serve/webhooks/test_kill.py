from __future__ import annotations

import json
import random
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kc_otel.client.signing import new_secret, verify

WORKER = Path(__file__).with_name("outbox_worker.py")
MESSAGES = 150
KILLS = 8


@pytest.mark.slow
def test_no_message_is_lost_or_reordered_when_the_process_is_killed(tmp_path, receiver):
    """Whenever the process is killed, every message arrives, in order per contract, under one id."""
    rng = random.Random(20)
    secret, database = new_secret(), tmp_path / "kc.db"
    receiver.answers["/pager"] = [(rng.choice([204, 204, 204, 500, 503]), {}) for _ in range(2 * MESSAGES)]
    command = [sys.executable, str(WORKER), str(database), f"{receiver.url}/pager", secret, str(MESSAGES)]
    kills = 0
    while True:
        seen = len(receiver.requests)
        process = subprocess.Popen(command)
        if kills == KILLS:
            assert process.wait(timeout=60) == 0
            break
        deadline = time.monotonic() + 30
        while len(receiver.requests) == seen and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(rng.uniform(0.0, 0.04))
        process.send_signal(signal.SIGKILL)
        assert process.wait(timeout=10) == -signal.SIGKILL, "it finished before it could be killed: send more messages"
        kills += 1

    order, ids = {}, {}
    for _, headers, body in receiver.requests:
        message = verify(secret, headers, body)
        key = (message["contract"], message["n"])
        ids.setdefault(key, set()).add(headers["webhook-id"])
        if key not in order.setdefault(message["contract"], []):
            order[message["contract"]].append(key)
    for contract, arrived in order.items():
        assert arrived == [(contract, number) for number in range(MESSAGES)]
    assert len(order) == 2
    assert all(len(known) == 1 for known in ids.values())
    connection = sqlite3.connect(database)
    stored = {json.dumps([m["contract"], m["n"]]): id for id, m in _stored(connection)}
    connection.close()
    assert {json.dumps(list(key)): known.pop() for key, known in ids.items()} == stored


def _stored(connection):
    return [(id, json.loads(body)) for id, body in connection.execute("SELECT id, body FROM outbox")]
