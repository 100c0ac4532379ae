"""What tests of a served engine share: clients, a look at the spool from outside, the rescorer as a process."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import httpx

from examples.tiny_model import prompts
from examples.vllm_server.server import NAME
from tests.tools.waiting import eventually


def send(address, slice_, count, *, tokens=16, **options):
    """So many completions of a slice, some at a time; the names under which the clients know those that came back."""

    def ask(number):
        body = {"model": NAME, "prompt": texts[number], "max_tokens": tokens, "ignore_eos": True, **options}
        try:
            answer = client.post("/v1/completions", json={**body, "vllm_xargs": {"task": slice_}})
        except httpx.TransportError:  # the server was killed
            return None
        answer.raise_for_status()
        return answer.json()["id"]

    texts = prompts(slice_, count, characters=60)
    with httpx.Client(base_url=address, timeout=120.0) as client, ThreadPoolExecutor(8) as clients:
        return [name for name in clients.map(ask, range(count)) if name is not None]


def kept(spool):
    """The engine's names of the requests in a spool, as any other process sees them."""
    with closing(sqlite3.connect(f"file:{spool}?mode=ro", uri=True, timeout=10.0)) as connection:
        return [name for (name,) in connection.execute("SELECT request_id FROM requests ORDER BY id")]


def wait_for(true, seconds, what):
    eventually(true, seconds, 0.02, lambda: f"not within {seconds} s: {what}")


def rescoring(spool, contract, otlp, *options):
    """`kc-otel rescore` as a process of its own."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OTEL_", "KC_OTEL_"))}
    return subprocess.Popen(
        [*(sys.executable, "-m", "kc_otel", "rescore", str(spool)), *("--contract", str(contract), *map(str, options))],
        env=environment | {"OTEL_EXPORTER_OTLP_ENDPOINT": otlp, "OTEL_TRACES_EXPORTER": "none"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
