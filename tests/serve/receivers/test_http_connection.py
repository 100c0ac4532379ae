"""Whether a connection is read here or by uvicorn, its sender cannot tell."""

from __future__ import annotations

import asyncio
import gzip
import re
import resource
import socket
import time
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from kc_otel.judge.otlp import Limits
from kc_otel.serve.receivers import http_connection
from kc_otel.serve.receivers.http_server import http_app
from tests.serve.receivers.test_servers import http_server

HEAD = "POST /v1/metrics HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/x-protobuf\r\n"


def usual(body: bytes, more: str = "") -> bytes:
    return f"{HEAD}{more}Content-Length: {len(body)}\r\n\r\n".encode() + body


def answers(connection: socket.socket, count: int = 1) -> list[tuple[int, bytes, bytes]]:
    """Status, head and body of the next answers."""
    found = []
    with connection.makefile("rb") as stream:
        for _ in range(count):
            status = stream.readline()
            assert status, "the connection was closed"
            head = b"".join(iter(stream.readline, b"\r\n"))
            [length] = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
            found.append((int(status.split()[1]), head, stream.read(int(length.split(b":")[1]))))
    return found


@pytest.fixture
def body(request_of_metrics: Any) -> bytes:
    return request_of_metrics.SerializeToString()


@pytest.fixture(params=["h11_impl.H11Protocol", "httptools_impl.HttpToolsProtocol"])
def uvicorn_connections(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Connections that are uvicorn's, without the extra `fast` and with it."""
    module, _, name = request.param.partition(".")
    if module == "httptools_impl":
        pytest.importorskip("httptools")
    made = []

    class Counted(getattr(import_module(f"uvicorn.protocols.http.{module}"), name)):  # type: ignore[misc]
        def __init__(self, **arguments: Any) -> None:
            super().__init__(**arguments)
            made.append(self)

    monkeypatch.setattr(http_connection, "AutoHTTPProtocol", Counted)
    return made


@pytest.mark.slow
def test_usual_requests_are_read_without_uvicorn(sink: Any, body: bytes, uvicorn_connections: list[Any]) -> None:
    """Whole, in pieces, with other headers, and what is refused for what it says: one connection serves them all."""
    packed = gzip.compress(body)
    with http_server(sink) as port, socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
        connection.sendall(usual(body))
        assert [status for status, _, _ in answers(connection)] == [200]
        connection.sendall(usual(packed, "Content-Encoding: gzip\r\nConnection: keep-alive\r\nX-Team: \xe9\r\n"))
        assert [status for status, _, _ in answers(connection)] == [200]
        head, rest = usual(body)[: -len(body)], body
        for piece in (head, rest[:1], rest[1:7], rest[7:]):
            connection.sendall(piece)
            time.sleep(0.02)
        assert [status for status, _, _ in answers(connection)] == [200]
        connection.sendall(usual(b"\xff"))
        [(status, said, _)] = answers(connection)
        assert status == 400
        assert b"content-type: application/x-protobuf" in said
    assert len(sink.requests) == 3
    assert not uvicorn_connections


@pytest.mark.slow
@pytest.mark.parametrize(
    "sent",
    [
        HEAD.replace("HTTP/1.1", "HTTP/1.0") + "Content-Length: {size}\r\n\r\n{body}",
        HEAD.replace("/v1/metrics", "/v1/metrics?x=1") + "Content-Length: {size}\r\n\r\n{body}",
        HEAD + "Connection: close\r\nContent-Length: {size}\r\n\r\n{body}",
        HEAD + "Transfer-Encoding: chunked\r\n\r\n{size:x}\r\n{body}\r\n0\r\n\r\n",
        HEAD + "Expect: nothing\r\nContent-Length: {size}\r\n\r\n{body}",
        HEAD + "X-Twice: a\r\nX-Twice: b\r\nContent-Length: {size}\r\n\r\n{body}",
    ],
)
def test_unusual_requests_are_uvicorns(sink: Any, body: bytes, uvicorn_connections: list[Any], sent: str) -> None:
    """What might be understood in another way is not read here; it is answered all the same, also after usual ones."""
    text = sent.format(size=len(body), body=body.decode("latin-1")).encode("latin-1")
    with http_server(sink) as port, socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
        connection.sendall(usual(body))
        assert answers(connection)[0][0] == 200
        connection.sendall(text)
        assert answers(connection)[0][0] == 200
    assert len(sink.requests) == 2
    assert len(uvicorn_connections) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "length", ["5\r\nContent-Length: 6", "5, 5", "+5", "-1", "5\r\nTransfer-Encoding: chunked", "0x5"]
)
def test_no_length_is_believed_that_others_understand_otherwise(sink: Any, length: str) -> None:
    """Where a proxy sees another end of a request, what follows would be anybody's: it is refused."""
    with http_server(sink) as port, socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
        connection.sendall(f"{HEAD}Content-Length: {length}\r\n\r\nPOST /v1/metrics HTTP/1.1\r\n".encode())
        assert answers(connection)[0][0] == 400
    assert not sink.requests


@pytest.mark.slow
def test_requests_that_do_not_wait_for_answers_are_answered_in_their_order(sink: Any, body: bytes) -> None:
    """Also where the second came in while the first was taken."""
    with http_server(sink) as port, socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
        connection.sendall(usual(body) + usual(b"\xff") + usual(body))
        assert [status for status, _, _ in answers(connection, 3)] == [200, 400, 200]
        connection.sendall(usual(body)[:-1])
        time.sleep(0.05)
        connection.sendall(body[-1:] + usual(b"\xff") + usual(body))
        assert [status for status, _, _ in answers(connection, 3)] == [200, 400, 200]


@pytest.mark.slow
def test_what_is_left_of_a_body_that_came_too_late_is_no_request(sink: Any, body: bytes) -> None:
    """It is answered with 408 and read to its end; then the connection serves on."""
    with (
        http_server(sink, Limits(read_timeout=0.2)) as port,
        socket.create_connection(("127.0.0.1", port), timeout=5) as connection,
    ):
        hidden = usual(body)
        connection.sendall(usual(hidden)[: -len(hidden)])
        assert answers(connection)[0][0] == 408
        connection.sendall(hidden)
        connection.sendall(usual(body))
        assert answers(connection)[0][0] == 200
    assert len(sink.requests) == 1


@pytest.mark.slow
def test_who_hangs_up_in_a_body_is_no_error(sink: Any, body: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """The next is served, and nothing is logged."""
    with http_server(sink) as port:
        with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
            connection.sendall(usual(body)[:-1])
        with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
            connection.sendall(usual(body))
            assert answers(connection)[0][0] == 200
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def resident() -> int:
    """Bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's own count of memory")
def test_bodies_that_are_announced_take_no_memory(sink: Any, body: bytes) -> None:
    """A length is only a claim; and what has no place to be read yet waits in the kernel, not here."""
    announced = f"{HEAD}Content-Length: {16 * 2**20}\r\n\r\n".encode()
    with http_server(sink) as port, ExitStack() as open_:
        before = resident()
        for _ in range(100):
            open_.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5)).sendall(announced)
        time.sleep(0.3)
        assert resident() - before < 64 * 2**20
        filled = open_.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5))
        filled.sendall(usual(body))
        assert [status for status, _, _ in answers(filled)] == [200]


@pytest.mark.slow
def test_a_body_without_a_place_is_refused_and_thrown_away(sink: Any, body: bytes) -> None:
    """Nothing of it is taken for the next request of its connection."""
    with http_server(sink, Limits(max_concurrent=1, patience=20)) as port, ExitStack() as open_:
        first, second = (
            open_.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5)) for _ in range(2)
        )
        head, rest = usual(body)[: -len(body)], body
        first.sendall(head)
        time.sleep(0.1)
        second.sendall(usual(bytes(8 * 2**20)))
        assert [status for status, _, _ in answers(second)] == [503]
        first.sendall(rest)
        assert [status for status, _, _ in answers(first)] == [200]
        second.sendall(usual(body))
        assert [status for status, _, _ in answers(second)] == [200]
    assert len(sink.requests) == 2


@pytest.mark.slow
def test_a_body_whose_end_comes_as_it_is_given_up_is_answered(sink: Any, body: bytes) -> None:
    """Its time is over and its last bytes are there in one turn of the event loop; it is told so, not hung up on."""

    class Transport(asyncio.Transport):
        def __init__(self) -> None:
            super().__init__()
            self.written, self.closed = b"", False

        def write(self, data: Any) -> None:
            self.written += data

        def close(self) -> None:
            self.closed = True

        def is_closing(self) -> bool:
            return self.closed

        def pause_reading(self) -> None:
            pass

        def resume_reading(self) -> None:
            pass

    def feed(connection: http_connection.HttpConnection, data: bytes) -> None:
        connection.get_buffer(-1)[: len(data)] = data
        connection.buffer_updated(len(data))

    failed: list[Any] = []

    async def scenario(*, hangs_up: bool) -> bytes:
        config = uvicorn.Config(http_app(sink, Limits(read_timeout=0.05)))
        config.load()
        connection = http_connection.HttpConnection(config, uvicorn.server.ServerState(), {})
        transport, loop = Transport(), asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: failed.append(context))
        connection.connection_made(transport)
        feed(connection, usual(body)[:-1])
        await asyncio.sleep(0.01)
        time.sleep(0.1)  # nobody looks while its time passes  # noqa: ASYNC251
        last = (connection.connection_lost, None) if hangs_up else (feed, connection, body[-1:])
        loop.call_soon(loop.call_soon, *last)  # after the timeout is seen, and before the reader is told of it
        await asyncio.sleep(0.1)
        if not hangs_up:
            feed(connection, usual(body))
            await asyncio.sleep(0.1)
        return transport.written

    assert re.findall(rb"HTTP/1.1 (\d+)", asyncio.run(scenario(hangs_up=False))) == [b"408", b"200"]
    asyncio.run(scenario(hangs_up=True))
    assert not failed
