from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from kc_otel.contract.model import Contract
from kc_otel.judge.verdict import Verdict
from tests.tools.contracts import contract_of
from tests.tools.verdicts import verdict_of

LADDER = [
    {"on": "fail", "severity": "warning", "do": ["notify", "sample-more"]},
    {"on": "fail", "for": "2m", "clear_for": "10m", "severity": "critical",
     "do": [{"route": "train-kernel"}, {"webhook": "pager"}]},
    {"on": "no-data", "for": "3m", "do": ["notify", "hold-promotion"]},
]  # fmt: skip


def contract_with(escalation: list[dict[str, Any]] | None = None, **changes: Any) -> Contract:
    parts = {
        "metadata": {"name": "policy-7b", "version": 3, "owner": "rl-infra", "runbook": "https://runbooks/kc"},
        "slices": {"code": {"where": {"task": "code"}}},
        "statistical": [{"id": "token-tv", "metric": "tv_token", "unit": "token", "limit": 0.004}],
        "observability": {"window": "5m"},
        "escalation": LADDER if escalation is None else escalation,
    }
    return contract_of(**parts | changes)


@pytest.fixture(scope="session")
def make_contract() -> Callable[..., Contract]:
    return contract_with


@pytest.fixture(scope="session")
def make_verdict() -> Callable[..., Verdict]:
    return verdict_of


@pytest.fixture
def connection() -> Iterator[sqlite3.Connection]:
    opened = sqlite3.connect(":memory:", isolation_level=None)
    yield opened
    opened.close()


class Receiver:
    """A real HTTP server that remembers requests and answers as told."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, dict[str, str], bytes]] = []
        self.answers: dict[str, list[tuple[int, dict[str, str]]]] = {}
        self.release = threading.Event()
        self.delay = 0.0
        """Seconds before each answer."""
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                length = int(self.headers["content-length"])
                body = self.rfile.read(length)
                if len(body) < length:  # the sender was killed in the middle of it
                    self.close_connection = True
                    return
                headers = {name.lower(): value for name, value in self.headers.items()}
                owner.requests.append((self.path, headers, body))
                if self.path.startswith("/hang"):
                    owner.release.wait(30)
                time.sleep(owner.delay)
                waiting = owner.answers.get(self.path, [])
                status, extra = waiting.pop(0) if waiting else (204, {})
                self.send_response(status)
                for name, value in {"content-length": "0", **extra}.items():
                    self.send_header(name, value)
                self.end_headers()

            def log_message(self, *args: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *args: Any) -> None:  # a client that hung up is no news
                pass

        self.server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.release.set()
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    server = Receiver()
    yield server
    server.close()
