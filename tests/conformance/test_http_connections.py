"""OTLP/HTTP: connections that stay, requests side by side, and what a server says that has too much to do."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from email.utils import parsedate_to_datetime
from typing import Any

import pytest

from tests.conformance.clients import HttpClient
from tests.conformance.payloads import A_MEGABYTE, ENCODINGS, JSON, METRICS, NOT_PROTOBUF, PROTOBUF, SIGNALS


@pytest.mark.should("OTLP/HTTP Connection")
def test_connections_stay(http: HttpClient) -> None:
    """A connection serves one request after the other."""
    http.post(METRICS.path, METRICS.body(PROTOBUF), PROTOBUF)
    first = http.connection.sock
    for _ in range(20):
        assert http.post(METRICS.path, METRICS.body(PROTOBUF), PROTOBUF).status == 200
    assert first is not None
    assert http.connection.sock is first


@pytest.mark.should("OTLP/HTTP Connection")
def test_encodings_share_a_port(http: HttpClient) -> None:
    """Protobuf and JSON are taken on the same port, even in turn on one connection."""
    for signal in SIGNALS:
        for encoding in ENCODINGS:
            answer = http.post(signal.path, signal.body(encoding), encoding)
            assert (answer.status, answer.media) == (200, encoding)


@pytest.mark.should("OTLP/HTTP Connection; RFC 9112, 9.3")
def test_a_refusal_breaks_no_connection(http: HttpClient) -> None:
    """After a refused request the next one is taken as any other, on a new connection where the old one was closed."""
    wrong = [(METRICS.path, NOT_PROTOBUF, PROTOBUF, 400), ("/v1/weather", METRICS.body(JSON), JSON, 404)]
    for path, body, encoding, status in [*wrong, (METRICS.path, METRICS.body(JSON), JSON, 200)]:
        try:
            answer = http.post(path, body, encoding)
        except ConnectionError:
            http.close()
            answer = http.post(path, body, encoding)
        assert answer.status == status, answer


@pytest.mark.may("OTLP/HTTP Concurrent Requests")
def test_parallel_connections(target: Any) -> None:
    """A client may send on several connections at once, and each gets the answers to its own requests."""

    def sender(number: int) -> list[tuple[int, str]]:
        client, encoding = HttpClient(target.http), ENCODINGS[number % 2]
        signal = SIGNALS[number % 3]
        got = [client.post(signal.path, signal.body(encoding), encoding) for _ in range(10)]
        client.close()
        return [(answer.status, answer.media) for answer in got]

    with ThreadPoolExecutor(8) as pool:
        for number, got in enumerate(pool.map(sender, range(8))):
            assert got == [(200, ENCODINGS[number % 2])] * 10


@contextmanager
def unfinished(client: HttpClient) -> Iterator[None]:
    """A request that announces four megabytes, which do not come."""
    host, port = client.connection.host, client.connection.port
    with socket.create_connection((host, port)) as sock:
        head = f"POST {client.base}{METRICS.path} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: {PROTOBUF}\r\n"
        sock.sendall(f"{head}Content-Length: {2**22}\r\n\r\n0".encode())
        yield


def crowded(http: HttpClient) -> Any:
    """The first answer of a server with a hundred unfinished requests that is not a success."""
    with ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(unfinished(http))
        for _ in range(3):
            answer = http.post(METRICS.path, METRICS.body(PROTOBUF) + A_MEGABYTE * 2, PROTOBUF)
            if answer.status != 200:
                return answer
    return pytest.fail("a hundred unfinished requests do not fill this server")


@pytest.mark.should("OTLP/HTTP Throttling")
def test_throttling(http: HttpClient) -> None:
    """A server with more requests than it takes answers 429 or 503, which a client sends again; it may say when."""
    answer = crowded(http)
    assert answer.status in {429, 503}
    answer.problem()
    after = answer.headers["retry-after"]
    assert after.isdigit() or parsedate_to_datetime(after)
