"""The evaluator as a process of its own, and the receiver of its webhooks."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx

from kc_otel.client.webhooks import VerificationError, verify

_START_SECONDS = 120.0
"""A process that lives is waited for: beside other work it starts slowly."""


class Evaluator:
    """What its API says.

    Args:
        command: The command line it was started with.
        otlp: Where it takes OTLP over gRPC.
        api: Base URL of its API.
    """

    def __init__(self, command: list[str], otlp: str, api: str) -> None:
        self.command, self.otlp, self.api = command, otlp, api
        self._client = httpx.Client(base_url=api, timeout=10.0, trust_env=False)
        self._seen = 0

    def ready(self) -> bool:
        """Whether it has evaluated."""
        try:
            return self._client.get("/readyz").is_success
        except httpx.TransportError:
            return False

    def verdicts(self) -> list[dict[str, Any]]:
        """The newest verdict of every cell."""
        return self._get("/api/v1/verdicts")["verdicts"]

    def events(self) -> list[dict[str, Any]]:
        """What happened since the last call."""
        newest = self._get("/api/v1/events", newest=1000)["events"]
        events = [event for event in newest if event["id"] > self._seen]
        self._seen = max((event["id"] for event in events), default=self._seen)
        return events

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _get(self, path: str, **parameters: Any) -> Any:
        return self._client.get(path, params=parameters).raise_for_status().json()


@contextmanager
def evaluating(contract: Path, folder: Path, webhook: str, secret: str) -> Iterator[Evaluator]:
    """`kc-otel serve` on free ports of this machine, until the block ends.

    Args:
        contract: What it judges.
        folder: Takes its state and its log.
        webhook: URL of the endpoint `pager`.
        secret: What its webhooks are signed with.

    Raises:
        RuntimeError: If it does not come up; the message ends with its log.
    """
    grpc, http, api = free_ports(3)
    scripts = Path(sysconfig.get_path("scripts"))
    command = ["kc-otel", "serve", str(contract), "--state", str(folder / "state.sqlite")]
    command += ["--group-wait", "1s", "--group-interval", "5s"]  # a story of three minutes
    command += ["--grpc-port", str(grpc), "--http-port", str(http), "--api-port", str(api)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    environment |= {
        "KC_OTEL_WEBHOOK_PAGER_URL": webhook,
        "KC_OTEL_WEBHOOK_PAGER_SECRET": secret,
        "KC_OTEL_WEBHOOK_PAGER_ALLOW_PRIVATE": "1",
    }
    environment |= {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    log = folder / "evaluator.log"
    with log.open("wb") as output:
        process = subprocess.Popen(  # noqa: S603 - our own command
            [sys.executable, str(scripts / command[0]), *command[1:]],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    evaluator = Evaluator(command, f"http://127.0.0.1:{grpc}", f"http://127.0.0.1:{api}")
    try:
        deadline = time.monotonic() + _START_SECONDS
        while not evaluator.ready():
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the evaluator did not start:\n{log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.1)
        yield evaluator
    finally:
        evaluator.close()
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def receiving(secret: str, handle: Callable[[dict[str, Any]], None]) -> Iterator[str]:
    """A webhook receiver on a free port of this machine; yields its URL.

    Args:
        secret: What webhooks have to be signed with.
        handle: Called with each verified body, on a thread of the receiver.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            raw = self.rfile.read(int(self.headers["content-length"]))
            try:
                body = verify(secret, dict(self.headers), raw)
            except VerificationError as error:
                self.send_error(401, str(error))
                return
            handle(body)
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/pager"
    finally:
        server.shutdown()
        server.server_close()


def free_ports(count: int) -> list[int]:
    """Ports that nothing listens on at this moment, all different."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [sock.getsockname()[1] for sock in sockets]
    for sock in sockets:
        sock.close()
    return ports
