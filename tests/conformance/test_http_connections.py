"""OTLP/HTTP: connections that stay, requests side by side, and what a server says that has too much to do."""

import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from email.utils import parsedate_to_datetime
from typing import Any

import pytest

from tests.conformance.clients import HttpClient
from tests.conformance.payloads import A_MEGABYTE, ENCODINGS, JSON, METRICS, NOT_PROTOBUF, PROTOBUF, SIGNALS


@pytest.mark.should("OTLP/HTTP Connection; RFC 9112, 9.3")
def test_connections_stay(http: HttpClient) -> None:
    """A connection serves one request after the other, in protobuf and JSON in turn, also after refused ones."""
    requests = [
        *((signal.path, signal.body(encoding), encoding, 200) for signal in SIGNALS for encoding in ENCODINGS),
        (METRICS.path, NOT_PROTOBUF, PROTOBUF, 400),
        ("/v1/weather", METRICS.body(JSON), JSON, 404),
        (METRICS.path, METRICS.body(JSON), JSON, 200),
    ]
    connections = set()
    for path, body, encoding, status in requests:
        answer = http.post(path, body, encoding)
        assert (answer.status, answer.media) == (status, encoding)
        connections.add(http.connection.sock)
    assert len(connections - {None}) == 1


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


@pytest.mark.should("OTLP/HTTP Throttling")
def test_throttling(http: HttpClient) -> None:
    """A server with more requests than it takes answers 429 or 503, which a client sends again; it may say when."""
    host, port = http.connection.host, http.connection.port
    head = f"POST {http.base}{METRICS.path} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: {PROTOBUF}\r\n"
    with ExitStack() as stack:
        for _ in range(100):  # requests that announce four megabytes, which do not come
            connection = stack.enter_context(socket.create_connection((host, port)))
            connection.sendall(f"{head}Content-Length: {2**22}\r\n\r\n0".encode())
        answer = http.post(METRICS.path, METRICS.body(PROTOBUF) + A_MEGABYTE * 2, PROTOBUF)
    assert answer.status in {429, 503}
    answer.problem()
    after = answer.headers["retry-after"]
    assert after.isdigit() or parsedate_to_datetime(after)
