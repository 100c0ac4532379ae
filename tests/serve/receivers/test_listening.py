"""Who connects and says nothing keeps nobody else out, neither of a port nor of the process."""

import asyncio
import contextlib
import resource
import socket
import sys
from contextlib import ExitStack

import httpx
import pytest

from kc_otel.serve.receivers import http_server
from kc_otel.serve.receivers.http_server import connections_per_port, listen, serving_http
from tests.integration.conftest import CONTRACT, Evaluator

pytestmark = [pytest.mark.slow, pytest.mark.anyio]

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])


class Echo:
    """A server that says what it is told, and knows how many are connected."""

    def __init__(self):
        self.connected = self.most_connected = 0

    async def __call__(self, reader, writer):
        self.connected += 1
        self.most_connected = max(self.connected, self.most_connected)
        writer.write(await reader.read(100))
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        self.connected -= 1


async def asked(port):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"hello")
    said = await reader.read()
    writer.close()
    await writer.wait_closed()
    return said


@pytest.mark.parametrize("silent", [3, 4, 5, 40])
async def test_the_oldest_connection_gives_its_place_to_who_comes(silent, caplog):
    """However many are silent, whoever asks is answered; no more are ever open than there may be."""
    echo = Echo()
    server = await asyncio.start_server(echo, sock=listen("127.0.0.1", 0, "tests", 4))
    port = server.sockets[0].getsockname()[1]
    with ExitStack() as stack:
        for _ in range(silent):
            stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        said = await asyncio.wait_for(asked(port), 20)
    server.close()
    while echo.connected:  # noqa: ASYNC110 - a few turns of the loop
        await asyncio.sleep(0.01)
    assert said == b"hello"
    assert echo.most_connected <= 10  # the one that ends is told so a moment after the next has come
    assert ("has 4 connections" in caplog.text) == (silent >= 4)
    assert len(caplog.records) <= 1


def test_who_was_answered_keeps_its_place_before_the_silent():
    """The oldest connection is the busy one: it goes last, and of the answered who was so longest ago."""
    with ExitStack() as stack:
        listener = stack.enter_context(listen("127.0.0.1", 0, "tests", 3))

        def connected():
            client = stack.enter_context(socket.create_connection(listener.getsockname()))
            client.settimeout(0.2)
            with contextlib.suppress(BlockingIOError):
                return client, stack.enter_context(listener.accept()[0])
            return client, stack.enter_context(listener.accept()[0])

        def is_open(client):
            with contextlib.suppress(TimeoutError):
                return client.recv(1) != b""
            return True

        busy, silent, *others = (connected() for _ in range(3))
        listener.answered(busy[1].fileno())
        others.append(connected())
        assert [is_open(client) for client, _ in (busy, silent, *others)] == [True, False, True, True]
        for _, connection in (others[0], busy, others[1]):
            listener.answered(connection.fileno())
        newest = connected()
        assert [is_open(client) for client, _ in (busy, *others, newest)] == [True, False, True, True]


async def test_a_connection_that_a_request_was_answered_on_outlives_silent_ones():
    """Over HTTP, on the port that is full."""

    async def app(scope, _receive, send):
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
            await send({"type": "http.response.body", "body": b"ok"})

    sock = listen("127.0.0.1", 0, "tests", 4)
    async with serving_http(app, sock):
        port = sock.getsockname()[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with ExitStack() as stack:
            for _ in range(2):
                writer.write(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
                assert (await asyncio.wait_for(reader.readuntil(b"ok"), 10)).startswith(b"HTTP/1.1 200")
                for _ in range(20):
                    stack.enter_context(socket.create_connection(("127.0.0.1", port)))
                    await asyncio.sleep(0.01)
        writer.close()


async def test_who_has_hung_up_holds_no_place(caplog):
    """A thousand who were answered leave nothing behind, and nobody is closed for them."""
    server = await asyncio.start_server(Echo(), sock=listen("127.0.0.1", 0, "tests", 4))
    port = server.sockets[0].getsockname()[1]
    said = {await asked(port) for _ in range(100)}
    server.close()
    assert said == {b"hello"}
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("limits", "most"),
    [((1024, 1024), 298), ((1024, 20_000), 4096), ((10, 10), 16), ((resource.RLIM_INFINITY,) * 2, 4096)],
)
def test_a_port_has_its_share_of_the_files_that_the_process_may_have(limits, most, monkeypatch):
    """Of as many as the system allows, not of as many as it begins with; the rest is for the log and the state."""
    monkeypatch.setattr(http_server.resource, "getrlimit", lambda _: limits)
    raised = []
    monkeypatch.setattr(http_server.resource, "setrlimit", lambda _, to: raised.append(to))
    assert connections_per_port() == most
    assert raised == ([(limits[1],) * 2] if limits[0] != limits[1] else [])


def test_short_answers_are_sent_at_once():
    """Gathered, each would wait until the one before it is acknowledged, which its reader puts off for 40 ms."""

    class Connected(asyncio.Protocol):
        def connection_made(self, transport):
            made.set_result(transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

    async def connected():
        nonlocal made
        made = asyncio.get_running_loop().create_future()
        sock = listen("127.0.0.1", 0, "tests", 8)
        async with await asyncio.get_running_loop().create_server(Connected, sock=sock):
            with socket.create_connection(sock.getsockname()):
                return await made

    made = None
    assert asyncio.run(connected())


class Cramped(Evaluator):
    """An evaluator that may have few files."""

    command = ("bash", "-c", 'ulimit -n 250; exec "$@"', "-", sys.executable, "-m", "kc_otel")


def test_silent_connections_to_every_port_stop_nothing(tmp_path):
    """More of them than the process may have files: the other ports, and the API itself, answer all the while."""
    (tmp_path / "policy.yaml").write_text(CONTRACT)
    evaluator = Cramped(tmp_path / "policy.yaml", tmp_path / "state.sqlite", {}, "--no-webhooks")
    try:
        with ExitStack() as stack:
            for address, begun in (
                (evaluator.grpc, PREFACE),
                (evaluator.http.removeprefix("http://"), b"POST /v1/metrics HTTP/1.1\r\nhost: localhost\r\n"),
                (evaluator.api.removeprefix("http://"), b"POST /api/v1/silences HTTP/1.1\r\nhost: localhost\r\n"),
            ):
                host, port = address.rsplit(":", 1)
                for _ in range(300):
                    connection = stack.enter_context(socket.create_connection((host, int(port))))
                    connection.sendall(begun)
                assert httpx.get(f"{evaluator.api}/healthz", timeout=20).status_code == 200
                assert httpx.get(f"{evaluator.http}/v1/metrics", timeout=20).status_code == 405
    finally:
        evaluator.stop()
    assert "Too many open files" not in evaluator.log
    assert "has 40 connections" in evaluator.log
