"""Servers for tests: programs that are waited for, and HTTP sinks in a thread."""

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


Answer = tuple[int, Mapping[str, str], bytes]


@contextmanager
def answering(respond: Callable[[str, Mapping[str, str], bytes], Answer]) -> Iterator[str]:
    """URL of a server whose answer to a request is made of its path, headers (lower case) and body."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1  # headers and body in one packet: in two, the second waits for an acknowledgement

        def do_GET(self) -> None:
            length = int(self.headers.get("content-length") or 0)
            body = self.rfile.read(length)
            if len(body) < length:  # the sender was killed in the middle of it
                self.close_connection = True
                return
            status, headers, content = respond(self.path, {k.lower(): v for k, v in self.headers.items()}, body)
            self.send_response(status)
            for name, value in {"content-length": str(len(content)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        def do_POST(self) -> None:
            self.do_GET()

        def log_message(self, *_: object) -> None:
            """Stay quiet."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: object) -> None:
            """A client that hung up is no news."""

    with Server(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{http.server_port}"
        finally:
            http.shutdown()
            thread.join()


@contextmanager
def sink(handle: Callable[[bytes, Mapping[str, str]], int]) -> Iterator[str]:
    with answering(lambda _path, headers, body: (handle(body, headers), {}, b"")) as url:
        yield url


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
