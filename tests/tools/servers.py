"""Servers for tests: programs that are waited for, and HTTP sinks in a thread."""

from __future__ import annotations

import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx

_START_SECONDS = 300.0
"""A process that lives is waited for: on a machine with other work it starts slowly. One that ended is not."""


@contextmanager
def sink(handle: Callable[[bytes, Mapping[str, str]], int]) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            self.send_response(handle(body, dict(self.headers)))
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Stay quiet."""

    with _served(Handler) as address:
        yield f"http://{address}"


@contextmanager
def _served(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as http:
        thread = threading.Thread(target=http.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"127.0.0.1:{http.server_port}"
        finally:
            http.shutdown()
            thread.join()


def free_address() -> str:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{sock.getsockname()[1]}"


@contextmanager
def running(command: Sequence[object], log: Path, ready: str, answers: int = 200) -> Iterator[subprocess.Popen]:
    with log.open("w") as out, subprocess.Popen([*map(str, command)], stdout=out, stderr=out) as process:
        try:
            end = time.monotonic() + _START_SECONDS
            while True:
                try:
                    if httpx.get(ready, trust_env=False).status_code == answers:
                        break
                except httpx.TransportError:
                    pass
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < end, log.read_text()
                time.sleep(0.1)
            yield process
        finally:
            process.terminate()
